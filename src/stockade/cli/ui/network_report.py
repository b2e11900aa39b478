"""What network rules decided, in lines for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from stockade.cli.ui import output
from stockade.cli.ui.formats import many
from stockade.result import Decision, Denial

#: How the hint about a refusal begins: see `runs.explain.refused_connections`.
REFUSED = ("the network rules refused", "a limit refused")
#: How many targets the line about refusals names.
SHOWN_TARGETS = 3


def refused_line(denials: Sequence[Denial]) -> str:
    """Return one line about what was refused and why, and which options would allow it."""
    shown = denials[:SHOWN_TARGETS]
    named = ", ".join(_refusal(one) for one in shown)
    more = f" and {len(denials) - len(shown)} more" if len(denials) > len(shown) else ""
    return output.name(f"refused: {named}{more}{_allow(shown, len(denials))}")


def _allow(shown: Sequence[Denial], count: int) -> str:
    hints = list(dict.fromkeys(one.hint for one in shown if one.hint))
    if not hints:
        return ""
    what = "it" if count == 1 else "them" if count == len(shown) else f"the first {len(shown)}"
    if not all(one.hint for one in shown):
        what = ", ".join(one.target for one in shown if one.hint)
    return f"; allow {what} with {' '.join(hints)}"


def other_hints(hint: str) -> str:
    """Return a hint without the part that says the same as `refused_line`."""
    return "; ".join(part for part in hint.split("; ") if not part.startswith(REFUSED))


def _refusal(one: Denial) -> str:
    if one.what in ("connection", "datagram"):
        what = f"{many(one.count, one.what)} to {one.target}"
    else:
        what = f"the {one.what} {one.target}"
    return f"{what} ({one.reason})" if one.reason not in ("", "no rule") else what


def decision_line(one: Decision) -> str:
    """Return one line about a decision, as it happens."""
    what = f"{one.kind} " if one.kind in ("name", "request", "rule", "secret") else ""
    address = f" at {one.address}" if one.name and one.address else ""
    rule = f"rule {one.rule}" if one.rule and one.kind != "rule" else ""
    why = "; ".join(filter(None, (one.reason, rule)))
    by = f" by {one.process}" if one.process else ""
    return output.name(f"network: {one.verdict}: {what}{one.target}{address}{by}{f' ({why})' if why else ''}")
