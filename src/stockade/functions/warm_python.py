"""`WarmPython`: sandboxes copied from an interpreter that has already loaded its modules."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TypeVar, Unpack

import stockade
from stockade.errors import PolicyError
from stockade.functions.interpreter_template import template
from stockade.gate import client
from stockade.gate.template import TemplateArgv
from stockade.linux import os_errors
from stockade.policy.model import PolicyLike, policy_or_default
from stockade.result import Result
from stockade.runs.options import OnExit, RunOptions, SandboxOptions, refuse_unknown
from stockade.runs.prepare import prepare
from stockade.sandbox import finalize
from stockade.sandbox.pool import Pool, valid_size
from stockade.sandbox.pool_member import PoolMember
from stockade.sandbox.sandbox import Sandbox, SandboxBase, run

L = TypeVar("L", bound=SandboxBase)


class WarmPython:
    """Runs Python code, each time in a fresh sandbox, without starting an interpreter each time.

    >>> import stockade
    >>> with stockade.functions.WarmPython(preload=["json"]) as python:
    ...     python.run("import json, sys; print(json.dumps(sys.argv[1:]))", args=["1"]).text
    '["1"]\\n'

    It starts one interpreter, the template, which imports `preload` outside, as you: name only modules that
    you would import yourself. Each sandbox is a copy of the template behind the walls of the policy and is
    used once; `size` of them are kept ready. `python` is the path of another interpreter; `on_exit` is as
    for `Sandbox`. docs/how-to/warm-python.md says what copies share. Threads may share a WarmPython. Without
    `with`, call `close`.
    """

    def __init__(
        self,
        policy: PolicyLike | None = None,
        *,
        preload: Iterable[str] = (),
        python: str | os.PathLike[str] | None = None,
        size: int = 2,
        on_exit: OnExit = "keep",
    ) -> None:
        self.policy = policy_or_default(policy)
        self._on_exit: OnExit = on_exit
        valid_size(size, 0)
        self._template = template(self.policy, preload, python)
        self._command = (self._template.argv[0],)
        self._start()
        self._owner = os.getpid()
        self._pool = _WarmStock(self, size, on_exit) if size else None
        finalize.close_at_exit(self)

    def _start(self) -> None:
        """Start the template now, so that a module that cannot be loaded raises at once."""
        prepared = prepare(self.policy, dry=True, command=self._command, template=self._template)
        try:
            with os_errors.setup_errors():
                client.resident(prepared.gate, scoped=prepared.scoped, template=self._template)
        finally:
            prepared.close(discard=True)

    def __repr__(self) -> str:
        state = "closed" if self._template.retired.is_set() else "open"
        return f"<WarmPython {self._command[0]}: {state}>"

    def __enter__(self) -> WarmPython:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the template and the ready sandboxes; those in use go on. Harmless when repeated."""
        try:
            if self._pool is not None:
                self._pool.close()
        finally:
            client.retire(self._template)

    def __del__(self) -> None:
        if hasattr(self, "_pool") and not self._template.retired.is_set():
            finalize.warn_unclosed("a WarmPython was not closed: use it in a `with` statement", self._owner)
            self.close()

    def code(self, code: str, args: Sequence[str] = ()) -> Sequence[str]:
        """Return code as a command, for `run`, `start` and the like of a sandbox from `sandbox`."""
        if not isinstance(code, str):
            raise PolicyError(
                f"code must be a str, not {type(code).__name__}", hint="pass the source of the program"
            )
        return TemplateArgv([*self._command, "-c", code, *args], self._template)

    def run(self, code: str, *, args: Sequence[str] = (), **options: Unpack[RunOptions]) -> Result:
        """Run code as `python -c` does, with `args` as its arguments, in its own sandbox.

        The options are `input`, `env`, `cwd`, `timeout`, `grace`, `on_stdout`, `on_stderr` and `who`, as for
        `stockade.run`.
        """
        refuse_unknown("run", options, RunOptions.__optional_keys__)
        words = self.code(code, args)
        if self._pool is None:
            return run(words, self.policy, on_exit=self._on_exit, **options)
        return self._pool.run(words, **options)

    async def aio(self, code: str, *, args: Sequence[str] = (), **options: Unpack[RunOptions]) -> Result:
        """Run code as `run` does, with its options, in the event loop and a newly made sandbox.

        Cancelling ends the code first.
        """
        from stockade.sandbox.async_sandbox import run_async

        refuse_unknown("aio", options, RunOptions.__optional_keys__)
        return await run_async(self.code(code, args), self.policy, on_exit=self._on_exit, **options)

    def sandbox(self, **options: Unpack[SandboxOptions]) -> Sandbox:
        """Return a living sandbox, with the options of `Sandbox`. It runs any command, and `code`."""
        options.setdefault("on_exit", self._on_exit)
        return self._copied(Sandbox(self.policy, **options))

    def async_sandbox(self, **options: Unpack[SandboxOptions]) -> stockade.AsyncSandbox:
        """Return a living sandbox for the event loop, with the options of `AsyncSandbox`."""
        from stockade.sandbox.async_sandbox import AsyncSandbox

        options.setdefault("on_exit", self._on_exit)
        return self._copied(AsyncSandbox(self.policy, **options))

    def _copied(self, box: L) -> L:
        box._template, box._command = self._template, self._command
        return box


class _WarmStock(Pool):
    """The sandboxes of a WarmPython that are kept ready."""

    def __init__(self, python: WarmPython, size: int, on_exit: OnExit) -> None:
        self._python = python
        super().__init__(python.policy, size=size, on_exit=on_exit)

    def _open_member(self) -> PoolMember:
        box = self._python.sandbox()
        box.open()
        return PoolMember(box)
