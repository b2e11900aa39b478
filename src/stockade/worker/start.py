"""Where a worker comes from: a fresh Python in a sandbox of its own, for one call.

Everything about starting it is in `once`, so that another way to have an
interpreter there takes its place.
"""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Literal

import msgspec

from stockade.errors import SetupError
from stockade.policy import Policy
from stockade.receipt.account import Account
from stockade.sandbox.launch import prepare
from stockade.sandbox.once import _once
from stockade.sandbox.result import Result
from stockade.sandbox.sandbox import command
from stockade.sandbox.steps import Events, Steps
from stockade.sandbox.streams import Sink
from stockade.sandbox.supervise import GRACE
from stockade.worker.talk import Talk

if TYPE_CHECKING:
    from stockade.receipt.statement import Who

OnExit = Literal["keep", "discard"]


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """How a call is made, whatever is called."""

    policy: Policy
    who: Who | None = None
    timeout: float | None = None
    grace: float = GRACE
    executable: str = ""
    on_exit: OnExit = "keep"
    #: Whether the policy's paths are real names (`discover`).
    pinned: bool = False
    on_stdout: Sink | None = None
    on_stderr: Sink | None = None


def once(start: Start, talk: Talk, events: Events) -> Steps[Result]:
    """A sandbox and a Python in it, from their start to their end; what is said goes through the talk."""
    argv = [start.executable or sys.executable, "-I", "-c", talk.boot()]
    account = Account(start.policy, argv, start.who)
    discard = start.on_exit == "discard"
    with account.telling():
        prepared = prepare(start.policy, pinned=start.pinned, command=argv)
        account.prepared = prepared
        try:
            run = command(
                prepared, argv, env=None, cwd=None, timeout=start.timeout, grace=start.grace,
                on_stdout=start.on_stdout, on_stderr=start.on_stderr, kept=False, meanwhile=account.ready,
            )  # fmt: skip
            run = msgspec.structs.replace(run, beside=talk)
            result = yield from _once(prepared, run, account, events)
            if not discard and result.workspace and prepared.layer is not None:
                result = msgspec.structs.replace(result, lost=prepared.layer.bring_last())
            discard = discard or not result.workspace
            return result
        except BaseException:
            # Whatever ended it, what was done is kept, unless nothing was.
            with contextlib.suppress(SetupError):
                discard = discard or prepared.unchanged()
            raise
        finally:
            prepared.close(discard=discard, earlier=start.on_exit == "discard")
