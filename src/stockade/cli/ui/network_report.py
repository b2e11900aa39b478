"""What network rules decided, in lines for the terminal."""

from __future__ import annotations

import time
from collections.abc import Sequence

from stockade.cli.ui import output
from stockade.cli.ui.formats import many
from stockade.result import Decision, Denial

#: How the hint about a refusal begins: see `runs.explain.refused_connections`.
REFUSED = "the network rules refused"
#: How many targets the line about refusals names.
SHOWN_TARGETS = 3


def refused_line(denials: Sequence[Denial]) -> str:
    """Return one line about what was refused, and which options would allow it."""
    shown = denials[:SHOWN_TARGETS]
    named = ", ".join(_refusal(one) for one in shown)
    more = f" and {len(denials) - len(shown)} more" if len(denials) > len(shown) else ""
    hints = list(dict.fromkeys(one.hint for one in shown if one.hint))
    allow = f"; allow {'it' if len(denials) == 1 else 'them'} with {' '.join(hints)}" if hints else ""
    return output.name(f"refused: {named}{more}{allow}")


def other_hints(hint: str) -> str:
    """Return a hint without the part that says the same as `refused_line`."""
    return "; ".join(part for part in hint.split("; ") if not part.startswith(REFUSED))


def _refusal(one: Denial) -> str:
    if one.what == "name":
        return f"the name {one.target}"
    return f"{many(one.count, 'connection')} to {one.target}"


def decision_line(one: Decision) -> str:
    """Return one line about a decision, as it happens."""
    what = "name " if one.kind == "name" else ""
    address = f" at {one.address}" if one.name and one.address else ""
    why = "; ".join(filter(None, (one.reason, f"rule {one.rule}" if one.rule else "")))
    by = f" by {one.process}" if one.process else ""
    return output.name(f"network: {one.verdict}: {what}{one.target}{address}{by}{f' ({why})' if why else ''}")


def decision_row(one: Decision) -> str:
    """Return one line about a decision that was recorded, with its time and its bytes."""
    at = time.strftime("%H:%M:%S", time.localtime(one.time))
    moved = f", {one.sent} bytes out, {one.received} in" if one.sent or one.received else ""
    times = f", {one.count} times" if one.count > 1 else ""
    return f"{at} {decision_line(one).removeprefix('network: ')}{moved}{times}"
