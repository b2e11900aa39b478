"""Network policies as clients write them, and the rules of `net` that they stand for.

A policy names domains, addresses and networks; everything else is denied. A rule without ports means 80 and
443, as everywhere in Stockade.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated

from msgspec import UNSET, Meta, Struct, UnsetType

from stockade.policy.net_addresses import special_range
from stockade.policy.net_errors import NetRuleError
from stockade.policy.net_rules import NetRule, network_of, parse_rule
from stockade.server.wire.errors import INVALID_REQUEST, ApiError

ALLOW, DENY = "allow", "deny"
#: A rule that reaches nothing: no name ends so. A sandbox with it has rules that can change.
PLACEHOLDER = "nothing.invalid"
#: How many rules a policy may have.
MOST_RULES = 200


class NetworkRule(Struct, frozen=True):
    """Allow or deny a domain, everything below one (`*.example.com`), an address or a network."""

    action: str
    target: Annotated[str, Meta(min_length=1, max_length=300)]
    #: TCP ports; without them 80 and 443.
    ports: list[Annotated[int, Meta(ge=1, le=65535)]] | UnsetType | None = UNSET


class NetworkPolicySpec(Struct, frozen=True, rename="camel"):
    """What a sandbox may reach."""

    default_action: str | None = None
    egress: list[NetworkRule] | None = None


class NetworkPolicyAnswer(Struct, frozen=True, rename="camel"):
    """The policy that is in force."""

    default_action: str
    egress: tuple[NetworkRule, ...]


class NetworkStatus(Struct, frozen=True, rename="camel"):
    """How a policy is enforced, and the policy."""

    policy: NetworkPolicyAnswer
    status: str = "active"
    mode: str = "deny_all"
    enforcement_mode: str = "dns+proxy"


def checked_policy(spec: NetworkPolicySpec, field: str) -> tuple[NetworkRule, ...]:
    """Check the network policy of a request and return its rules."""
    if spec.default_action not in (None, "", ALLOW, DENY):
        raise ApiError(400, INVALID_REQUEST, f"{field}.defaultAction: must be allow or deny")
    if spec.default_action == ALLOW:
        raise ApiError(
            400,
            INVALID_REQUEST,
            f"{field}.defaultAction: a sandbox reaches only what rules name, so name the hosts that it needs",
        )
    return checked_rules(spec.egress or (), f"{field}.egress")


def checked_rules(rules: Sequence[NetworkRule], field: str) -> tuple[NetworkRule, ...]:
    """Check rules; of several for one target the first counts."""
    found: dict[str, NetworkRule] = {}
    for index, rule in enumerate(rules):
        if rule.action not in (ALLOW, DENY):
            raise ApiError(400, INVALID_REQUEST, f"{field}[{index}].action: must be allow or deny")
        rule_text(rule, f"{field}[{index}].target")
        found.setdefault(target_key(rule.target), rule)
    return bounded(tuple(found.values()), field)


def target_key(target: str) -> str:
    """Return the one spelling of a target, by which a later rule replaces an earlier one."""
    return target.strip().rstrip(".").lower()


def bounded(rules: tuple[NetworkRule, ...], field: str) -> tuple[NetworkRule, ...]:
    """Refuse more rules than a sandbox can have."""
    if len(rules) > MOST_RULES:
        raise ApiError(400, INVALID_REQUEST, f"{field}: at most {MOST_RULES} rules")
    return rules


def rule_text(rule: NetworkRule, field: str) -> str:
    """Return the rule of `net` for one of a policy."""
    if rule.target.startswith("!"):
        raise ApiError(400, INVALID_REQUEST, f"{field}: write the action deny instead of !")
    ports = f":{','.join(map(str, rule.ports))}" if rule.ports else ""
    target = f"[{rule.target}]" if ports and _is_ipv6(rule.target) else rule.target
    try:
        parsed = parse_rule(f"{'!' if rule.action == DENY else ''}{target}{ports}")
    except NetRuleError as error:
        words = f"{error.problem} ({error.hint})" if error.hint else error.problem
        raise ApiError(400, INVALID_REQUEST, f"{field}: {rule.target[:80]!r}: {words}") from None
    _refuse_this_machine(parsed, field)
    return parsed.text


def net_of(rules: Iterable[NetworkRule]) -> tuple[str, ...]:
    """Return the rules of `net` for a policy."""
    found = tuple(dict.fromkeys(rule_text(rule, "target") for rule in rules))
    return found if any(not text.startswith("!") for text in found) else (PLACEHOLDER, *found)


def rules_of(net: Iterable[str]) -> tuple[NetworkRule, ...]:
    """Return the rules of a policy for those of `net`, which the server's configuration has."""
    return tuple(
        NetworkRule(DENY if text.startswith("!") else ALLOW, text.removeprefix("!"))
        for text in net
        if text != PLACEHOLDER
    )


def _is_ipv6(target: str) -> bool:
    return ":" in target


#: Why no sandbox gets these addresses: the server listens there, or a cloud hands out the machine's own keys.
_REFUSED = {
    "loopback": "a sandbox cannot reach the server's own machine",
    "unspecified": "a sandbox cannot reach the server's own machine",
    "link-local": "a sandbox cannot reach link-local addresses",
    "metadata": "a sandbox cannot reach the metadata service of the server's machine",
}


def _refuse_this_machine(parsed: NetRule, field: str) -> None:
    """Refuse to allow addresses of this machine, and those where it gets its own credentials."""
    network = network_of(parsed)
    special = special_range(network) if network is not None and not parsed.deny else None
    if special is not None and (words := _REFUSED.get(special[1])):
        raise ApiError(400, INVALID_REQUEST, f"{field}: {words}")
