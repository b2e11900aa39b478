"""The decoders of the egress under random and mutated bytes.

For any bytes a decoder returns or raises its own error, in bounded time and memory, and its verdict does not
depend on where the input is cut. What is sent instead of a head of HTTP is read by another parser.
STOCKADE_FUZZ_SECONDS is how long the decoders are fuzzed, a third for each; a failure prints seed and input.
"""

from __future__ import annotations

import contextlib
import os
import random
import ssl
import time
import tracemalloc
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

import dns.message
import h11
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stockade.egress.client_checks import RefusalError, names_host
from stockade.egress.decoders.dns import DnsError, DnsReply, NameAnswer, NameServer, StreamQueries, frame
from stockade.egress.decoders.tls_hello import HELLO_SIZE, ClientHello, HelloError, HelloReader
from stockade.egress.termination.http1_heads import decode_request, encode_request
from support.mutation import pieces, run_fuzzer

#: In all, shared by the three decoders.
SECONDS = float(os.environ.get("STOCKADE_FUZZ_SECONDS", "5")) / 3

INTERESTING = (
    b"\0", b"\r", b"\n", b"\r\n", b"\r\n\r\n", b" ", b"\t", b":", b";", b",", b"\xff", b"\x80", b"\xc0\x0c",
    b"\x7f", b"\0\0", b"\xff\xff", b"\x16\x03\x01", b"\x15\x03\x01", b"a.test", b"evil.test",
    b"Host: evil.test\r\n", b"GET / HTTP/1.1\r\nHost: evil.test\r\n\r\n", b"Content-Length: 5\r\n",
    b"Content-Length: 38\r\n",
    b"Transfer-Encoding: chunked\r\n", b"0\r\n\r\n", b"5\r\nhello\r\n", b"Upgrade: websocket\r\n",
    b"HTTP/1.0", b"http://a.test", b"http://evil.test", b"\x00\x29", b"\xfe\x0d",
)  # fmt: skip


def fuzz(corpus: list[bytes], examine: Callable[[bytes, random.Random], bool]) -> None:
    run_fuzzer(corpus, examine, INTERESTING, SECONDS)


class Table:
    def lookup(self, name: str) -> NameAnswer | None:
        assert name == name.lower() and name.isascii() and not set(name) - NAME_CHARACTERS
        return NameAnswer("198.18.0.3", "fd00:5afe::3") if name.endswith("a.test") else None

    def reverse(self, address: str) -> str | None:
        return "a.test" if address in ("198.18.0.3", "fd00:5afe::3") else None


NAME_CHARACTERS = set("abcdefghijklmnopqrstuvwxyz0123456789-_.")


def queries() -> list[bytes]:
    names = [
        "a.test",
        "x.a.test",
        "evil.test",
        ".",
        "localhost",
        "3.0.18.198.in-addr.arpa",
        "a" * 63 + ".a.test",
    ]
    kinds = ["A", "AAAA", "HTTPS", "ANY", "PTR", "TXT"]
    made = [dns.message.make_query(name, kind) for name in names for kind in kinds]
    made += [dns.message.make_query(name, "A", use_edns=0, want_dnssec=True) for name in names]
    return [one.to_wire() for one in made]


def examine_query(data: bytes) -> DnsReply | None:
    reply = NameServer(Table()).answer(data)
    if reply is None:
        return None
    assert len(reply.message) <= 512
    assert reply.message[:2] == data[:2] and reply.message[2] & 0x80
    assert reply.name.isascii() and reply.name.isprintable()
    response = dns.message.from_wire(reply.message)
    if reply.verdict == "allowed":
        # Another decoder reads the same name in the question; options of EDNS are ignored, not read.
        query = dns.message.from_wire(data, question_only=True)
        assert query.question[0].name.to_text().lower() == reply.name + "."
        assert query.is_response(response)
        assert reply.name.endswith("a.test")
    else:
        assert not response.answer or reply.verdict == "local"
    return reply


def test_mutated_queries_are_answered_or_dropped() -> None:
    def examine(data: bytes, chance: random.Random) -> bool:
        reply = examine_query(data)
        check_stream(data, chance)
        return reply is not None and reply.verdict == "allowed"

    fuzz(queries(), examine)


def check_stream(data: bytes, chance: random.Random) -> None:
    """Cut the data, and the data as a framed query, into queries; the pieces do not matter."""
    for stream in (data, frame(data[:4096]) + frame(data[:4096])):
        results = []
        for parts in ([stream], pieces(stream, chance)):
            reader, found, refused = StreamQueries(), list[bytes](), False
            with contextlib.suppress(DnsError):
                for part in parts:
                    refused = True
                    found += reader.feed(part)
                    refused = False
            results.append((found if not refused else [], refused))
        assert results[0][1] == results[1][1]
        assert results[0][0] == results[1][0]


@given(st.binary(max_size=600))
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_a_query_or_are_not(data: bytes) -> None:
    examine_query(data)
    examine_query(b"\0\1\1\0\0\1\0\0\0\0\0\0" + data)


def hellos() -> list[bytes]:
    found = []
    for name in ("a.test", "a-long-name.evil.test", None):
        for protocols in ([], ["h2", "http/1.1"]):
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname = False
            if protocols:
                context.set_alpn_protocols(protocols)
            outgoing = ssl.MemoryBIO()
            client = context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname=name)
            with contextlib.suppress(ssl.SSLWantReadError):
                client.do_handshake()
            hello = outgoing.read()
            body = hello[5:]
            found += [hello, hello + b"\x14\3\3\0\1\1"]
            found.append(
                b"".join(
                    b"\x16\3\1" + len(part).to_bytes(2, "big") + part
                    for part in (body[at : at + 90] for at in range(0, len(body), 90))
                )
            )
    return found


def read_hello(parts: list[bytes]) -> ClientHello | str | None:
    reader, found = HelloReader(), None
    for part in parts:
        try:
            found = reader.feed(part)
        except HelloError as error:
            return str(error)
        if found is not None:
            assert found.name == "" or not set(found.name) - NAME_CHARACTERS
            return found
        assert len(reader.received) <= HELLO_SIZE
    return found


def openssl_name(data: bytes) -> str | None:
    """Return the name that OpenSSL's server reads in a hello; None if it reads no hello."""
    seen: list[str] = []
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2

    def remember(_: ssl.SSLObject, name: str | None, __: ssl.SSLContext) -> int:
        seen.append(name or "")
        return int(ssl.AlertDescription.ALERT_DESCRIPTION_UNRECOGNIZED_NAME)

    context.sni_callback = remember
    incoming = ssl.MemoryBIO()
    incoming.write(data)
    with contextlib.suppress(ssl.SSLError, ValueError):
        context.wrap_bio(incoming, ssl.MemoryBIO(), server_side=True).do_handshake()
    return seen[0] if seen else None


def examine_hello(data: bytes, chance: random.Random) -> bool:
    whole = read_hello([data])
    assert read_hello(pieces(data, chance)) == whole
    if not isinstance(whole, ClientHello):
        return False
    theirs = openssl_name(data)
    assert theirs is None or theirs.lower().removesuffix(".") == whole.name
    return True


def test_mutated_hellos_are_read_as_openssl_reads_them_or_refused() -> None:
    corpus = hellos()
    assert openssl_name(corpus[0]) == "a.test"
    fuzz(corpus, examine_hello)


@given(st.binary(max_size=600), st.randoms(use_true_random=False))
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_a_hello_or_are_not(data: bytes, chance: random.Random) -> None:
    for prefix in (b"", b"\x16\3\1", b"\x16\3\1\0\x40\1\0\0\x3c\3\3" + bytes(32)):
        examine_hello(prefix + data, chance)


GET = b"GET /path HTTP/1.1\r\nHost: a.test\r\nAccept: */*\r\n\r\n"
REQUESTS = [
    GET,
    GET + GET,
    GET + GET.replace(b"a.test", b"evil.test"),
    b"POST / HTTP/1.1\r\nHost: a.test:80\r\nContent-Length: 5\r\n\r\nhello" + GET,
    b"POST / HTTP/1.1\r\nHost: a.test\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nX: y\r\n\r\n"
    + GET,
    b"PUT / HTTP/1.1\r\nHost: a.test\r\nContent-Length: 35\r\n\r\nGET / HTTP/1.1\r\nHost: evil.test\r\n\r\n"
    + GET,
    b"GET http://a.test/ HTTP/1.1\r\nHost: a.test\r\nConnection: keep-alive\r\n\r\n" + GET,
    b"GET / HTTP/1.0\r\nHost: a.test\r\n\r\n",
    # Refused as they are; each would bring evil.test past a screen that lacks one check.
    b"GET / HTTP/1.1\r\nHost: a.test\r\nHost: evil.test\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: a.test\r\nContent-Length: 40\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    b"GET / HTTP/1.1\r\nHost: evil.test\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: a.test\r\nTransfer-Encoding: chunked\r\n\r\n23;\n\r\n"
    b"GET / HTTP/1.1\r\nHost: evil.test\r\n\r\n\r\n0\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a.test\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
]


def first_head(parts: list[bytes]) -> tuple[bool, str]:
    """Whether a client has sent the head of its first request, and the reason why it is refused."""
    received, done = bytearray(), False
    for part in parts:
        received += part
        try:
            done = done or names_host(received, len(part), "a.test", 80)
        except RefusalError as error:
            return False, error.reason
    return done, ""


def hosts_seen_by_h11(data: bytes) -> Iterator[str]:
    """The hosts that another parser, a less strict one, finds in what is sent instead of a head."""
    request = decode_request(data.partition(b"\r\n\r\n")[0] + b"\r\n\r\n", "http", "a.test", 80)
    server = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
    server.receive_data(encode_request(request, request.head, "a.test"))
    event = server.next_event()
    assert isinstance(event, h11.Request)
    yield from hosts_of(event)


def hosts_of(request: h11.Request) -> list[str]:
    hosts = [value.decode("latin-1").lower() for name, value in request.headers if name == b"host"]
    assert len(hosts) == 1 or (request.http_version == b"1.0" and not hosts)
    if request.target[:1] in (b"/", b"*"):
        return hosts
    return [*hosts, urlsplit(request.target.decode("ascii")).netloc.lower()]


def examine_requests(data: bytes, chance: random.Random) -> bool:
    done, reason = first_head([data])
    assert first_head(pieces(data, chance)) == (done, reason)
    if done:
        assert set(hosts_seen_by_h11(data)) == {"a.test"}
    return done


def test_mutated_requests_that_pass_are_for_the_name() -> None:
    fuzz(REQUESTS, examine_requests)


REQUEST_PARTS = st.sampled_from(
    [
        *INTERESTING,
        b"GET / HTTP/1.1\r\n", b"POST http://a.test/ HTTP/1.1\r\n", b"Host: a.test\r\n", b"\r\n", b"hello",
        b"3\r\nabc\r\n", b"Connection: close\r\n", b"Connection: host\r\n", b"X: y\r\n", b" folded\r\n",
        b"a", b"26\r\n",
    ]
)  # fmt: skip


@given(st.lists(REQUEST_PARTS | st.binary(max_size=3), max_size=16), st.randoms(use_true_random=False))
@settings(max_examples=500, deadline=None)
def test_any_assembly_of_requests_passes_only_for_the_name(parts: list[bytes], chance: random.Random) -> None:
    examine_requests(b"".join(parts), chance)
    examine_requests(b"GET / HTTP/1.1\r\nHost: a.test\r\n" + b"".join(parts), chance)


@pytest.mark.parametrize(
    "feed",
    [
        lambda data: HelloReader().feed(b"\x16\x03\x01\x00\x01\x01" + data),
        lambda data: first_head([data]),
        lambda data: first_head([b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 5000, data]),
        lambda data: StreamQueries().feed(data),
        lambda data: NameServer(Table()).answer(data),
    ],
)
def test_memory_is_bounded_by_what_was_fed(feed: Callable[[bytes], object]) -> None:
    data = b"\x16\x03\x01\x00\x01\x01" * 40_000
    tracemalloc.start()
    try:
        with contextlib.suppress(HelloError, DnsError):
            feed(data)
        assert tracemalloc.get_traced_memory()[1] < 8 * len(data) + (1 << 20)
    finally:
        tracemalloc.stop()


def test_a_byte_at_a_time_is_not_slower_than_linear() -> None:
    def cost(size: int) -> float:
        head, reader = bytearray(b"GET / HTTP/1.1\r\nX: "), HelloReader()
        began = time.thread_time()
        reader.feed(b"\x16\3\1\x40\0\1\0\xff\0")
        for _ in range(size):
            head.append(0x61)
            names_host(head, 1, "a.test", 80)
            reader.feed(b"a")
        return time.thread_time() - began

    small, large = min(cost(2_000) for _ in range(3)), min(cost(16_000) for _ in range(3))
    assert large < 8 * small * 3
