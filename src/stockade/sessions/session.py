"""What a shell and an interpreter share: one program inside that serves many runs."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import NamedTuple

import msgspec

import stockade
from stockade.errors import SetupError
from stockade.gate import client, wire
from stockade.receipt.account import Account
from stockade.result import Outcome, Result, Usage
from stockade.runs.command import wait_until_thawed
from stockade.runs.io.eventloop import Events, Steps
from stockade.runs.launch import LaunchedSandbox
from stockade.runs.prepare import RunPreparation
from stockade.runs.supervise import Run, RunEnding
from stockade.sessions.connection import DriverConnection, start_driver
from stockade.sessions.exchange import DriverReply, Exchange


class LivingSandbox(NamedTuple):
    """The calls into a `Sandbox` that a session of it needs."""

    #: Return the sandbox and its preparation, or raise an error if it is closed.
    require_open: Callable[[], tuple[LaunchedSandbox, RunPreparation]]
    #: Return the account of a command: who asked for it, and its receipt.
    account: Callable[[Sequence[str], stockade.receipt.Who | Mapping[str, str] | None], Account]
    #: Return the steps of one command, up to its result.
    run: Callable[[LaunchedSandbox, RunPreparation, Run, Events, Account], Steps[Result]]
    #: Return the result of a run that has ended.
    judge: Callable[..., Result]
    #: Take the snapshot that the user asked for before each run.
    before_run: Callable[[], None]
    #: Keep the sandbox open for the time of one call.
    use: Callable[[], AbstractContextManager[tuple[LaunchedSandbox, RunPreparation]]]


class AsyncLivingSandbox(NamedTuple):
    """The calls into an `AsyncSandbox` that a session of it needs."""

    require_open: Callable[[], tuple[LaunchedSandbox, RunPreparation]]
    account: Callable[[Sequence[str], stockade.receipt.Who | Mapping[str, str] | None], Account]
    run: Callable[[LaunchedSandbox, RunPreparation, Run, Events, Account], Steps[Result]]
    judge: Callable[..., Result]
    before_run: Callable[[], Awaitable[None]]
    use: Callable[[], AbstractAsyncContextManager[tuple[LaunchedSandbox, RunPreparation]]]


class Session:
    """What every session shares: a driver, started on demand, that serves one run at a time."""

    #: The session's name in messages, and the state that is lost when it ends.
    name = "session"
    state = ""
    program = ""
    #: Whether the driver must be the sandbox's first process after init.
    first = False
    #: Whether a driver that sleeps on after an interrupt is interrupted again.
    insistent = False

    def __init__(self, sandbox: LivingSandbox | AsyncLivingSandbox) -> None:
        self._account_of, self._judge = sandbox.account, sandbox.judge
        self._line: DriverConnection | None = None
        self._closed = self._started = False

    @property
    def ended(self) -> bool:
        """Whether its program was started and has ended since."""
        return self._started and (self._line is None or self._line.ended)

    def __repr__(self) -> str:
        state = "closed" if self._closed else "not started" if self._line is None else "open"
        return f"<{type(self).__name__}: {state}>"

    def _run_on_driver(
        self,
        box: LaunchedSandbox,
        prepared: RunPreparation,
        driver: Run,
        run: Run,
        request: bytes,
        number: bytes,
        most: int,
        events: Events,
        account: Account,
    ) -> Steps[tuple[DriverReply | None, Result]]:
        """Run one request on the driver; start a driver if none is running."""
        if self._closed:
            raise SetupError(f"the {self.name} was closed", stage=self.name)
        yield from wait_until_thawed(box)
        lost = False
        if self._line is not None and (self._line.box is not box or self._line.ended):
            lost = self._line.box is box
            self._let_go()
        if self._line is None:
            started = yield from self._start_driver(box, driver.program, events)
            if isinstance(started, wire.Reply):
                refused = RunEnding(reply=started, wall=0)
                return None, self._judge(refused, driver.program, prepared, box, account)
            self._line, request = started, self._preamble() + request
        exchange = Exchange(self._line, run, request, number, events, most, insistent=self.insistent)
        try:
            answer, ended = yield from exchange.steps()
        finally:
            if exchange.ended:
                self._let_go()

        def revised(result: Result) -> Result:
            result = self._revise(self._with_driver_end(result, gone=exchange.ended), answer)
            if lost and not result.hint:
                hint = f"the {self.name} had ended since the last run, so this run started a fresh one"
                result = msgspec.structs.replace(result, hint=hint)
            return result

        return answer, self._judge(ended, run.program, prepared, box, account, revised)

    def _start_driver(
        self, box: LaunchedSandbox, program: client.Program, events: Events
    ) -> Steps[DriverConnection | wire.Reply]:
        """Start a driver and return its connection, or the gate's reply that refuses it."""
        # The policy's wall limit applies to one run, not to the driver.
        program = msgspec.structs.replace(program, wall=None, first=self.first)
        started = yield from start_driver(box, program, events)
        if isinstance(started, wire.Reply) and started.text == "first":
            raise SetupError(
                "this shell cannot be the sandbox's first process: the sandbox has already had one",
                stage=self.name,
                hint="open the shell before any run, use a new sandbox, or leave out `first`",
            )
        self._started = self._started or isinstance(started, DriverConnection)
        return started

    def _account(self, code: str, who: stockade.receipt.Who | Mapping[str, str] | None) -> Account:
        """Return the account of one run; its command is the driver and the code."""
        readable = code.replace("\0", "\\0").encode("utf-8", "backslashreplace").decode()
        return self._account_of([self.program, readable], who)

    def _revise(self, result: Result, answer: DriverReply | None) -> Result:
        """Revise the result by the driver's own report."""
        return result

    @property
    def _next(self) -> str:
        if self.first:
            return "only a new sandbox can have another first process"
        return "the next run starts a fresh one"

    def _preamble(self) -> bytes:
        """Return the bytes that a new driver must read before its first request."""
        return b""

    def _with_driver_end(self, result: Result, *, gone: bool) -> Result:
        """Add to the result what counted its time and, if the driver has ended, how."""
        replace = msgspec.structs.replace
        if not gone:
            return replace(result, usage=_counted(result.usage))
        if result.outcome not in (Outcome.EXITED, Outcome.SIGNALLED, Outcome.TIMED_OUT):
            return result
        how = f"with {result.exit_code}" if result.outcome is Outcome.EXITED else f": {result.reason}"
        return replace(
            result,
            reason=f"the {self.name} ended {how}".replace(" :", ":"),
            hint=f"{self.state} went with it; {self._next}",
        )

    def _let_go(self) -> None:
        line, self._line = self._line, None
        if line is not None:
            line.close()

    def _hang_up(self) -> None:
        """Make a waiting run stop. In a forked child this only marks the child's copy as closed."""
        self._closed = True
        if (line := self._line) is not None and line.owner == os.getpid():
            line.channel.hang_up()


def _counted(usage: Usage) -> Usage:
    """Correct the sources of a run whose driver lives on: /proc counts its time, nothing its memory."""
    source = {what: "proc" if by == "rusage" else by for what, by in usage.source.items()}
    if source["memory"] == "proc":
        del source["memory"]
    return msgspec.structs.replace(usage, source=source)
