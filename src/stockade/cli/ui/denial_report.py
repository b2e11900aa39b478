"""What walls refused in an observed run, in lines for the terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from stockade.cli.ui import output
from stockade.cli.ui.formats import many

if TYPE_CHECKING:
    from stockade.result import Denial, Result

#: How many denials are printed.
SHOWN = 100
#: Clauses that a policy would need, and that do not allow something themselves.
ABSENT = ("read", "write", "net", "accept", "syscalls.allow")
#: Reasons of the egress process, in whole sentences.
REASONS = {"no rule": "no rule of the policy covers it"}
VERBS = {
    "connection": "connect to",
    "name": "look up",
    "datagram": "send to",
    "connect": "connect to",
    "bind": "listen on",
    "mount": "call",
    "call": "call",
}


def report(result: Result) -> None:
    """Print each refusal of an observed run, and what would allow it."""
    if not result.denials:
        # Datagrams are counted by the kernel and not observed: then the hint is about them.
        seen = "no refusal was observed" if result.hint else "no wall refused anything"
        output.say(seen + _but(result))
        return
    output.say(f"{many(len(result.denials), 'thing')} refused{_but(result)}:")
    for one in result.denials[:SHOWN]:
        for line in lines(one):
            output.say(f"  {line}")
    if (more := len(result.denials) - SHOWN) > 0:
        output.say(f"  and {more} more: --json lists all")


def _but(result: Result) -> str:
    return f" (not everything was seen: {result.denials_cut})" if result.denials_cut else ""


def lines(one: Denial) -> Sequence[str]:
    """Return the lines about one refusal."""
    verb = VERBS.get(one.what, one.what)
    what = f"{verb} {one.target}" + (f" to {one.other}" if one.other else "")
    by = ", ".join(os.path.basename(name) or name for name in one.programs)
    times = f", {one.count} times" if one.count > 1 else ""
    painted = output.paint(output.name(what), "bold", sys.stderr)
    found = [f"{painted} ({output.name(by)}{times})" if by else f"{painted}{times}"]
    found.append(f"    {REASONS.get(one.reason) or output.name(one.reason) or 'refused'}")
    found.append(f"    {because(one.clause, one.place)} (control: {one.wall})")
    if not one.hint:
        return [*found, "    no change of the policy allows it"]
    change = f" ({output.name(one.change)})" if one.change and one.change != one.hint else ""
    found.append(f"    to allow it: {output.name(one.hint)}{change}")
    if one.danger:
        found.append(f"    {output.paint('dangerous', 'red', sys.stderr)}: {output.name(one.danger)}")
    return found


def because(clause: str, place: str, *, allowed: bool = False) -> str:
    """Return the clause that decides, and where it is written."""
    if clause == "default":
        return "by default" if allowed else "Stockade's own default, whatever the policy says"
    if clause in ABSENT and not allowed:
        return f"no `{output.name(clause)}` of the policy allows it"
    where = f", {output.name(place)}" if place else ""
    return f"because of {output.name(clause)}{where}"
