"""Whether a policy's limits on its network, and its proxy inside, fit its rules."""

from __future__ import annotations

from collections.abc import Iterable

from stockade.errors import PolicyError
from stockade.policy.model import NETWORK_LIMITS, Limits, Policy, limit_text
from stockade.policy.net_names import ANY_HOST
from stockade.policy.net_ports import MOST_PORTS
from stockade.policy.net_rules import PROXY_PORT, NetRule, parse_rule, ports_of

_HTTP_PORTS = ((80, 80),)


def refuse_unfitting(policy: Policy) -> None:
    """Refuse what needs an egress process without one, and limits on requests that it cannot see."""
    if policy.proxy and policy.net == "open":
        raise PolicyError(
            'proxy = true: with net = "open" the program connects by itself, and there is no proxy inside',
            hint="write rules in net, or leave proxy out",
        )
    if policy.proxy:
        refuse_taken_proxy_port(policy.net)
    written = _written(policy.limits, NETWORK_LIMITS)
    if written and policy.net == "open":
        raise PolicyError(
            f'{written[0]}: with net = "open" the program connects by itself, and nothing counts that',
            hint='write rules in net instead of "open", or leave the limit out',
        )
    if policy.net != "open":
        refuse_unseen_requests(policy.limits, policy.net)


def refuse_taken_proxy_port(rules: Iterable[str]) -> None:
    """Refuse rules that name the port of the proxy inside, or leave no room for it."""
    parsed = [parse_rule(rule) for rule in rules]
    ports = ports_of(parsed)
    if PROXY_PORT in ports:
        raise PolicyError(
            f"proxy = true: a rule names port {PROXY_PORT}, which is the proxy's inside",
            hint="leave the proxy out: without it programs reach that port directly",
        )
    if (count := len(ports) + len(ports_of(parsed, udp=True))) >= MOST_PORTS:
        raise PolicyError(
            f"proxy = true: the rules name {count} ports, and with the proxy's there is room for "
            f"{MOST_PORTS - 1}",
            hint="name fewer ports",
        )


def refuse_unseen_requests(limits: Limits, rules: Iterable[str]) -> None:
    """Refuse a limit on requests if a rule allows connections whose requests Stockade does not see."""
    written = _written(limits, ("requests", "host_requests"))
    unseen = [rule for rule in map(parse_rule, rules) if not rule.deny and not _shows_requests(rule)]
    if written and unseen:
        raise PolicyError(
            f"{written[0]}: Stockade does not see the requests that {unseen[0].text} allows",
            hint="limit connections, upload or download, or write a rule for requests: "
            f"GET,POST https://{unseen[0].name.strip(ANY_HOST) or 'host.example'}/**",
        )


def _shows_requests(rule: NetRule) -> bool:
    by_name = bool(rule.name) and rule.name != ANY_HOST  # which is about addresses too
    return rule.http is not None or (by_name and not rule.opaque and rule.ports == _HTTP_PORTS)


def _written(limits: Limits, names: Iterable[str]) -> list[str]:
    return [
        f"limits.{name} = {limit_text(name, value)}"
        for name in names
        if (value := getattr(limits, name)) is not None
    ]
