"""What a receipt says about a run, from the run's own values."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgspec

from stockade._version import __version__
from stockade.controls import Control, Grade
from stockade.errors import ReceiptError, SetupError, StockadeError
from stockade.receipt import chain
from stockade.receipt.account import policy_hash
from stockade.receipt.statement import (
    BEGUN,
    EVENT_TYPE,
    ORPHANED,
    RECORDED,
    ROTATED,
    UNWALLED,
    Command,
    Ending,
    Event,
    HostFacts,
    Network,
    Parent,
    Predicate,
    Receipt,
    Seen,
    Statement,
    Subject,
    Used,
    Who,
    canonical,
    digest,
    text,
)
from stockade.sandbox.records import utc

if TYPE_CHECKING:
    from stockade.receipt.account import Account
    from stockade.sandbox.evidence import Chosen, Evidence
    from stockade.sandbox.records import Record
    from stockade.sandbox.result import Result
    from stockade.workspace.layers import Change

#: What of a result its digest covers, besides the streams and the changes.
COVERED = ("outcome", "exit_code", "signal", "reason", "hint", "truncated", "usage", "controls", "plan")
#: How far back a receipt of a killed supervisor's own is looked for.
NEWEST = 500
#: As much as is kept of a program's name.
MOST_NAME = 256
NO_USE = Used(
    cpu_user=0, cpu_system=0, peak_memory=0, peak_tasks=None, bytes_written=None, source={"cpu": "none"}
)


def ready(home: str) -> None:
    """Do what can be done before there is a receipt."""
    chain.of(home).ready()


def ended(account: Account, result: Result, streams: dict[str, str]) -> Result:
    """The result with the receipt of its run; `streams` are the digests of what it printed."""
    usage = result.usage
    used = Used(
        cpu_user=_micro(usage.cpu_user),
        cpu_system=_micro(usage.cpu_system),
        peak_memory=usage.peak_memory,
        peak_tasks=usage.peak_tasks,
        bytes_written=usage.bytes_written,
        source=usage.source,
    )
    ending = Ending(result.outcome, result.exit_code, result.signal, result.truncated)
    prepared = account.prepared
    controls = None
    if prepared is not None and result.controls is prepared.controls:
        controls = _controls(prepared.chosen)
    covered = result_digest(result, controls)
    subjects = streams | {"changes": changes_digest(result.changes), "result": covered}
    try:
        receipt = _made(account, ending, used, subjects, _micro(usage.wall))
    except ReceiptError as error:
        error.args = (f"the command has run ({result.outcome}), but has no receipt: {error.message}",)
        error.result = result
        raise
    return msgspec.structs.replace(result, receipt=receipt)


def failed(account: Account, error: BaseException) -> Receipt:
    """The receipt of a run that an exception ended, or kept from starting."""
    refused = isinstance(error, StockadeError)
    stage, number = (error.stage, error.errno) if isinstance(error, SetupError) else ("", 0)
    ending = Ending(
        outcome="setup-failed" if refused else "cancelled",
        exit_code=125 if refused else 130,
        error=type(error).__name__,
        stage=stage,
        errno=number,
    )
    return _made(account, ending, NO_USE, {}, _micro(account.age))


def abandoned(account: Account) -> Receipt:
    """The receipt of a run that its caller has let go of before it ended, and that was ended therefore."""
    return _made(account, Ending("cancelled", 130), NO_USE, {}, _micro(account.age))


def orphaned(home: str, record: Record) -> None:
    """Make the receipt of a run whose supervisor was killed, unless it came to that itself.

    Only what was written down before it started is known: that it was begun, and under which policy.
    """
    log = chain.of(home)
    newest = log.rows(newest=NEWEST)
    if newest and any(
        one.receipt.predicate.sandbox == record.id for one in log.all(first=newest[0].sequence)
    ):
        return
    fields = _blank() | {
        "sandbox": record.id,
        "command": Command(record.command[0][:MOST_NAME], ""),
        "policy": record.policy,
        "plan": record.plan,
        "ending": Ending("cancelled", 130, error=ORPHANED),
        "parent": Parent(record.parent, record.parent_plan) if record.parent else None,
        "started": record.started.removesuffix("Z") + ".000000Z",
    }
    log.append(lambda link: Statement((), Predicate(**msgspec.structs.asdict(link), **fields)))


def event(link: chain.Link, who: Who, event: Event) -> Statement:
    """The record of a decision that later runs depend on."""
    fields = _blank() | {"who": who, "ending": Ending(RECORDED, 0), "event": event}
    return Statement((), Predicate(**msgspec.structs.asdict(link), **fields), predicate_type=EVENT_TYPE)


def rotation(link: chain.Link, public: bytes) -> Statement:
    """The record that another key signs from the next receipt on."""
    return event(link, Who(action=ROTATED), Event(key=public.hex()))


def begun(home: str, who: Who, why: str) -> None:
    """Record that a handler is about to run without a sandbox: whoever kills it leaves no receipt."""
    said = Who(who.agent, who.category, BEGUN, f"{who.action}: {why}")
    chain.of(home).append(lambda link: event(link, said, Event()))


def unwalled(
    home: str, who: Who, program: str, why: str, started: float, error: BaseException | None
) -> Receipt:
    """The receipt of a handler that ran as any function does: no policy was in force, and no control."""
    none = Seen(why, UNWALLED, UNWALLED, Grade.ABSENT.value)
    ending = Ending("exited", 0)
    if isinstance(error, Exception):
        ending = Ending("exited", 1, error=type(error).__name__)
    elif error is not None:
        ending = Ending("cancelled", 130, error=type(error).__name__)
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
    """What is said of something that nobody has seen run."""
    return {
        "sandbox": "",
        "who": Who(),
        "command": Command("", ""),
        "backend": "",
        "policy": "",
        "plan": "",
        "filter": "",
        "controls": {},
        "evidence": None,
        "network": Network(""),
        "ending": Ending("", 0),
        "usage": NO_USE,
        "started": stamp(time.time()),
        "duration": 0,
        "host": _host(os.geteuid()),
    }


def _made(account: Account, ending: Ending, used: Used, subjects: dict[str, str], duration: int) -> Receipt:
    said = _said(account, ending, used, duration)
    about = tuple(Subject(name, {"sha256": found}) for name, found in sorted(subjects.items()))
    place = 0

    def write(link: chain.Link) -> Statement:
        nonlocal place
        place = link.sequence
        fields: dict[str, Any] = msgspec.structs.asdict(link)
        return Statement(about, Predicate(**fields, **said))

    receipt = chain.of(account.home).append(write)
    account.places.append(place)
    return receipt


def _said(account: Account, ending: Ending, used: Used, duration: int) -> dict[str, Any]:
    prepared, box = account.prepared, account.box
    plan = None if prepared is None else prepared.plan
    entry = None if prepared is None else prepared.made.entry
    policy = account.policy if prepared is None else prepared.resolved.policy
    return {
        "sandbox": "" if entry is None else entry.record.id,
        "who": account.who or Who(),
        "command": _command(account.command),
        "backend": "" if plan is None else plan.backend,
        "policy": policy_hash(policy),
        "plan": "" if plan is None else plan.hash,
        "filter": "" if plan is None else plan.filter,
        # Where nothing was started, nothing was enforced.
        "controls": {} if prepared is None or box is None else _controls(prepared.chosen),
        "evidence": None if box is None else _evidence(box.evidence),
        "network": Network("open" if policy.net == "open" else "none"),
        "ending": ending,
        "usage": used,
        "started": stamp(account.started),
        "duration": duration,
        "host": _host(os.geteuid()),
        "parent": account.parent,
        "children": tuple(account.children),
    }


def stamp(seconds: float) -> str:
    """A time as receipts write it: UTC, with microseconds, so that text sorts as time does."""
    whole = int(seconds)
    return f"{utc(whole)}.{int((seconds - whole) * 1e6):06d}Z"


def changes_digest(changes: Sequence[Change]) -> str:
    """SHA-256 of the kind and the path of each change in order, each followed by a NUL byte."""
    return digest(b"".join(b"%s\0%s\0" % (one.kind.encode(), os.fsencode(one.path)) for one in changes))


def result_digest(result: Result, controls: msgspec.Raw | None = None) -> str:
    """SHA-256 of what a result says besides its streams and changes, as JSON with sorted keys.

    `controls` are its own, where they have been encoded already.
    """
    said = {name: getattr(result, name) for name in COVERED}
    try:
        return digest(canonical(said if controls is None else said | {"controls": controls}))
    except UnicodeEncodeError:
        return digest(canonical(_readable(msgspec.to_builtins(said))))


def _readable(value: Any) -> Any:
    """The value as JSON can hold it: a file name in a reason may not be UTF-8."""
    if isinstance(value, str):
        return text(value)
    if isinstance(value, dict):
        return {name: _readable(inner) for name, inner in value.items()}
    return value


def _command(words: Sequence[str]) -> Command:
    joined = b"".join(os.fsencode(word) + b"\0" for word in words)
    return Command(text(words[0][:MOST_NAME]) if words else "", digest(joined))


@lru_cache(maxsize=64)
def _controls(chosen: Chosen) -> msgspec.Raw:
    """What the receipts of all runs under a policy say of its controls."""
    seen = {
        name: Seen(text(one.requested), text(one.mechanism), one.observed, one.grade.value)
        for name, one in chosen.controls.items()
    }
    return msgspec.Raw(canonical(seen))


@lru_cache(maxsize=16)
def _evidence(evidence: Evidence) -> msgspec.Raw:
    """What those of all runs in a sandbox say of what was seen of it: nothing is added any more."""
    return msgspec.Raw(canonical(evidence))


@lru_cache(maxsize=4)
def _host(uid: int) -> HostFacts:
    from stockade.host import host

    found = host()
    return HostFacts(found.kernel, found.machine, found.landlock, __version__, uid)


def _micro(seconds: float) -> int:
    return int(seconds * 1_000_000)
