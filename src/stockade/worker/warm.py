"""`WarmPython`: sandboxes that are copies of an interpreter which has loaded its modules already."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from stockade.errors import PolicyError
from stockade.gate import client
from stockade.gate.template import Resumed
from stockade.live.pool import Pool, checked_size
from stockade.live.slots import Slot
from stockade.policy import Policy
from stockade.sandbox import scarce, unclosed
from stockade.sandbox.launch import prepare
from stockade.sandbox.result import Result
from stockade.sandbox.sandbox import Living, OnExit, Sandbox, run
from stockade.sandbox.streams import Sink
from stockade.sandbox.supervise import GRACE
from stockade.worker.template import template

if TYPE_CHECKING:
    from stockade.receipt.statement import Who
    from stockade.sandbox.aio import AsyncSandbox

L = TypeVar("L", bound=Living)


class WarmPython:
    """Runs Python code, each time in a fresh sandbox, without starting an interpreter for it.

    >>> import stockade
    >>> with stockade.WarmPython(preload=["json"]) as python:
    ...     python.run("import json, sys; print(json.dumps(sys.argv[1:]))", args=["1"]).text
    '["1"]\\n'

    An interpreter, the template, is started once and imports `preload`, outside, as you: name only what you
    would import yourself. Each sandbox is a copy of it behind the walls of the policy, used once; `size` of
    them are kept ready. `python` is the path of another interpreter than this one, `on_exit` is as for
    `Sandbox`. What copies share is in docs/warm-python.md. Safe to use from threads. Without `with`, call
    `close`.
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
        self.policy = Policy() if policy is None else policy
        self._on_exit: OnExit = on_exit
        checked_size(size, 0)
        self._template = template(self.policy, preload, python)
        self._command = (self._template.argv[0],)
        self._start()
        self._owner = os.getpid()
        self._pool = _Ready(self, size, on_exit) if size else None
        unclosed.opened(self)

    def _start(self) -> None:
        """Start the template, so that whoever names what cannot be loaded is told at once."""
        prepared = prepare(self.policy, dry=True, command=self._command, template=self._template)
        try:
            with scarce.refused():
                client.resident(prepared.gate, scoped=prepared.scoped, template=self._template)
        finally:
            prepared.close(discard=True)

    def __enter__(self) -> WarmPython:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the template and the sandboxes that are ready; those in use go on. Harmless when repeated."""
        try:
            if self._pool is not None:
                self._pool.close()
        finally:
            client.retire(self._template)

    def __del__(self) -> None:
        if hasattr(self, "_pool") and not self._template.retired.is_set():
            unclosed.tell("a WarmPython was not closed: use it in a `with` statement", self._owner)
            self.close()

    def code(self, code: str, args: Sequence[str] = ()) -> Sequence[str]:
        """Code as a command, for `run`, `start` and the like of what `sandbox` opens."""
        if not isinstance(code, str):
            raise PolicyError(f"the code is {type(code).__name__}, not text")
        return Resumed([*self._command, "-c", code, *args], self._template)

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
        """Run code as `python -c` does, with `args` behind it, in a sandbox of its own."""
        options: dict[str, Any] = {
            "input": input, "env": env, "cwd": cwd, "timeout": timeout, "grace": grace,
            "on_stdout": on_stdout, "on_stderr": on_stderr, "who": who,
        }  # fmt: skip
        words = self.code(code, args)
        if self._pool is None:
            return run(words, self.policy, on_exit=self._on_exit, **options)
        return self._pool.run(words, **options)

    async def aio(self, code: str, *, args: Sequence[str] = (), **options: Any) -> Result:
        """As `run`, with its options, in the event loop and a sandbox that is made for it.

        A cancelled one is ended first.
        """
        from stockade.sandbox import aio

        return await aio.run(self.code(code, args), self.policy, on_exit=self._on_exit, **options)

    def sandbox(self, **options: Any) -> Sandbox:
        """A sandbox to live in, with the options of `Sandbox`. It runs commands as any other, and `code`."""
        return self._copied(Sandbox(self.policy, **{"on_exit": self._on_exit, **options}))

    def async_sandbox(self, **options: Any) -> AsyncSandbox:
        """The same for the event loop, with the options of `AsyncSandbox`."""
        from stockade.sandbox.aio import AsyncSandbox

        return self._copied(AsyncSandbox(self.policy, **{"on_exit": self._on_exit, **options}))

    def _copied(self, box: L) -> L:
        box._template, box._command = self._template, self._command
        return box


class _Ready(Pool):
    """The sandboxes that are kept ready."""

    def __init__(self, python: WarmPython, size: int, on_exit: OnExit) -> None:
        self._python = python
        super().__init__(python.policy, size=size, on_exit=on_exit)

    def _opened(self) -> Slot:
        box = self._python.sandbox()
        box.open()
        return Slot(box)
