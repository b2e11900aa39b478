"""The rules that hold now, and what they decide about a connection.

The supervisor may replace the rules while connections are under way. So every part of the egress process asks
`RulesInForce` anew, in the moment in which it needs a decision.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any, NamedTuple

from stockade.egress.names import SyntheticNames, is_synthetic
from stockade.policy.http_targets import Target
from stockade.policy.net_rule_set import NetDecision, RuleSet
from stockade.policy.net_rules import NetRule, parse_rule

#: The ports on which a client of a name has to say the name first.
HTTP_PORT, TLS_PORT = 80, 443


class Destination(NamedTuple):
    """Where a connection of a program leads; either the name or the address is empty."""

    name: str
    address: str
    port: int


class ActiveRules:
    """The rules of one moment, with their places in the whole list."""

    def __init__(self, rules: Sequence[NetRule], active: Sequence[int]) -> None:
        self._places = [place for place in active if 0 <= place < len(rules)]
        self._rules = [rules[place] for place in self._places]
        self.set = RuleSet(self._rules)

    def place(self, index: int) -> int:
        """Return the place in the whole list of the rule that decided, or -1."""
        return self._places[index] if 0 <= index < len(self._places) else -1

    def for_request(self, name: str, port: int, method: str, target: Target) -> tuple[NetDecision, int]:
        """Decide about a request; also return the place of the rule that decided, or -1."""
        decision = self.set.for_request(name, port, method, target)
        return decision, self.place(decision.rule)

    def decide(self, destination: Destination, *, udp: bool = False) -> NetDecision:
        """Decide about a connection, or about datagrams."""
        if destination.name:
            return self.set.for_name(destination.name, destination.port, udp=udp)
        return self.set.for_address(destination.address, destination.port, udp=udp)

    def is_open_question(self, name: str, port: int) -> bool:
        """Whether no rule decides about a connection; those that deny some requests need a look into it."""
        return self.set.for_name(name, port).rule < 0 and not self.set.denies_requests(name, port)

    def wildcard(self, index: int) -> str:
        """Return the name below which the rule allows all names; empty if it names one."""
        rule = self._rules[index] if index >= 0 else None
        return rule.name if rule is not None and rule.wildcard else ""


class RulesInForce:
    """Has the rules that hold now as `active`, which may be others after each `await`."""

    def __init__(self, message: dict[str, Any]) -> None:
        self.replace(message)

    def replace(self, message: dict[str, Any]) -> None:
        """Let the rules of a message of the supervisor hold from now on."""
        rules = [parse_rule(text) for text in message["rules"]]
        self.active = ActiveRules(rules, message.get("active", range(len(rules))))


class ConnectionJudge:
    """Says what a program means by an address, what the rules say to that, and whether to ask the user."""

    def __init__(
        self, rules: RulesInForce, names: SyntheticNames, ports: Container[int], *, asks: bool
    ) -> None:
        self._rules, self._names = rules, names
        #: The ports that Landlock lets this process dial, unless they are those of the host's proxies.
        self._ports = ports
        #: Whether the policy says that the user is asked, and there is somebody to ask.
        self._asks = asks

    def judge(
        self, name: str, address: str, port: int, *, udp: bool = False
    ) -> tuple[Destination, NetDecision]:
        """Return what a program means by a name, or by an address that may stand for one, and decide."""
        found = name or self._names.name_of(address) or ""
        destination = Destination(found, "" if found else address, port)
        if not found and is_synthetic(address):
            # It stands for no name, so no rule can mean it.
            return destination, NetDecision(False, -1, False)
        return destination, self._rules.active.decide(destination, udp=udp)

    def can_ask(self, name: str, *ports: int) -> bool:
        """Whether the user can be asked about a name, because no rule decides about one of the ports."""
        rules = self._rules.active
        return (
            self._asks
            and rules.set.is_name(name)
            and any(port in self._ports and rules.is_open_question(name, port) for port in ports)
        )


def denial_of(decision: NetDecision) -> str:
    """Return the reason that a record gives for a connection that the rules do not allow."""
    return "no rule" if decision.rule < 0 else "deny rule"
