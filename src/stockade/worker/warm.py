"""`WarmPython`: sandboxes that are copies of an interpreter which has loaded its modules already."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stockade.errors import PolicyError
from stockade.gate import client
from stockade.gate.template import Resumed
from stockade.policy import Policy
from stockade.sandbox.result import Result
from stockade.sandbox.sandbox import OnExit, Sandbox, run
from stockade.sandbox.streams import Sink
from stockade.sandbox.supervise import GRACE
from stockade.worker.template import template

if TYPE_CHECKING:
    from stockade.receipt.statement import Who


class WarmPython:
    """Runs Python code, each in a fresh sandbox, without starting an interpreter for it.

    >>> import stockade
    >>> with stockade.WarmPython(preload=["json"]) as python:
    ...     python.run("print(json.dumps([1, 2]))").ok
    ...     python.run("import json; print(json.dumps([1, 2]))").text
    False
    '[1, 2]\\n'

    An interpreter, the template, is started once and imports `preload`, outside, as you: name only what you
    would import yourself. Each sandbox is a copy of it behind the walls of the policy. `python` is the path of
    another interpreter than this one. What copies share is in docs/warm-python.md. Safe to use from threads.
    """

    def __init__(
        self,
        policy: Policy | None = None,
        *,
        preload: Iterable[str] = (),
        python: str | os.PathLike[str] | None = None,
    ) -> None:
        self.policy = Policy() if policy is None else policy
        self._template = template(self.policy, preload, python)

    def __enter__(self) -> WarmPython:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the template. Sandboxes that live go on; a later run starts another."""
        client.retire(self._template)

    def code(self, code: str, args: Sequence[str] = ()) -> Sequence[str]:
        """Code as a command, for `run` and `start` of a sandbox that `sandbox` has made."""
        if not isinstance(code, str):
            raise PolicyError(f"the code is {type(code).__name__} and not text")
        return Resumed([self._template.argv[0], "-c", code, *args], self._template)

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
        on_exit: OnExit = "keep",
        who: Who | Mapping[str, str] | None = None,
    ) -> Result:
        """Run code as `python -c` would, in a sandbox of its own. Everything else is as for `stockade.run`."""
        return run(
            self.code(code, args), self.policy, input=input, env=env, cwd=cwd, timeout=timeout, grace=grace,
            on_stdout=on_stdout, on_stderr=on_stderr, on_exit=on_exit, who=who,
        )  # fmt: skip

    def sandbox(self, **options: Any) -> Sandbox:
        """A sandbox to live in, with the options of `Sandbox`. Commands run there as always, and `code` does."""
        box = Sandbox(self.policy, **options)
        box._template, box._command = self._template, (self._template.argv[0],)
        return box
