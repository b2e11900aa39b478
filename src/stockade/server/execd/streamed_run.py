"""One run of a command, a shell or a code context, from its start to what is known about it later."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

from stockade.errors import StockadeError
from stockade.result import Outcome, Result
from stockade.server.execd.output_log import OutputLog
from stockade.server.tally import TALLY
from stockade.server.wire.errors import ServerPaths, api_error
from stockade.server.wire.events import EventStream

#: The error's name that clients know for a command, or a line in a bash session, that fails.
COMMAND_ERROR = "CommandExecError"
#: The exit codes of a run that was interrupted, and of one that could not start.
INTERRUPTED, NOT_STARTED = 143, 125
#: How many characters of a command are remembered: a thousand commands are, and a body can have megabytes.
LONGEST_CONTENT = 64 << 10


class RunConclusion:
    """How a run ended, as its events and its status say it."""

    def __init__(self, exit_code: int, reason: str = "", outcome: Outcome = Outcome.EXITED) -> None:
        self.exit_code = exit_code
        self.outcome = outcome
        self.reason = "" if exit_code == 0 else ServerPaths.hide(reason)

    @classmethod
    def of(cls, result: Result) -> RunConclusion:
        """Return the end that a result describes."""
        # An outcome that is not a success must not look like one, whatever its exit code.
        code = result.exit_code if result.ok else result.exit_code or NOT_STARTED
        return cls(code, result.reason, result.outcome)


class StreamedRun:
    """A run with an id. Its task outlives the request that started it, if that was for the background."""

    def __init__(self, content: str, log: OutputLog | None = None) -> None:
        self.id = str(uuid.uuid4())
        #: The command as the client wrote it, as far as it is remembered.
        self.content = content[:LONGEST_CONTENT]
        #: Its output, if it runs in the background.
        self.log = log
        self.started_at = datetime.now(UTC)
        self.finished_at: datetime | None = None
        self.end: RunConclusion | None = None
        self._began = time.monotonic()
        self._interrupted = False
        self._task: asyncio.Task[None] | None = None

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self.end is None

    @property
    def milliseconds(self) -> float:
        """How long it has been running."""
        return (time.monotonic() - self._began) * 1000

    def begin(
        self,
        work: Callable[[], Awaitable[Result]],
        tell: Callable[[RunConclusion, Any], None],
        ended: Callable[[StreamedRun], None] = lambda run: None,
    ) -> None:
        """Start the run. `tell` gets its end, and the result if there is one; `ended` is called at last."""
        self._task = asyncio.get_running_loop().create_task(self._work(work, tell))
        self._task.add_done_callback(lambda _: ended(self))

    async def _work(
        self, work: Callable[[], Awaitable[Result]], tell: Callable[[RunConclusion, Any], None]
    ) -> None:
        result: Result | None = None
        try:
            result = await work()
            end = RunConclusion.of(result)
        except asyncio.CancelledError:
            end = RunConclusion(INTERRUPTED, "interrupted", Outcome.CANCELLED)
        except (StockadeError, OSError) as error:
            end = RunConclusion(NOT_STARTED, api_error(error).message, Outcome.SETUP_FAILED)
        except BaseException as error:
            end = RunConclusion(NOT_STARTED, api_error(error).message, Outcome.SETUP_FAILED)
            raise
        finally:
            self.end, self.finished_at = end, datetime.now(UTC)
            TALLY.note_run("command", self.milliseconds, result)
            tell(end, result)

    def interrupt(self) -> None:
        """Begin to end the run; again, this does nothing: a second cancellation would cut the grace short."""
        if self._task is not None and not self._interrupted:
            self._interrupted = True
            self._task.cancel()

    def kill(self) -> None:
        """End the run without grace."""
        if self._task is not None:
            self._task.cancel()

    async def wait(self, seconds: float | None = None) -> None:
        """Wait until the run is over, or for this long."""
        if self._task is not None:
            await asyncio.wait([self._task], timeout=seconds)

    def tell_stream(self, stream: EventStream, end: RunConclusion) -> None:
        """End an event stream as commands do: by completion, or by one error with the exit code."""
        if end.exit_code == 0:
            stream.complete(self.milliseconds)
        else:
            words = [end.reason] if end.reason else []
            stream.error(COMMAND_ERROR, str(end.exit_code), words, end.outcome)
