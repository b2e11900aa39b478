"""`WarmPython`: sandboxes copied from an interpreter that has already loaded its modules."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import stockade
from stockade.errors import PolicyError
from stockade.functions.interpreter_template import template
from stockade.gate import client
from stockade.gate.template import TemplateArgv
from stockade.linux import os_errors
from stockade.policy import Policy
from stockade.policy.model import policy_or_default
from stockade.receipt.statement import Who
from stockade.result import Result
from stockade.runs.io.streams import Sink
from stockade.runs.prepare import prepare
from stockade.runs.supervise import GRACE
from stockade.sandbox import finalize
from stockade.sandbox.pool import Pool, valid_size
from stockade.sandbox.pool_member import PoolMember
from stockade.sandbox.sandbox import OnExit, Sandbox, SandboxBase, run

L = TypeVar("L", bound=SandboxBase)


class WarmPython:
    """Runs Python code, each time in a fresh sandbox, without starting an interpreter each time.

    >>> import stockade
    >>> with stockade.WarmPython(preload=["json"]) as python:
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
        policy: Policy | None = None,
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

    def run(
        self,
        code: str,
        *,
        args: Sequence[str] = (),
        input: bytes = b"",
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        timeout: float | None = None,
        grace: float = GRACE,
        on_stdout: Sink | None = None,
        on_stderr: Sink | None = None,
        who: Who | Mapping[str, str] | None = None,
    ) -> Result:
        """Run code as `python -c` does, with `args` as its arguments, in its own sandbox."""
        options: dict[str, Any] = {
            "input": input, "env": env, "cwd": cwd, "timeout": timeout, "grace": grace,
            "on_stdout": on_stdout, "on_stderr": on_stderr, "who": who,
        }  # fmt: skip
        words = self.code(code, args)
        if self._pool is None:
            return run(words, self.policy, on_exit=self._on_exit, **options)
        return self._pool.run(words, **options)

    async def aio(self, code: str, *, args: Sequence[str] = (), **options: Any) -> Result:
        """Run code as `run` does, with its options, in the event loop and a newly made sandbox.

        Cancelling ends the code first.
        """
        from stockade.sandbox.async_sandbox import run as run_async

        return await run_async(self.code(code, args), self.policy, on_exit=self._on_exit, **options)

    def sandbox(self, **options: Any) -> Sandbox:
        """Return a living sandbox, with the options of `Sandbox`. It runs any command, and `code`."""
        return self._copied(Sandbox(self.policy, **{"on_exit": self._on_exit, **options}))

    def async_sandbox(self, **options: Any) -> stockade.AsyncSandbox:
        """Return a living sandbox for the event loop, with the options of `AsyncSandbox`."""
        from stockade.sandbox.async_sandbox import AsyncSandbox

        return self._copied(AsyncSandbox(self.policy, **{"on_exit": self._on_exit, **options}))

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
