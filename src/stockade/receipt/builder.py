"""Build the statement of a receipt from the values of a run."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgspec

from stockade._version import __version__
from stockade.controls import Control, Grade
from stockade.errors import NotFoundError, ReceiptError, SetupError, StockadeError
from stockade.linux.plain_text import utc
from stockade.linux.sha256 import Sha256Stream
from stockade.receipt import chain
from stockade.receipt.account import policy_hash
from stockade.receipt.statement import (
    BEGUN,
    EVENT_TYPE,
    ORPHANED,
    PRUNED,
    RECORDED,
    ROTATED,
    SIGNED,
    UNWALLED,
    CommandDigest,
    Event,
    EvidenceSummary,
    HostFacts,
    Network,
    Parent,
    Predicate,
    Protection,
    Receipt,
    Removal,
    ResourceUse,
    RunEnd,
    SecretUse,
    Statement,
    Subject,
    Who,
    canonical,
    digest,
    text,
)

if TYPE_CHECKING:
    from stockade.policy import Policy
    from stockade.receipt.account import Account
    from stockade.result import Result
    from stockade.runs.evidence import BackendChoice, Evidence
    from stockade.runs.network.egress_handle import EgressHandle
    from stockade.runs.register.sandbox_record import SandboxRecord

#: The fields of a result that its digest covers, besides the streams and the changes.
COVERED = ("outcome", "exit_code", "signal", "reason", "hint", "truncated", "usage", "controls", "plan")
#: The fields of the usage that its digest leaves out if they are None.
ONLY_WITH_RULES = ("bytes_sent", "bytes_received")
#: How many of the newest receipts are searched for one that a killed supervisor made itself.
NEWEST = 500
#: The most characters of a program's name.
MOST_NAME = 256
#: The most characters of patterns in a receipt.
MOST_PATTERNS = 1 << 16
#: Changes of network rules that a receipt lists.
MOST_CHANGES = 100
NO_USE = ResourceUse(
    cpu_user=0, cpu_system=0, peak_memory=0, peak_tasks=None, bytes_written=None, source={"cpu": "none"}
)


def ready(account: Account) -> None:
    """Open the log, load the key and collect what is known of a run, before there is a receipt."""
    chain.of(account.home).ready()
    if account.box is not None:
        account.known = _known_fields(account)


def ended(account: Account, result: Result, streams: dict[str, str]) -> Result:
    """Return the result with its receipt; `streams` are the digests of the program's output."""
    usage = result.usage
    used = ResourceUse(
        cpu_user=_micro(usage.cpu_user),
        cpu_system=_micro(usage.cpu_system),
        peak_memory=usage.peak_memory,
        peak_tasks=usage.peak_tasks,
        bytes_written=usage.bytes_written,
        source=usage.source,
        bytes_sent=msgspec.UNSET if usage.bytes_sent is None else usage.bytes_sent,
        bytes_received=msgspec.UNSET if usage.bytes_received is None else usage.bytes_received,
    )
    ending = RunEnd(
        result.outcome,
        result.exit_code,
        result.signal,
        result.truncated,
        changes_cut=True if result.changes_cut else msgspec.UNSET,
    )
    prepared = account.prepared
    controls = None
    if prepared is not None and result.controls is prepared.chosen.controls:
        controls = _controls(prepared.chosen)
    covered = result_digest(result, controls)
    subjects = streams | {"changes": changes_digest(result), "result": covered}
    try:
        receipt = _make_receipt(account, ending, used, subjects, _micro(usage.wall), result)
    except ReceiptError as error:
        error.args = (f"the command has run ({result.outcome}), but it has no receipt: {error.message}",)
        error.result = result
        raise
    return msgspec.structs.replace(result, receipt=receipt)


def failed(account: Account, error: BaseException) -> Receipt:
    """Make the receipt of a run that an exception ended or kept from starting."""
    refused = isinstance(error, StockadeError)
    stage, number = (error.stage, error.errno) if isinstance(error, SetupError) else ("", 0)
    ending = RunEnd(
        outcome="setup-failed" if refused else "cancelled",
        exit_code=125 if refused else 130,
        error=type(error).__name__,
        stage=stage,
        errno=number,
    )
    return _make_receipt(account, ending, NO_USE, {}, _micro(account.age))


def abandoned(account: Account) -> Receipt:
    """Make the receipt of a run that was ended because its caller abandoned it."""
    return _make_receipt(account, RunEnd("cancelled", 130), NO_USE, {}, _micro(account.age))


def orphaned(home: str, record: SandboxRecord) -> None:
    """Make the receipt of a run whose supervisor was killed, unless the supervisor made it before.

    Only what the register recorded at the launch is known: that the run began, and under which policy.
    """
    log = chain.of(home)
    newest = log.rows(newest=NEWEST)
    if newest and any(
        one.receipt.predicate.sandbox == record.id for one in log.all(first=newest[0].sequence)
    ):
        return
    fields = _blank() | {
        "sandbox": record.id,
        "command": CommandDigest(record.command[0][:MOST_NAME], ""),
        "policy": record.policy,
        "plan": record.plan,
        "ending": RunEnd("cancelled", 130, error=ORPHANED),
        "parent": Parent(record.parent, record.parent_plan) if record.parent else None,
        "started": record.started.removesuffix("Z") + ".000000Z",
        "name": record.name,
    }
    log.append(lambda link: Statement((), Predicate(**msgspec.structs.asdict(link), **fields)))


def event(link: chain.ChainLink, who: Who, event: Event) -> Statement:
    """Return the record of a decision that later runs depend on."""
    fields = _blank() | {"who": who, "ending": RunEnd(RECORDED, 0), "event": event}
    return Statement((), Predicate(**msgspec.structs.asdict(link), **fields), predicate_type=EVENT_TYPE)


def rotation(link: chain.ChainLink, public: bytes) -> Statement:
    """Return the record that another key signs from the next receipt on."""
    return event(link, Who(action=ROTATED), Event(key=public.hex()))


def checkpoint(link: chain.ChainLink, removal: Removal) -> Statement:
    """Return the record that older receipts were removed."""
    return event(link, Who(action=PRUNED), Event(pruned=removal))


def head(link: chain.ChainLink, signed: tuple[str, ...], found: tuple[str, ...]) -> Statement:
    """Return the record that signs the receipts before it that have no signature of their own."""
    return event(link, Who(action=SIGNED), Event(signed=signed, found=found))


def begun(home: str, who: Who, why: str) -> None:
    """Record that a handler is about to run without a sandbox: if it is killed, there is no receipt of it."""
    begins = Who(who.agent, who.category, BEGUN, f"{who.action}: {why}")
    chain.of(home).append(lambda link: event(link, begins, Event()))


def unwalled(
    home: str, who: Who, program: str, why: str, started: float, error: BaseException | None
) -> Receipt:
    """Make the receipt of a handler that ran without a sandbox: no policy and no control was in force."""
    none = EvidenceSummary(why, UNWALLED, UNWALLED, Grade.ABSENT)
    ending = RunEnd("exited", 0)
    if isinstance(error, Exception):
        ending = RunEnd("exited", 1, error=type(error).__name__)
    elif error is not None:
        ending = RunEnd("cancelled", 130, error=type(error).__name__)
    fields = _blank() | {
        "who": who,
        "command": _command([program]),
        "backend": UNWALLED,
        "controls": {control.value: none for control in Control},
        "network": Network("open"),
        "ending": ending,
        "started": stamp(started),
        "duration": max(0, _micro(time.time() - started)),
    }
    return chain.of(home).append(
        lambda link: Statement((), Predicate(**msgspec.structs.asdict(link), **fields))
    )


def _blank() -> dict[str, Any]:
    """Return the fields of a receipt about something that Stockade did not observe."""
    return {
        "sandbox": "",
        "who": Who(),
        "command": CommandDigest("", ""),
        "backend": "",
        "policy": "",
        "plan": "",
        "filter": "",
        "controls": {},
        "evidence": None,
        "network": Network(""),
        "ending": RunEnd("", 0),
        "usage": NO_USE,
        "started": stamp(time.time()),
        "duration": 0,
        "host": _host(),
    }


def _make_receipt(
    account: Account,
    ending: RunEnd,
    used: ResourceUse,
    subjects: dict[str, str],
    duration: int,
    result: Result | None = None,
) -> Receipt:
    about_run = _run_fields(account, ending, used, duration)
    about_run["network"] = _network(account, result)
    about = tuple(Subject(name, {"sha256": sha256}) for name, sha256 in sorted(subjects.items()))

    def write(link: chain.ChainLink) -> Statement:
        fields: dict[str, Any] = msgspec.structs.asdict(link)
        statement = Statement(about, Predicate(**fields, **about_run))
        account.statement = link.sequence, statement
        return statement

    receipt = _appended(account)
    if receipt is None:
        receipt = chain.of(account.home).append(write, batched=_policy(account).receipts == "batched")
    assert account.statement is not None
    if (place := account.statement[0]) not in account.places[-1:]:
        account.places.append(place)
    return receipt


def _appended(account: Account) -> Receipt | None:
    """Return the receipt of a run if an attempt that was interrupted has added it to the log."""
    if account.statement is None:
        return None
    place, statement = account.statement
    try:
        found = chain.of(account.home).get(place)
    except NotFoundError:
        return None
    return found if found.payload == canonical(statement) else None


def _policy(account: Account) -> Policy:
    return account.policy if account.prepared is None else account.prepared.resolved.policy


def _run_fields(account: Account, ending: RunEnd, used: ResourceUse, duration: int) -> dict[str, Any]:
    known = _known_fields(account) if account.known is None else account.known
    return known | {
        "ending": ending,
        "usage": used,
        "duration": duration,
        "children": tuple(account.children),
        "protection": None if account.protection is None else account.protection(),
    }


def _known_fields(account: Account) -> dict[str, Any]:
    """Return the fields of a receipt that do not depend on what the program does."""
    prepared, box = account.prepared, account.box
    plan = None if prepared is None else prepared.plan
    entry = None if prepared is None else prepared.made.entry
    return {
        "sandbox": "" if entry is None else entry.record.id,
        "who": account.who or Who(),
        "command": _command(account.command),
        "backend": "" if plan is None else plan.backend,
        "policy": policy_hash(_policy(account)),
        "plan": "" if plan is None else plan.hash,
        "filter": "" if plan is None else plan.filter,
        # If nothing was started, nothing was enforced.
        "controls": {} if prepared is None or box is None else _controls(prepared.chosen),
        "evidence": None if box is None else _evidence(box.evidence),
        "started": stamp(account.started),
        "host": _host(),
        "parent": account.parent,
        "observed": prepared is not None and prepared.plan.observed,
        "matched": {} if prepared is None or box is None else _matched(prepared.resolved.hidden.matched),
        "name": account.name,
        "pipeline": account.pipeline,
    }


def _network(account: Account, result: Result | None) -> Network:
    """Return what a receipt says about the network of a run: its mode and, with rules, what they decided."""
    net = _policy(account).net
    egress = None if account.box is None else account.box.egress
    mode = "open" if net == "open" else "rules" if net else "none"
    if mode != "rules" and egress is None:
        return Network(mode)
    rules = tuple(net) if egress is None else egress.rules_at(account.network_mark)
    observed = None if egress is None else egress.observed
    changes = account.network_changes
    listed = changes[:MOST_CHANGES]
    return Network(
        mode,
        rules=rules if sum(map(len, rules)) <= MOST_PATTERNS else (),
        counts=account.network,
        decisions="" if result is None else decisions_digest(result),
        cut="" if result is None else text(result.network_cut),
        routes=() if observed is None else observed.routes,
        listeners=() if observed is None else observed.listeners,
        egress=None if egress is None else egress.walls,
        changes=listed,
        more_changes=len(changes) - len(listed),
        published=() if egress is None else tuple(map(str, egress.published)),
        resolver=None if egress is None else egress.resolver,
        **_secrets(egress),
        asked=account.network_answers,
        proxies=() if egress is None else egress.proxies,
    )


def _secrets(egress: EgressHandle | None) -> dict[str, Any]:
    """Return what a receipt says about the secrets of a sandbox."""
    if egress is None or egress.secrets is None:
        return {}
    held = egress.secrets
    return {
        "secrets": tuple(
            SecretUse(name, one.hosts, one.as_, one.source)
            for name, one in held.policy.secrets.items()
            if name in held.placeholders
        ),
        "secrets_refreshed": held.refreshed,
        # Without either, the sandbox would not have started.
        "secrets_protection": Protection(locked="observed", wiped="observed"),
    }


def _matched(counts: Mapping[str, int]) -> dict[str, int]:
    """Return as many of the patterns as a receipt has room for."""
    fitting: dict[str, int] = {}
    room = MOST_PATTERNS
    for pattern, count in counts.items():
        room -= len(pattern)
        if room < 0:
            break
        fitting[text(pattern)] = count
    return fitting


def stamp(seconds: float) -> str:
    """Format a time as receipts write it: UTC, with microseconds, so that it sorts as text."""
    whole = int(seconds)
    return f"{utc(whole)}.{int((seconds - whole) * 1e6):06d}Z"


def changes_digest(result: Result) -> str:
    """Return the SHA-256 of the kind and the path of each change in order, each followed by a NUL byte.

    If the list is incomplete, "cut" and the reason follow in the same way.
    """
    streamed = Sha256Stream()
    for one in result.changes:
        streamed.update(b"%s\0%s\0" % (one.kind.encode(), os.fsencode(one.path)))
    if result.changes_cut:
        streamed.update(b"cut\0%s\0" % os.fsencode(result.changes_cut))
    return streamed.hexdigest()


def decisions_digest(result: Result) -> str:
    """Return the SHA-256 of the decisions of a result, as canonical JSON."""
    return digest(canonical(result.network))


def result_digest(result: Result, controls: msgspec.Raw | None = None) -> str:
    """Return the SHA-256 of the `COVERED` fields of a result, as JSON with sorted keys.

    `controls` are the result's own, if they are encoded already.
    """
    covered = {name: getattr(result, name) for name in COVERED}
    covered["usage"] = _usage(result)
    try:
        return digest(canonical(covered if controls is None else covered | {"controls": controls}))
    except UnicodeEncodeError:
        return digest(canonical(_readable(msgspec.to_builtins(covered))))


def _usage(result: Result) -> dict[str, Any]:
    """Return the usage without the fields that only network rules have, so that older digests stay valid."""
    used: dict[str, Any] = msgspec.structs.asdict(result.usage)
    return {name: value for name, value in used.items() if value is not None or name not in ONLY_WITH_RULES}


def _readable(value: Any) -> Any:
    """Return the value as JSON can hold it: a file name in a reason may not be UTF-8."""
    if isinstance(value, str):
        return text(value)
    if isinstance(value, dict):
        return {name: _readable(inner) for name, inner in value.items()}
    return value


def _command(words: Sequence[str]) -> CommandDigest:
    joined = b"".join(os.fsencode(word) + b"\0" for word in words)
    return CommandDigest(text(words[0][:MOST_NAME]) if words else "", digest(joined))


@lru_cache(maxsize=64)
def _controls(chosen: BackendChoice) -> msgspec.Raw:
    """Encode the controls once for the receipts of all runs under a policy."""
    seen = {
        name: EvidenceSummary(text(one.requested), text(one.mechanism), one.observed, one.grade)
        for name, one in chosen.controls.items()
    }
    return msgspec.Raw(canonical(seen))


@lru_cache(maxsize=16)
def _evidence(evidence: Evidence) -> msgspec.Raw:
    """Encode the evidence once for the receipts of all runs in a sandbox: it does not change any more."""
    return msgspec.Raw(canonical(evidence))


def _host() -> HostFacts:
    from stockade.host import host

    found = host()
    return HostFacts(found.kernel, found.machine, found.landlock, __version__, os.geteuid())


def _micro(seconds: float) -> int:
    return int(seconds * 1_000_000)
