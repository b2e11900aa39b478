"""`Shell`: one bash in a living sandbox, whose directory, variables and functions stay from run to run."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Mapping
from types import ModuleType
from typing import TYPE_CHECKING

import msgspec

from stockade.errors import SetupError, UnsupportedError
from stockade.gate import client
from stockade.live import bash, posix
from stockade.live.line import Line, opening, refused
from stockade.live.talk import Talk, Told
from stockade.sandbox.launch import Box, Prepared
from stockade.sandbox.result import Outcome, Result, Usage
from stockade.sandbox.sandbox import calm, command
from stockade.sandbox.steps import Events, Steps, drive
from stockade.sandbox.streams import Sink
from stockade.sandbox.supervise import GRACE, Ended, Run

if TYPE_CHECKING:
    from stockade.receipt.account import Account
    from stockade.receipt.statement import Who
    from stockade.sandbox.aio import AsyncSandbox
    from stockade.sandbox.sandbox import Living, Sandbox

#: What an answer may carry besides the status.
NOTHING = 0


class Session:
    """What every session shares: a driver, started when it is needed, that is asked one thing at a time."""

    #: What it is called in messages, and what is lost with it.
    name = "session"
    state = ""
    program = ""
    #: Whether it is the sandbox's first process after the gate.
    first = False

    def __init__(self, sandbox: Living) -> None:
        self._living = sandbox
        self._line: Line | None = None
        self._closed = False

    def _running(
        self, box: Box, prepared: Prepared, driver: Run, run: Run, request: bytes, number: bytes, most: int,
        events: Events, account: Account,
    ) -> Steps[tuple[Told | None, Result]]:  # fmt: skip
        """Ask the driver, one that is started for it if there is none."""
        if self._closed:
            raise SetupError(f"the {self.name} was closed", stage=self.name)
        yield from calm(box)
        lost = False
        if self._line is not None and (self._line.box is not box or self._line.ended):
            lost = self._line.box is box
            self._let_go()
        if self._line is None:
            opened = yield from self._opened(box, driver.program, events)
            if isinstance(opened, client.Reply):
                refused = Ended(reply=opened, wall=0)
                return None, self._living._judged(refused, driver.program, prepared, box, account)
            self._line, request = opened, self._first() + request
        talk = Talk(self._line, run, request, number, events, most)
        try:
            told, ended = yield from talk.steps()
        finally:
            if talk.ended:
                self._let_go()

        def revised(result: Result) -> Result:
            result = self._said(self._told(result, gone=talk.ended), told)
            if lost and not result.hint:
                hint = f"the {self.name} had ended since the last run: this one had a fresh one"
                result = msgspec.structs.replace(result, hint=hint)
            return result

        return told, self._living._judged(ended, run.program, prepared, box, account, revised)

    def _opened(self, box: Box, program: client.Program, events: Events) -> Steps[Line | client.Reply]:
        """A driver that was started, or why that was refused."""
        # The policy's time is that of one run.
        program = msgspec.structs.replace(program, wall=None, first=self.first)
        opened = yield from opening(box, program, events)
        if isinstance(opened, client.Reply) and opened.text == "first":
            raise SetupError(
                "the sandbox has had its first process, so this shell cannot be that",
                stage=self.name,
                hint="run nothing before it, take a new sandbox when it has ended, or leave `first` out",
            )
        return opened

    def _account(self, code: str, who: Who | Mapping[str, str] | None) -> Account:
        """The account of one run: its command is the driver and the code."""
        readable = code.replace("\0", "\\0").encode("utf-8", "backslashreplace").decode()
        return self._living._account([self.program, readable], who)

    def _said(self, result: Result, told: Told | None) -> Result:
        """The result with what the driver says of its outcome."""
        return result

    @property
    def _next(self) -> str:
        return "a new sandbox has another first process" if self.first else "the next run starts a fresh one"

    def _first(self) -> bytes:
        """What a new driver is sent before anything else."""
        return b""

    def _told(self, result: Result, *, gone: bool) -> Result:
        """The result, with whoever counted its time, and what became of the driver."""
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
        """Whoever waits for it stops. A forked child only lets go of its copy."""
        self._closed = True
        if (line := self._line) is not None and line.owner == os.getpid():
            line.channel.hang_up()


def _counted(usage: Usage) -> Usage:
    """What one run of a driver that lives on has used: /proc tells its time, and nobody its memory."""
    source = {what: "proc" if by == "rusage" else by for what, by in usage.source.items()}
    if source["memory"] == "proc":
        del source["memory"]
    return msgspec.structs.replace(usage, source=source)


class Bash(Session):
    """What `Shell` and `AsyncShell` share: everything but the waiting."""

    name = program = "shell"
    state = "its directory, variables and functions"
    #: What is asked: bash, or where that is not there inside, sh.
    _driver: ModuleType | None = None

    def _inside(self, box: Box, prepared: Prepared, files: int, events: Events) -> Steps[ModuleType]:
        """What there is inside, found out by starting it; bash where there is neither."""
        if self.first and prepared.plan.plain:
            raise UnsupportedError(
                "without a pid namespace a shell cannot be the sandbox's first process",
                hint='shell() without `first`, or a backend that has one: "native", "bwrap"',
            )
        if self._driver is None and self._line is None and not self._closed:
            yield from calm(box)
            for driver in (bash, posix):
                run = command(prepared, driver.command(files), env=None, cwd=None, timeout=None, kept=True)
                opened = yield from self._opened(box, run.program, events)
                refusal = opened if isinstance(opened, client.Reply) else (yield from refused(opened, events))
                if isinstance(opened, Line) and refusal is None:
                    self._line, self._driver = opened, driver
                if refusal is None or refusal.error not in (errno.ENOENT, errno.EACCES):
                    break
                if self.first:
                    raise SetupError(
                        "there is no bash inside that could be the first process",
                        stage=self.name,
                        hint="shell() without `first` is an sh then",
                    )
        return self._driver or bash

    def _asking(
        self, box: Box, prepared: Prepared, code: str, events: Events, account: Account, *, given: bytes,
        env: Mapping[str, str] | None, timeout: float | None, grace: float, on_stdout: Sink | None,
        on_stderr: Sink | None,
    ) -> Steps[Result]:  # fmt: skip
        files = int(prepared.resolved.limits.files or bash.HIGHEST)
        asked = yield from self._inside(box, prepared, files, events)
        words = asked.command(files)
        driver = command(prepared, words, env=None, cwd=None, timeout=None, kept=True)
        run = command(
            prepared, words, given=given, env=env, cwd=None, timeout=timeout, grace=grace,
            on_stdout=on_stdout, on_stderr=on_stderr, kept=True,
        )  # fmt: skip
        number = os.urandom(12).hex().encode()
        request = asked.request(code, env or {}, number, files)
        _, result = yield from self._running(
            box, prepared, driver, run, request, number, NOTHING, events, account
        )
        return result


class Shell(Bash):
    """One bash in a `Sandbox`.

    >>> import stockade
    >>> with stockade.Sandbox() as box, box.shell() as shell:
    ...     _ = shell.run("cd /usr; greet() { echo hello from $PWD; }")
    ...     shell.run("greet; exit 3").exit_code, shell.run("greet").text
    (3, 'hello from /usr\\n')

    Directory, variables, functions and jobs stay from run to run, also after `exit`, `set -e` and a
    timeout (but for the list of jobs). When the shell itself is gone, the result says so, and the next run
    starts a fresh one, unless it was the `first` process. Several threads may use it; one run waits for the
    other. Each run has the timeout or `limits.wall`, whichever is shorter. Where no bash is
    there inside it is `sh`, which `exit` ends.
    """

    def __init__(self, sandbox: Sandbox, *, first: bool = False) -> None:
        super().__init__(sandbox)
        self.first = first
        self._sandbox = sandbox
        self._lock = threading.Lock()

    def __enter__(self) -> Shell:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self._let_go()

    def run(
        self,
        code: str,
        *,
        input: bytes = b"",
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
        grace: float = GRACE,
        on_stdout: Sink | None = None,
        on_stderr: Sink | None = None,
        who: Who | Mapping[str, str] | None = None,
    ) -> Result:
        """Run code in the shell. `input` is its standard input, `env` holds for this run only.

        When the time is over, the foreground is interrupted, after the grace killed, and the shell stays
        where it can. Background jobs go on; what they print comes with the next run.
        """
        account = self._account(code, who)
        with account.telling(), self._lock:
            self._sandbox._before_run()
            with self._sandbox._used() as (box, prepared), Events() as events:
                steps = self._asking(
                    box, prepared, code, events, account, given=input, env=env, timeout=timeout,
                    grace=grace, on_stdout=on_stdout, on_stderr=on_stderr,
                )  # fmt: skip
                return drive(steps, events)

    def close(self) -> None:
        """End the shell and what it has started."""
        self._hang_up()
        with self._lock:
            self._let_go()


class AsyncShell(Bash):
    """One bash in an `AsyncSandbox`; as `Shell`, with `await`. A cancelled run is interrupted."""

    def __init__(self, sandbox: AsyncSandbox, *, first: bool = False) -> None:
        import asyncio

        super().__init__(sandbox)
        self.first = first
        self._sandbox = sandbox
        self._lock = asyncio.Lock()

    async def __aenter__(self) -> AsyncShell:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __del__(self) -> None:
        self._let_go()

    async def run(
        self,
        code: str,
        *,
        input: bytes = b"",
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
        grace: float = GRACE,
        on_stdout: Sink | None = None,
        on_stderr: Sink | None = None,
        who: Who | Mapping[str, str] | None = None,
    ) -> Result:
        """Run code in the shell, as `Shell.run` does."""
        from stockade.sandbox import aio

        account = self._account(code, who)
        with account.telling():
            async with self._lock, self._sandbox._used() as (box, prepared):
                await self._sandbox._snapshotted()
                with Events() as events:
                    steps = self._asking(
                        box, prepared, code, events, account, given=input, env=env, timeout=timeout,
                        grace=grace, on_stdout=on_stdout, on_stderr=on_stderr,
                    )  # fmt: skip
                    return await aio.drive(steps, events)

    async def close(self) -> None:
        """End the shell and what it has started."""
        self._hang_up()
        async with self._lock:
            self._let_go()
