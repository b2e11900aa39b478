"""The rules of `net`: how each is written. What a set of them decides is in `net_rule_set`.

A rule is a host (`api.example.com`), everything below a host (`*.example.com`), an address or a network
(`10.1.2.3`, `10.1.0.0/16`), each with ports or without (`:443`, `:80,443`, `:8000-8010`); `tcp://host:5432`
allows bytes that Stockade does not look into, and `udp://host:123` datagrams; `GET
https://api.example.com/v1/**` allows requests (`http_rules`); `*` is every name and every public address; `!`
before a rule denies. A deny rule wins over every other. The rule `ask` allows nothing by itself: the user is
asked about names that no other rule covers.

Two processes use this module and those that it is made of (`net_names`, `net_addresses`, `net_ports`): the
supervisor, which reads policies, and the egress process, which reads what a hostile program sends. So they
need nothing but the standard library, have no side effect, and every function takes any text: it raises
`NetRuleError`, or returns an answer that allows nothing.
"""

from __future__ import annotations

import _socket as socket  # socket itself would also load selectors
import contextlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from stockade.policy.http_rules import (
    SCHEMES,
    HttpPattern,
    parse_pattern,
    refuse_mistyped_methods,
    rule_text,
    split_rule,
)
from stockade.policy.net_addresses import (
    MAPPED,
    AddressRange,
    network_text,
    parse_address,
    parse_network,
    special_range,
    unmapped,
)
from stockade.policy.net_errors import NetRuleError
from stockade.policy.net_names import ANY_HOST, ONE_HOST, character_name, is_number, normal_name
from stockade.policy.net_ports import (
    ALL_PORTS,
    MOST_PORTS,
    WEB_PORTS,
    Ranges,
    has_port,
    merged,
    parse_ports,
    ports_text,
    without,
)

#: The rules of one policy.
MOST_RULES = 256
MOST_TEXT = 512
#: Stockade answers the sandbox's DNS questions itself, on this port.
DNS_PORT = 53
#: Where programs inside find a proxy, if the policy has one: at the address of the name server.
PROXY_PORT, PROXY_ADDRESSES = 3128, ("198.18.0.1", "fd00:5afe::1")
#: The rule by which the user is asked.
ASK = "ask"

_METHODS = ("get", "head", "post", "put", "patch", "delete", "options", "connect", "*")
#: What to write for the scheme of a URL.
_SCHEMES = {
    "http": "{host}:80",
    "ws": "{host}:80",
    "https": "{host}:443",
    "wss": "{host}:443",
    "ssh": "tcp://{host}:22",
    "git": "tcp://{host}:9418",
    "postgres": "tcp://{host}:5432",
    "postgresql": "tcp://{host}:5432",
    "mysql": "tcp://{host}:3306",
    "redis": "tcp://{host}:6379",
    "udp": "udp://{host}:PORT",
    "ntp": "udp://{host}:123",
    "stun": "udp://{host}:3478",
    "quic": "udp://{host}:443",
}
#: What a rule that Stockade does not look into begins with, and a port for hints.
_TRANSPORTS = {"tcp": 5432, "udp": 123}
#: Words for a whole network, and what a policy has for it.
_WORDS = {
    **dict.fromkeys(("open", "host", "bridge", "on", "yes", "true"), 'net = "open"'),
    **dict.fromkeys(
        ("all", "any", "internet"), '* for every public host, net = "open" for your whole network'
    ),
    **dict.fromkeys(("none", "off", "no", "false", "closed", "disabled"), 'net = "none"'),
}
_BROADCAST = AddressRange(32, 0xFFFFFFFF, 32)
_NO_PATH = "a rule without a method names a host and ports, without a path"
_NO_DNS = "leave it out: programs can look up the names that rules allow without a rule for that"


class NetRule(NamedTuple):
    """One rule. Rules that mean the same are equal."""

    #: The one way to write the rule.
    text: str
    deny: bool
    #: Stockade does not look into what is sent: rules with `tcp://` and `udp://`, and rules for addresses.
    opaque: bool
    #: In A-labels and lower case, without `*.`; `*` for every host; empty for an address, and for `ask`.
    name: str
    wildcard: bool
    #: An address, or a network such as `10.0.0.0/8`; empty for a name.
    network: str
    #: Inclusive, sorted, and merged where they touch.
    ports: Ranges
    #: Which requests the rule is about; None for one about connections.
    http: HttpPattern | None = None
    #: It allows datagrams and no connections. A rule that denies is about both.
    udp: bool = False


def parse_new_rule(text: str) -> NetRule:
    """Parse a rule that somebody has just written: a mistyped method is refused, too."""
    rule = parse_rule(text)
    if rule.http is not None:
        refuse_mistyped_methods(rule.http)
    return rule


def parse_rule(text: str) -> NetRule:
    """Parse one rule.

    >>> parse_rule("API.example.com:443,80").text, parse_rule("[2001:db8::1]:443").network
    ('api.example.com', '2001:db8::1')
    """
    if len(text) > MOST_TEXT:
        raise NetRuleError(f"is longer than {MOST_TEXT} characters", ONE_HOST)
    if not text:
        raise NetRuleError("is empty", "write a host such as api.example.com:443")
    if text != text.strip():
        raise NetRuleError("begins or ends with a space", f"write {text.strip()}")
    deny, body = text[0] == "!", text.removeprefix("!")
    if body == ASK and deny:
        raise NetRuleError("is no rule", "leave ask out, or write !ask:443 for a host of that name")
    if text == ASK:
        # On the ports that it has, and those that other rules name, there are listeners inside.
        return NetRule(ASK, False, False, "", False, "", WEB_PORTS)
    if (parts := split_rule(body)) is not None:
        return _http_rule(deny, *parts)
    _refuse_other_forms(body)
    transport = body.partition("://")[0] if "://" in body else ""
    place = body.removeprefix(f"{transport}://")
    if deny and transport:
        raise NetRuleError("a deny rule covers every protocol", f"write !{place}")
    host, ports = _split(place, transport)
    if transport and not ports:
        hint = f"write {body}:{_TRANSPORTS[transport]}, with the port of your server"
        raise NetRuleError(f"{transport}:// needs a port", hint)
    ranges = parse_ports(ports) if ports else ALL_PORTS if deny else WEB_PORTS
    if not deny:
        _refuse_many_ports(ranges)
    if not deny and has_port(ranges, DNS_PORT):
        others = ports_text(without(ranges, ((DNS_PORT, DNS_PORT),)))
        raise NetRuleError(
            f"Stockade answers port {DNS_PORT} inside itself",
            f"write {body.removesuffix(ports)}{others}" if others else _NO_DNS,
        )
    network = _rule_network(host)
    if transport == "udp":
        _refuse_multicast(network)
    name, wildcard = ("", False) if network is not None else _connection_name(host, ports)
    shown = network_text(network) if network is not None else f"*.{name}" if wildcard else name
    opaque = not deny and (bool(transport) or not name)
    rule = NetRule("", deny, opaque, name, wildcard, "" if name else shown, ranges, udp=transport == "udp")
    return rule._replace(text=_text(rule, shown))


def _refuse_multicast(network: AddressRange | None) -> None:
    """Refuse datagrams to a group: Stockade passes on only answers of the address that was dialled."""
    special = None if network is None else special_range(network)
    if network == _BROADCAST or (special is not None and special[1] == "multicast"):
        raise NetRuleError("datagrams to a group of hosts do not leave a sandbox", "name one host")


def _http_rule(deny: bool, methods: str, scheme: str, authority: str, target: str) -> NetRule:
    pattern = parse_pattern(methods, scheme, authority, target)
    host, ports = _split(authority)
    ranges = parse_ports(ports) if ports else ((SCHEMES[pattern.scheme], SCHEMES[pattern.scheme]),)
    if len(ranges) > 1 or ranges[0][0] != ranges[0][1]:
        raise NetRuleError("a URL has one port", "write one rule for each port")
    port = ranges[0][0]
    if port == DNS_PORT:
        raise NetRuleError(f"Stockade answers port {DNS_PORT} inside itself", "name another port")
    if (network := _rule_network(host)) is not None:
        raise NetRuleError(
            "requests are judged by the name of their host",
            f"write {network_text(network)}:{port} to allow connections to the address",
        )
    name, wildcard = rule_name(host, ports)
    shown = (f"*.{name}" if wildcard else name) + ("" if port == SCHEMES[pattern.scheme] else f":{port}")
    before = "!" if deny else ""
    return NetRule(before + rule_text(pattern, shown), deny, False, name, wildcard, "", ranges, pattern)


def network_of(rule: NetRule) -> AddressRange | None:
    """Return the range of addresses that a rule names; None for a name."""
    return parse_network(rule.network)


def ports_of(rules: Iterable[NetRule], *, udp: bool = False) -> tuple[int, ...]:
    """Return the ports of TCP, or of UDP, that the rules allow to some host, sorted.

    It is an error if those of both are too many.
    """
    allowing = [rule for rule in rules if not rule.deny]
    both = {
        kind: merged(p for one in allowing if one.udp is kind for p in one.ports) for kind in (False, True)
    }
    _refuse_many_ports([one for ranges in both.values() for one in ranges])
    return tuple(port for low, high in both[udp] for port in range(low, high + 1))


def _refuse_many_ports(ranges: Iterable[tuple[int, int]]) -> None:
    count = sum(high - low + 1 for low, high in ranges)
    if count > MOST_PORTS:
        raise NetRuleError(
            f"the rules name {count} ports, and a sandbox has at most {MOST_PORTS}", "name fewer ports"
        )


def check_rules(rules: Sequence[NetRule]) -> None:
    """Refuse rules that contradict each other: a host is either looked into or not."""
    plain = [rule for rule in rules if rule.http is None and not rule.deny and rule.name]
    looked_into = [rule for rule in rules if rule.http is not None]
    for rule in looked_into:
        for other in plain:
            if not _share_port(rule, other):
                continue
            if covers_name(other, rule) or (rule.deny and covers_name(rule, other)):
                raise NetRuleError(
                    f"{other.text} already allows everything to this host, without a look at the requests",
                    "leave out one of the two; to allow all requests but look at them, "
                    + _judged(rule, other),
                )
        for other in looked_into:
            differs = rule.http and other.http and rule.http.scheme != other.http.scheme
            if (
                differs
                and _share_port(rule, other)
                and (covers_name(rule, other) or covers_name(other, rule))
            ):
                raise NetRuleError(
                    f"{other.text} has another scheme for the same host and port",
                    "one port speaks one of them",
                )


def _judged(rule: NetRule, other: NetRule) -> str:
    """Return what to write instead of `other`, so that requests are judged as those of `rule` are."""
    scheme = rule.http.scheme if rule.http else "https"
    if other.name == ANY_HOST:
        return f"name the hosts instead of *, such as * {scheme}://{_shown_name(rule)}/**"
    return f"write * {scheme}://{_shown_name(other)}/**"


def covers_name(wide: NetRule, narrow: NetRule) -> bool:
    """Whether every name of `narrow` is one of `wide`."""
    if wide.name == ANY_HOST:
        return bool(narrow.name)
    if wide.wildcard:
        return narrow.name.endswith(f".{wide.name}") or (narrow.wildcard and narrow.name == wide.name)
    return wide.name == narrow.name and not narrow.wildcard


def _share_port(one: NetRule, other: NetRule) -> bool:
    return without(one.ports, other.ports) != one.ports


def _shown_name(rule: NetRule) -> str:
    return f"*.{rule.name}" if rule.wildcard else rule.name


def _text(rule: NetRule, shown: str) -> str:
    before = "!" if rule.deny else "udp://" if rule.udp else "tcp://" if rule.opaque and rule.name else ""
    if rule.ports == (ALL_PORTS if rule.deny else WEB_PORTS) and "://" not in before:
        return before + shown
    return f"{before}{f'[{shown}]' if ':' in shown else shown}:{ports_text(rule.ports)}"


def _split(place: str, transport: str = "") -> tuple[str, str]:
    """Split a rule into host and ports. `transport` is what came before it, for hints."""
    before, usual = (f"{transport}://", _TRANSPORTS[transport]) if transport else ("", 443)
    if place.startswith("["):
        host, closed, rest = place[1:].partition("]")
        if not closed:
            raise NetRuleError("has a [ without a ]", f"write [{host}]")
        if rest and not rest.startswith(":"):
            raise NetRuleError(f"has {rest!r} after the ]", f"write [{host}{rest.partition(':')[0]}]:443")
        if ":" not in host:
            raise NetRuleError("brackets are for IPv6 addresses", f"write {host}{rest}")
        if rest == ":":
            raise NetRuleError("the port is missing", f"write {before}[{host}]:{usual}")
        return host, rest[1:]
    if place.count(":") > 1:
        if parse_network(place) is None:
            _refuse_odd_ipv6(place)
        return place, ""
    host, colon, ports = place.partition(":")
    if colon and not ports:
        raise NetRuleError("the port is missing", f"write {before}{host}:{usual}")
    if "/" in ports:
        numbers, _, path = ports.partition("/")
        if path in _TRANSPORTS:
            raise NetRuleError("the protocol comes first", f"write {path}://{host}:{numbers}")
        raise NetRuleError(_NO_PATH, f"write {before}{host}:{numbers or usual}")
    return host, ports


def _refuse_odd_ipv6(place: str) -> None:
    if "%" in place:
        raise NetRuleError("a rule has no zone", f"write {place.partition('%')[0]}")
    host, _, ports = place.rpartition(":")
    hint = "write it as [2001:db8::1]:443"
    if "/" in host and parse_network(host) is not None:
        hint = f"write [{host}]:{ports}"
    raise NetRuleError("is neither a host with ports nor an IPv6 address", hint)


def _rule_network(host: str) -> AddressRange | None:
    """Return the address or network of a rule; None if `host` is to be a name."""
    if "%" in host and ":" in host:
        raise NetRuleError("a rule has no zone", f"write {host.partition('%')[0]}")
    network = parse_network(host)
    if network is None:
        _refuse_odd_address(host)
        return None
    shift = network.bits - network.prefix
    plain = network._replace(start=network.start >> shift << shift)
    if plain != network:
        raise NetRuleError(
            f"the address has bits beyond /{network.prefix}",
            f"write {network_text(plain)} for the network, or {host.partition('/')[0]} for the one address",
        )
    if MAPPED.contains(network):
        inner = AddressRange(32, network.start & 0xFFFFFFFF, network.prefix - 96)
        raise NetRuleError("is an IPv4 address in the form of IPv6", f"write {network_text(inner)}")
    return network


def _refuse_odd_address(host: str) -> None:
    head, slash, _ = host.partition("/")
    if slash and (parse_address(head) is not None):
        most = 128 if ":" in head else 32
        raise NetRuleError(
            "the network's prefix is not a number of bits", f"write {head}/{most}, with 0 to {most} bits"
        )
    if ":" in host:
        raise NetRuleError("is not an IPv6 address", "write it as [2001:db8::1]:443")
    if head.isascii() and head.isdigit() and len(head) <= 5:
        raise NetRuleError("names a port and no host", f"write api.example.com:{head}")
    if all(map(is_number, head.lower().split("."))):
        hint = "write the address as four numbers: 127.0.0.1"
        with contextlib.suppress(OSError):
            hint = f"write {socket.inet_ntoa(socket.inet_aton(head))}"
        raise NetRuleError("is not an address in its usual form", hint)
    if slash:
        raise NetRuleError(_NO_PATH, f"write {_near(head) or 'api.example.com'}:443")


def _connection_name(host: str, ports: str) -> tuple[str, bool]:
    """Return what `rule_name` does, for a rule that may also be about every host."""
    return (ANY_HOST, False) if host == ANY_HOST else rule_name(host, ports)


def rule_name(host: str, ports: str) -> tuple[str, bool]:
    """Return the name of a rule and whether it means everything below it; the ports are for hints."""
    wildcard = host.startswith("*.")
    if not host:
        raise NetRuleError("names no host", f"write api.example.com:{ports or 443}")
    if host == ANY_HOST:
        raise NetRuleError(
            "a rule for requests names its host",
            f"write *.example.com, or *:{ports or 443} for connections to every host",
        )
    if host == "*.":
        raise NetRuleError("names no host after the *", "write *.example.com:443, or * for every host")
    if "*" in host[2 if wildcard else 0 :]:
        near = _near(host.rpartition("*")[2].partition(".")[2])
        raise NetRuleError(
            "a * stands only for everything before a host",
            f"write *.{near}" if near else "write *.example.com, or name each host",
        )
    name = normal_name(host[2 if wildcard else 0 :])
    if name == "localhost" or name.endswith(".localhost"):
        place = f"127.0.0.1:{ports}" if ports else "127.0.0.1:8080, with the port of the server"
        raise NetRuleError("localhost is the sandbox itself", f"for a server on your machine, write {place}")
    return name, wildcard


def _refuse_other_forms(body: str) -> None:
    """Refuse what is not a rule but looks like one: URLs, HTTP rules, a user before a host, words."""
    if body.lower() in _WORDS:
        raise NetRuleError(
            "is not a rule",
            f"write {_WORDS[body.lower()]}, or {body.lower()}:443 for a host of that name",
        )
    if body.lower().split(maxsplit=1)[:1] in ([method] for method in _METHODS) and len(body.split()) > 1:
        host = _host_of(body.rsplit(maxsplit=1)[-1]) or "api.example.com"
        raise NetRuleError("a rule for requests needs a URL", f"write GET https://{host}/**")
    if body.isupper() and all(word.lower() in _METHODS for word in body.split(",")):
        hint = f"write the rule as one word, in quotes: '{body} https://api.example.com/**'"
        raise NetRuleError("is a method without a URL", hint)
    for letter in body:
        if letter.isspace() or not letter.isprintable():
            raise NetRuleError(f"contains {character_name(letter)}", ONE_HOST)
    _refuse_mistyped_transport(body)
    scheme, has_scheme, _ = body.partition("://")
    if has_scheme and scheme not in _TRANSPORTS:
        known = scheme.lower()
        every = _authority(body).partition(":")[0] == ANY_HOST
        host, port = ANY_HOST if every else _host_of(body), _port_of(body)
        form = _SCHEMES.get(known, "tcp://{host}:PORT")
        if port:
            form = f"{form.rpartition(':')[0]}:{port}"
        form = form.format(host=host or "host")
        looked_into = bool(host) and not every and known in SCHEMES
        some = f", or for some requests alone 'GET {known}://{host}/**'" if looked_into else ""
        raise NetRuleError("a rule names a host and ports, not a URL", f"write {form}{some}")
    if "@" in body:
        host = _host_of(body) or "host"
        raise NetRuleError("a rule has no user", f"write {host}:22 for ssh, or {host} for HTTP and TLS")


def _refuse_mistyped_transport(body: str) -> None:
    """Refuse `udp:host:123` and `udp//host:123`; `udp:123` is a host of that name."""
    for transport, port in _TRANSPORTS.items():
        after = body.removeprefix(transport)
        place = after.lstrip(":/")
        if after == body or after.startswith("://") or after[:1] not in (":", "/"):
            continue
        if "/" in after or "." in place or ":" in place:
            ports = "" if ":" in place else f":{port}"
            raise NetRuleError(
                f"begins with {transport}{after[0]}, and not with {transport}://",
                f"write {transport}://{place}{ports}",
            )


def _authority(url: str) -> str:
    after = url.partition("://")[2] or url
    for mark in "/?#":
        after = after.partition(mark)[0]
    return after.rpartition("@")[2]


def _host_of(url: str) -> str:
    """Return the host of a URL if it can be one of a rule; empty otherwise."""
    host = _authority(url)
    return _near(host if host.startswith("[") and host.endswith("]") else host.partition(":")[0])


def _port_of(url: str) -> str:
    port = _authority(url).rpartition(":")[2]
    return port if port.isascii() and port.isdigit() and len(port) <= 5 else ""


def _near(host: str) -> str:
    """Return a host for a hint, if it is valid."""
    if host.startswith("[") and parse_address(host[1:-1]) is not None:
        return host
    if parse_address(host) is not None:
        return host
    try:
        return ("*." if host.startswith("*.") else "") + normal_name(host.removeprefix("*."))
    except NetRuleError:
        return ""


def suggest(name_or_address: str, port: int, *, udp: bool = False) -> str:
    """Return the rule that would allow a connection, or datagrams, for a hint; empty if no rule can.

    >>> suggest("API.example.com", 443), suggest("2001:db8::1", 123, udp=True)
    ('api.example.com:443', 'udp://[2001:db8::1]:123')
    """
    if port == DNS_PORT or not 1 <= port <= 65535:
        return ""
    before = "udp://" if udp else ""
    address = parse_address(name_or_address)
    if address is not None:
        text = network_text(unmapped(address))
        return f"{before}[{text}]:{port}" if ":" in text else f"{before}{text}:{port}"
    near = _near(name_or_address)
    return f"{before}{near}:{port}" if near and not near.startswith(("*", "[")) else ""
