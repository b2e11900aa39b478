"""The rules of `net`: how they are written, what they allow, and that no text breaks them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stockade.policy.net_addresses import forbidden_address
from stockade.policy.net_errors import NetRuleError
from stockade.policy.net_names import normal_name
from stockade.policy.net_rule_set import RuleSet
from stockade.policy.net_rules import NetRule, parse_rule, ports_of, suggest


def rules(*texts: str) -> RuleSet:
    return RuleSet([parse_rule(text) for text in texts])


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("api.example.com", "api.example.com"),
        ("API.Example.COM.", "api.example.com"),
        ("api.example.com:443,80", "api.example.com"),
        ("api.example.com:443", "api.example.com:443"),
        ("api.example.com:443,443,444", "api.example.com:443-444"),
        ("h.example:8000-8010,22", "h.example:22,8000-8010"),
        ("*.example.com", "*.example.com"),
        ("*.com:443", "*.com:443"),
        ("*", "*"),
        ("*:443,80", "*"),
        ("*:443", "*:443"),
        ("tcp://*:22", "tcp://*:22"),
        ("!*:25", "!*:25"),
        ("intranet:8080", "intranet:8080"),
        ("my_bucket.example.com", "my_bucket.example.com"),
        ("!ads.example.com", "!ads.example.com"),
        ("!ads.example.com:1-65535", "!ads.example.com"),
        ("!ads.example.com:443", "!ads.example.com:443"),
        ("tcp://db.example.com:5432", "tcp://db.example.com:5432"),
        ("tcp://db.example.com:80,443", "tcp://db.example.com:80,443"),
        ("tcp://*.example.com:22", "tcp://*.example.com:22"),
        ("tcp://10.0.0.1:22", "10.0.0.1:22"),
        ("udp://NTP.example.com:123", "udp://ntp.example.com:123"),
        ("udp://*.example.com:80,443", "udp://*.example.com:80,443"),
        ("udp://192.0.2.7:5000-5001", "udp://192.0.2.7:5000-5001"),
        ("udp://[2001:DB8::1]:123", "udp://[2001:db8::1]:123"),
        ("udp://*:443", "udp://*:443"),
        ("10.0.0.1", "10.0.0.1"),
        ("10.0.0.1/32:443", "10.0.0.1:443"),
        ("10.0.0.0/8:443", "10.0.0.0/8:443"),
        ("0.0.0.0/0", "0.0.0.0/0"),
        ("2001:DB8:0:0::1", "2001:db8::1"),
        ("2001:db8::/32", "2001:db8::/32"),
        ("[2001:db8::1]", "2001:db8::1"),
        ("[2001:db8::1]:443", "[2001:db8::1]:443"),
        ("[2001:db8::/32]:443", "[2001:db8::/32]:443"),
        ("tcp://[::1]:80,443", "::1"),
        ("!2001:db8::/32", "!2001:db8::/32"),
        ("bücher.example", "xn--bcher-kva.example"),
        ("*.BÜCHER.example:443", "*.xn--bcher-kva.example:443"),
        ("xn--bcher-kva.example", "xn--bcher-kva.example"),
    ],
)
def test_a_rule_has_one_spelling(text: str, canonical: str) -> None:
    rule = parse_rule(text)
    assert rule.text == canonical
    assert parse_rule(canonical) == rule


def test_the_parts_of_a_rule() -> None:
    assert parse_rule("*.example.com") == NetRule(
        "*.example.com", False, False, "example.com", True, "", ((80, 80), (443, 443))
    )
    assert parse_rule("!10.0.0.0/8") == NetRule(
        "!10.0.0.0/8", True, False, "", False, "10.0.0.0/8", ((1, 65535),)
    )
    assert parse_rule("tcp://db.example:5432").opaque
    assert parse_rule("10.0.0.1").opaque  # Stockade knows no name to compare anything with


#: What people and programs write instead of a rule, a part of the message, and a part of the hint.
REFUSED = [
    ("", "is empty", "api.example.com"),
    ("https://host.example", "not a URL", "write host.example:443"),
    ("https://host.example/v1?x#y", "not a URL", "write host.example:443"),
    ("https://me:pw@host.example:8443/v1", "not a URL", "write host.example:8443"),
    ("http://host.example", "not a URL", "write host.example:80"),
    ("ssh://git@host.example/repo", "not a URL", "write tcp://host.example:22"),
    ("postgres://db.example/x", "not a URL", "write tcp://db.example:5432"),
    ("udp://host.example:53", "port 53", "look up the names"),
    ("udp://host.example:53,123", "port 53", "write udp://host.example:123"),
    ("udp://host.example", "udp:// needs a port", "write udp://host.example:123"),
    ("UDP://host.example:123", "not a URL", "write udp://host.example:123"),
    ("ntp://host.example", "not a URL", "write udp://host.example:123"),
    ("!udp://host.example:123", "covers every protocol", "write !host.example:123"),
    ("udp://tcp://host.example:1", "neither a host", "write"),
    ("udp://239.1.2.3:5000", "a group of hosts", "name one host"),
    ("udp://host.example:123/path", "without a path", "write udp://host.example:123"),
    ("udp://host.example:", "the port is missing", "write udp://host.example:123"),
    ("udp://255.255.255.255:5000", "a group of hosts", "name one host"),
    ("udp:host.example:123", "begins with udp:", "write udp://host.example:123"),
    ("udp:/host.example:123", "begins with udp:", "write udp://host.example:123"),
    ("udp//host.example:123", "begins with udp/", "write udp://host.example:123"),
    ("tcp:host.example", "begins with tcp:", "write tcp://host.example:5432"),
    ("host.example:123/udp", "the protocol comes first", "write udp://host.example:123"),
    ("host.example:5432/tcp", "the protocol comes first", "write tcp://host.example:5432"),
    ("quic://host.example", "not a URL", "write udp://host.example:443"),
    ("https://*.example.com", "not a URL", "write *.example.com:443"),
    ("https://host.example/v1", "not a URL", "or for some requests alone 'GET https://host.example/**'"),
    ("GET", "a method without a URL", "in quotes: 'GET https://api.example.com/**'"),
    ("GET,POST", "a method without a URL", "in quotes: 'GET,POST https://api.example.com/**'"),
    ("GET host.example/v1", "needs a URL", "write GET https://host.example/**"),
    ("get https://host.example/v1", "'get' is not a method", "write GET"),
    ("GET https://host.example", "has no path", "write GET https://host.example/** for every path"),
    ("GET https://10.0.0.1/", "by the name of their host", "write 10.0.0.1:443"),
    ("GET https://host.example:80,443/", "one port", "one rule for each port"),
    ("GET wss://host.example/socket", "begins as a GET", "write GET https://host.example/socket"),
    ("GET ftp://host.example/", "http and https", "write GET https://host.example/**"),
    ("GET https://me@host.example/", "no user", "write https://host.example/"),
    ("CONNECT https://host.example/", "no request", "name the host"),
    ("host.example/path", "without a path", "write host.example:443"),
    ("host.example:443/path", "without a path", "write host.example:443"),
    ("user@host.example", "no user", "write host.example:22 for ssh"),
    ("git@host.example:group/project.git", "no user", "write host.example:22 for ssh"),
    ("*.", "names no host after the *", "write *.example.com:443, or * for every host"),
    ("*:", "the port is missing", "write *:443"),
    ("*:53", "port 53", "look up the names"),
    ("*:1000-2000", "at most 64", "name fewer ports"),
    ("*:1-65535", "at most 64", "name fewer ports"),
    ("https://*", "not a URL", "write *:443"),
    ("any", "is not a rule", 'write * for every public host, net = "open" for your whole network'),
    ("internet", "is not a rule", "write * for every public host"),
    ("tcp://*", "needs a port", "write tcp://*:5432"),
    ("GET https://*/**", "a rule for requests names its host", "*:443 for connections to every host"),
    ("!", "names no host", ""),
    (":443", "names no host", "write api.example.com:443"),
    ("443", "names a port and no host", "write api.example.com:443"),
    ("foo*.example.com", "stands only for", "write *.example.com"),
    ("a.*.example.com", "stands only for", "write *.example.com"),
    ("*.*.example.com", "stands only for", "write *.example.com"),
    ("**.example.com", "stands only for", "write *.example.com"),
    ("0x7f.1", "usual form", "write 127.0.0.1"),
    ("2130706433", "usual form", "write 127.0.0.1"),
    ("127.1", "usual form", "write 127.0.0.1"),
    ("0177.0.0.1", "usual form", "write 127.0.0.1"),
    ("127.0.0.01:80", "usual form", "write 127.0.0.1"),
    ("256.1.1.1", "usual form", "four numbers"),
    ("1.2.3.4.5", "usual form", "four numbers"),
    ("host.0x1", "usual form", "four numbers"),
    ("*.0x1", "usual form", "four numbers"),
    ("fe80::1%eth0", "no zone", "write fe80::1"),
    ("[fe80::1%eth0]:80", "no zone", "write fe80::1"),
    ("10.1.2.3/8", "bits beyond /8", "write 10.0.0.0/8"),
    ("2001:db8::1/32", "bits beyond /32", "write 2001:db8::/32"),
    ("10.0.0.0/33", "prefix", "0 to 32"),
    ("10.0.0.0/08", "prefix", "0 to 32"),
    ("10.0.0.0/255.0.0.0", "prefix", "0 to 32"),
    ("::ffff:10.0.0.1", "in the form of IPv6", "write 10.0.0.1"),
    ("::ffff:10.0.0.0/104", "in the form of IPv6", "write 10.0.0.0/8"),
    ("2001:db8::/32:443", "neither a host", "write [2001:db8::/32]:443"),
    ("2001:db8:::1", "neither a host", "[2001:db8::1]:443"),
    ("[2001:db8::]/32:443", "after the ]", "write [2001:db8::/32]:443"),
    ("[2001:db8::1", "without a ]", "write [2001:db8::1]"),
    ("[example.com]:443", "brackets", "write example.com:443"),
    ("[::1]:", "port is missing", "write [::1]:443"),
    ("[1:2]:443", "not an IPv6 address", "[2001:db8::1]:443"),
    ("host.example\0", "a NUL byte", ""),
    ("host\0.example", "a NUL byte", ""),
    (" host.example", "a space", "write host.example"),
    ("host .example", "a space", "one rule for each host"),
    ("a.example,b.example", "','", "one rule for each host"),
    ("a..example", "empty part", ""),
    (".example.com", "empty part", ""),
    ("*..com", "empty part", ""),
    ("example.com..", "empty part", ""),
    ("-a.example", "begins or ends with -", ""),
    ("a" * 64 + ".example", "longer than 63", ""),
    (".".join(["a" * 60] * 5), "longer than 253", ""),
    ("x" * 600, "longer than 512", ""),
    ("host.example:0", "'0' is not a port", "1 to 65535"),
    ("host.example:70000", "'70000' is not a port", "1 to 65535"),
    ("host.example:443,", "port is missing", "1 to 65535"),
    ("host.example:", "port is missing", "write host.example:443"),
    ("host.example:https", "'https' is not a port", "write 443"),
    ("host.example:*", "'*' is not a port", "name the ports"),
    ("host.example:-1", "'-1' is not a port", "1 to 65535"),
    ("host.example:٤٤٣", "is not a port", "1 to 65535"),
    ("host.example:443-80", "wrong way round", "write 80-443"),
    ("host.example:1000-1064", "65 ports", "fewer"),
    ("host.example:53", "answers port 53", "leave it out"),
    ("host.example:50-60", "answers port 53", "write host.example:50-52,54-60"),
    ("tcp://host.example", "needs a port", "write tcp://host.example:5432"),
    ("!tcp://host.example:22", "every protocol", "write !host.example:22"),
    ("host", "is not a rule", 'net = "open"'),
    ("None", "is not a rule", 'net = "none"'),
    ("bridge", "is not a rule", 'net = "open"'),
    ("localhost:3000", "the sandbox itself", "for a server on your machine, write 127.0.0.1:3000"),
    ("*.localhost", "the sandbox itself", "127.0.0.1"),
    ("faß.example", "standards disagree", "xn--"),
    ("ｅxample.com", "stand for others", "write example"),
    ("a\u3002example", "for a dot", "write a.example"),
    ("\ud800.example", "contains U+D800", ""),
    ("a\u202eb.example", "contains U+202E", ""),
]


@pytest.mark.parametrize(("text", "problem", "hint"), REFUSED)
def test_what_is_no_rule_is_refused_with_the_nearest_form(text: str, problem: str, hint: str) -> None:
    with pytest.raises(NetRuleError) as caught:
        parse_rule(text)
    assert problem in caught.value.problem
    assert hint in caught.value.hint


def test_names_match_whole_labels_only() -> None:
    some = rules("good.com", "*.below.com")
    for name in ("good.com", "GOOD.com.", "a.below.com", "a.b.below.com"):
        assert some.for_name(name, 443).allowed, name
        assert some.knows(name), name
    for name in (
        "evilgood.com", "good.com.evil", "a.good.com", "below.com", "evilbelow.com", "a.below.com.evil",
        "com", "", ".", "good.com\0", "good.com..", "good_com", "*.below.com", "1.2.3.4", "a..below.com",
    ):  # fmt: skip
        assert not some.for_name(name, 443).allowed, name
        assert not some.knows(name), name


def test_ports_are_part_of_a_rule() -> None:
    some = rules("web.example", "db.example:5432", "r.example:8000-8002")
    assert [port for port in (80, 81, 443, 5432) if some.for_name("web.example", port).allowed] == [80, 443]
    assert [port for port in (80, 443, 5432) if some.for_name("db.example", port).allowed] == [5432]
    assert [p for p in range(7990, 8010) if some.for_name("r.example", p).allowed] == [8000, 8001, 8002]


def test_a_deny_rule_wins_whatever_its_place() -> None:
    for texts in (("*.example.com", "!ads.example.com"), ("!ads.example.com", "*.example.com")):
        some = rules(*texts)
        decision = some.for_name("ads.example.com", 443)
        assert (decision.allowed, decision.rule) == (False, texts.index("!ads.example.com"))
        assert not some.knows("ads.example.com")
        assert some.for_name("a.ads.example.com", 443).allowed
    one_port = rules("h.example:80,443", "!h.example:80")
    assert not one_port.for_name("h.example", 80).allowed
    assert one_port.for_name("h.example", 443).allowed
    assert one_port.knows("h.example")


def test_the_rule_for_every_host_covers_names_and_public_addresses_alone() -> None:
    world = rules("*:443", "!ads.example", "!9.9.9.9")
    for name in ("a.example", "b.c.test", "com"):
        assert world.knows(name) and world.for_name(name, 443).allowed
        assert not world.for_name(name, 80).allowed
    assert not world.for_name("ads.example", 443).allowed
    assert not world.for_name("localhost:443", 443).allowed
    for ip in ("8.8.8.8", "2606:2800::1"):
        assert world.for_address(ip, 443).allowed and not world.for_address(ip, 80).allowed
    special = ("127.0.0.1", "::1", "10.0.0.1", "169.254.169.254", "64:ff9b::a00:1", "9.9.9.9")
    assert not any(world.for_address(ip, 443).allowed for ip in special)
    closed = rules("*", "10.0.0.0/8:80", "!*:80")
    assert closed.for_name("a.example", 443).allowed and not closed.for_name("a.example", 80).allowed
    assert not closed.for_address("10.0.0.1", 80).allowed and closed.denies_address("8.8.8.8", 80) == 2


def test_rules_for_datagrams_and_for_connections_are_apart_and_a_deny_rule_is_about_both() -> None:
    some = rules(
        "udp://ntp.example:123", "web.example:443", "udp://10.0.0.1:5000", "udp://*:8000", "!bad.example"
    )
    assert some.knows("ntp.example") and some.for_name("ntp.example", 123, udp=True).opaque
    assert (
        not some.for_name("ntp.example", 123).allowed
        and not some.for_name("web.example", 443, udp=True).allowed
    )
    assert some.for_address("10.0.0.1", 5000, udp=True).allowed
    assert not some.for_address("10.0.0.1", 5000).allowed
    assert some.for_address("8.8.8.8", 8000, udp=True).allowed
    assert not some.for_address("10.0.0.2", 8000, udp=True).allowed
    assert some.for_name("bad.example", 8000, udp=True) == (False, 4, False, "")
    assert ports_of(some.rules) == (443,) and ports_of(some.rules, udp=True) == (123, 5000, 8000)


def test_a_decision_has_the_rule_that_made_it_and_an_opaque_rule_allows_the_most() -> None:
    some = rules("*.example.com:443", "tcp://db.example.com:443", "db.example.com:443")
    assert some.for_name("a.example.com", 443) == (True, 0, False, "")
    assert some.for_name("db.example.com", 443) == (True, 1, True, "")
    assert some.for_name("other.example", 443) == (False, -1, False, "")


def test_rules_that_are_not_active_decide_nothing_and_keep_their_index() -> None:
    parsed = [parse_rule(text) for text in ("a.example", "!a.example", "8.8.8.8", "*.example")]
    some = RuleSet(parsed, active=[3])
    assert some.for_name("a.example", 443) == (True, 3, False, "")
    assert not some.for_address("8.8.8.8", 443).allowed
    assert not RuleSet(parsed, active=[]).knows("a.example")


def test_addresses_are_allowed_by_address_rules_alone() -> None:
    some = rules("example.com", "93.184.216.0/24:443", "[2606:2800::/32]:443", "!93.184.216.35")
    assert some.for_address("93.184.216.34", 443) == (True, 1, True, "")
    assert some.for_address("::ffff:93.184.216.34", 443) == (True, 1, True, "")
    assert some.for_address("2606:2800::1", 443) == (True, 2, True, "")
    assert some.for_address("93.184.216.34", 80) == (False, -1, False, "")
    assert some.for_address("93.184.216.35", 443) == (False, 3, False, "")
    assert some.for_address("::ffff:93.184.216.35", 443) == (False, 3, False, "")
    assert some.for_address("93.184.217.1", 443) == (False, -1, False, "")
    for odd in ("", "example.com", "93.184.216.034", "0x5db8d822", "2606:2800::1%lo", "93.184.216.34\0"):
        assert not some.for_address(odd, 443).allowed, odd


def test_a_denied_address_is_denied_behind_a_name_and_inside_other_addresses() -> None:
    some = rules("example.com", "!93.184.216.0/24", "![2606:2800::/32]:80")
    for ip in (
        "93.184.216.34", "::ffff:93.184.216.34", "64:ff9b::5db8:d822", "2002:5db8:d822::1",
        "2001:0:4136:e378:8000:63bf:a247:27dd",
    ):  # fmt: skip
        assert some.denies_address(ip, 443) == 1, ip
    assert some.denies_address("2606:2800::1", 80) == 2
    assert some.denies_address("2606:2800::1", 443) == -1
    assert some.denies_address("1.1.1.1", 80) == some.denies_address("no address", 80) == -1


def test_a_wide_network_does_not_cover_special_addresses() -> None:
    everything = rules("0.0.0.0/0", "::/0", "64:ff9b::/96")
    assert everything.for_address("1.1.1.1", 443).allowed
    assert everything.for_address("2606:4700::1111", 443).allowed
    assert everything.for_address("64:ff9b::101:101", 443).allowed
    for ip in (
        "127.0.0.1", "10.1.2.3", "169.254.169.254", "0.0.0.0", "::1", "fd00::1", "64:ff9b::7f00:1",
        "2002:7f00:1::", "::ffff:127.0.0.1", "fe80::1",
    ):  # fmt: skip
        assert not everything.for_address(ip, 443).allowed, ip
    named = rules(
        "127.0.0.1:8080", "10.0.0.0/8", "[fd00::/8]:443", "169.254.169.254:80", "[64:ff9b::7f00:0/104]:80"
    )
    assert named.for_address("127.0.0.1", 8080).allowed
    assert named.for_address("10.1.2.3", 443).allowed
    assert named.for_address("fd12::1", 443).allowed
    assert named.for_address("169.254.169.254", 80).allowed
    assert named.for_address("64:ff9b::7f00:1", 80).allowed
    assert not named.for_address("fd00:ec2::254", 443).allowed  # metadata is named only by its own address
    assert not rules("169.254.0.0/16").for_address("169.254.169.254", 80).allowed


@pytest.mark.parametrize(
    ("ip", "reason"),
    [
        ("1.1.1.1", ""),
        ("2606:4700:4700::1111", ""),
        ("0.0.0.0", "unspecified"),
        ("10.0.0.1", "private"),
        ("172.31.255.255", "private"),
        ("172.32.0.0", ""),
        ("192.168.1.1", "private"),
        ("100.64.0.1", "private"),
        ("127.255.255.254", "loopback"),
        ("169.254.1.1", "link-local"),
        ("169.254.169.254", "metadata"),
        ("100.100.100.200", "metadata"),
        ("168.63.129.16", "metadata"),
        ("198.18.0.5", "reserved"),
        ("224.0.0.1", "multicast"),
        ("255.255.255.255", "reserved"),
        ("::", "unspecified"),
        ("::1", "loopback"),
        ("fe80::1", "link-local"),
        ("fc00::1", "private"),
        ("fd00:ec2::254", "metadata"),
        ("fec0::1", "private"),
        ("ff02::1", "multicast"),
        ("4000::1", "reserved"),
        ("2001:db8::1", "reserved"),
        ("::ffff:127.0.0.1", "loopback"),
        ("::ffff:1.1.1.1", "translated (mapped)"),
        ("::127.0.0.1", "loopback"),
        ("::1.1.1.1", "translated (IPv4-compatible)"),
        ("64:ff9b::a9fe:a9fe", "metadata"),
        ("64:ff9b::101:101", "translated (NAT64)"),
        ("64:ff9b:1::101:101", "translated (NAT64)"),
        ("2002:a00:1::", "private"),
        ("2002:101:101::1", "translated (6to4)"),
        ("2001:0:101:101:0:0:80ff:fffe", "loopback"),
        ("2001:0:101:101:0:0:fefe:fefe", "translated (Teredo)"),
        ("", "not an address"),
        ("example.com", "not an address"),
        ("127.1", "not an address"),
        ("fe80::1%eth0", "not an address"),
    ],
)  # fmt: skip
def test_why_a_resolved_address_is_refused(ip: str, reason: str) -> None:
    assert forbidden_address(ip) == reason


def test_the_ports_of_all_rules_are_bounded() -> None:
    assert ports_of([parse_rule("a.example"), parse_rule("!b.example"), parse_rule("c.example:22")]) == (
        22,
        80,
        443,
    )
    many = [parse_rule("a.example:1000-1031"), parse_rule("b.example:2000-2031")]
    assert len(ports_of(many)) == 64
    with pytest.raises(NetRuleError, match="the rules name 65 ports, and a sandbox has at most 64"):
        ports_of([*many, parse_rule("c.example:22")])


@pytest.mark.parametrize(
    ("place", "port", "rule"),
    [
        ("API.example.com.", 443, "api.example.com:443"),
        ("93.184.216.34", 22, "93.184.216.34:22"),
        ("::ffff:93.184.216.34", 22, "93.184.216.34:22"),
        ("2606:2800::1", 443, "[2606:2800::1]:443"),
        ("bad name", 443, ""),
        ("*", 443, ""),
        ("example.com", 53, ""),
        ("example.com", 0, ""),
    ],
)
def test_the_rule_that_would_allow_a_connection(place: str, port: int, rule: str) -> None:
    assert suggest(place, port) == rule
    assert not rule or parse_rule(rule)


labels = st.from_regex(r"[a-z][a-z0-9-]{0,6}[a-z0-9]", fullmatch=True)
names = st.lists(labels, min_size=1, max_size=4).map(".".join)
ports = st.sampled_from(["", ":443", ":80,443", ":22", ":8000-8010", ":443,444", ":1-52"])
addresses = st.ip_addresses().map(str)
texts = st.one_of(
    st.builds("{}{}{}{}".format, st.sampled_from(["", "!"]), st.sampled_from(["", "*."]), names, ports),
    st.builds("tcp://{}:{}".format, names, st.integers(54, 65535)),
    st.builds("{}{}".format, st.sampled_from(["", "!"]), addresses),
    st.text(max_size=40),
    st.text(alphabet="ab*.:/!@[]0-9x,%ü", max_size=20),
)


@settings(max_examples=400, deadline=None)
@given(texts)
def test_any_text_is_a_rule_with_one_spelling_or_a_clear_error(text: str) -> None:
    try:
        rule = parse_rule(text)
    except NetRuleError as error:
        assert error.problem
        return
    assert parse_rule(rule.text) == rule
    assert bool(rule.name) is not bool(rule.network)
    assert rule.ports


def _covers(rule: NetRule, name: str) -> bool:
    return name.endswith(f".{rule.name}") if rule.wildcard else name == rule.name


@settings(max_examples=400, deadline=None)
@given(st.lists(texts, max_size=5), st.one_of(names, st.text(max_size=30)), st.integers(-1, 70000))
def test_no_name_is_allowed_that_no_rule_covers(written: list[str], name: str, port: int) -> None:
    some = []
    for text in written:
        try:
            some.append(parse_rule(text))
        except NetRuleError:
            continue
    decision = RuleSet(some).for_name(name, port)
    if decision.allowed:
        rule = some[decision.rule]
        assert not rule.deny
        assert rule.name
        assert _covers(rule, normal_name(name))
        assert any(low <= port <= high for low, high in rule.ports)
        assert not any(
            one.deny and one.name and _covers(one, normal_name(name))
            and any(low <= port <= high for low, high in one.ports)
            for one in some
        )  # fmt: skip
    else:
        assert decision.rule < 0 or some[decision.rule].deny


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=60), st.integers(-5, 70000))
def test_no_text_breaks_a_decision(text: str, port: int) -> None:
    some = rules("*.example.com", "0.0.0.0/0", "!10.0.0.0/8")
    assert not some.for_name(text, port).allowed or text.lower().removesuffix(".").endswith(".example.com")
    some.for_address(text, port)
    some.denies_address(text, port)
    some.knows(text)
    forbidden_address(text)
    suggest(text, port)


@settings(max_examples=300, deadline=None)
@given(addresses)
def test_the_reasons_agree_with_the_standard_library(ip: str) -> None:
    import ipaddress

    if not ipaddress.ip_address(ip).is_global:
        assert forbidden_address(ip)
