"""From what was seen of a run's end to its result and its receipt."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from stockade.errors import StockadeError, one_line
from stockade.gate import client
from stockade.receipt.account import Account
from stockade.sandbox import runlog
from stockade.sandbox.continued import commit_and_close
from stockade.sandbox.launch import Box, Prepared
from stockade.sandbox.limits import measured
from stockade.sandbox.outcome import judge
from stockade.sandbox.result import Outcome, Result
from stockade.sandbox.supervise import Ended
from stockade.workspace.layers import lost


def result_of(
    ended: Ended,
    program: client.Program,
    prepared: Prepared,
    box: Box,
    account: Account,
    *,
    closed: bool = False,
    revised: Callable[[Result], Result] = lambda result: result,
) -> Result:
    """What became of a run, with the receipt of it. `closed` says that its sandbox was closed under it.

    `revised` is the result as the caller will see it, before the receipt is made for it.
    """
    entry = prepared.made.entry
    # What a closed sandbox had is gone.
    group, layer = (None, None) if closed else (box.group, prepared.layer)
    killed = entry is not None and entry.was_killed()
    verdict = judge(
        ended, program, prepared.resolved, group, closed=closed, killed=killed,
        full=layer is not None and layer.is_full(), asked_inside=account.parent is not None,
    )  # fmt: skip
    changes = tuple(layer.changes()) if layer is not None else ()
    cancelled = account.because if verdict.outcome is Outcome.CANCELLED else ""
    result = Result(
        outcome=verdict.outcome,
        exit_code=verdict.exit_code,
        signal=verdict.signal,
        reason=cancelled or verdict.reason,
        hint=verdict.hint,
        stdout=ended.stdout,
        stderr=ended.stderr,
        truncated=ended.truncated,
        spilled=ended.spilled,
        usage=measured(ended, group, None if layer is None else layer.written),
        controls=prepared.controls,
        changes=changes,
        workspace=layer.id if layer is not None and (changes or layer.continued) else "",
        plan=prepared.plan.hash,
    )
    result = revised(result)
    place = prepared.resolved.workspace
    runlog.note(
        prepared.state,
        account.command,
        result,
        sandbox="" if entry is None else entry.record.id,
        directory="" if place is None else place.path,
    )
    return account.ended(result, ended.digests)


def committed(result: Result, prepared: Prepared) -> Result:
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
