"""Read a program's output while it runs, and end it with everything that it started if it must not go on."""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Callable

from stockade.errors import SetupError, TimeoutError
from stockade.result import Outcome, Result
from stockade.sandbox.process import Process

#: How often to ask whether the program may go on, in seconds.
TICK = 0.1
PIECE = 1 << 16
#: Seconds from TERM to KILL, and for the output of a program that was ended.
GRACE, LAST_OUTPUT = 2.0, 5.0

#: Gets the seconds since the last output; returns why the program must end, or "".
Stop = Callable[[float], str]
Sink = Callable[[bytes], object]


def watch(process: Process, on_stdout: Sink, on_stderr: Sink, stop: Stop) -> tuple[str, Result]:
    """Feed the sinks until the program ends; return why it was stopped, "" if it was not, and its result."""
    sinks = {
        stream.fileno(): sink
        for stream, sink in ((process.stdout, on_stdout), (process.stderr, on_stderr))
        if stream is not None
    }
    poll = select.poll()
    for descriptor in sinks:
        poll.register(descriptor, select.POLLIN)
    last = time.monotonic()
    stopped, until = "", float("inf")
    while sinks:
        for descriptor, _ in poll.poll(TICK * 1000):
            piece = os.read(descriptor, PIECE)
            if piece:
                last = time.monotonic()
                sinks[descriptor](piece)
            else:
                poll.unregister(descriptor)
                del sinks[descriptor]
        if not stopped and (stopped := stop(time.monotonic() - last)):
            process.kill(GRACE)
            until = time.monotonic() + GRACE + LAST_OUTPUT
        if time.monotonic() > until:
            break
    while True:
        # A program can close its output and go on.
        with contextlib.suppress(TimeoutError):
            return stopped, checked(process.wait(TICK))
        if not stopped and (stopped := stop(time.monotonic() - last)):
            process.kill(GRACE)


def checked(result: Result) -> Result:
    """Return the result of a program that ran; raise if the sandbox around it failed."""
    if result.outcome is Outcome.SETUP_FAILED:
        raise SetupError(result.reason or "the sandbox could not be set up", stage="run", hint=result.hint)
    return result
