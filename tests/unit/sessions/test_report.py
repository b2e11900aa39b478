"""The report of an interpreter, which the code inside may have forged."""

from __future__ import annotations

import struct

import pytest

from stockade.inside import encoder
from stockade.inside.encoder import NotPlainDataError
from stockade.sessions.exchange import DriverReply
from stockade.sessions.interpreter import _Report

MOST = 1 << 24


def display() -> bytes:
    """A display with numbers that all have one hash: less than half of the work that one value may cost."""
    numbers = [encoder.encode(number * ((1 << 61) - 1), MOST) for number in range(5000)]
    evil = b"s\xff" + struct.pack(">Q", len(numbers)) + b"".join(numbers)
    return b"d\x01" + encoder.encode("text/plain", MOST) + evil


def report(count: int) -> _Report:
    content = encoder.encode({"displays": [display()] * count}, MOST)
    return _Report(DriverReply(0, content), MOST)


def test_many_displays_cost_no_more_work_than_one_value_may() -> None:
    assert list(report(1).displays()) == [{}]
    with pytest.raises(NotPlainDataError, match="one hash"):
        list(report(6).displays())
