"""Start a worker: a Python in its own sandbox, fresh or copied from a template."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import msgspec

from stockade.functions.channel import FunctionChannel
from stockade.policy import Policy
from stockade.receipt.account import Account
from stockade.receipt.statement import Protection
from stockade.result import Result
from stockade.runs.command import command
from stockade.runs.io.eventloop import Events, Steps
from stockade.runs.io.streams import Sink
from stockade.runs.options import RunOptions, Variables
from stockade.runs.prepare import prepare
from stockade.runs.supervise import GRACE, Run, StageTies, template_of
from stockade.sandbox.sandbox import one_shot

if TYPE_CHECKING:
    from stockade.functions.warm_python import WarmPython
    from stockade.receipt.statement import PipelinePlace, Who


#: Does what `-I` would: nothing is imported from the current directory.
ISOLATED = "import sys\nsys.path.remove('')\n"

OnExit = Literal["keep", "discard"]


class WorkerStarter(msgspec.Struct, frozen=True, kw_only=True):
    """How to start the worker of a call."""

    policy: Policy
    who: Who | None = None
    timeout: float | None = None
    grace: float = GRACE
    executable: str = ""
    #: The WarmPython whose template the worker is copied from, instead of a fresh interpreter.
    warm: WarmPython | None = None
    on_exit: OnExit = "keep"
    #: Whether the policy's paths are real names (`discover`).
    pinned: bool = False
    on_stdout: Sink | None = None
    on_stderr: Sink | None = None
    #: Variables besides those of the policy, the sandbox's name, and with `stage` and `place` what it is in a
    #: pipeline, whose first stage reads `input` or the content of the descriptor `stdin`.
    env: Variables | None = None
    name: str = ""
    input: bytes | str = b""
    stdin: int | None = None
    stage: StageTies | None = None
    place: PipelinePlace | None = None

    def command(self, boot: str) -> Sequence[str]:
        """Return the command that executes the text inside."""
        if self.warm is not None:
            return self.warm.code(ISOLATED + boot)
        return [self.executable or sys.executable, "-I", "-c", boot]


def run_worker(start: WorkerStarter, talk: FunctionChannel, events: Events) -> Steps[Result]:
    """Run a Python in its own sandbox from start to end; its call and answer go through the channel."""
    argv = start.command(talk.boot())
    account = Account(start.policy, argv, start.who, name=start.name)
    account.pipeline = start.place
    account.protection = lambda: Protection(sealed="observed" if talk.is_sealed else "absent")
    with account.telling():
        prepared = prepare(
            start.policy, pinned=start.pinned, command=argv, name=start.name, template=template_of(argv)
        )
        account.prepared = prepared

        def make_run() -> Run:
            options: RunOptions = {
                "timeout": start.timeout,
                "grace": start.grace,
                "on_stdout": start.on_stdout,
                "on_stderr": start.on_stderr,
                "env": start.env,
                "input": start.input,
            }
            run = command(
                prepared, argv, options, source=start.stdin, kept=False, meanwhile=account.ready,
                stage=start.stage,
            )  # fmt: skip
            return msgspec.structs.replace(run, beside=talk)

        return (yield from one_shot(prepared, make_run, account, events, start.on_exit))
