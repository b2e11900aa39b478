"""What learning finds: an entry of the policy with its reason, or a question that only the user answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

#: How many programs the reason for an entry names.
MOST_PROGRAMS = 3


class LearnedEntry(msgspec.Struct, frozen=True):
    """One item of a clause, as a policy writes it, and the reason for it.

    The program may have chosen the text of both: a writer escapes them.
    """

    text: str
    reason: str = ""


class LearnQuestion(msgspec.Struct, frozen=True):
    """Something that the program wanted and that learning does not grant."""

    #: What it wanted, in words.
    wanted: str
    #: Why that is not granted.
    why: str
    #: The line of a policy that would allow it; "" if none would.
    allow: str = ""
    #: The option of `stockade learn` that would allow it; "" if none would.
    option: str = ""


#: Asks the user whether the program may have something, given what it wants and why that may be a secret.
Consent = Callable[[str, str], bool]


def refuse(wanted: str, why: str) -> bool:
    """Refuse, where there is no user to ask."""
    return False


def by_programs(programs: Iterable[str]) -> str:
    """Return the names of programs for a reason: the first few, and how many more."""
    names = sorted({path.rpartition("/")[2] for path in programs} - {""})
    more = f" and {len(names) - MOST_PROGRAMS} more" if len(names) > MOST_PROGRAMS else ""
    return ", ".join(names[:MOST_PROGRAMS]) + more
