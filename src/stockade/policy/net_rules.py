"""The rules of `net`: how each is written, and which names, addresses and ports they allow.

    >>> rules = RuleSet([parse_rule("*.example.com"), parse_rule("!ads.example.com")])
    >>> rules.for_name("api.example.com", 443).allowed, rules.for_name("ads.example.com", 443).allowed
    (True, False)

A rule is a host (`api.example.com`), everything below a host (`*.example.com`), an address or a network
(`10.1.2.3`, `10.1.0.0/16`), each with ports or without (`:443`, `:80,443`, `:8000-8010`); `tcp://host:5432`
allows bytes that Stockade does not look into; `GET https://api.example.com/v1/**` allows requests
(`http_rules`); `!` before a rule denies. A deny rule wins over every other. The rule `ask` allows nothing by
itself: the user is asked about names that no other rule covers.

Two processes use this module: the supervisor, which reads policies, and the egress process, which reads what
a hostile program sends. So it needs nothing but the standard library, has no side effect, and every function
takes any text: it raises `NetRuleError`, or returns an answer that allows nothing.

Some ranges of addresses are special: private, loopback, link-local, and so on. A rule covers a special
address only if the whole rule lies in the range: `10.0.0.0/8` covers 10.1.2.3, `0.0.0.0/0` does not.
"""

from __future__ import annotations

import _socket as socket  # socket itself would also load selectors
import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from stockade.policy import net_errors
from stockade.policy.http_rules import (
    SCHEMES,
    HttpPattern,
    Target,
    matches,
    parse_pattern,
    refuse_mistyped_methods,
    rule_text,
    split_rule,
)

NetRuleError = net_errors.NetRuleError
#: Each port needs two listeners in the sandbox, and one message carries the descriptors of them all.
MOST_PORTS = 64
#: The rules of one policy.
MOST_RULES = 256
MOST_TEXT = 512
MOST_NAME = 253
MOST_LABEL = 63
MOST_ADDRESS = 45
#: The ports of an allowing rule without ports, and of a deny rule without ports.
WEB_PORTS = ((80, 80), (443, 443))
ALL_PORTS = ((1, 65535),)
#: Stockade answers the sandbox's DNS questions itself, on this port.
DNS_PORT = 53

#: Where programs inside find a proxy, if the policy has one: at the address of the name server.
PROXY_PORT, PROXY_ADDRESSES = 3128, ("198.18.0.1", "fd00:5afe::1")
#: The rule by which the user is asked.
ASK = "ask"

Ranges = tuple[tuple[int, int], ...]


class NetRule(NamedTuple):
    """One rule. Rules that mean the same are equal."""

    #: The one way to write the rule.
    text: str
    deny: bool
    #: Stockade does not look into what is sent: rules with `tcp://`, and rules for addresses.
    opaque: bool
    #: In A-labels and lower case, without `*.`; empty for an address, and for `ask`.
    name: str
    wildcard: bool
    #: An address, or a network such as `10.0.0.0/8`; empty for a name.
    network: str
    #: Inclusive, sorted, and merged where they touch.
    ports: Ranges
    #: Which requests the rule is about; None for one about connections.
    http: HttpPattern | None = None


class NetDecision(NamedTuple):
    """Whether a connection is allowed, and the rule that decided: its index, or -1 for no rule."""

    allowed: bool
    rule: int
    opaque: bool
    #: The scheme, if only rules for requests allow it: each request is judged. Empty otherwise.
    scheme: str = ""


class AddressRange(NamedTuple):
    """A range of addresses, as numbers."""

    bits: int
    start: int
    prefix: int

    def contains(self, other: AddressRange) -> bool:
        """Whether every address of the other is in this one."""
        shift = self.bits - self.prefix
        same = self.bits == other.bits and self.prefix <= other.prefix
        return same and self.start >> shift == other.start >> shift


_NOT_ALLOWED = NetDecision(False, -1, False)

_LETTERS = frozenset("abcdefghijklmnopqrstuvwxyz0123456789_-")
_DIGITS = frozenset("0123456789")
_HEX_DIGITS = frozenset("0123456789abcdef")
_METHODS = ("get", "head", "post", "put", "patch", "delete", "options", "connect", "*")
#: Dots of other scripts, which some programs take for a dot.
_OTHER_DOTS = ("\u3002", "\uff0e", "\uff61")
#: IDNA of 2003 and of 2008 read these in different ways.
_AMBIGUOUS = ("\u00df", "\u03c2", "\u200c", "\u200d")
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
}
#: Words for a whole network, and the one that a policy has for it.
_WORDS = {
    **dict.fromkeys(("open", "host", "bridge", "all", "any", "on", "yes", "true", "internet"), "open"),
    **dict.fromkeys(("none", "off", "no", "false", "closed", "disabled"), "none"),
}
_NO_PATH = "a rule without a method names a host and ports, without a path"
_NO_DNS = "leave it out: programs can look up the names that rules allow without a rule for that"
_ONE_HOST = "write one rule for each host"
_SERVICES = {"http": "80", "https": "443", "ssh": "22"}


# Names


def normal_name(text: str) -> str:
    """Return the one spelling of a host's name: A-labels, lower case, no dot at the end.

    >>> normal_name("Bücher.Example.")
    'xn--bcher-kva.example'
    """
    if not text:
        raise NetRuleError("the name is empty", "write a host such as api.example.com")
    if len(text) > MOST_NAME + 1:
        raise NetRuleError(f"the name is longer than {MOST_NAME} characters")
    for dot in _OTHER_DOTS:
        if dot in text:
            raise NetRuleError(f"the name has U+{ord(dot):04X} for a dot", f"write {text.replace(dot, '.')}")
    labels = text.removesuffix(".").split(".")
    name = ".".join([_label(label) for label in labels])
    if len(name) > MOST_NAME:
        raise NetRuleError(f"the name is longer than {MOST_NAME} characters")
    if _is_number(name.rpartition(".")[2]):
        raise NetRuleError(
            "is neither a name nor an address in its usual form",
            "write an address as four numbers: 127.0.0.1",
        )
    return name


def _label(label: str) -> str:
    plain = label.lower() if label.isascii() else _a_label(label)
    if plain and _LETTERS.issuperset(plain) and "-" not in (plain[0], plain[-1]) and len(plain) <= MOST_LABEL:
        return plain
    if not label:
        raise NetRuleError("the name has an empty part", "write one dot between two parts of a name")
    if len(plain) > MOST_LABEL:
        raise NetRuleError(f"a part of the name is longer than {MOST_LABEL} characters")
    if "*" in label:
        raise NetRuleError(
            "a * stands only for whole names before a host", "write *.example.com, or name each host"
        )
    if "-" in (plain[0], plain[-1]):
        raise NetRuleError("a part of the name begins or ends with -")
    wrong = next(letter for letter in plain if letter not in _LETTERS)
    hint = _ONE_HOST if wrong in ",;" else "write a host such as api.example.com"
    raise NetRuleError(f"a name cannot contain {_character(wrong)}", hint)


def _is_number(text: str) -> bool:
    """Whether programs take it for a number, as a part of an address: 127, 0x7f."""
    if text.startswith("0x"):
        return _HEX_DIGITS.issuperset(text[2:])
    return bool(text) and _DIGITS.issuperset(text)


def _character(letter: str) -> str:
    names = {" ": "a space", "\0": "a NUL byte", "\t": "a tab", "\n": "a line break"}
    return names.get(letter) or (repr(letter) if letter.isprintable() else f"U+{ord(letter):04X}")


def _a_label(label: str) -> str:
    """Return the A-label of a label with letters beyond ASCII."""
    if len(label) > MOST_LABEL:
        raise NetRuleError(f"a part of the name is longer than {MOST_LABEL} characters")
    hint = "write the name in its ASCII form, which begins with xn--"
    for letter in label:
        if letter in _AMBIGUOUS:
            raise NetRuleError(f"standards disagree about U+{ord(letter):04X} in a name", hint)
    import unicodedata
    from encodings import idna  # 4 ms, so only for such a name

    try:
        found = idna.ToASCII(label).decode("ascii").lower()
        same = idna.ToUnicode(found) == unicodedata.normalize("NFC", label.lower())
    except UnicodeError:
        raise NetRuleError("the name has letters that no host name can have", hint) from None
    if not found.startswith("xn--") or not same:
        # Wide letters, ligatures and the like: what it says is not what a program would look up.
        raise NetRuleError("the name has letters that stand for others", f"write {found} for {label}")
    return found


# Addresses


def _address(text: str) -> AddressRange | None:
    """Return the address that `text` writes in the usual form; None for any other text."""
    if len(text) > MOST_ADDRESS or not text.isascii() or "\0" in text:
        return None
    family, bits = (socket.AF_INET6, 128) if ":" in text else (socket.AF_INET, 32)
    if bits == 32 and any(part.startswith("0") and part != "0" for part in text.split(".")):
        return None  # some programs take 010 for ten, others for eight
    try:
        return AddressRange(bits, int.from_bytes(socket.inet_pton(family, text), "big"), bits)
    except OSError:
        return None


def _network(text: str) -> AddressRange | None:
    """Return the address or network that `text` writes, also one with bits after its prefix."""
    head, slash, digits = text.partition("/")
    address = _address(head)
    if address is None or not slash:
        return address
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 3 and str(int(digits)) == digits):
        return None
    return AddressRange(address.bits, address.start, int(digits)) if int(digits) <= address.bits else None


def network_text(network: AddressRange) -> str:
    """Return an address or a network as text, in its one spelling."""
    family = socket.AF_INET if network.bits == 32 else socket.AF_INET6
    text = socket.inet_ntop(family, network.start.to_bytes(network.bits // 8, "big"))
    return text if network.prefix == network.bits else f"{text}/{network.prefix}"


def network_of(rule: NetRule) -> AddressRange | None:
    """Return the range of addresses that a rule names; None for a name."""
    return _network(rule.network)


_MAPPED = AddressRange(128, 0xFFFF << 32, 96)
_TEREDO = AddressRange(128, 0x2001 << 112, 32)
#: Ranges whose addresses have an IPv4 address in them, and where it begins.
_EMBEDDING = (
    (_MAPPED, 96),
    (AddressRange(128, 0, 96), 96),
    (AddressRange(128, 0xFFFF << 48, 96), 96),
    (AddressRange(128, 0x64FF9B << 96, 96), 96),
    (AddressRange(128, 0x2002 << 112, 16), 16),
)
#: By range, why an address in it is refused. The smallest range that has an address counts.
_SPECIAL = (
    ("0.0.0.0/8", "unspecified"),
    ("10.0.0.0/8", "private"),
    ("100.64.0.0/10", "private"),
    ("100.100.100.200", "metadata"),
    ("127.0.0.0/8", "loopback"),
    ("168.63.129.16", "metadata"),
    ("169.254.0.0/16", "link-local"),
    ("169.254.169.254", "metadata"),
    ("169.254.170.2", "metadata"),
    ("169.254.170.23", "metadata"),
    ("172.16.0.0/12", "private"),
    ("192.0.0.0/24", "reserved"),
    ("192.0.0.192", "metadata"),
    ("192.0.2.0/24", "reserved"),
    ("192.88.99.0/24", "translated (6to4)"),
    ("192.168.0.0/16", "private"),
    ("198.18.0.0/15", "reserved"),
    ("198.51.100.0/24", "reserved"),
    ("203.0.113.0/24", "reserved"),
    ("224.0.0.0/4", "multicast"),
    ("240.0.0.0/4", "reserved"),
    # Only 2000::/3 is in use for hosts of the internet.
    ("::/3", "reserved"),
    ("4000::/2", "reserved"),
    ("8000::/1", "reserved"),
    ("::/96", "translated (IPv4-compatible)"),
    ("::", "unspecified"),
    ("::1", "loopback"),
    ("::ffff:0:0/96", "translated (mapped)"),
    ("::ffff:0:0:0/96", "translated (SIIT)"),
    ("64:ff9b::/96", "translated (NAT64)"),
    ("64:ff9b:1::/48", "translated (NAT64)"),
    ("2001::/23", "reserved"),
    ("2001::/32", "translated (Teredo)"),
    ("2001:db8::/32", "reserved"),
    ("2002::/16", "translated (6to4)"),
    ("3fff::/20", "reserved"),
    ("fc00::/7", "private"),
    ("fd00:ec2::254", "metadata"),
    ("fd00:ec2::23", "metadata"),
    ("fd20:ce::254", "metadata"),
    ("fe80::/10", "link-local"),
    ("fec0::/10", "private"),
    ("ff00::/8", "multicast"),
)
#: The same as numbers, the smallest first.
_RANGES = sorted(
    ((network, reason) for text, reason in _SPECIAL if (network := _network(text)) is not None),
    key=lambda row: -row[0].prefix,
)


def special_range(network: AddressRange) -> tuple[AddressRange, str] | None:
    """Return the smallest special range that has all of a network, and why it is one; None if none has."""
    embedded = _embedded(network)
    if embedded is not None:
        inner, offset = embedded
        found = special_range(inner)
        if found is not None:
            # The part of the range of translated addresses that stands for the special range.
            return AddressRange(128, network.start, offset + found[0].prefix if offset else 128), found[1]
    return next((row for row in _RANGES if row[0].contains(network)), None)


def _embedded(network: AddressRange) -> tuple[AddressRange, int] | None:
    """Return the IPv4 addresses that a network of IPv6 stands for, and where they begin in its addresses."""
    if network.bits != 128:
        return None
    for around, offset in _EMBEDDING:
        # :: and ::1 are addresses of their own.
        if around.contains(network) and network.start > 1 and network.prefix > offset:
            prefix = min(network.prefix - offset, 32)
            return AddressRange(32, network.start >> (96 - offset) & 0xFFFFFFFF, prefix), offset
    if _TEREDO.contains(network) and network.prefix == 128:
        return AddressRange(32, ~network.start & 0xFFFFFFFF, 32), 0
    return None


def _unmapped(address: AddressRange) -> AddressRange:
    """Return the IPv4 address that a mapped one is for the kernel; any other address as it is."""
    if _MAPPED.contains(address):
        return AddressRange(32, address.start & 0xFFFFFFFF, 32)
    return address


def forbidden_address(ip: str) -> str:
    """Say why an address that a name resolved to is refused, unless a rule names it; empty if it is not.

    >>> [forbidden_address(ip) for ip in ("169.254.169.254", "64:ff9b::a00:1", "1.1.1.1")]
    ['metadata', 'private', '']
    """
    address = _address(ip)
    if address is None:
        return "not an address"
    found = special_range(address)
    return found[1] if found is not None else ""


# Ports


def _ports(text: str) -> Ranges:
    """Parse ports such as `443`, `80,443` and `8000-8010`."""
    found = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        low = _port(first, part)
        high = _port(last, part) if dash else low
        if high < low:
            raise NetRuleError(f"the ports {part} are the wrong way round", f"write {high}-{low}")
        found.append((low, high))
    return merged(found)


def _port(text: str, part: str) -> int:
    if text.isascii() and text.isdigit() and len(text) <= 5 and 1 <= int(text) <= 65535:
        return int(text)
    hint = "write a port from 1 to 65535, several as 80,443 or 8000-8010"
    if text.lower() in _SERVICES:
        hint = f"write {_SERVICES[text.lower()]}"
    elif text == "*":
        hint = f"name the ports, at most {MOST_PORTS}; without ports a rule allows 80 and 443"
    raise NetRuleError(f"{part!r} is not a port" if part else "the port is missing", hint)


def merged(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Return the same ports as sorted ranges that do not touch."""
    found: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if found and low <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(found[-1][1], high)
        else:
            found.append((low, high))
    return tuple(found)


def without(ranges: Iterable[tuple[int, int]], gone: Iterable[tuple[int, int]]) -> Ranges:
    """Return the ports of `ranges` that are not in `gone`."""
    left = list(merged(ranges))
    for low, high in merged(gone):
        kept = []
        for first, last in left:
            kept += [(first, min(last, low - 1))] if first < low else []
            kept += [(max(first, high + 1), last)] if last > high else []
        left = kept
    return tuple(left)


def _has(ranges: Ranges, port: int) -> bool:
    return any(low <= port <= high for low, high in ranges)


def ports_text(ranges: Ranges) -> str:
    """Return ports as a rule writes them."""
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in ranges)


def ports_of(rules: Iterable[NetRule]) -> tuple[int, ...]:
    """Return the ports that the rules allow to some host, sorted; an error if they are too many."""
    ranges = merged(pair for rule in rules if not rule.deny for pair in rule.ports)
    count = sum(high - low + 1 for low, high in ranges)
    if count > MOST_PORTS:
        raise NetRuleError(
            f"the rules name {count} ports, and a sandbox has at most {MOST_PORTS}", "name fewer ports"
        )
    return tuple(port for low, high in ranges for port in range(low, high + 1))


# Rules


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
        raise NetRuleError(f"is longer than {MOST_TEXT} characters", _ONE_HOST)
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
    opaque, place = body.startswith("tcp://"), body.removeprefix("tcp://")
    if deny and opaque:
        raise NetRuleError("a deny rule covers every protocol", f"write !{place}")
    host, ports = _split(place)
    if opaque and not ports:
        raise NetRuleError("tcp:// needs a port", f"write tcp://{host}:5432, with the port of your server")
    ranges = _ports(ports) if ports else ALL_PORTS if deny else WEB_PORTS
    if not deny and _has(ranges, DNS_PORT):
        others = ports_text(without(ranges, ((DNS_PORT, DNS_PORT),)))
        raise NetRuleError(
            f"Stockade answers port {DNS_PORT} inside itself", f"write {host}:{others}" if others else _NO_DNS
        )
    network = _rule_network(host)
    name, wildcard = ("", False) if network is not None else _rule_name(host, ports)
    shown = network_text(network) if network is not None else f"*.{name}" if wildcard else name
    rule = NetRule("", deny, not deny and (opaque or not name), name, wildcard, "" if name else shown, ranges)
    if not deny:
        ports_of([rule])
    return rule._replace(text=_text(rule, shown))


def _http_rule(deny: bool, methods: str, scheme: str, authority: str, target: str) -> NetRule:
    pattern = parse_pattern(methods, scheme, authority, target)
    host, ports = _split(authority)
    ranges = _ports(ports) if ports else ((SCHEMES[pattern.scheme], SCHEMES[pattern.scheme]),)
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
    name, wildcard = _rule_name(host, ports)
    shown = (f"*.{name}" if wildcard else name) + ("" if port == SCHEMES[pattern.scheme] else f":{port}")
    before = "!" if deny else ""
    return NetRule(before + rule_text(pattern, shown), deny, False, name, wildcard, "", ranges, pattern)


def check_rules(rules: Sequence[NetRule]) -> None:
    """Refuse rules that contradict each other: a host is either looked into or not."""
    plain = [rule for rule in rules if rule.http is None and not rule.deny and rule.name]
    looked_into = [rule for rule in rules if rule.http is not None]
    for rule in looked_into:
        for other in plain:
            if not _share_port(rule, other):
                continue
            if covers_name(other, rule) or (rule.deny and covers_name(rule, other)):
                everything = f"* {rule.http.scheme if rule.http else 'https'}://{_shown_name(other)}/**"
                raise NetRuleError(
                    f"{other.text} already allows everything to this host, without a look at the requests",
                    f"leave out one of the two; to allow all requests but look at them, write {everything}",
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


def covers_name(wide: NetRule, narrow: NetRule) -> bool:
    """Whether every name of `narrow` is one of `wide`."""
    if wide.wildcard:
        return narrow.name.endswith(f".{wide.name}") or (narrow.wildcard and narrow.name == wide.name)
    return wide.name == narrow.name and not narrow.wildcard


def _share_port(one: NetRule, other: NetRule) -> bool:
    return without(one.ports, other.ports) != one.ports


def _shown_name(rule: NetRule) -> str:
    return f"*.{rule.name}" if rule.wildcard else rule.name


def _text(rule: NetRule, shown: str) -> str:
    before = "!" if rule.deny else "tcp://" if rule.opaque and rule.name else ""
    if rule.ports == (ALL_PORTS if rule.deny else WEB_PORTS) and before != "tcp://":
        return before + shown
    return f"{before}{f'[{shown}]' if ':' in shown else shown}:{ports_text(rule.ports)}"


def _split(place: str) -> tuple[str, str]:
    """Split a rule into host and ports."""
    if place.startswith("["):
        host, closed, rest = place[1:].partition("]")
        if not closed:
            raise NetRuleError("has a [ without a ]", f"write [{host}]")
        if rest and not rest.startswith(":"):
            raise NetRuleError(f"has {rest!r} after the ]", f"write [{host}{rest.partition(':')[0]}]:443")
        if ":" not in host:
            raise NetRuleError("brackets are for IPv6 addresses", f"write {host}{rest}")
        if rest == ":":
            raise NetRuleError("the port is missing", f"write [{host}]:443")
        return host, rest[1:]
    if place.count(":") > 1:
        if _network(place) is None:
            _refuse_odd_ipv6(place)
        return place, ""
    host, colon, ports = place.partition(":")
    if colon and not ports:
        raise NetRuleError("the port is missing", f"write {host}:443")
    if "/" in ports:
        raise NetRuleError(_NO_PATH, f"write {host}:{ports.partition('/')[0] or 443}")
    return host, ports


def _refuse_odd_ipv6(place: str) -> None:
    if "%" in place:
        raise NetRuleError("a rule has no zone", f"write {place.partition('%')[0]}")
    host, _, ports = place.rpartition(":")
    hint = "write it as [2001:db8::1]:443"
    if "/" in host and _network(host) is not None:
        hint = f"write [{host}]:{ports}"
    raise NetRuleError("is neither a host with ports nor an IPv6 address", hint)


def _rule_network(host: str) -> AddressRange | None:
    """Return the address or network of a rule; None if `host` is to be a name."""
    if "%" in host and ":" in host:
        raise NetRuleError("a rule has no zone", f"write {host.partition('%')[0]}")
    network = _network(host)
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
    if _MAPPED.contains(network):
        inner = AddressRange(32, network.start & 0xFFFFFFFF, network.prefix - 96)
        raise NetRuleError("is an IPv4 address in the form of IPv6", f"write {network_text(inner)}")
    return network


def _refuse_odd_address(host: str) -> None:
    head, slash, _ = host.partition("/")
    if slash and (_address(head) is not None):
        most = 128 if ":" in head else 32
        raise NetRuleError(
            "the network's prefix is not a number of bits", f"write {head}/{most}, with 0 to {most} bits"
        )
    if ":" in host:
        raise NetRuleError("is not an IPv6 address", "write it as [2001:db8::1]:443")
    if head.isascii() and head.isdigit() and len(head) <= 5:
        raise NetRuleError("names a port and no host", f"write api.example.com:{head}")
    if all(map(_is_number, head.lower().split("."))):
        hint = "write the address as four numbers: 127.0.0.1"
        with contextlib.suppress(OSError):
            hint = f"write {socket.inet_ntoa(socket.inet_aton(head))}"
        raise NetRuleError("is not an address in its usual form", hint)
    if slash:
        raise NetRuleError(_NO_PATH, f"write {_near(head) or 'api.example.com'}:443")


def _rule_name(host: str, ports: str) -> tuple[str, bool]:
    wildcard = host.startswith("*.")
    if not host:
        raise NetRuleError("names no host", f"write api.example.com:{ports or 443}")
    if host in ("*", "*."):
        hint = 'write net = "open" for the host\'s whole network, or name the hosts'
        raise NetRuleError("every host is not a rule", hint)
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
            f'write net = "{_WORDS[body.lower()]}", or {body.lower()}:443 for a host of that name',
        )
    if body.lower().split(maxsplit=1)[:1] in ([method] for method in _METHODS) and len(body.split()) > 1:
        host = _host_of(body.rsplit(maxsplit=1)[-1]) or "api.example.com"
        raise NetRuleError("a rule for requests needs a URL", f"write GET https://{host}/**")
    if body.isupper() and all(word.lower() in _METHODS for word in body.split(",")):
        hint = f"write the rule as one word, in quotes: '{body} https://api.example.com/**'"
        raise NetRuleError("is a method without a URL", hint)
    for letter in body:
        if letter.isspace() or not letter.isprintable():
            raise NetRuleError(f"contains {_character(letter)}", _ONE_HOST)
    scheme, has_scheme, _ = body.partition("://")
    if has_scheme and scheme != "tcp":
        known = scheme.lower()
        host, port = _host_of(body), _port_of(body)
        form = _SCHEMES.get(known, "tcp://{host}:PORT")
        if port:
            form = f"{form.rpartition(':')[0]}:{port}"
        form = form.format(host=host or "host")
        if known == "udp":
            hint = _NO_DNS if port == str(DNS_PORT) else f"if the server speaks TCP too, write {form}"
            raise NetRuleError("only TCP leaves a sandbox", hint)
        some = f", or for some requests alone 'GET {known}://{host}/**'" if host and known in SCHEMES else ""
        raise NetRuleError("a rule names a host and ports, not a URL", f"write {form}{some}")
    if "@" in body:
        host = _host_of(body) or "host"
        raise NetRuleError("a rule has no user", f"write {host}:22 for ssh, or {host} for HTTP and TLS")


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
    if host.startswith("[") and _address(host[1:-1]) is not None:
        return host
    if _address(host) is not None:
        return host
    try:
        return ("*." if host.startswith("*.") else "") + normal_name(host.removeprefix("*."))
    except NetRuleError:
        return ""


def suggest(name_or_address: str, port: int) -> str:
    """Return the rule that would allow a connection, for a hint; empty if no rule can.

    >>> suggest("API.example.com", 443), suggest("2001:db8::1", 22)
    ('api.example.com:443', '[2001:db8::1]:22')
    """
    if port == DNS_PORT or not 1 <= port <= 65535:
        return ""
    address = _address(name_or_address)
    if address is not None:
        text = network_text(_unmapped(address))
        return f"[{text}]:{port}" if ":" in text else f"{text}:{port}"
    near = _near(name_or_address)
    return f"{near}:{port}" if near and not near.startswith(("*", "[")) else ""


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
            return name.isascii() and _rule_name(name, "")[0] == name
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

    def for_name(self, name: str, port: int) -> NetDecision:
        """Decide about a connection to a name."""
        return self._decide(self._for_name(name), port)

    def denies_requests(self, name: str, port: int) -> bool:
        """Whether a rule denies some request to a name, so that a connection must be looked into."""
        rules = (self.rules[index] for index in self._for_name(name))
        return any(rule.deny and rule.http and _has(rule.ports, port) for rule in rules)

    def for_request(self, name: str, port: int, method: str, target: Target) -> NetDecision:
        """Decide about a request on a connection that only rules for requests allow."""
        found = _NOT_ALLOWED
        for index in sorted(self._for_name(name)):
            rule = self.rules[index]
            if not _has(rule.ports, port):
                continue
            if rule.deny and (rule.http is None or matches(rule.http, method, target, deny=True)):
                return NetDecision(False, index, False)
            if found.allowed or rule.http is None or rule.deny:
                continue
            if matches(rule.http, method, target, deny=False):
                found = NetDecision(True, index, False, rule.http.scheme)
        return found

    def for_address(self, ip: str, port: int) -> NetDecision:
        """Decide about a connection to an address, by the rules for addresses alone."""
        address = _address(ip)
        if address is None:
            return _NOT_ALLOWED
        denied = self.denies_address(ip, port)
        if denied >= 0:
            return NetDecision(False, denied, False)
        return self._decide(self._for_address(_unmapped(address)), port)

    def denies_address(self, ip: str, port: int | None = None) -> int:
        """Return the index of a rule that denies an address, at this port or at any; -1 if none does.

        A rule that denies an IPv4 address denies every IPv6 address that stands for it too.
        """
        found = _address(ip)
        if found is None:
            return -1
        address = _unmapped(found)
        embedded = _embedded(address)
        addresses = [address, *([embedded[0]] if embedded is not None else [])]
        for index, network in self._networks:
            rule = self.rules[index]
            if not rule.deny or not (port is None or _has(rule.ports, port)):
                continue
            if any(map(network.contains, addresses)):
                return index
        return -1

    def _decide(self, indexes: Iterable[int], port: int) -> NetDecision:
        found = _NOT_ALLOWED
        for index in sorted(indexes):
            rule = self.rules[index]
            if not _has(rule.ports, port) or (rule.deny and rule.http):
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
