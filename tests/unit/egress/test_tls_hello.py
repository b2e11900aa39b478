"""The reader of TLS hellos: real ones are understood, ambiguous ones are refused."""

from __future__ import annotations

import ssl
import struct

import pytest

from stockade.egress.decoders.tls_hello import HELLO_SIZE, ClientHello, HelloError, HelloReader, NotTlsError


def real_hello(name: str | None = "api.example.com", **settings: object) -> bytes:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    for setting, value in settings.items():
        if setting == "alpn":
            context.set_alpn_protocols(value)  # type: ignore[arg-type]
        else:
            setattr(context, setting, value)
    outgoing = ssl.MemoryBIO()
    client = context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname=name)
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    return outgoing.read()


def vector(size: int, data: bytes) -> bytes:
    return len(data).to_bytes(size, "big") + data


def extension(kind: int, data: bytes) -> bytes:
    return struct.pack(">H", kind) + vector(2, data)


def server_name(*names: bytes, kind: int = 0) -> bytes:
    return extension(0, vector(2, b"".join(bytes([kind]) + vector(2, name) for name in names)))


def body(extensions: bytes | None = b"", *, version: bytes = b"\3\3", session: bytes = b"s" * 32) -> bytes:
    return (
        version
        + b"r" * 32
        + vector(1, session)
        + vector(2, b"\x13\x01\x13\x02")
        + vector(1, b"\0")
        + (b"" if extensions is None else vector(2, extensions))
    )


def message(content: bytes, kind: int = 1) -> bytes:
    return bytes([kind]) + vector(3, content)


def record(fragment: bytes, kind: int = 22, version: bytes = b"\3\1") -> bytes:
    return bytes([kind]) + version + vector(2, fragment)


def hello(*extensions: bytes) -> bytes:
    return record(message(body(b"".join(extensions))))


def read(data: bytes) -> ClientHello | None:
    return HelloReader().feed(data)


def refusal(data: bytes) -> str:
    with pytest.raises(HelloError) as caught:
        read(data)
    return str(caught.value)


def test_the_hello_of_openssl_is_understood() -> None:
    assert read(real_hello()) == ClientHello("api.example.com", False, ())
    assert read(real_hello("API.Example.COM", alpn=["h2", "http/1.1"])) == ClientHello(
        "api.example.com", False, (b"h2", b"http/1.1")
    )


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_every_version_of_tls_is_understood(version: ssl.TLSVersion) -> None:
    assert read(real_hello(minimum_version=version, maximum_version=version)) is not None


def test_a_client_may_name_no_server() -> None:
    assert read(real_hello(None)) == ClientHello("", False, ())
    assert read(record(message(body(None)))) == ClientHello("", False, ())
    assert read(real_hello("127.0.0.1")) == ClientHello("", False, ()), "OpenSSL sends no address as a name"


def test_a_hello_is_the_same_wherever_segments_and_records_end() -> None:
    whole = real_hello()
    content = whole[5:]
    for size in (1, 2, 3, 5, 100, len(content)):
        fragments = b"".join(record(content[at : at + size]) for at in range(0, len(content), size))
        reader, found = HelloReader(), None
        for at, byte in enumerate(fragments):
            assert found is None, f"ready after {at} of {len(fragments)} bytes"
            found = reader.feed(bytes([byte]))
        assert found == ClientHello("api.example.com", False, ())
        assert reader.received == fragments


def test_what_follows_the_hello_in_records_of_its_own_is_left_alone() -> None:
    reader = HelloReader()
    data = real_hello() + record(b"\1", kind=20) + record(b"early data", kind=23)
    assert reader.feed(data) == ClientHello("api.example.com", False, ())
    assert reader.received == data


def test_a_post_quantum_hello_is_understood() -> None:
    keys = extension(51, vector(2, b"\x11\xec" + vector(2, b"k" * 1216) + b"\0\x1d" + vector(2, b"k" * 32)))
    assert read(hello(server_name(b"a.test"), keys)) == ClientHello("a.test", False, ())


def test_encrypted_client_hello_is_seen_and_the_outer_name_counts() -> None:
    outer = extension(0xFE0D, b"\0\0\1\0\1\7" + vector(2, b"k" * 32) + vector(2, b"p" * 200))
    assert read(hello(server_name(b"public.test"), outer)) == ClientHello("public.test", True, ())
    assert read(hello(server_name(b"public.test"), extension(0xFFCE, b"x"))) == ClientHello(
        "public.test", True, ()
    )
    assert refusal(hello(server_name(b"a.test"), extension(0xFE0D, b"\1"))) == "an inner hello outside"
    assert refusal(hello(server_name(b"a.test"), extension(0xFE0D, b""))) == "an inner hello outside"


@pytest.mark.parametrize("name", [b"a.test", b"A.TEST", b"a.test."])
def test_a_name_is_normalised(name: bytes) -> None:
    assert read(hello(server_name(name))) == ClientHello("a.test", False, ())


def test_the_longest_name_has_253_bytes_and_a_final_dot() -> None:
    assert read(hello(server_name(b"a." * 127))) == ClientHello("a." * 126 + "a", False, ())


@pytest.mark.parametrize(
    ("extensions", "reason"),
    [
        ([server_name(b"a.test"), server_name(b"a.test")], "an extension twice"),
        ([server_name(b"a.test"), server_name(b"b.test")], "an extension twice"),
        ([server_name(b"a.test"), extension(99, b""), extension(99, b"")], "an extension twice"),
        ([server_name(b"a.test", b"b.test")], "several server names"),
        ([server_name(b"a.test", b"a.test")], "several server names"),
        ([server_name(b"a.test", kind=1)], "kind of a server name"),
        ([server_name()], "lengths in the hello"),
        ([server_name(b"")], "labels of a server name"),
        ([server_name(b".")], "labels of a server name"),
        ([server_name(b".a.test")], "labels of a server name"),
        ([server_name(b"a..test")], "labels of a server name"),
        ([server_name(b"a.test..")], "labels of a server name"),
        ([server_name(b"a" * 64 + b".test")], "labels of a server name"),
        ([server_name(b"aa." * 90)], "labels of a server name"),
        ([server_name(b"a.test\0.evil.test")], "bytes of a server name"),
        ([server_name(b"a.test\0")], "bytes of a server name"),
        ([server_name(b"a.test ")], "bytes of a server name"),
        ([server_name(b"a.test:443")], "bytes of a server name"),
        ([server_name(b"\xc3\xa4.test")], "bytes of a server name"),
        ([server_name(b"*.test")], "bytes of a server name"),
        ([server_name(b"::1")], "bytes of a server name"),
        ([server_name(b"127.0.0.1")], "an address as server name"),
        ([server_name(b"127.1.")], "an address as server name"),
        ([server_name(b"2130706433")], "an address as server name"),
        ([server_name(b"0x7f.0X1")], "an address as server name"),
        ([extension(0, b"")], "lengths in the hello"),
        ([extension(0, vector(2, b"\0" + vector(2, b"a.test")) + b"\0")], "lengths in the hello"),
        ([extension(0, vector(2, b"\0\0\x40a.test"))], "lengths in the hello"),
        ([extension(16, b"")], "lengths in the hello"),
        ([extension(16, vector(2, b""))], "lengths in the hello"),
        ([extension(16, vector(2, b"\0"))], "lengths in the hello"),
        ([extension(16, vector(2, b"\5h2"))], "lengths in the hello"),
        ([b"\0"], "lengths in the hello"),
        ([b"\0\0\0\x09a"], "lengths in the hello"),
    ],
)
def test_extensions_that_could_be_read_in_two_ways_are_refused(extensions: list[bytes], reason: str) -> None:
    assert refusal(hello(*extensions)) == reason


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (record(b"", kind=22) + hello(), "length of a record"),
        (record(b"\2\x28", kind=21) + hello(), "not a hello first"),
        (record(b"\1", kind=20) + hello(), "not a hello first"),
        (record(b"data", kind=23) + hello(), "not a hello first"),
        (record(message(body(), kind=2)), "not a hello first"),
        (record(message(b"", kind=0)), "not a hello first"),
        (record(message(body())[:9]) + record(b"\2\x28", kind=21), "another record in a hello"),
        (record(message(body())[:9]) + record(b""), "length of a record"),
        (record(message(body()) + b"\1"), "more than a hello in its record"),
        (record(message(body()), version=b"\3\5"), "version of a record"),
        (record(message(body())[:9]) + record(message(body())[9:], version=b"\2\1"), "version of a record"),
        (record(message(body(version=b"\2\0"))), "version of the hello"),
        (record(message(body(session=b"s" * 33))), "lengths in the hello"),
        (record(message(b"")), "lengths in the hello"),
        (record(message(body() + b"\0")), "lengths in the hello"),
        (record(message(b"\3\3" + b"r" * 32 + b"\0\0\0\1\0")), "lengths in the hello"),
        (record(message(b"\3\3" + b"r" * 32 + b"\0\0\3aaa\1\0")), "lengths in the hello"),
        (record(message(b"\3\3" + b"r" * 32 + b"\0\0\2aa\0")), "lengths in the hello"),
        (b"\x16\3\1\x40\1", "length of a record"),
        (record(b"\1\1\0\0"), "hello too long"),
        (record(b"\1\0\xff\xff" + b"a" * 16380) * 5, "hello too long"),
    ],
)
def test_games_with_records_and_lengths_are_refused(data: bytes, reason: str) -> None:
    assert refusal(data) == reason
    reader = HelloReader()
    with pytest.raises(HelloError, match=reason):
        for byte in data:
            reader.feed(bytes([byte]))
    assert len(reader.received) <= HELLO_SIZE
    with pytest.raises(HelloError, match=reason):
        reader.feed(b"")


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n",
        b"SSH-2.0-OpenSSH\r\n",
        b"\0\0\0\x08\x04\xd2\x16\x2f",
        b"\x80\x2e\x01\x03\x01\0\x15\0\0\0\x10",
        b"\x16\x02\x00",
        b"\x15\x00",
        b"\n",
    ],
)
def test_other_protocols_are_told_at_their_first_bytes(data: bytes) -> None:
    for part in (data, data[:2]):
        with pytest.raises(NotTlsError, match="not TLS"):
            read(part)


def test_nothing_is_said_before_the_first_bytes_are_there() -> None:
    for data in (b"", b"\x16", b"\x16\3", b"\x15", hello()[:-1]):
        assert read(data) is None
