"""Answers about hosts, addresses and sockets: what the network clause of a policy lets a program reach."""

from __future__ import annotations

import errno
import ipaddress

from stockade.controls import Control
from stockade.errors import typed
from stockade.observe import dangers
from stockade.observe.access import Access, Action
from stockade.observe.answer_values import Answer, PolicyChange
from stockade.observe.file_answers import answer_socket
from stockade.observe.view import Walls
from stockade.policy.net_errors import NetRuleError
from stockade.policy.net_rule_set import NetDecision, RuleSet
from stockade.policy.net_rules import ASK, DNS_PORT, parse_rule, ports_of, suggest
from stockade.policy.secrets import host_of
from stockade.policy.values import show

#: Errors that the walls around the network give.
REFUSALS = (
    errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ECONNREFUSED, errno.EACCES, errno.EPERM, errno.EAFNOSUPPORT,
    errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.ECONNRESET, errno.ETIMEDOUT, errno.EOPNOTSUPP,
)  # fmt: skip
#: What a target begins with that is about datagrams.
UDP = "udp://"
#: Addresses that stand for names inside; only the egress knows which.
SYNTHETIC = ipaddress.ip_network("198.18.0.0/15")


def answer_network(access: Access, walls: Walls) -> Answer:
    """Answer whether a program may connect to a host or a socket, or listen on an address."""
    if access.target.startswith("unix:"):
        return answer_socket(access, walls)
    host, port = split_target(access.target)
    if access.action is Action.BIND:
        return _answer_bind(access, host, port, walls)
    net = walls.resolved.policy.net
    if access.error and access.error not in REFUSALS:
        return _allowed(access, _wall(net), "default", "no wall gives this error")
    if net == "open":
        return _allowed(access, Control.NETWORK_NONE, 'net = "open"', "the policy shares the host's network")
    if _is_loopback(host) and not net and not walls.alone:
        return _allowed(
            access, Control.NETWORK_NONE, "default", f"{host} is the sandbox itself, not your machine"
        )
    if not net:
        reason = f"the policy gives the program no network, so it cannot reach {access.target}"
        return _refused(access, Control.NETWORK_NONE, "net", reason, _rule(access, host, port, walls))
    return _answer_rules(access, host, port, walls)


def split_target(target: str) -> tuple[str, int]:
    """Split `HOST:PORT`, also with `udp://`, `[ADDRESS]:PORT` or a host alone; the port is 0 without one."""
    target = target.removeprefix(UDP)
    host, colon, port = target.rpartition(":")
    if (
        not colon
        or not port.isascii()
        or not port.isdigit()
        or len(port) > 5
        or (":" in host and host[:1] != "[")
    ):
        host, port = target, "0"
    return host.removeprefix("[").removesuffix("]").lower(), int(port)


def _answer_rules(access: Access, host: str, port: int, walls: Walls) -> Answer:
    written = walls.resolved.policy.net
    assert not isinstance(written, str)
    rules = RuleSet([parse_rule(rule) for rule in written])
    address = _address(host)
    if address is not None and address in SYNTHETIC and access.error:
        return _allowed(
            access, Control.NETWORK_RULES, "net", "only the egress knows the name that it stands for"
        )
    if address is not None and address.is_loopback and not port_taken(port, written):
        # Ports of the sandbox itself; a rule for 127.0.0.1 leads to the machine's.
        return _allowed(
            access,
            Control.NETWORK_RULES,
            "default",
            f"{host} is the sandbox itself: only its own servers are there",
        )
    wanted, udp = port or 443, access.target.startswith(UDP)
    place = f"{UDP if udp else ''}{host}:{wanted}"
    decided = _decide(rules, host, wanted, udp=udp)
    rule = written[decided.rule] if decided.rule >= 0 else ""
    clause = f"net = {show(rule)}" if rule else "net"
    if decided.allowed and decided.scheme:
        return _allowed(access, Control.NETWORK_RULES, clause, _requests(host, wanted, walls))
    if decided.allowed:
        return _allowed(access, Control.NETWORK_RULES, clause, f"the rule {rule} allows {place}")
    if rule:
        reason = f"the rule {rule} denies {place}"
        return _refused(access, Control.NETWORK_RULES, clause, reason, PolicyChange(remove=clause))
    reason = f"no rule of the policy allows {place}"
    if ASK in written and address is None and not udp and port_taken(wanted, written):
        clause = f"net = {show(ASK)}"
        reason = f"unless you allow it when Stockade asks you: no other rule covers {host}:{wanted}"
    return _refused(access, Control.NETWORK_RULES, clause, reason, _rule(access, host, port, walls))


def _decide(rules: RuleSet, host: str, port: int, *, udp: bool = False) -> NetDecision:
    decide = rules.for_name if _address(host) is None else rules.for_address
    return decide(host, port, udp=udp)


def _requests(host: str, port: int, walls: Walls) -> str:
    """Return which requests to a host are allowed, in words, and which secrets they get."""
    policy = walls.resolved.policy
    about = [
        rule
        for rule in policy.net
        if rule != ASK and _decide(RuleSet([parse_rule(rule.removeprefix("!"))]), host, port).scheme
    ]
    words = f"for requests to {host}:{port} that these rules allow, and for no others: {', '.join(about)}"
    places = {
        name: [(one.name, one.port) for one in map(host_of, secret.hosts)]
        for name, secret in policy.secrets.items()
    }
    sent = [name for name, hosts in places.items() if (host, port) in hosts]
    if not sent:
        return words
    return f"{words}; Stockade replaces the placeholder of {', '.join(sent)} in them by the value"


def is_address(text: str) -> bool:
    """Whether text is an IPv4 or IPv6 address."""
    return _address(text) is not None


def port_taken(port: int, rules: tuple[str, ...]) -> bool:
    """Whether the egress listens on a port inside, for a rule."""
    return port == DNS_PORT or port in ports_of([parse_rule(rule) for rule in rules])


def _answer_bind(access: Access, host: str, port: int, walls: Walls) -> Answer:
    net = walls.resolved.policy.net
    wall = _wall(net)
    if walls.alone and not net:
        reason = "without namespaces and without a network there are no sockets to listen on"
        change = PolicyChange(toml='net = "open"', flag="--net open", danger=dangers.NET_OPEN)
        return _refused(access, wall, "net", reason, change)
    if net and net != "open" and port_taken(port, net):
        reason = f"the network rules take port {port} inside: a server there needs another port"
        return _refused(access, wall, "net", reason)
    if access.error == errno.EACCES and 0 < port < 1024:
        return _refused(
            access,
            Control.PRIVILEGES,
            "default",
            f"no program inside has the privilege to listen on port {port}",
        )
    reason = "a program may listen inside; only `--publish` lets the host reach it"
    return _allowed(
        access, wall, "default", reason if net != "open" else "the policy shares the host's network"
    )


def _rule(access: Access, host: str, port: int, walls: Walls) -> PolicyChange | None:
    """Return the change that allows a host; None if no rule can."""
    if walls.alone:
        return PolicyChange(toml='net = "open"', flag="--net open", danger=dangers.NET_OPEN)
    try:
        udp = access.target.startswith(UDP)
        rule = parse_rule(suggest(host, port, udp=udp) if port else host).text
    except NetRuleError:
        return None
    if not rule:
        return None
    return PolicyChange(
        toml=f"net = [{show(rule)}]", flag=f"--net {typed(rule)}", danger=dangers.of_host(host)
    )


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _is_loopback(host: str) -> bool:
    address = _address(host)
    return host == "localhost" or (address is not None and address.is_loopback)


def _wall(net: object) -> Control:
    return Control.NETWORK_RULES if net and net != "open" else Control.NETWORK_NONE


def _allowed(access: Access, wall: Control, clause: str, reason: str) -> Answer:
    return Answer(access=access, allowed=True, wall=wall.value, clause=clause, reason=reason)


def _refused(
    access: Access, wall: Control, clause: str, reason: str, change: PolicyChange | None = None
) -> Answer:
    return Answer(access=access, allowed=False, wall=wall.value, clause=clause, reason=reason, change=change)
