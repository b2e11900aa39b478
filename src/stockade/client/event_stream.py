"""The events of a run, collected into its result.

The server sends bare JSON objects, one to a line. A stream that ends without the event that ends a run has
been cut off: the result is unknown then, and never "0".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from stockade.client.remote_errors import ServerError, UnreachableError
from stockade.client.values import CodeFailure, RemoteCodeResult, RemoteResult
from stockade.result import Outcome

#: What a shell adds to a signal's number.
SIGNALLED = 128
Handler = Callable[[str], object]


class _Error(msgspec.Struct):
    ename: str = ""
    evalue: str = ""
    traceback: list[str] = []
    #: Our server's own word for how the run ended.
    outcome: str = ""


class _Event(msgspec.Struct):
    type: str
    text: str = ""
    error: _Error | None = None
    results: dict[str, Any] = {}
    execution_time: float = 0.0


class EventCollector:
    """Takes the bytes of a stream, calls the handlers, and keeps what the result is made of."""

    def __init__(self, on_stdout: Handler | None = None, on_stderr: Handler | None = None) -> None:
        self._handlers = {"stdout": on_stdout, "stderr": on_stderr}
        self._output: dict[str, list[str]] = {"stdout": [], "stderr": []}
        self._displays: list[dict[str, str]] = []
        self._decoder = msgspec.json.Decoder(_Event)
        self._rest = b""
        self._id = ""
        self._error: _Error | None = None
        self._complete = False
        self._duration = 0.0

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the stream."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in filter(None, map(bytes.strip, lines)):
            self._take(line)

    def _take(self, line: bytes) -> None:
        try:
            event = self._decoder.decode(line)
        except msgspec.DecodeError as error:
            raise ServerError(f"the server sent an event that cannot be read: {error}") from None
        if event.type in self._output:
            self._output[event.type].append(event.text)
            if (handler := self._handlers[event.type]) is not None:
                handler(event.text)
        elif event.type == "init":
            self._id = event.text
        elif event.type == "result":
            self._displays.append({name: str(value) for name, value in event.results.items()})
        elif event.type == "error":
            self._error = event.error or _Error(ename="Error", evalue=event.text)
        elif event.type == "execution_complete":
            self._complete, self._duration = True, event.execution_time / 1000

    def _fields(self) -> dict[str, Any]:
        if not self._complete and self._error is None:
            raise UnreachableError(
                "the connection ended before the run did, so its result is unknown",
                hint="look at the run's receipt: box.receipts()",
            )
        output = {name: "".join(texts).encode() for name, texts in self._output.items()}
        return {"id": self._id, "duration": self._duration, **output}

    def result(self) -> RemoteResult:
        """Return the result of a command."""
        fields = self._fields()
        if self._error is None:
            return RemoteResult(outcome=Outcome.EXITED, exit_code=0, **fields)
        return RemoteResult(**_ending(self._error), **fields)

    def code_result(self) -> RemoteCodeResult:
        """Return the result of code in an interpreter, where an exception has no exit code."""
        fields, error = self._fields(), self._error
        failure = None
        if error is not None:
            failure = CodeFailure(error.ename, error.evalue, tuple(error.traceback))
        return RemoteCodeResult(
            outcome=Outcome.EXITED,
            exit_code=0 if error is None else 1,
            reason="" if error is None else f"the code raised {error.ename}: {error.evalue}",
            displays=tuple(self._displays),
            error=failure,
            **fields,
        )


def _ending(error: _Error) -> dict[str, Any]:
    """Return how a run ended that did not exit with 0."""
    said = "; ".join(error.traceback)
    try:
        code = int(error.evalue)
    except ValueError:  # isolated sessions have no exit code for a run that did not end by itself
        outcome = Outcome.TIMED_OUT if error.ename == "TimeoutError" else Outcome.CANCELLED
        code = 124 if outcome is Outcome.TIMED_OUT else 130
        return {"outcome": outcome, "exit_code": code, "reason": error.evalue or said or error.ename}
    outcome = Outcome(error.outcome) if error.outcome in list(Outcome) else Outcome.EXITED
    return {"outcome": outcome, "exit_code": code, "reason": said or f"exited with {code}"}
