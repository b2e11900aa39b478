"""What walls refused in an observed run, as denials: each once, with what would allow it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from stockade.observe import records
from stockade.observe.access import Access, Action
from stockade.observe.answers import answer
from stockade.observe.file_answers import MISSING
from stockade.observe.view import Walls
from stockade.result import Denial, Result

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stockade.observe.answer_values import Answer
    from stockade.runs.prepare import RunPreparation

#: How many denials a result has, and how many accesses that failed are judged for them.
MOST, MOST_JUDGED = 1000, 20_000
#: How many programs a denial names.
MOST_PROGRAMS = 10
#: What the C library asks for before it looks up a name, and does without.
OPTIONAL = frozenset({"/etc/gai.conf", "/etc/host.conf"})


def with_denials(
    result: Result, prepared: RunPreparation, since: records.Mark = records.START, sources: Sequence[str] = ()
) -> Result:
    """Return the result of an observed run with what the walls refused since that moment.

    `sources` are the files of the policy. Without an observer the result stays as it is.
    """
    if prepared.observations < 0:
        return result
    seen = records.read(prepared.observations, since)
    walls = Walls(prepared.resolved, prepared.plan.backend, tuple(sources))
    changed = seen.changed()
    failed = [
        access
        for access in seen.accesses
        if access.error and not _is_early(access, changed) and not _is_optional(access)
    ]
    found = denials(failed[:MOST_JUDGED], walls)
    reasons = [
        f"{len(failed) - MOST_JUDGED} failures were not looked at" if len(failed) > MOST_JUDGED else "",
        f"{len(found) - MOST} more were refused" if len(found) > MOST else "",
        seen.cut,
    ]
    return msgspec.structs.replace(
        result,
        denials=(*result.denials, *found[:MOST]),
        denials_cut="; ".join(filter(None, reasons)),
        observed=True,
    )


def _is_early(access: Access, changed: frozenset[str]) -> bool:
    """Whether something could not be made because its directory was missing, and was made in the end."""
    return access.error in MISSING and access.action is Action.CREATE and access.target in changed


def _is_optional(access: Access) -> bool:
    """Whether programs do as well without it."""
    if records.is_compiled_python(access):
        return True
    return access.error in MISSING and access.action is Action.READ and access.target in OPTIONAL


def denials(failed: Sequence[Access], walls: Walls) -> list[Denial]:
    """Return what a wall refused; other failures are left out."""
    refused: dict[tuple[str, str, str], list[Answer]] = {}
    for access in failed:
        one = answer(access, walls)
        if not one.allowed:
            refused.setdefault((access.action, access.target, access.other), []).append(one)
    return [_denial(answers) for answers in refused.values()]


def _denial(answers: list[Answer]) -> Denial:
    """Return the denial of one thing that several programs may have tried."""
    one = answers[0]
    access, change = one.access, one.change
    programs = dict.fromkeys(each.access.program for each in answers if each.access.program)
    return Denial(
        what=access.action.value,
        target=access.target,
        other=access.other,
        programs=tuple(programs)[:MOST_PROGRAMS],
        wall=one.wall,
        clause=one.clause,
        place=one.place,
        hint="" if change is None else change.flag or change.describe(),
        change="" if change is None else change.toml,
        danger="" if change is None else change.danger,
        reason=one.reason,
        count=sum(each.access.count for each in answers),
    )
