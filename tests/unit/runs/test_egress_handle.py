"""What the supervisor keeps of an egress process ends with its sandbox, whatever happens meanwhile."""

from __future__ import annotations

import os
from typing import Any

import pytest

from stockade.egress.records import create_records
from stockade.runs import egress
from stockade.runs.egress import EgressHandle


class Interruption(BaseException):
    """What a Ctrl-C is; pytest would take the real one for its own."""


class SlowProcess:
    """Takes a step to pass on what programs have sent, and a step to end."""

    def __init__(self) -> None:
        self.is_closed = False

    def ending(self) -> None:
        return None

    def drained(self, events: Any) -> Any:
        yield 3.0

    def closed(self, events: Any) -> Any:
        yield 1.0
        self.is_closed = True


def test_an_interrupt_while_the_last_bytes_pass_still_ends_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(egress, "_walls", lambda process: None)
    process: Any = SlowProcess()
    nothing: Any = None
    records, nudge = create_records(), os.eventfd(0)
    closing = EgressHandle(process, records, nudge, (), nothing).closed(nothing)
    assert next(closing) == 3.0
    assert closing.throw(Interruption) == 1.0
    with pytest.raises(Interruption):
        next(closing)
    assert process.is_closed
    for descriptor in (records, nudge):
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)
