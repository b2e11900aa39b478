"""Answers to the DNS queries of a sandbox: one decoder for queries, one encoder for answers, nothing else.

The egress process calls `NameServer.answer` with each message that the
program inside sends to port 53, over UDP or TCP. The bytes are hostile: for
any of them the answer is a message or None, in time and memory that the size
of the message bounds. No packet leaves for a query. Outside, a name is
resolved when the program connects to the address that it got here.

A query has one question. Names in it are matched without regard to case, and
the question is echoed byte for byte, because some resolvers vary the case to
recognise their answers. Compression is refused: nothing precedes the question
that a pointer could lead to. A label with a byte that no host name has (NUL, a
dot, a space, 8 bits) is never turned into text that a rule could match.

Names outside the rules do not exist (NXDOMAIN). Types other than addresses are
empty for names inside the rules (NODATA), HTTPS and SVCB records too: these
could name another host, another port or a key for Encrypted Client Hello, and
every client falls back to the address and to the port that it wanted anyway.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

TYPE_A, TYPE_SOA, TYPE_PTR, TYPE_AAAA, TYPE_OPT, TYPE_ANY = 1, 6, 12, 28, 41, 255
CLASS_IN = 1
NOERROR, FORMERR, SERVFAIL, NXDOMAIN, NOTIMP, REFUSED = range(6)
#: An extended code: its upper bits are in the OPT record.
BADVERS = 16

#: Synthetic addresses stay the same for the life of a sandbox.
ADDRESS_TTL = 300
#: Short, because rules may be added while the sandbox lives.
NEGATIVE_TTL = 1
#: The longest query that is read from a TCP stream.
STREAM_QUERY_SIZE = 4096
#: What we offer to receive over UDP: the size that fits every path. Our answers stay below 512 bytes.
_UDP_SIZE = 1232

_HEADER = struct.Struct(">HHHHHH")
_QUESTION = struct.Struct(">HH")
_RECORD = struct.Struct(">HHIH")
_LENGTH = struct.Struct(">H")
_QR, _OPCODE, _RD, _RA, _CD = 0x8000, 0x7800, 0x0100, 0x0080, 0x0010
_DO = 0x8000
_HOST_BYTES = frozenset(b"abcdefghijklmnopqrstuvwxyz0123456789-_")
#: A pointer to the question, which begins right behind the header.
_TO_QUESTION = b"\xc0\x0c"
#: The start of authority of everything that is answered here; the root, so that it covers every name.
_SOA_DATA = b"\0\0" + struct.pack(">IIIII", 1, 3600, 600, 86400, NEGATIVE_TTL)
_SOA = b"\0" + _RECORD.pack(TYPE_SOA, CLASS_IN, NEGATIVE_TTL, len(_SOA_DATA)) + _SOA_DATA


class DnsError(ValueError):
    """A stream that holds no DNS queries; the message is a short fixed reason."""


class NameAnswer(NamedTuple):
    """The addresses of a name that the rules allow; "" for a family that it has none of."""

    ipv4: str = ""
    ipv6: str = ""


class Names(Protocol):
    """What the name server asks, with names in lower-case ASCII without a final dot."""

    def lookup(self, name: str) -> NameAnswer | None:
        """Return the synthetic addresses of a name, or None if no rule allows it."""

    def reverse(self, address: str) -> str | None:
        """Return the name that a synthetic address, written as by inet_ntop, stands for."""


class DnsReply(NamedTuple):
    """An answer to send, and what was asked, for the record."""

    message: bytes
    #: As it was asked, in lower case, printable; "" if the query could not be read, "." for the root.
    name: str
    type: int
    code: int
    #: "allowed" and "denied" by the rules; "local" for localhost, the root and addresses; "malformed".
    verdict: str


class _Query(NamedTuple):
    id: int
    flags: int
    labels: tuple[bytes, ...]
    type: int
    qclass: int
    #: The question as it came.
    question: bytes
    #: The DO bit of the OPT record, its version; None without such a record.
    edns: tuple[int, int] | None


class NameServer:
    """Answers queries from what `names` knows; `ipv6` says whether the sandbox has IPv6."""

    def __init__(self, names: Names, *, ipv6: bool = True) -> None:
        self._names = names
        self._ipv6 = ipv6

    def answer(self, message: bytes) -> DnsReply | None:
        """Return the answer to one message without framing; None for what gets none, such as an answer."""
        if len(message) < _HEADER.size:
            return None
        id, flags = struct.unpack_from(">HH", message)
        if flags & _QR:
            return None
        if flags & _OPCODE:
            return _bare(id, flags, NOTIMP)
        query = _decode(message)
        if query is None:
            return _bare(id, flags, FORMERR)
        if query.edns is not None and query.edns[1] != 0:
            return _reply(query, BADVERS, "malformed")
        if query.qclass != CLASS_IN:
            return _reply(query, REFUSED, "malformed")
        return self._answer_name(query)

    def _answer_name(self, query: _Query) -> DnsReply:
        if not query.labels:
            return _reply(query, NOERROR, "local")
        name = _host_name(query.labels)
        if name is None:
            return _reply(query, NXDOMAIN, "denied")
        if name == "localhost" or name.endswith(".localhost"):
            return self._answer_addresses(query, NameAnswer("127.0.0.1", "::1"), "local")
        if name.endswith((".in-addr.arpa", ".ip6.arpa")):
            return self._answer_address(query, name)
        found = self._names.lookup(name)
        if found is None:
            return _reply(query, NXDOMAIN, "denied")
        return self._answer_addresses(query, found, "allowed")

    def _answer_addresses(self, query: _Query, found: NameAnswer, verdict: str) -> DnsReply:
        ipv6 = found.ipv6 if self._ipv6 else ""
        if query.type in (TYPE_A, TYPE_ANY) and found.ipv4:
            # ANY gets one kind of record only, as RFC 8482 has it.
            record = _answer_record(TYPE_A, socket.inet_pton(socket.AF_INET, found.ipv4))
        elif query.type in (TYPE_AAAA, TYPE_ANY) and ipv6:
            record = _answer_record(TYPE_AAAA, socket.inet_pton(socket.AF_INET6, ipv6))
        else:
            record = b""
        return _reply(query, NOERROR, verdict, record)

    def _answer_address(self, query: _Query, name: str) -> DnsReply:
        """Answer a question about an address: its name if it is a synthetic one or loopback."""
        address = _reverse_address(name)
        found = "localhost" if address in ("127.0.0.1", "::1") else address and self._names.reverse(address)
        if not found:
            return _reply(query, NXDOMAIN, "local")
        record = _answer_record(TYPE_PTR, _encode_name(found)) if query.type in (TYPE_PTR, TYPE_ANY) else b""
        return _reply(query, NOERROR, "local", record)


class StreamQueries:
    """Cuts the queries out of a TCP stream, where a length precedes each."""

    def __init__(self) -> None:
        self._buffer = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Return the queries that are complete now; raises DnsError if a length is none of a query."""
        buffer, start, found = self._buffer + data, 0, list[bytes]()
        while len(buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer, start)
            if not _HEADER.size <= length <= STREAM_QUERY_SIZE:
                self._buffer = b""
                raise DnsError("length of a query")
            end = start + _LENGTH.size + length
            if len(buffer) < end:
                break
            found.append(buffer[start + _LENGTH.size : end])
            start = end
        self._buffer = buffer[start:]
        return found


def frame(message: bytes) -> bytes:
    """Return an answer as it is sent over TCP, with its length in front."""
    return _LENGTH.pack(len(message)) + message


class NameBudget:
    """Bounds how many names below allowed wildcards one sandbox may dial.

    Nothing leaves the machine for a DNS query, but the dial of a name below `*.example.com` makes the host
    resolve it, and the servers of that zone see the name: each fresh one carries bytes out. So the egress
    process spends from this budget before it resolves such a name. Names that were dialled before are free.

    A name is long if one of its labels below the wildcard has more than `label` bytes, or all of them
    together have more than twice that.
    """

    def __init__(
        self,
        *,
        per_minute: int = 300,
        total: int = 10_000,
        label: int = 40,
        long_names: int = 10,
        clock: Callable[[], float] = time.monotonic,
        spent: tuple[int, int] = (0, 0),
    ) -> None:
        self._per_minute, self._label = per_minute, label
        self._total, self._long_names = total - spent[0], long_names - spent[1]
        self._spent = spent
        self._clock = clock
        self._seen: set[str] = set()
        self._long = 0
        #: By the wildcard's name: when its present minute began, and the names since then.
        self._minutes: dict[str, tuple[float, int]] = {}

    def spend(self, name: str, wildcard: str) -> bool:
        """Return whether `name` may be dialled; `wildcard` is the rule's name without `*.`."""
        if name in self._seen:
            return True
        now = self._clock()
        began, count = self._minutes.get(wildcard, (now, 0))
        if now - began >= 60:
            began, count = now, 0
        long = self._is_long(name.removesuffix("." + wildcard))
        if (
            len(self._seen) >= self._total
            or count >= self._per_minute
            or (long and self._long >= self._long_names)
        ):
            return False
        self._seen.add(name)
        self._long += long
        self._minutes[wildcard] = (began, count + 1)
        return True

    @property
    def spent(self) -> tuple[int, int]:
        """How many names were dialled, and how many of them were long, for the process that takes over."""
        return self._spent[0] + len(self._seen), self._spent[1] + self._long

    def _is_long(self, below: str) -> bool:
        return len(below) > 2 * self._label or any(len(one) > self._label for one in below.split("."))


def _decode(message: bytes) -> _Query | None:
    """Read a query with one question and at most an OPT record; None if it is anything else."""
    id, flags, questions, answers, authorities, additional = _HEADER.unpack_from(message)
    if questions != 1 or answers or authorities or additional > 1:
        return None
    read = _labels(message, _HEADER.size)
    if read is None:
        return None
    labels, at = read
    end = at + _QUESTION.size
    if len(message) < end:
        return None
    qtype, qclass = _QUESTION.unpack_from(message, at)
    edns, rest = None, message[end:]
    if additional:
        # The root as its name, then type, size, the flags where other records have a TTL, and options.
        if len(rest) < 1 + _RECORD.size or rest[0] != 0:
            return None
        kind, _, extended, length = _RECORD.unpack_from(rest, 1)
        if kind != TYPE_OPT or len(rest) != 1 + _RECORD.size + length:
            return None
        edns = (extended & _DO, extended >> 16 & 0xFF)
    elif rest:
        return None
    return _Query(id, flags, labels, qtype, qclass, message[_HEADER.size : end], edns)


def _labels(message: bytes, at: int) -> tuple[tuple[bytes, ...], int] | None:
    """Read a name without compression; return its labels and where it ends."""
    labels, begin = list[bytes](), at
    while at < len(message):
        length = message[at]
        at += 1
        if length == 0:
            return tuple(labels), at
        # 63 is the longest label; above that are pointers and forms that nobody uses. 255 bounds the whole
        # name with its final zero.
        if length > 63 or at + length >= len(message) or at + length - begin > 254:
            return None
        labels.append(message[at : at + length])
        at += length
    return None


def _host_name(labels: tuple[bytes, ...]) -> str | None:
    """Return the name in lower case, or None if a byte is not one of a host name."""
    lower = [label.lower() for label in labels]
    if not all(_HOST_BYTES.issuperset(label) for label in lower):
        return None
    return b".".join(lower).decode("ascii")


def _printable(labels: tuple[bytes, ...]) -> str:
    """Return a name for the record: odd bytes as in zone files, so that no two names look the same."""
    return ".".join(
        "".join(chr(byte) if byte in _HOST_BYTES else f"\\{byte:03d}" for byte in label.lower())
        for label in labels
    ) or "."  # fmt: skip


def _reverse_address(name: str) -> str:
    """Return the address that a name below in-addr.arpa or ip6.arpa asks about; "" if it asks about none."""
    if name.endswith(".in-addr.arpa"):
        parts = name.removesuffix(".in-addr.arpa").split(".")
        if len(parts) == 4 and all(_is_octet(part) for part in parts):
            return ".".join(reversed(parts))
        return ""
    parts = name.removesuffix(".ip6.arpa").split(".")
    if len(parts) != 32 or not all(len(part) == 1 and part in "0123456789abcdef" for part in parts):
        return ""
    return socket.inet_ntop(socket.AF_INET6, bytes.fromhex("".join(reversed(parts))))


def _is_octet(text: str) -> bool:
    return len(text) <= 3 and text.isdecimal() and str(int(text)) == text and int(text) < 256


def _encode_name(name: str) -> bytes:
    labels = name.encode("ascii").split(b".")
    return b"".join(bytes([len(label)]) + label for label in labels) + b"\0"


def _answer_record(kind: int, data: bytes) -> bytes:
    return _TO_QUESTION + _RECORD.pack(kind, CLASS_IN, ADDRESS_TTL, len(data)) + data


def _reply(query: _Query, code: int, verdict: str, record: bytes = b"") -> DnsReply:
    """Answer with the record; without one, with the SOA that lets the client remember it for a moment."""
    soa = b"" if record or code not in (NOERROR, NXDOMAIN) else _SOA
    opt = b""
    if query.edns is not None:
        opt = b"\0" + _RECORD.pack(TYPE_OPT, _UDP_SIZE, code >> 4 << 24 | query.edns[0], 0)
    header = _HEADER.pack(
        query.id, _response_flags(query.flags, code), 1, int(bool(record)), int(bool(soa)), int(bool(opt))
    )
    message = header + query.question + record + soa + opt
    return DnsReply(message, _printable(query.labels), query.type, code, verdict)


def _bare(id: int, flags: int, code: int) -> DnsReply:
    """Answer a message whose question was not read."""
    return DnsReply(_HEADER.pack(id, _response_flags(flags, code), 0, 0, 0, 0), "", 0, code, "malformed")


def _response_flags(flags: int, code: int) -> int:
    return _QR | flags & (_OPCODE | _RD | _CD) | _RA | code & 0xF
