"""Where a worker comes from: a Python in a sandbox of its own, fresh or a copy of a warm one."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import msgspec

from stockade.policy import Policy
from stockade.receipt.account import Account
from stockade.sandbox.launch import prepare
from stockade.sandbox.result import Result
from stockade.sandbox.sandbox import command, one_shot
from stockade.sandbox.steps import Events, Steps
from stockade.sandbox.streams import Sink
from stockade.sandbox.supervise import GRACE, Run, template_of
from stockade.worker.talk import Talk

if TYPE_CHECKING:
    from stockade.receipt.statement import Who
    from stockade.worker.warm import WarmPython


#: What `-I` says: nothing is imported from the directory that the function finds itself in.
ISOLATED = "import sys\nsys.path.remove('')\n"

OnExit = Literal["keep", "discard"]


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """How a call is made, whatever is called."""

    policy: Policy
    who: Who | None = None
    timeout: float | None = None
    grace: float = GRACE
    executable: str = ""
    #: Whose template the Python is a copy of, instead of being executed.
    warm: WarmPython | None = None
    on_exit: OnExit = "keep"
    #: Whether the policy's paths are real names (`discover`).
    pinned: bool = False
    on_stdout: Sink | None = None
    on_stderr: Sink | None = None

    def command(self, boot: str) -> Sequence[str]:
        """What is run inside, to execute that text."""
        if self.warm is not None:
            return self.warm.code(ISOLATED + boot)
        return [self.executable or sys.executable, "-I", "-c", boot]


def once(start: Start, talk: Talk, events: Events) -> Steps[Result]:
    """A sandbox and a Python in it, from their start to their end; what is said goes through the talk."""
    argv = start.command(talk.boot())
    account = Account(start.policy, argv, start.who)
    with account.telling():
        prepared = prepare(start.policy, pinned=start.pinned, command=argv, template=template_of(argv))
        account.prepared = prepared

        def made() -> Run:
            run = command(
                prepared, argv, env=None, cwd=None, timeout=start.timeout, grace=start.grace,
                on_stdout=start.on_stdout, on_stderr=start.on_stderr, kept=False, meanwhile=account.ready,
            )  # fmt: skip
            return msgspec.structs.replace(run, beside=talk)

        return (yield from one_shot(prepared, made, account, events, start.on_exit))
