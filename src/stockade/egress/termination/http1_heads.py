"""Heads of HTTP/1 messages: decoded strictly, encoded anew.

What a client sends is judged by the same code as plain HTTP (`decoders.http_requests`). What a server sends
is as hostile: a response that ends elsewhere for the program than it does here would let a server answer
requests that were never sent to it.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from stockade.egress.decoders.http_requests import (
    BAD_IN_LINE,
    DECISIVE,
    RequestLines,
    RequestRefusedError,
    bad_byte,
    split_field,
)
from stockade.egress.termination.messages import Fields, RequestHead, ResponseHead

#: The longest head, and section of trailers.
HEAD_SIZE = 65536
MOST_FIELDS = 256
_STATUS_LINE = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9]{2})(?: ([\x20-\x7e\x80-\xff\t]*))?")
_LENGTH = re.compile(rb"[0-9]{1,18}")
#: What is about one connection, beside what Connection names.
_HOP_BY_HOP = frozenset(
    {
        b"connection", b"keep-alive", b"proxy-connection", b"proxy-authenticate", b"proxy-authorization",
        b"te", b"trailer", b"transfer-encoding", b"upgrade", b"content-length", b"host", b"http2-settings",
        b"expect",
    }
)  # fmt: skip
#: Why a request is refused whose Expect is not `100-continue`, over HTTP/1.1 and HTTP/2.
OTHER_EXPECT = "its Expect is not 100-continue"
#: What Connection may not name, because servers and intermediaries need it.
_KEPT = frozenset({b"authorization", b"cookie", b"content-type", b"content-encoding"})


class ResponseRefusedError(ValueError):
    """A response that is not passed on; the message is a short fixed reason."""


class Body(NamedTuple):
    """How a body is framed."""

    #: Bytes; 0 for none, -1 for chunks, -2 for all until the end of the connection.
    length: int

    @property
    def chunked(self) -> bool:
        """Whether it comes in chunks."""
        return self.length == -1


CHUNKS, UNTIL_END, NO_BODY = Body(-1), Body(-2), Body(0)


class Http1Request(NamedTuple):
    """A request and what is about its connection."""

    head: RequestHead
    body: Body
    #: Content-Length was given, also if it is 0.
    has_length: bool
    upgrades: bool
    #: The connection ends with this exchange.
    closes: bool
    #: Of HTTP/1.
    minor: int
    #: The program waits for `100 Continue` before it sends the body. It gets that here: a server that does
    #: not want the body could take it for the next request.
    expects: bool = False


class Http1Response(NamedTuple):
    """A response and what is about its connection."""

    head: ResponseHead
    #: The words after the status.
    words: bytes
    body: Body
    #: The value of Content-Length, also where no body follows; None without.
    length: int | None
    closes: bool
    upgrades: bool


def decode_request(block: bytes, scheme: str, host: str, port: int) -> Http1Request:
    """Decode the head of a request with its last empty line, or raise RequestRefusedError."""
    lines = _lines(block, RequestRefusedError)
    usual = {"https": 443, "http": 80}[scheme] == port
    written = RequestLines(host.encode("ascii"), b":%d" % port, scheme.encode("ascii"))
    written.begin(lines[0])
    if len(lines) > MOST_FIELDS:
        raise RequestRefusedError("too many headers")
    for line in lines[1:]:
        written.add(line)
    written.check()
    if not usual and not _names_port(written, port):
        raise RequestRefusedError("Host without the port")
    if written.target == b"*":
        raise RequestRefusedError("OPTIONS *")
    expected = [value.lower() for name, value in written.fields if name == b"expect"]
    if expected not in ([], [b"100-continue"]):
        raise RequestRefusedError(OTHER_EXPECT)
    dropped = _HOP_BY_HOP | (written.connection - _KEPT)
    body = CHUNKS if written.chunked else Body(written.length)
    fields = tuple((name, value) for name, value in written.fields if name not in dropped)
    return Http1Request(
        RequestHead(
            written.method.decode("ascii"), scheme, host, port, written.target.decode("ascii"), fields
        ),
        body,
        any(name == b"content-length" for name, _ in written.fields),
        written.upgrades,
        b"close" in written.connection or (written.minor == 0 and b"keep-alive" not in written.connection),
        written.minor,
        bool(expected) and body != NO_BODY and written.minor > 0,
    )


def _names_port(written: RequestLines, port: int) -> bool:
    hosts = [value for name, value in written.fields if name == b"host"]
    return bool(hosts) and hosts[0].endswith(b":%d" % port)


def encode_request(request: Http1Request, head: RequestHead, authority: str) -> bytes:
    """Encode a head for the server."""
    lines = [f"{head.method} {head.target} HTTP/1.1\r\nhost: {authority}\r\n".encode("ascii")]
    lines += [b"%b: %b\r\n" % one for one in head.fields]
    if request.body.chunked:
        lines.append(b"transfer-encoding: chunked\r\n")
    elif request.has_length:
        lines.append(b"content-length: %d\r\n" % request.body.length)
    if request.upgrades:
        lines.append(b"connection: Upgrade\r\nupgrade: websocket\r\n")
    elif request.closes:
        lines.append(b"connection: close\r\n")
    return b"".join((*lines, b"\r\n"))


def decode_response(block: bytes, method: str) -> Http1Response:
    """Decode the head of a response with its last empty line, or raise ResponseRefusedError."""
    lines = _lines(block, ResponseRefusedError)
    match = _STATUS_LINE.fullmatch(lines[0])
    if match is None:
        raise ResponseRefusedError("status line")
    if len(lines) > MOST_FIELDS:
        raise ResponseRefusedError("too many headers")
    status = int(match[2])
    try:
        fields = [split_field(line) for line in lines[1:]]
    except RequestRefusedError as error:
        raise ResponseRefusedError(str(error)) from None
    lengths = {value for name, value in fields if name == b"content-length"}
    codings = [value.lower() for name, value in fields if name == b"transfer-encoding"]
    if len(lengths) > 1 or (lengths and codings):
        raise ResponseRefusedError("two lengths")
    length = None
    if lengths:
        (text,) = lengths
        if not _LENGTH.fullmatch(text):
            raise ResponseRefusedError("Content-Length")
        length = int(text)
    if codings and (codings != [b"chunked"] or match[1] == b"0"):
        raise ResponseRefusedError("Transfer-Encoding")
    named = _connection(fields)
    upgrades = status == 101
    if upgrades and [value.lower() for name, value in fields if name == b"upgrade"] != [b"websocket"]:
        raise ResponseRefusedError("upgrade")
    body = CHUNKS if codings else UNTIL_END if length is None else Body(length)
    if method == "HEAD" or status < 200 or status in (204, 304):
        body = NO_BODY
    closes = b"close" in named or body is UNTIL_END or (match[1] == b"0" and b"keep-alive" not in named)
    dropped = _HOP_BY_HOP | named
    kept = tuple((name, value) for name, value in fields if name not in dropped)
    return Http1Response(ResponseHead(status, kept), match[3] or b"", body, length, closes, upgrades)


def encode_response(response: Http1Response, head: ResponseHead, *, chunks: bool, closes: bool) -> bytes:
    """Encode a head for the program."""
    lines = [b"HTTP/1.1 %d %b\r\n" % (head.status, response.words)]
    lines += [b"%b: %b\r\n" % one for one in head.fields]
    if response.upgrades:
        lines.append(b"connection: Upgrade\r\nupgrade: websocket\r\n")
    elif head.status >= 200:
        if chunks:
            lines.append(b"transfer-encoding: chunked\r\n")
        elif response.length is not None and head.status != 204:
            lines.append(b"content-length: %d\r\n" % response.length)
        if closes:
            lines.append(b"connection: close\r\n")
    return b"".join((*lines, b"\r\n"))


def decode_trailers(block: bytes) -> Fields:
    """Decode a section of trailers with its last empty line, or raise RequestRefusedError."""
    if block == b"\r\n":
        return ()
    lines = _lines(block, RequestRefusedError)
    if len(lines) > MOST_FIELDS:
        raise RequestRefusedError("too many trailers")
    found = tuple(split_field(line) for line in lines)
    if any(name in DECISIVE or name in _HOP_BY_HOP for name, _ in found):
        raise RequestRefusedError("trailer that must be a header")
    return found


def encode_chunk(data: bytes) -> bytes:
    """Encode a chunk; nothing for no data, because an empty chunk is the last one."""
    return b"%x\r\n%b\r\n" % (len(data), data) if data else b""


def encode_trailers(fields: Fields) -> bytes:
    """Encode the last chunk and the trailers."""
    return b"".join((b"0\r\n", *(b"%b: %b\r\n" % one for one in fields), b"\r\n"))


def refusal(status: int, text: str) -> bytes:
    """Return the response to a request that goes nowhere."""
    body = _plain(text)
    head = (
        f"HTTP/1.1 {status} {_WORDS.get(status, 'Refused')}\r\ncontent-type: text/plain; charset=us-ascii\r\n"
        f"content-length: {len(body)}\r\ncache-control: no-store\r\nconnection: close\r\n\r\n"
    )
    return (head + body).encode("ascii")


_HOST_REASONS = frozenset(
    {"Host differs", "target differs", "no Host", "several Hosts", "Host without the port"}
)


class RequestRefusal(NamedTuple):
    """What a program gets, and what a record says, about a request that could not be decoded."""

    status: int
    #: One of `records.REASONS`.
    reason: str
    text: str

    @property
    def response(self) -> bytes:
        """The response to it."""
        return refusal(self.status, refusal_text("a request", self.text))


def refusal_of(error: RequestRefusedError) -> RequestRefusal:
    """Return what becomes of a request that could not be decoded."""
    status, reason = (421, "Host differs") if str(error) in _HOST_REASONS else (400, "not HTTP")
    return RequestRefusal(status, reason, f"{error} (it names {error.host})" if error.host else str(error))


_WORDS = {400: "Bad Request", 403: "Forbidden", 421: "Misdirected Request", 502: "Bad Gateway"}


def refusal_text(what: str, why: str) -> str:
    """Return what a program gets to read about a request that was refused."""
    return _plain(f"Stockade refused {what}: {why}\n")


def _plain(text: str) -> str:
    return "".join(one if one.isascii() and (one.isprintable() or one == "\n") else "?" for one in text)


def _lines(block: bytes, refused: type[ValueError]) -> list[bytes]:
    if found := BAD_IN_LINE.search(block):
        raise refused(bad_byte(found[0]))
    return block[:-4].split(b"\r\n")


def _connection(fields: list[tuple[bytes, bytes]]) -> set[bytes]:
    return {
        one.strip(b" \t").lower()
        for name, value in fields
        if name == b"connection"
        for one in value.split(b",")
    }
