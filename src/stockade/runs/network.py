"""What programs reached over the network: the records of the egress as decisions and denials.

The egress process reads hostile bytes, so nothing that it has recorded is trusted here: names and addresses
are reduced to the letters that they can have, numbers to their range, words to those that are known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from stockade.controls import Control
from stockade.result import Decision, Denial

if TYPE_CHECKING:
    from stockade.egress.records import RawRecord
    from stockade.receipt.statement import NetworkCounts

#: How many denials a result has; each is one target.
MOST_DENIALS = 100
#: The most characters of a name, and of a reason.
MOST_NAME, MOST_REASON = 255, 100
#: Larger than any number of bytes that a run can move.
MOST_BYTES = 1 << 62
#: Reasons why a connection to an allowed name was refused that a `tcp://` rule would not give.
LOOKED_INTO = frozenset({"no SNI", "not TLS", "not HTTP"})


class NetworkUse(NamedTuple):
    """What the egress of a sandbox has decided and relayed since a run began."""

    decisions: Sequence[Decision]
    #: Why the list of decisions is incomplete; "" if it is not.
    cut: str
    denials: tuple[Denial, ...]
    counts: NetworkCounts
    sent: int
    received: int
    warnings: tuple[str, ...] = ()


def decisions(
    records: Iterable[RawRecord],
    rules: Sequence[str],
    process_of: Callable[[RawRecord], str | None] = lambda record: None,
) -> list[Decision]:
    """Return the records as decisions; `rules` are the texts that the numbers of rules refer to."""
    return [_decision(record, rules, process_of(record)) for record in records]


def _decision(record: RawRecord, rules: Sequence[str], process: str | None) -> Decision:
    verdict: Literal["allowed", "denied", "failed"] = "failed"
    if record.verdict == "allowed":
        verdict = "allowed"
    elif record.verdict == "denied":
        verdict = "denied"
    return Decision(
        kind="name" if record.kind == "name" else "connect",
        time=round(record.time, 3),
        process=process,
        name=_plain(record.name, MOST_NAME),
        address=_plain(record.address, MOST_NAME),
        port=record.port if record.kind != "name" and 0 <= record.port <= 0xFFFF else 0,
        verdict=verdict,
        reason=_plain(record.reason, MOST_REASON),
        rule=rules[record.rule] if 0 <= record.rule < len(rules) else "",
        sent=_bytes(record.sent),
        received=_bytes(record.received),
        duration=round(max(0.0, record.duration), 3),
        count=max(1, _bytes(record.times)),
    )


def _bytes(number: int) -> int:
    return min(max(0, number), MOST_BYTES)


def _plain(text: str, most: int) -> str:
    """Return text without what a terminal or a log could take for something else."""
    return "".join(letter if " " <= letter <= "~" else "?" for letter in text[:most])


def denials(found: Iterable[Decision]) -> tuple[Denial, ...]:
    """Return what the rules refused: each target once, in the order in which they were refused first."""
    counts: dict[tuple[str, str], int] = {}
    first: dict[tuple[str, str], Decision] = {}
    for one in found:
        if one.verdict == "denied":
            key = one.kind, one.target
            counts[key] = counts.get(key, 0) + one.count
            first.setdefault(key, one)
    return tuple(
        Denial(
            what="name" if one.kind == "name" else "connection",
            target=one.target,
            wall=Control.NETWORK_RULES.value,
            clause=f'net = "{one.rule}"' if one.rule else "net",
            hint=_hint(one),
            count=counts[key],
        )
        for key, one in list(first.items())[:MOST_DENIALS]
    )


def _hint(one: Decision) -> str:
    """Return what would allow it, as the command line takes it; "" if no rule would."""
    if one.rule.startswith("!"):
        return ""
    from stockade.policy.net_rules import NetRuleError, parse_rule, suggest

    host = one.name or one.address
    if one.name and one.reason in LOOKED_INTO:
        rule = f"tcp://{one.name}:{one.port}"
    elif one.name and one.rule:
        # The name is allowed, and the address that it leads to is not.
        rule = suggest(one.address, one.port) if one.address and "address" in one.reason else ""
    elif one.kind == "name":
        rule = host
    else:
        rule = suggest(host, one.port)
    try:
        return f"--net {parse_rule(rule).text}" if rule else ""
    except NetRuleError:  # the program asked for something that is no name
        return ""


def counts_between(before: NetworkCounts, after: NetworkCounts) -> NetworkCounts:
    """Return what was counted between two moments."""
    from stockade.receipt.statement import NetworkCounts

    fields = NetworkCounts.__struct_fields__
    return NetworkCounts(*(max(0, getattr(after, name) - getattr(before, name)) for name in fields))
