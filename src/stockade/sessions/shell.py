"""`Shell`: one bash in a living sandbox; its directory, variables and functions stay from run to run."""

from __future__ import annotations

import errno
import os
import threading
from types import ModuleType
from typing import Unpack

from stockade.errors import SetupError, UnsupportedError
from stockade.gate import wire
from stockade.receipt.account import Account
from stockade.result import Result
from stockade.runs.command import command, wait_until_thawed
from stockade.runs.io.eventloop import Events, Steps, drive
from stockade.runs.launch import LaunchedSandbox
from stockade.runs.options import ShellOptions, directory, refuse_unknown, variables
from stockade.runs.prepare import RunPreparation
from stockade.sessions import bash, posix_shell
from stockade.sessions.connection import DriverConnection, startup_refusal
from stockade.sessions.session import AsyncLivingSandbox, LivingSandbox, Session

#: How many bytes of content an answer may have besides the status.
NOTHING = 0


class Bash(Session):
    """What `Shell` and `AsyncShell` share: everything but the waiting."""

    name = program = "shell"
    state = "its directory, variables and functions"
    insistent = True
    #: The module for the shell that was found inside: bash, or else sh.
    _driver: ModuleType | None = None

    def _find_shell(
        self, box: LaunchedSandbox, prepared: RunPreparation, files: int, events: Events
    ) -> Steps[ModuleType]:
        """Find out which shell is inside by starting it; return bash if neither starts."""
        if self.first and prepared.plan.plain:
            raise UnsupportedError(
                "a shell cannot be the sandbox's first process: this backend has no pid namespace",
                hint='call shell() without `first`, or choose a backend that has one: "native", "bwrap"',
            )
        if self._driver is None and self._line is None and not self._closed:
            yield from wait_until_thawed(box)
            for driver in (bash, posix_shell):
                run = command(prepared, driver.command(files), kept=True)
                started = yield from self._start_driver(box, run.program, events)
                refusal = (
                    started
                    if isinstance(started, wire.Reply)
                    else (yield from startup_refusal(started, events))
                )
                if isinstance(started, DriverConnection) and refusal is None:
                    self._line, self._driver = started, driver
                if refusal is None or refusal.error not in (errno.ENOENT, errno.EACCES):
                    break
                if self.first:
                    raise SetupError(
                        "no shell can be the first process: there is no bash inside",
                        stage=self.name,
                        errno=refusal.error,
                        hint="show a bash inside, or call shell() without `first`, which falls back to sh",
                    )
        return self._driver or bash

    def _run_code(
        self,
        box: LaunchedSandbox,
        prepared: RunPreparation,
        code: str,
        events: Events,
        account: Account,
        options: ShellOptions,
    ) -> Steps[Result]:
        files = int(prepared.resolved.limits.files or bash.HIGHEST)
        shell = yield from self._find_shell(box, prepared, files, events)
        words = shell.command(files)
        driver = command(prepared, words, kept=True)
        run = command(prepared, words, options, kept=True)
        number = os.urandom(12).hex().encode()
        place = directory(options.get("cwd"))
        request = shell.request(code, variables(options.get("env")), number, files, place)
        _, result = yield from self._run_on_driver(
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
    timeout (except the list of jobs). If the shell itself ends, the result says so, and the next run
    starts a fresh one, unless it was the `first` process. Several threads may use it; their runs take
    turns. Each run ends after the timeout or `limits.wall`, whichever is shorter. If there is no bash
    inside, the shell is `sh`, which ends at `exit`.
    """

    def __init__(self, sandbox: LivingSandbox, *, first: bool = False) -> None:
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

    def run(self, code: str, **options: Unpack[ShellOptions]) -> Result:
        """Run code in the shell. `input` is its standard input; `env` and `cwd` apply to this run only.

        After the timeout the foreground processes are interrupted, and after the grace killed; the shell
        survives if it can. Background jobs go on; the next run returns their output. The options are `input`,
        `env`, `cwd`, `timeout`, `grace`, `on_stdout`, `on_stderr` and `who`, as for `stockade.run`.
        """
        refuse_unknown("run", options, ShellOptions.__optional_keys__)
        account = self._account(code, options.get("who"))
        with account.telling(), self._lock:
            self._sandbox.before_run()
            with self._sandbox.use() as (box, prepared), Events() as events:
                return drive(self._run_code(box, prepared, code, events, account, options), events)

    def close(self) -> None:
        """End the shell and what it has started."""
        self._hang_up()
        with self._lock:
            self._let_go()


class AsyncShell(Bash):
    """One bash in an `AsyncSandbox`: `Shell` with `await`. Cancelling a run interrupts the code."""

    def __init__(self, sandbox: AsyncLivingSandbox, *, first: bool = False) -> None:
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

    async def run(self, code: str, **options: Unpack[ShellOptions]) -> Result:
        """Run code in the shell, as `Shell.run` does."""
        from stockade.runs.io import async_eventloop

        refuse_unknown("run", options, ShellOptions.__optional_keys__)
        account = self._account(code, options.get("who"))
        with account.telling():
            async with self._lock, self._sandbox.use() as (box, prepared):
                await self._sandbox.before_run()
                with Events() as events:
                    steps = self._run_code(box, prepared, code, events, account, options)
                    return await async_eventloop.drive(steps, events)

    async def close(self) -> None:
        """End the shell and what it has started."""
        self._hang_up()
        async with self._lock:
            self._let_go()
