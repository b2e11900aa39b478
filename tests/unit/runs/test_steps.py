"""Work that blocks, done in a thread while the steps of others go on."""

from __future__ import annotations

import os
import threading
import time

import pytest

from stockade.runs.io.eventloop import Events, drive, in_thread


def test_what_it_returns_comes_back_and_what_it_raises_is_raised() -> None:
    with Events() as events:
        assert drive(in_thread(lambda: 42, events), events) == 42
        with pytest.raises(ZeroDivisionError):
            drive(in_thread(lambda: 1 // 0, events), events)


def test_what_is_raised_meanwhile_waits_until_it_is_done() -> None:
    gate, done = threading.Event(), []

    def work() -> None:
        gate.wait(10)
        done.append(1)

    before = sorted(os.listdir("/proc/self/fd"))
    with Events() as events:
        steps = in_thread(work, events)
        assert next(steps) is None
        assert steps.throw(KeyboardInterrupt("now")) is None
        gate.set()
        with pytest.raises(KeyboardInterrupt, match="now"):
            drive(steps, events)
        assert done == [1]
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_steps_that_are_closed_wait_for_it_too() -> None:
    done: list[int] = []

    def work() -> None:
        time.sleep(0.2)
        done.append(1)

    with Events() as events:
        steps = in_thread(work, events)
        next(steps)
        steps.close()
        assert done == [1]
