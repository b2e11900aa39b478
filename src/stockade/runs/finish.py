"""Turn the observed ending of a run into its result and its receipt."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Literal

import msgspec

from stockade.controls import Control
from stockade.gate import client, wire
from stockade.policy.socket_options import MULTICAST
from stockade.receipt.account import Account, RunRecord
from stockade.resolve.paths.protected_paths import warnings
from stockade.result import Outcome, Result
from stockade.runs.io.eventloop import Events, Steps, in_thread
from stockade.runs.launch import LaunchedSandbox
from stockade.runs.limits import usage_of
from stockade.runs.outcome import judge
from stockade.runs.prepare import RunPreparation, reach_warnings
from stockade.runs.register import runlog
from stockade.runs.supervise import RunEnding
from stockade.workspace.overlay import OverlayLayer

if TYPE_CHECKING:
    from stockade.runs.handoffs import Handoffs
    from stockade.runs.network.decisions import NetworkUse


def is_settled(ended: RunEnding, prepared: RunPreparation, box: LaunchedSandbox) -> bool:
    """Whether the result of a sandbox's only run is known before its gate has ended.

    The gate reports the end of a program after every process inside has ended. What still waits for the gate
    is the egress process, which records until then, the observer, and what looks at the files that are left.
    """
    reply = ended.reply
    return (
        reply is not None
        and reply.kind == wire.REPLY_EXITED
        and reply.ended == wire.ENDED_ITSELF
        and box.egress is None
        and prepared.observations < 0
        and not prepared.layers
        and not prepared.resolved.repositories.trees
    )


def result_of(
    ended: RunEnding,
    program: client.Program,
    prepared: RunPreparation,
    box: LaunchedSandbox,
    account: Account,
    *,
    closed: bool = False,
    revised: Callable[[Result], Result] = lambda result: result,
) -> Result:
    """Return the result of a run, with its receipt, and add it to the log of runs.

    `closed` says that the sandbox was closed while the run went on. `revised` may change the result before
    the receipt is made for it.
    """
    entry = prepared.made.entry
    # The cgroups and the layer of a closed sandbox are gone.
    group, layer = (None, None) if closed else (box.group, prepared.layer)
    killed = entry is not None and entry.was_killed()
    verdict = judge(
        ended, program, prepared.resolved, group, closed=closed, killed=killed,
        full=layer is not None and layer.is_full(), advise=account.advise,
        uncounted=_has_uncounted_tasks(prepared),
    )  # fmt: skip
    changes = layer.changes() if layer is not None else ()
    network = None if box.egress is None else box.egress.since(account.network_mark)
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
        usage=usage_of(ended, group, None if layer is None else layer.written, network),
        controls=prepared.controls,
        matched=prepared.resolved.hidden.matched,
        changes=changes,
        changes_cut="" if layer is None else layer.cut,
        workspace_id=layer.id if layer is not None and (changes or layer.cut or layer.continued) else "",
        network_mode=_network_mode(prepared),
        warnings=(
            *_warnings(prepared),
            *prepared.resolved.notes,
            *(_not_compared(layer) if layer is not None else ()),
        ),
        plan=prepared.plan.hash,
    )
    if network is not None:
        account.network, account.network_changes = network.counts, network.changes
        account.network_answers = network.answers
        result = msgspec.structs.replace(
            result,
            network=network.decisions,
            network_cut=network.cut,
            denials=network.denials,
            published=() if box.egress is None else tuple(map(str, box.egress.published)),
            warnings=(*result.warnings, *network.warnings),
            hint=_with_refusals(result, ended, network, prepared),
        )
    result = revised(result)
    place = prepared.resolved.workspace
    line = runlog.line(
        account.command,
        result,
        sandbox="" if entry is None else entry.record.id,
        directory="" if place is None else place.path,
        name=account.name,
    )
    return account.ended(
        RunRecord(result, ended.digests, lambda repeated: runlog.add(prepared.state, line, repeated))
    )


#: Why the rule `ask` had no effect.
NOBODY_TO_ASK = 'net = "ask": there was no terminal and no on_ask to ask, so only the other rules counted'


#: What a policy gives away that opens multicast.
MULTICAST_OPEN = (
    f'syscalls.allow = "{MULTICAST}": a socket joins at most {wire.MOST_MEMBERSHIPS} IPv4 groups, and any '
    "number of IPv6 groups; programs that join many make other sandboxes of this machine wait"
)


def _with_refusals(result: Result, ended: RunEnding, network: NetworkUse, prepared: RunPreparation) -> str:
    """Return the hint of a result and, if the program failed to connect, why and what would allow it."""
    if result.outcome is not Outcome.EXITED or not result.exit_code:
        return result.hint
    from stockade.runs.explain.ran_and_failed import GUESS
    from stockade.runs.explain.refused_connections import hint

    # Some programs, agents among them, say what went wrong on standard output.
    words = ended.tail if ended.tail.strip() else result.stdout[-2048:]
    refused = hint(words, network.denials, tuple(prepared.resolved.policy.net), network.decisions)
    known = bool(network.denials) and result.hint.startswith(GUESS)
    return "; ".join(filter(None, ("" if known else result.hint, refused)))


def _network_mode(prepared: RunPreparation) -> Literal["none", "rules", "open"]:
    net = prepared.resolved.policy.net
    return "none" if not net else "open" if net == "open" else "rules"


def _warnings(prepared: RunPreparation) -> tuple[str, ...]:
    network = prepared.resolved.network
    found = warnings(prepared.resolved.policy, "" if _covers(prepared) else prepared.plan.backend)
    if "ask" in prepared.resolved.policy.net and prepared.made.on_ask is None:
        found = (*found, NOBODY_TO_ASK)
    if MULTICAST in prepared.resolved.policy.syscalls.allow:
        found = (*found, MULTICAST_OPEN)
    return (*found, *reach_warnings(prepared.resolved.policy), *(network.warnings if network else ()))


def _has_uncounted_tasks(prepared: RunPreparation) -> bool:
    """Whether RLIMIT_NPROC limits the tasks: unlike a cgroup, it does not count what it refuses."""
    selection = prepared.chosen.selection
    return Control.LIMITS_TASKS not in selection.by_cgroup and Control.LIMITS_TASKS not in selection.weaker


def _covers(prepared: RunPreparation) -> bool:
    """Whether the backend mounts read-only what must not change inside a writable directory."""
    return prepared.chosen.selection.covers


def _not_compared(layer: OverlayLayer) -> Iterator[str]:
    if layer.unsure:
        files = f"{layer.unsure} file{'s' if layer.unsure != 1 else ''}"
        yield f"{files} listed as changed without being compared with yours: comparing them takes too long"


def with_handoffs(result: Result, handoffs: Handoffs | None) -> Result:
    """Return the result with the handoffs that the program left, and warnings about them."""
    if handoffs is None:
        return result
    return msgspec.structs.replace(
        result, handoffs=handoffs.left, warnings=(*result.warnings, *handoffs.warnings)
    )


def left_by_run(prepared: RunPreparation, events: Events) -> Steps[Handoffs | None]:
    """Find the handoffs of a sandbox's only run, once everything inside has ended."""
    if not prepared.resolved.repositories.trees:
        return None
    from stockade.runs.handoffs import handoffs

    return (yield from in_thread(lambda: handoffs(prepared.resolved, covered=_covers(prepared)), events))


def left_by_sandbox(prepared: RunPreparation) -> Handoffs | None:
    """Find the handoffs of an ended sandbox, and add them to the log of runs."""
    if not prepared.resolved.repositories.trees:
        return None
    from stockade.runs.handoffs import handoffs

    found, entry = handoffs(prepared.resolved, covered=_covers(prepared)), prepared.made.entry
    if entry is not None:
        runlog.note_left(prepared.state, entry.record.id, found.left, found.warnings)
    return found
