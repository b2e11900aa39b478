"""What programs reached over the network: the records of the egress as decisions and denials.

The egress process reads hostile bytes, so nothing that it has recorded is trusted here: names and addresses
are reduced to the letters that they can have, numbers to their range, words to those that are known.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Literal, NamedTuple

from stockade.controls import Control
from stockade.result import Decision, Denial

if TYPE_CHECKING:
    from stockade.egress.records import RawRecord
    from stockade.receipt.statement import NetworkCounts, RuleChange

#: How many denials a result has; each is one target.
MOST_DENIALS = 100
#: The most characters of a name, and of a reason.
MOST_NAME, MOST_REASON, MOST_REQUEST = 255, 100, 300
_KINDS: dict[str, Literal["connect", "name", "publish", "request", "secret", "udp"]] = {
    "connect": "connect",
    "name": "name",
    "publish": "publish",
    "request": "request",
    "secret": "secret",
    "udp": "udp",
}
#: Larger than any number of bytes that a run can move.
MOST_BYTES = 1 << 62
#: Kinds of decisions that are denials, in the words of denials.
_DENIED: dict[str, Literal["connection", "name", "request", "secret", "datagram"]] = {
    "connect": "connection",
    "name": "name",
    "request": "request",
    "secret": "secret",
    "udp": "datagram",
}
#: The controls that refuse something else than a connection or a name.
_WALLS = {"request": Control.NETWORK_HTTP, "secret": Control.SECRETS}
#: Reasons why a connection to an allowed name was refused that a `tcp://` rule would not give.
LOOKED_INTO = frozenset({"no SNI", "not TLS", "not HTTP"})
#: Kinds of addresses that a rule beside the one for the name may be meant to allow.
ALLOWED_BY_ADDRESS = frozenset({"private address", "loopback address"})
#: Reasons of denials and failures in the words of messages. A reason that is not here stays as it is.
REASON_TEXTS = {
    "deny rule": "the rule {rule} denies it",
    "no SNI": "its TLS hello names no host",
    "SNI differs": "its TLS hello names another host",
    "Host differs": "one of its requests names another host",
    "not TLS": "it does not speak TLS",
    "not HTTP": "it does not speak HTTP",
    "ambiguous request": "servers could read it in different ways",
    "bad certificate": "the server's certificate is not valid for its name",
    "certificate refused": "the program does not accept Stockade's certificate: it may pin the server's own",
    "bad response": "the server's response is not HTTP",
    "limit": "the egress process was at one of its limits",
    "refused when asked": "the answer to the question about it was no",
    "no answer": "nobody answered the question about it",
    "too many questions": "there were too many questions about other hosts",
    "too many names": "the program used too many names",
    "name not found": "this machine finds no such name",
    "resolver failed": "this machine could not look up the name",
    "connection refused": "{address} refused the connection",
    "another host": "the secret is not bound to this host, so its placeholder was not replaced",
    "another place": "the secret's `as` does not name this place, so its placeholder was not replaced",
    "echoed": "the server sent the value back, and it was masked",
    "unreachable": "this machine has no route to {address}",
    "timed out": "{address} did not answer in time",
}
#: Why a request was refused that is no HTTP, or has parts that the egress process does not pass on.
UNREADABLE_REQUEST = "the server could misread it, and the response to the program says why"


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
    #: How the rules changed, in order.
    changes: tuple[RuleChange, ...] = ()
    #: What the user was asked, and the answers: `HOST:PORT ANSWER`.
    answers: tuple[str, ...] = ()


def decisions(
    records: Iterable[RawRecord], rules: Sequence[str], processes: Iterable[str | None] = repeat(None)
) -> list[Decision]:
    """Return the records as decisions.

    `rules` are the texts that the numbers of rules refer to, `processes` those that made each connection.
    """
    return [_decision(one, rules, process) for one, process in zip(records, processes, strict=False)]


def _decision(record: RawRecord, rules: Sequence[str], process: str | None) -> Decision:
    verdict: Literal["allowed", "denied", "failed"] = "failed"
    if record.verdict == "allowed":
        verdict = "allowed"
    elif record.verdict == "denied":
        verdict = "denied"
    return Decision(
        kind=_KINDS.get(record.kind, "connect"),
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
        request=_plain(record.request, MOST_REQUEST),
    )


def change_time() -> float:
    """Return the time of a change or an answer: seconds since 1970."""
    return round(time.time(), 3)


def change_decision(change: RuleChange) -> Decision:
    """Return a change of the rules as results list it."""
    denies = change.rule.startswith("!")
    return Decision(
        kind="rule",
        time=change.at,
        verdict="denied" if denies == change.in_force else "allowed",
        reason="added" if change.in_force else "taken back",
        rule=change.rule,
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
        # That a server echoes a value is no doing of the program.
        if one.verdict == "denied" and one.kind in _DENIED and one.reason != "echoed":
            key = one.kind, one.target
            counts[key] = counts.get(key, 0) + one.count
            first.setdefault(key, one)
    return tuple(
        Denial(
            what=_DENIED[one.kind],
            target=one.target,
            wall=(
                Control.LIMITS_NETWORK if _limit(one) else _WALLS.get(one.kind, Control.NETWORK_RULES)
            ).value,
            clause=_limit(one) or _clause(one),
            hint=_hint(one),
            reason=reason_text(one),
            count=counts[key],
        )
        for key, one in list(first.items())[:MOST_DENIALS]
    )


def _clause(one: Decision) -> str:
    if one.kind == "secret":
        return f"secrets.{one.request}.{'hosts' if one.reason == 'another host' else 'as'}"
    return f'net = "{one.rule}"' if one.rule else "net"


def _limit(one: Decision) -> str:
    """Return the limit of the policy that was used up; "" if another wall refused it."""
    return one.reason if one.reason.startswith("limits.") else ""


def reason_text(one: Decision) -> str:
    """Return why it was denied or failed, as a clause of a sentence."""
    if clause := _limit(one):
        return f"the sandbox has used up {clause}"
    if one.reason.endswith(" address"):
        return f"the name leads to the {one.reason} {one.address}"
    if (one.kind, one.reason) == ("request", "not HTTP"):
        return UNREADABLE_REQUEST
    text = REASON_TEXTS.get(one.reason)
    return one.reason if text is None else text.format(rule=one.rule, address=one.address or "the server")


def _hint(one: Decision) -> str:
    """Return what would allow it, as the command line takes it; "" if no rule would."""
    from stockade.policy.net_errors import NetRuleError
    from stockade.policy.net_rules import parse_rule, suggest

    rule = ""
    if one.kind == "secret":
        return ""
    if one.kind == "request":
        return _request_hint(one) if one.reason == "no rule" else ""
    if one.name and one.reason in LOOKED_INTO:
        rule = f"tcp://{one.name}:{one.port}"
    elif one.reason in ALLOWED_BY_ADDRESS:
        rule = suggest(one.address, one.port, udp=one.kind == "udp")
    elif one.reason == "no rule":
        udp = one.kind == "udp"
        rule = one.name if one.kind == "name" else suggest(one.name or one.address, one.port, udp=udp)
    try:
        return f"--net {parse_rule(rule).text}" if rule else ""
    except NetRuleError:  # the program asked for something that is no name
        return ""


def _request_hint(one: Decision) -> str:
    """Return the rule for exactly this request; "" if its path would be a pattern."""
    if "*" in one.request:
        return ""
    from stockade.policy.net_errors import NetRuleError
    from stockade.policy.net_rules import parse_new_rule

    try:
        return f"--net {shlex.quote(parse_new_rule(one.request).text)}"
    except NetRuleError:  # a path that was cut, one that no rule can name, or a mistyped method
        return ""
