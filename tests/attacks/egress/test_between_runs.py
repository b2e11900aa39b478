"""A connection that a program makes between two runs of its sandbox is in a result all the same."""

from __future__ import annotations

import time

from stockade import Policy, Sandbox

IN_THE_BACKGROUND = "(sleep 0.4; exec 3<>/dev/tcp/203.0.113.99/443; sleep 9) >/dev/null 2>&1 </dev/null &"


def test_what_a_shells_background_connects_to_between_runs_is_in_the_next_result() -> None:
    with Sandbox(Policy(net=("api.example.com",))) as box, box.shell() as shell:
        first = shell.run(IN_THE_BACKGROUND)
        assert not first.network
        time.sleep(1.5)
        second, third = shell.run("true"), shell.run("true")
        assert [one.address for one in second.network] == ["203.0.113.99"]
        assert [one.target for one in second.denials] == ["203.0.113.99:443"]
        assert not third.network
