"""Whether the rules of one policy's `net` allow no more than those of another.

Two name rules cover disjoint sets of names, or one set has the other in it; so do two networks, and `*` has
every one of both in it. So it is enough to compare pairs of rules, and to count ports. What only several
rules together would cover counts as more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from stockade.policy import http_rules
from stockade.policy.net_addresses import special_range
from stockade.policy.net_names import ANY_HOST
from stockade.policy.net_ports import Ranges, ports_text, without
from stockade.policy.net_rules import ASK, NetRule, covers_name, network_of, parse_rule
from stockade.policy.values import show


def excess(mine: Iterable[str], other: Iterable[str]) -> list[str]:
    """Describe what the rules `mine` allow beyond the rules `other`, one line for each difference."""
    own, theirs = [parse_rule(text) for text in mine], [parse_rule(text) for text in other]
    return [*_uncovered(own, theirs), *_undenied(own, theirs)]


def _uncovered(mine: list[NetRule], other: list[NetRule]) -> Iterator[str]:
    """Describe rules that allow what the other has no rule for."""
    for rule in mine:
        if rule.deny:
            continue
        covering = [one for one in other if not one.deny and _allows_all_of(one, rule)]
        own_denials = [one for one in mine if one.deny and covers(one, rule)]
        left = _ports_without(rule.ports, [*covering, *own_denials])
        if left:
            ports = "" if left == rule.ports else f": ports {ports_text(left)}"
            yield f"net = {show(rule.text)}{ports}"


def _undenied(mine: list[NetRule], other: list[NetRule]) -> Iterator[str]:
    """Describe deny rules of the other that some rule of mine needs and mine does not have."""
    for denial in other:
        if denial.deny and any(
            _ports_without(_shared_ports(denial, rule), _own_denials(mine, denial, rule))
            for rule in mine
            if not rule.deny and _meets(denial, rule)
        ):
            yield f"without net = {show(denial.text)}"


def _own_denials(mine: list[NetRule], denial: NetRule, rule: NetRule) -> list[NetRule]:
    """Return the rules of mine that deny all that `denial` denies of what `rule` allows."""
    narrower = rule if covers(denial, rule) else denial
    return [one for one in mine if one.deny and covers(one, narrower)]


def _shared_ports(one: NetRule, other: NetRule) -> Ranges:
    if other.text == ASK:  # it is about the ports of all other rules too
        return one.ports
    return without(one.ports, without(one.ports, other.ports))


def _ports_without(ports: Ranges, rules: list[NetRule]) -> Ranges:
    return without(ports, (pair for rule in rules for pair in rule.ports))


def covers(wide: NetRule, narrow: NetRule) -> bool:
    """Whether every name or address of `narrow`, and every request, is one of `wide`."""
    outer, inner = network_of(wide), network_of(narrow)
    if wide.name == ANY_HOST and inner is not None:
        return True
    if outer is not None or inner is not None:
        return outer is not None and inner is not None and outer.contains(inner)
    if wide.http is not None and (narrow.http is None or not http_rules.covers(wide.http, narrow.http)):
        return False
    return covers_name(wide, narrow)


def _allows_all_of(wide: NetRule, narrow: NetRule) -> bool:
    """Whether an allowing rule allows all that another allows, at the ports that it names."""
    outer, inner = network_of(wide), network_of(narrow)
    if wide.udp is not narrow.udp or not covers(wide, narrow):
        return False
    if narrow.opaque and inner is None and not wide.opaque:
        return False
    # A rule covers special addresses only if it lies in their range.
    special = None if inner is None else special_range(inner)
    return special is None or (outer is not None and special[0].contains(outer))


def _meets(denial: NetRule, rule: NetRule) -> bool:
    """Whether a deny rule could deny something that an allowing rule allows."""
    if rule.text == ASK:  # the user could allow any name
        return True
    if denial.http and rule.http and not http_rules.meets(denial.http, rule.http):
        return False
    if ANY_HOST in (denial.name, rule.name):
        return True
    if denial.name:
        return bool(rule.name) and (covers_name(denial, rule) or covers_name(rule, denial))
    if rule.name:  # the name could lead to a denied address
        return True
    denied, allowed = network_of(denial), network_of(rule)
    # An IPv6 address can stand for a denied IPv4 address.
    stands_for = denied is not None and allowed is not None and denied.bits < allowed.bits
    return stands_for or covers(denial, rule) or covers(rule, denial)
