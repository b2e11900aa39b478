"""A command that a signal ends still removes its temporary files."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator

ENDINGS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@contextlib.contextmanager
def cleaned_up_on_signals() -> Iterator[None]:
    """Turn the first ending signal into SystemExit, so that cleanup runs, and ignore further ones."""
    before = {number: signal.getsignal(number) for number in ENDINGS}
    ended = False

    def end(number: int, _: object) -> None:
        nonlocal ended
        ended = True
        for one in ENDINGS:
            signal.signal(one, signal.SIG_IGN)
        sys.exit(128 + number)

    for number in ENDINGS:
        # Keep ignoring what is ignored already, as under nohup.
        if before[number] is not signal.SIG_IGN:
            signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items() if not ended else ():
            signal.signal(number, handler)
