"""Ended from outside, a command still removes what it made."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator

ENDINGS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@contextlib.contextmanager
def ended_in_order() -> Iterator[None]:
    """What was made meanwhile goes when a signal ends the command, however often it is told."""
    before = {number: signal.getsignal(number) for number in ENDINGS}
    ended = False

    def end(number: int, _: object) -> None:
        nonlocal ended
        ended = True
        for one in ENDINGS:
            signal.signal(one, signal.SIG_IGN)
        sys.exit(128 + number)

    for number in ENDINGS:
        # What is ignored already, as under nohup, stays so.
        if before[number] is not signal.SIG_IGN:
            signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items() if not ended else ():
            signal.signal(number, handler)
