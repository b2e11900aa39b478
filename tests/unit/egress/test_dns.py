"""The name server of a sandbox: what each query is answered with, judged by another DNS library."""

from __future__ import annotations

import dns.edns
import dns.flags
import dns.message
import dns.name
import dns.opcode
import dns.rcode
import dns.rdatatype
import dns.reversename
import pytest

from stockade.egress.decoders.dns import (
    DnsError,
    DnsReply,
    NameAnswer,
    NameBudget,
    NameServer,
    StreamQueries,
    frame,
)

ADDRESSES = {
    "api.example.com": NameAnswer("198.18.0.3", "fd00:5afe::3"),
    "intranet": NameAnswer("198.18.0.4"),
}


class Table:
    def __init__(self) -> None:
        self.asked: list[str] = []

    def lookup(self, name: str) -> NameAnswer | None:
        self.asked.append(name)
        return ADDRESSES.get(name)

    def reverse(self, address: str) -> str | None:
        return {one: name for name, both in ADDRESSES.items() for one in both}.get(address)


def ask(query: dns.message.Message | bytes, *, ipv6: bool = True) -> DnsReply:
    data = query if isinstance(query, bytes) else query.to_wire()
    reply = NameServer(Table(), ipv6=ipv6).answer(data)
    assert reply is not None
    assert len(reply.message) <= 512
    return reply


def answer(name: str, kind: str = "A", *, ipv6: bool = True, **options: object) -> dns.message.Message:
    query = dns.message.make_query(name, kind, **options)  # type: ignore[arg-type]
    response = dns.message.from_wire(ask(query, ipv6=ipv6).message)
    assert query.is_response(response)
    return response


def raw(labels: list[bytes], kind: int = 1) -> bytes:
    name = b"".join(bytes([len(label)]) + label for label in labels) + b"\0"
    return bytes.fromhex("abcd01000001000000000000") + name + kind.to_bytes(2, "big") + b"\0\1"


def texts(response: dns.message.Message) -> list[str]:
    return [record.to_text() for group in response.answer for record in group]


def test_an_allowed_name_has_its_synthetic_addresses() -> None:
    assert texts(answer("api.example.com", "A")) == ["198.18.0.3"]
    assert texts(answer("api.example.com", "AAAA")) == ["fd00:5afe::3"]
    assert texts(answer("intranet.", "A")) == ["198.18.0.4"]


def test_a_family_that_is_missing_is_empty_and_not_an_error() -> None:
    for response in (answer("intranet", "AAAA"), answer("api.example.com", "AAAA", ipv6=False)):
        assert (response.rcode(), response.answer) == (dns.rcode.NOERROR, [])
        assert response.authority[0].rdtype == dns.rdatatype.SOA


@pytest.mark.parametrize("kind", ["HTTPS", "SVCB", "MX", "TXT", "NS", "SOA", "CNAME", "SRV", "CAA", "PTR"])
def test_other_types_of_an_allowed_name_are_empty(kind: str) -> None:
    response = answer("api.example.com", kind)
    assert (response.rcode(), response.answer) == (dns.rcode.NOERROR, [])
    assert response.authority[0].rdtype == dns.rdatatype.SOA


def test_any_has_one_kind_of_record() -> None:
    assert texts(answer("api.example.com", "ANY")) == ["198.18.0.3"]


@pytest.mark.parametrize("kind", ["A", "AAAA", "HTTPS", "TXT", "ANY"])
@pytest.mark.parametrize(
    "name",
    ["evil.test", "example.com", "x.api.example.com", "com", "api.example.com.lan", "_dmarc.evil.test"],
)
def test_a_name_outside_the_rules_does_not_exist(name: str, kind: str) -> None:
    response = answer(name, kind)
    assert (response.rcode(), response.answer) == (dns.rcode.NXDOMAIN, [])
    soa = response.authority[0]
    assert (soa.rdtype, soa.name, soa.ttl, soa[0].minimum) == (dns.rdatatype.SOA, dns.name.root, 1, 1)


def test_case_does_not_matter_and_is_echoed() -> None:
    query = dns.message.make_query("aPi.EXAMPLE.com", "A")
    reply = ask(query)
    assert b"\x03aPi\x07EXAMPLE\x03com\x00" in reply.message
    assert texts(dns.message.from_wire(reply.message)) == ["198.18.0.3"]
    assert (reply.name, reply.verdict, reply.type, reply.code) == ("api.example.com", "allowed", 1, 0)


@pytest.mark.parametrize("name", ["localhost", "LOCALHOST.", "a.b.localhost"])
def test_localhost_is_the_loopback_address(name: str) -> None:
    assert texts(answer(name, "A")) == ["127.0.0.1"]
    assert texts(answer(name, "AAAA")) == ["::1"]
    assert texts(answer(name, "AAAA", ipv6=False)) == []
    assert texts(answer(name, "MX")) == []


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("198.18.0.3", "api.example.com."),
        ("fd00:5afe::3", "api.example.com."),
        ("127.0.0.1", "localhost."),
        ("::1", "localhost."),
    ],
)
def test_addresses_have_names(address: str, name: str) -> None:
    reverse = dns.reversename.from_address(address)
    assert texts(answer(reverse.to_text(), "PTR")) == [name]
    assert texts(answer(reverse.to_text(), "A")) == []


@pytest.mark.parametrize(
    "name",
    [
        "8.8.8.8.in-addr.arpa",
        "03.0.18.198.in-addr.arpa",
        "3.0.18.198.0.in-addr.arpa",
        "256.0.18.198.in-addr.arpa",
        "x.in-addr.arpa",
        "_.0.18.198.in-addr.arpa",
        "3.ip6.arpa",
        "g." * 32 + "ip6.arpa",
        "in-addr.arpa",
        "ip6.arpa",
    ],
)
def test_other_addresses_have_no_names(name: str) -> None:
    assert answer(name, "PTR").rcode() == dns.rcode.NXDOMAIN


@pytest.mark.parametrize(
    "labels",
    [
        [b"evil\0", b"api", b"example", b"com"],
        [b"api.example.com"],
        [b"api.example", b"com"],
        [b"api\0", b"example", b"com"],
        [b"api", b"example", b"com\0"],
        [b"api ", b"example", b"com"],
        [b"\xc3\xa4pi", b"example", b"com"],
        [b"api\\", b"example", b"com"],
        [b"a\xe2\x84\xaai", b"example", b"com"],
        [b"api", b"example", b"com", b"localhost\0"],
        [b"1", b"0", b"0\0", b"127", b"in-addr", b"arpa"],
        [b"1.0", b"0.127", b"in-addr", b"arpa"],
    ],
)
def test_odd_bytes_never_become_another_name(labels: list[bytes]) -> None:
    table = Table()
    reply = NameServer(table).answer(raw(labels))
    assert reply is not None
    assert (reply.code, reply.verdict) == (3, "denied")
    assert table.asked == []
    assert reply.name.isascii() and reply.name.isprintable() and reply.name not in ADDRESSES


def test_the_root_is_empty() -> None:
    response = answer(".", "NS")
    assert (response.rcode(), response.answer) == (dns.rcode.NOERROR, [])
    assert ask(raw([])).name == "."


def test_the_longest_name_is_read_and_a_longer_one_is_refused() -> None:
    assert ask(raw([b"a" * 63, b"b" * 63, b"c" * 63, b"d" * 61])).code == 3
    assert ask(raw([b"a" * 63, b"b" * 63, b"c" * 63, b"d" * 62])).code == 1


def test_edns_is_accepted_and_answered_without_options() -> None:
    response = answer(
        "api.example.com", use_edns=0, want_dnssec=True, payload=4096, options=[dns.edns.NSIDOption(b"")]
    )  # type: ignore[attr-defined]
    assert (response.edns, response.payload, response.options) == (0, 1232, ())
    assert response.ednsflags & dns.flags.DO
    assert texts(response) == ["198.18.0.3"]
    assert answer("api.example.com").edns == -1


def test_another_version_of_edns_is_refused_with_our_version() -> None:
    query = dns.message.make_query("api.example.com", "A", use_edns=1)
    response = dns.message.from_wire(ask(query).message)
    assert (response.rcode(), response.edns, response.answer) == (dns.rcode.BADVERS, 0, [])


def test_the_header_echoes_what_the_client_relies_on() -> None:
    query = dns.message.make_query("api.example.com", "A", id=0x1234)
    query.flags |= dns.flags.CD | dns.flags.AD
    response = dns.message.from_wire(ask(query).message)
    assert response.id == 0x1234
    assert dns.flags.to_text(response.flags) == "QR RD RA CD"
    query.flags = 0
    assert dns.flags.to_text(dns.message.from_wire(ask(query).message).flags) == "QR RA"


@pytest.mark.parametrize(
    "opcode", [dns.opcode.IQUERY, dns.opcode.STATUS, dns.opcode.NOTIFY, dns.opcode.UPDATE, 15]
)
def test_other_operations_are_not_implemented(opcode: int) -> None:
    query = dns.message.make_query("api.example.com", "A")
    query.set_opcode(dns.opcode.Opcode(opcode)) if opcode < 6 else None
    data = bytearray(query.to_wire())
    data[2] = opcode << 3
    reply = ask(bytes(data))
    assert (reply.code, len(reply.message), reply.message[2] >> 3) == (4, 12, 16 | opcode)


@pytest.mark.parametrize("qclass", ["CH", "HS", "ANY", "NONE"])
def test_other_classes_are_refused(qclass: str) -> None:
    reply = ask(dns.message.make_query("version.bind", "TXT", rdclass=qclass))
    assert (reply.code, reply.verdict) == (5, "malformed")


GOOD = raw([b"api", b"example", b"com"])
OPT = bytes.fromhex("0000290400000000000000")


@pytest.mark.parametrize(
    "data",
    [
        GOOD[:4] + b"\0\0" + GOOD[6:],
        GOOD[:4] + b"\0\2" + GOOD[6:] + GOOD[12:],
        GOOD[:6] + b"\0\1" + GOOD[8:],
        GOOD[:8] + b"\0\1" + GOOD[10:],
        GOOD[:10] + b"\0\1" + GOOD[12:],
        GOOD[:10] + b"\0\2" + GOOD[12:] + OPT + OPT,
        GOOD[:10] + b"\0\1" + GOOD[12:] + OPT + b"\0",
        GOOD[:10] + b"\0\1" + GOOD[12:] + OPT[:-1] + b"\1",
        GOOD[:10] + b"\0\1" + GOOD[12:] + b"\1a" + OPT,
        GOOD[:10] + b"\0\1" + GOOD[12:] + b"\xc0\x0c" + OPT[1:],
        GOOD[:10] + b"\0\1" + GOOD[12:] + bytes.fromhex("0000010001000000000000"),
        GOOD + b"\0",
        GOOD + OPT,
        GOOD[:12] + b"\xc0\x0c\0\1\0\1",
        GOOD[:12] + b"\xc0\x00\0\1\0\1",
        GOOD[:12] + b"\x03api\xc0\x0c\0\1\0\1",
        GOOD[:12] + b"\x40" + b"a" * 64 + b"\0\0\1\0\1",
        GOOD[:12] + b"\x80a\0\0\1\0\1",
        *(GOOD[:end] for end in range(12, len(GOOD))),
    ],
)
def test_what_is_not_one_question_is_a_format_error(data: bytes) -> None:
    reply = ask(data)
    assert (reply.code, reply.message, reply.verdict) == (1, b"\xab\xcd\x81\x81" + bytes(8), "malformed")


@pytest.mark.parametrize("data", [*(GOOD[:end] for end in range(12)), GOOD[:2] + b"\x81\x80" + GOOD[4:]])
def test_fragments_of_a_header_and_answers_get_no_answer(data: bytes) -> None:
    assert NameServer(Table()).answer(data) is None


def test_a_stream_is_cut_into_queries_wherever_its_segments_end() -> None:
    queries = [GOOD, raw([b"a"]), GOOD + bytes(4096 - len(GOOD))]
    stream = b"".join(frame(one) for one in queries)
    for size in (1, 2, 3, 7, 50, len(stream)):
        reader = StreamQueries()
        pieces = [stream[at : at + size] for at in range(0, len(stream), size)]
        assert [one for piece in pieces for one in reader.feed(piece)] == queries


@pytest.mark.parametrize("length", [0, 11, 4097, 65535])
def test_a_length_that_no_query_has_ends_a_stream(length: int) -> None:
    with pytest.raises(DnsError, match="length of a query"):
        StreamQueries().feed(length.to_bytes(2, "big"))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_budget_bounds_fresh_names_per_minute_for_each_wildcard() -> None:
    clock = Clock()
    budget = NameBudget(per_minute=3, clock=clock)
    assert [budget.spend(f"{n}.a.test", "a.test") for n in range(5)] == [True] * 3 + [False] * 2
    assert budget.spend("0.a.test", "a.test"), "a name that was dialled before is free"
    assert budget.spend("0.b.test", "b.test")
    clock.now = 59.9
    assert not budget.spend("9.a.test", "a.test")
    clock.now = 60
    assert budget.spend("9.a.test", "a.test")


def test_the_budget_bounds_names_in_all() -> None:
    clock = Clock()
    budget = NameBudget(total=5, clock=clock)
    for n in range(8):
        clock.now += 100
        assert budget.spend(f"{n}.a.test", "a.test") == (n < 5)
    assert budget.spend("4.a.test", "a.test")


def test_the_budget_bounds_long_names_more_tightly() -> None:
    budget = NameBudget(long_names=2, clock=Clock())
    assert budget.spend("x" * 41 + ".a.test", "a.test")
    assert budget.spend(".".join(["x" * 30] * 3) + ".a.test", "a.test")
    assert not budget.spend("y" * 41 + ".a.test", "a.test")
    assert budget.spend("y" * 40 + ".a.test", "a.test")
    assert budget.spend("y." + "z" * 50 + ".test", "z" * 50 + ".test"), "the rule's own labels carry nothing"
