"""Whoever attends to a run in a living sandbox lives there too: ending or stopping it frees nobody.

A program inside can reach every process there but the first. So the first one
watches the keepers: if one of them dies or stops, everything is ended.
"""

from __future__ import annotations

import signal
import subprocess
import time

import pytest

from attacks.arena import command_of
from attacks.gate.test_keepers import kept_run
from stockade import Sandbox
from support.marks import HIDES, MARK, gone, marked


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP, signal.SIGTSTP, signal.SIGSEGV])
def test_a_program_that_ends_or_stops_its_keeper_escapes_no_time_limit(number: signal.Signals) -> None:
    attack, _ = command_of("keeper", int(number))
    with Sandbox() as box:
        began = time.monotonic()
        script = f'{HIDES}; "$@"; trap "" TERM; sleep 60; sleep 60'
        result = kept_run(box, ["sh", "-c", script, "sh", *attack], timeout=2, grace=0.2)
        assert result.outcome in ("signalled", "timed-out")
        assert time.monotonic() - began < 15
        assert gone()
        assert box.run(["echo", "on"], timeout=30).text == "on\n"


def test_the_signals_reach_somebody() -> None:
    attack, _ = command_of("keeper", 0)
    with subprocess.Popen(["sleep", "60"]) as process:
        assert str(process.pid) in subprocess.run(attack, capture_output=True, text=True, check=True).stdout
        process.kill()


#: Processes that are never where they were: each starts another and ends, in a session of its own.
RESTLESS = """
import os, signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
for _ in range(8):
    if not os.fork():
        while True:
            if os.fork():
                os._exit(0)
            os.setsid()
signal.pause()
"""


def test_processes_that_are_never_where_they_were_end_with_their_time() -> None:
    with Sandbox() as box:
        began = time.monotonic()
        result = kept_run(box, ["/usr/bin/python3", "-c", RESTLESS, MARK], timeout=1, grace=0.2)
        assert (result.outcome, result.text) in (("timed-out", "up\n"), ("signalled", "up\n"))
        assert time.monotonic() - began < 15
        assert gone()
        assert box.run(["echo", "on"], timeout=30).text == "on\n"


def test_a_stopped_program_is_ended_with_its_time() -> None:
    with Sandbox() as box:
        script = f"{HIDES}; kill -STOP 0"
        assert kept_run(box, ["sh", "-c", script], timeout=0.5, grace=0.2).outcome == "timed-out"
        assert marked() == []
