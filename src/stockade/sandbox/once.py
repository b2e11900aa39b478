"""A sandbox for one run: raised, used and put away."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Literal

import msgspec

from stockade.errors import SetupError, StockadeError, one_line
from stockade.receipt.account import Account
from stockade.sandbox.continued import commit_and_close, snapshot_before
from stockade.sandbox.launch import Prepared, launch
from stockade.sandbox.report import result_of
from stockade.sandbox.result import Outcome, Result
from stockade.sandbox.steps import Events, Steps
from stockade.sandbox.streams import Streams
from stockade.sandbox.supervise import Run, supervise
from stockade.workspace.layers import lost

OnExit = Literal["keep", "discard", "commit"]
#: How the names of snapshots begin that are taken before each run.
RUN = "run-"


def one_shot(
    prepared: Prepared,
    made: Callable[[], Run],
    account: Account,
    events: Events,
    end: OnExit,
    *,
    snapshot: bool = False,
) -> Steps[Result]:
    """A sandbox for one run, which is put away afterwards."""
    account.prepared = prepared
    discard = False
    try:
        run = made()
        if snapshot:
            snapshot_before(prepared, RUN)
        result = yield from _once(prepared, run, account, events)
        if end != "discard" and result.workspace and prepared.layer is not None:
            result = msgspec.structs.replace(result, lost=prepared.layer.bring_last())
        if end == "commit":
            return _committed(result, prepared)
        discard = not result.workspace
        return result
    except BaseException:
        # Whatever ended it, what was done is kept, unless nothing was.
        with contextlib.suppress(SetupError):
            discard = prepared.unchanged()
        raise
    finally:
        prepared.close(discard=discard or end == "discard", earlier=end == "discard")


def _committed(result: Result, prepared: Prepared) -> Result:
    """The result with what became of its changes. One that did not end by itself may have half of them."""
    replace = msgspec.structs.replace
    if result.outcome != Outcome.EXITED:
        why = f"nothing was committed, because the run was not finished: {result.outcome}"
        return replace(result, commit_error=why if result.changes else "")
    if result.lost:
        return replace(result, commit_error=f"nothing was committed, because of {lost(result.lost)}")
    try:
        done = commit_and_close(prepared)
    except StockadeError as error:
        why = f"{error.message}\n{error.hint}" if error.hint else one_line(error.message)
        return replace(result, commit_error=why)
    gone = done is None or done.closed
    return replace(result, committed=done, workspace="" if gone else result.workspace)


def _once(prepared: Prepared, run: Run, account: Account, events: Events) -> Steps[Result]:
    """A sandbox for one run."""
    pipes: list[Streams] = []
    try:
        box = yield from launch(prepared, events, lambda: pipes.append(run.streams()))
        account.box = box
        try:
            ended = yield from supervise(box, run, pipes[0], events)
        finally:
            yield from box.closed(events)
        return result_of(ended, run.program, prepared, box, account)
    finally:
        for streams in pipes:
            streams.close()
