"""An egress process ends with its sandbox, also if the caller is interrupted meanwhile."""

from __future__ import annotations

import pytest

from stockade import Policy, Sandbox
from stockade.runs.io.eventloop import Events


class Interruption(BaseException):
    """What a Ctrl-C is; pytest would take the real one for its own."""


def test_an_interrupt_while_the_last_bytes_pass_still_ends_the_process() -> None:
    with Sandbox(Policy(net=("api.example.com",))) as box, Events() as events:
        assert box._box is not None and box._box.egress is not None
        process = box._box.egress.process
        closing = box._box.egress.closed(events)
        next(closing)
        with pytest.raises(Interruption):
            events.wait(closing.throw(Interruption))
            while True:
                events.wait(next(closing))
        assert process.is_closed
