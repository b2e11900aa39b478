"""The decision of a set of rules about a name, an address or a request.

    >>> from stockade.policy.net_rules import parse_rule
    >>> rules = RuleSet([parse_rule("*.example.com"), parse_rule("!ads.example.com")])
    >>> rules.for_name("api.example.com", 443).allowed, rules.for_name("ads.example.com", 443).allowed
    (True, False)

A deny rule wins over every other. A rule covers a special address only if the whole rule lies in the special
range: `10.0.0.0/8` covers 10.1.2.3, `0.0.0.0/0` and `*` do not. A deny rule covers all that it names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from stockade.policy.http_rules import matches
from stockade.policy.http_targets import Target
from stockade.policy.net_addresses import (
    AddressRange,
    embedded_ipv4,
    parse_address,
    special_range,
    unmapped,
)
from stockade.policy.net_errors import NetRuleError
from stockade.policy.net_names import ANY_HOST, normal_name
from stockade.policy.net_ports import has_port, without
from stockade.policy.net_rules import NetRule, network_of, rule_name


class NetDecision(NamedTuple):
    """Whether a connection is allowed, and the rule that decided: its index, or -1 for no rule."""

    allowed: bool
    rule: int
    opaque: bool
    #: The scheme, if only rules for requests allow it: each request is judged. Empty otherwise.
    scheme: str = ""


_NOT_ALLOWED = NetDecision(False, -1, False)


class RuleSet:
    """The rules of one sandbox, which decide about names and addresses.

    With `active`, only the rules with these indexes count; the others keep their index.
    """

    def __init__(self, rules: Sequence[NetRule], active: Iterable[int] | None = None) -> None:
        self.rules = tuple(rules)
        counted = frozenset(range(len(self.rules)) if active is None else active)
        #: By name, the rules for that name itself and the rules for everything below it.
        self._exact: dict[str, list[int]] = {}
        self._below: dict[str, list[int]] = {}
        self._networks: list[tuple[int, AddressRange]] = []
        for index, rule in enumerate(self.rules):
            if index not in counted:
                continue
            network = network_of(rule)
            if network is not None:
                self._networks.append((index, network))
            elif rule.name:
                (self._below if rule.wildcard else self._exact).setdefault(rule.name, []).append(index)

    def is_name(self, name: str) -> bool:
        """Whether it is a name in its one spelling, which a rule could have."""
        try:
            return name.isascii() and rule_name(name, "")[0] == name
        except NetRuleError:
            return False

    def knows(self, name: str) -> bool:
        """Whether the rules allow some port of this name."""
        allowed: list[tuple[int, int]] = []
        denied: list[tuple[int, int]] = []
        for index in self._for_name(name):
            rule = self.rules[index]
            if not (rule.deny and rule.http):
                (denied if rule.deny else allowed).extend(rule.ports)
        return bool(without(allowed, denied))

    def for_name(self, name: str, port: int, *, udp: bool = False) -> NetDecision:
        """Decide about a connection, or datagrams, to a name."""
        return self._decide(self._for_name(name), port, udp)

    def denies_requests(self, name: str, port: int) -> bool:
        """Whether a rule denies some request to a name, so that a connection must be looked into."""
        rules = (self.rules[index] for index in self._for_name(name))
        return any(rule.deny and rule.http and has_port(rule.ports, port) for rule in rules)

    def for_request(self, name: str, port: int, method: str, target: Target) -> NetDecision:
        """Decide about a request on a connection that only rules for requests allow."""
        found = _NOT_ALLOWED
        for index in sorted(self._for_name(name)):
            rule = self.rules[index]
            if not has_port(rule.ports, port):
                continue
            if rule.deny and (rule.http is None or matches(rule.http, method, target, deny=True)):
                return NetDecision(False, index, False)
            if found.allowed or rule.http is None or rule.deny:
                continue
            if matches(rule.http, method, target, deny=False):
                found = NetDecision(True, index, False, rule.http.scheme)
        return found

    def for_address(self, ip: str, port: int, *, udp: bool = False) -> NetDecision:
        """Decide about a connection, or datagrams, to an address, by the rules for addresses alone."""
        address = parse_address(ip)
        if address is None:
            return _NOT_ALLOWED
        denied = self.denies_address(ip, port)
        if denied >= 0:
            return NetDecision(False, denied, False)
        return self._decide(self._for_address(unmapped(address)), port, udp)

    def denies_address(self, ip: str, port: int) -> int:
        """Return the index of a rule that denies an address at this port; -1 if none does.

        A rule that denies an IPv4 address denies every IPv6 address that stands for it too.
        """
        found = parse_address(ip)
        if found is None:
            return -1
        address = unmapped(found)
        embedded = embedded_ipv4(address)
        addresses = [address, *([embedded[0]] if embedded is not None else [])]
        denying = [index for index, network in self._networks if any(map(network.contains, addresses))]
        denying += self._exact.get(ANY_HOST, [])
        for index in denying:
            if self.rules[index].deny and has_port(self.rules[index].ports, port):
                return index
        return -1

    def _decide(self, indexes: Iterable[int], port: int, udp: bool) -> NetDecision:
        found = _NOT_ALLOWED
        for index in sorted(indexes):
            rule = self.rules[index]
            if not has_port(rule.ports, port) or (rule.deny and rule.http):
                continue
            if rule.udp is not udp and not rule.deny:
                continue
            if rule.deny:
                return NetDecision(False, index, False)
            if rule.http:
                # A rule that does not look into requests allows more.
                if not found.allowed:
                    found = NetDecision(True, index, False, rule.http.scheme)
                continue
            # Of several rules that allow it, one that looks at nothing allows the most.
            if not found.allowed or found.scheme or (rule.opaque and not found.opaque):
                found = NetDecision(True, index, rule.opaque)
        return found

    def _for_name(self, name: str) -> Iterator[int]:
        if not name.isascii():  # no program asks for such a name, and to spell it takes an import
            return
        try:
            plain = normal_name(name)
        except NetRuleError:
            return
        yield from self._exact.get(plain, ())
        yield from self._exact.get(ANY_HOST, ())
        while "." in plain:
            plain = plain.partition(".")[2]
            yield from self._below.get(plain, ())

    def _for_address(self, address: AddressRange) -> Iterator[int]:
        special = special_range(address)
        for index, network in self._networks:
            if self.rules[index].deny or not network.contains(address):
                continue
            if special is None or special[0].contains(network):
                yield index
        if special is None:
            yield from self._exact.get(ANY_HOST, ())
