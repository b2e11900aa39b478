"""The requests of a plain HTTP connection: each must name the host that the connection was opened to.

The egress process passes what a client sends on port 80 through a
`RequestScreen` and sends on what the screen returns. Responses are not looked
at. The bytes are hostile: whoever finds the end of a request elsewhere than
the server does lets a request for another host through as the body of an
allowed one. So framing must be what every server reads in the same way: lines
end with CRLF, one Content-Length or exactly `chunked`, no folded headers, no
chunk extensions. Whatever is unusual is refused; nothing is rewritten.

A head is held until it is complete and judged. Then the body passes by
counting. Requests may follow each other without waiting for the responses.

A WebSocket begins as a request with `Upgrade: websocket`. Only the server's
answer says whether the connection is still HTTP, so the screen holds back what
the client sends next, and the egress process shows it the response from its
first byte on: after 101 everything passes, after anything else requests are
judged as before. Such a request must be the first of its connection; behind
others, their responses could be taken for its own. Upgrades to anything else
are refused, HTTP/2 without TLS among them.
"""

from __future__ import annotations

import re
from collections.abc import Callable

#: The longest head, trailer section, and amount of bytes that are held during an upgrade.
HEAD_SIZE = 65536
#: The most that interim responses before the answer to an upgrade may have.
_INTERIM_SIZE = 8192
#: Fifteen hexadecimal digits and CRLF.
_CHUNK_LINE_SIZE = 17

_TOKEN = frozenset(b"!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
_REQUEST_LINE = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+) ([\x21-\x7e]+) HTTP/1\.([01])")
_OLD_REQUEST_LINE = re.compile(rb"[A-Z]+ [^ ]+")
_ABSOLUTE_TARGET = re.compile(rb"([A-Za-z]+)://([^/?#]*)((?:[/?][^#]*)?)")
_LENGTH = re.compile(rb"[0-9]{1,18}")
_CHUNK_SIZE = re.compile(rb"[0-9a-fA-F]{1,15}")
_STATUS_LINE = re.compile(rb"HTTP/1\.[01] ([0-9]{3})[ \r]")
#: What must not be in a line; a CR may be the last byte so far.
BAD_IN_LINE = re.compile(rb"(?<!\r)\n|\r[^\n]|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_BAD_IN_REQUEST_LINE = re.compile(rb"(?<!\r)\n|\r[^\n]|[\x00-\x09\x0b\x0c\x0e-\x1f\x7f-\xff]")
#: Headers that say where a request goes and where it ends.
DECISIVE = frozenset({b"host", b"content-length", b"transfer-encoding", b"upgrade"})

#: What the next byte of the client belongs to.
_REQUEST, _HEADERS, _BODY, _CHUNK, _DATA, _DATA_END, _TRAILERS, _RESPONSE, _OPAQUE = range(9)
#: The longest line of the states that have short ones.
_LINE_SIZES = {_CHUNK: _CHUNK_LINE_SIZE, _DATA_END: 2}
_TOO_LONG = {_CHUNK: "chunk size", _DATA_END: "end of a chunk"}


class RequestRefusedError(ValueError):
    """A request that is not sent on; the message is a short fixed reason."""

    def __init__(self, reason: str, host: str = "") -> None:
        super().__init__(reason)
        #: What was fed with the refused request but belongs to earlier ones, and may be sent on.
        self.passed = b""
        #: The other host that the request names, as printable ASCII; "" if that was not the reason.
        self.host = host


class RequestScreen:
    """Judges the requests of one connection, which was opened to `name` and `port`."""

    def __init__(self, name: str, port: int, spend: Callable[[], str] | None = None) -> None:
        """Take the host, and what counts a request: it returns why there may be no more, or nothing."""
        self._spend = spend
        self._name = name.encode("ascii")
        self._port = b":%d" % port
        self._state = _REQUEST
        #: Received and neither judged nor sent on.
        self._pending = bytearray()
        #: How much of the line at the start of `_pending` was searched for its end.
        self._searched = 0
        self._head = bytearray()
        self._request = RequestLines(self._name, self._port)
        #: What the body, or its present chunk, still has to come.
        self._left = 0
        self._response = bytearray()
        #: Reason and host of the refusal. Not the error itself: its traceback would keep the screen alive.
        self._refused: tuple[str, str] | None = None
        #: The heads that were passed.
        self.requests = 0

    @property
    def waiting_for_response(self) -> bool:
        """Whether the bytes of the response must be shown to `response_head`, and reading better pauses."""
        return self._state == _RESPONSE

    @property
    def opaque(self) -> bool:
        """Whether the connection has become a WebSocket, so that nothing is judged any more."""
        return self._state == _OPAQUE

    def feed(self, data: bytes) -> bytes:
        """Return what may be sent to the server now; raises RequestRefusedError, and then always."""
        if self._refused is not None:
            raise RequestRefusedError(*self._refused)
        if self._state == _OPAQUE:
            return data
        if self._state == _BODY and not self._pending and len(data) < self._left:
            self._left -= len(data)
            return data
        self._pending += data
        return self._advance()

    def response_head(self, data: bytes) -> bytes:
        """Look at the next bytes of the response to an upgrade; return what may be sent to the server now."""
        if self._refused is not None:
            raise RequestRefusedError(*self._refused)
        if self._state != _RESPONSE:
            return b""
        self._response += data
        status = _final_status(self._response)
        if status is None:
            return b""
        self._response.clear()
        if status == 101:
            self._state = _OPAQUE
            held = bytes(self._pending)
            self._pending.clear()
            return held
        self._state = _REQUEST
        return self._advance()

    def _advance(self) -> bytes:
        out = bytearray()
        try:
            while self._pending and self._step(out):
                pass
        except RequestRefusedError as error:
            error.passed = bytes(out)
            self._refused = (str(error), error.host)
            self._pending.clear()
            raise
        return bytes(out)

    def _step(self, out: bytearray) -> bool:
        """Go on by a line or by a piece of a body; return whether that was possible."""
        if self._state in (_BODY, _DATA):
            self._pass_body(out)
            return True
        if self._state == _RESPONSE:
            if len(self._pending) > HEAD_SIZE:
                raise RequestRefusedError("too much before the answer to an upgrade")
            return False
        line = self._take_line()
        if line is None:
            return False
        if self._state in (_REQUEST, _HEADERS):
            self._read_head(line, out)
        elif self._state == _TRAILERS:
            self._read_trailer(line, out)
        else:
            self._read_chunk_line(line)
            out += line
        return True

    def _take_line(self) -> bytes | None:
        """Cut off the next line with its CRLF; None if it is not complete."""
        pending, state = self._pending, self._state
        room = _LINE_SIZES.get(state, HEAD_SIZE - len(self._head))
        end = pending.find(b"\n", self._searched) + 1
        stop = min(end or len(pending), room)
        pattern = _BAD_IN_REQUEST_LINE if state == _REQUEST else BAD_IN_LINE
        if found := pattern.search(pending, max(self._searched - 1, 0), stop):
            raise RequestRefusedError(bad_byte(found[0], state))
        if (end or len(pending)) > room:
            raise RequestRefusedError(_TOO_LONG.get(state, "head too long"))
        if not end:
            self._searched = len(pending)
            return None
        line = bytes(pending[:end])
        del pending[:end]
        self._searched = 0
        return line

    def _read_head(self, line: bytes, out: bytearray) -> None:
        if self._state == _REQUEST:
            self._request = RequestLines(self._name, self._port)
            self._request.begin(line[:-2])
            self._state = _HEADERS
        elif line != b"\r\n":
            self._request.add(line[:-2])
        self._head += line
        if line == b"\r\n":
            self._finish_head(out)

    def _finish_head(self, out: bytearray) -> None:
        request = self._request
        request.check()
        if request.upgrades and self.requests:
            raise RequestRefusedError("upgrade after other requests")
        if self._spend is not None and (clause := self._spend()):
            raise RequestRefusedError(clause)
        self.requests += 1
        out += self._head
        self._head.clear()
        self._left = request.length
        if request.upgrades:
            self._state = _RESPONSE
        elif request.chunked:
            self._state = _CHUNK
        else:
            self._state = _BODY if self._left else _REQUEST

    def _pass_body(self, out: bytearray) -> None:
        taken = self._pending[: self._left]
        del self._pending[: self._left]
        out += taken
        self._left -= len(taken)
        if not self._left:
            self._state = _REQUEST if self._state == _BODY else _DATA_END

    def _read_chunk_line(self, line: bytes) -> None:
        if self._state == _DATA_END:
            if line != b"\r\n":
                raise RequestRefusedError("end of a chunk")
            self._state = _CHUNK
            return
        if not _CHUNK_SIZE.fullmatch(line[:-2]):
            raise RequestRefusedError("chunk size")
        self._left = int(line, 16)
        self._state = _DATA if self._left else _TRAILERS

    def _read_trailer(self, line: bytes, out: bytearray) -> None:
        """Hold trailers until they are complete; none of them may be one that decides."""
        self._head += line
        if line != b"\r\n":
            name, _ = split_field(line[:-2])
            if name in DECISIVE:
                raise RequestRefusedError("trailer that must be a header")
            return
        out += self._head
        self._head.clear()
        self._state = _REQUEST


class RequestLines:
    """The head of one request, gathered line by line, and what decides about it."""

    def __init__(self, name: bytes, port: bytes, scheme: bytes = b"http") -> None:
        self._name, self._port, self._scheme = name, port, scheme
        #: Of HTTP/1.
        self.minor = 1
        self._values: dict[bytes, list[bytes]] = {name: [] for name in (*DECISIVE, b"connection")}
        #: Method, path with query, and headers with names in lower case, as they came.
        self.method = self.target = b""
        self.fields: list[tuple[bytes, bytes]] = []
        self.length = 0
        self.chunked = self.upgrades = False
        #: What Connection names, in lower case.
        self.connection: set[bytes] = set()

    def begin(self, line: bytes) -> None:
        """Read the request line."""
        match = _REQUEST_LINE.fullmatch(line)
        if match is None:
            raise RequestRefusedError(_why_no_request(line))
        method, target, minor = match.groups()
        self.method, self.target = method, target
        self.minor = int(minor)
        if method.upper() == b"CONNECT":
            raise RequestRefusedError("CONNECT")
        if target.startswith(b"/") or (target == b"*" and method == b"OPTIONS"):
            return
        absolute = _ABSOLUTE_TARGET.fullmatch(target)
        if absolute is None or absolute[1].lower() != self._scheme:
            raise RequestRefusedError("target of a request")
        self._check_host(absolute[2], "target differs")
        self.target = absolute[3] if absolute[3].startswith(b"/") else b"/" + absolute[3]

    def add(self, line: bytes) -> None:
        """Read a header."""
        name, value = split_field(line)
        self.fields.append((name, value))
        if name in self._values:
            self._values[name].append(value)

    def check(self) -> None:
        """Judge the request when its head is complete."""
        hosts = self._values[b"host"]
        if len(hosts) > 1:
            raise RequestRefusedError("several Hosts")
        # HTTP/1.0 does not ask for one, but without it a server chooses among its hosts by itself.
        if not hosts:
            raise RequestRefusedError("no Host")
        self._check_host(hosts[0], "Host differs")
        # An intermediary removes the headers that Connection names.
        named = self.connection = {
            one.strip(b" \t").lower() for value in self._values[b"connection"] for one in value.split(b",")
        }
        if named & (DECISIVE - {b"upgrade"}):
            raise RequestRefusedError("Connection names a header that decides")
        self._check_framing()
        self._check_upgrade()

    def _check_host(self, authority: bytes, reason: str) -> None:
        host = authority.lower()
        if host.removesuffix(self._port).removesuffix(b".") != self._name:
            shown = "".join(chr(byte) if 0x20 < byte < 0x7F else "?" for byte in host[:300])
            raise RequestRefusedError(reason, shown)

    def _check_framing(self) -> None:
        lengths, codings = self._values[b"content-length"], self._values[b"transfer-encoding"]
        if lengths and codings:
            raise RequestRefusedError("Content-Length and Transfer-Encoding")
        if len(lengths) > 1:
            raise RequestRefusedError("several Content-Lengths")
        if lengths:
            if not _LENGTH.fullmatch(lengths[0]):
                raise RequestRefusedError("Content-Length")
            self.length = int(lengths[0])
        if codings:
            # In lower case only: not every server reads others. HTTP/1.0 has no chunks.
            if codings != [b"chunked"] or not self.minor:
                raise RequestRefusedError("Transfer-Encoding")
            self.chunked = True

    def _check_upgrade(self) -> None:
        protocols = self._values[b"upgrade"]
        if not protocols:
            return
        if [one.lower() for one in protocols] != [b"websocket"]:
            raise RequestRefusedError("upgrade to another protocol")
        if self.length or self.chunked:
            raise RequestRefusedError("upgrade with a body")
        self.upgrades = True


def split_field(line: bytes) -> tuple[bytes, bytes]:
    """Split a header into its name in lower case and its value."""
    if line[:1] in (b" ", b"\t"):
        raise RequestRefusedError("folded header")
    name, colon, value = line.partition(b":")
    if not colon or not name or not _TOKEN.issuperset(name):
        raise RequestRefusedError("name of a header")
    lower = name.lower()
    # Some servers read an underscore as a hyphen.
    if b"_" in lower and lower.replace(b"_", b"-") in DECISIVE:
        raise RequestRefusedError("name of a header")
    return lower, value.strip(b" \t")


def _why_no_request(line: bytes) -> str:
    if line == b"PRI * HTTP/2.0":
        return "HTTP/2 without TLS"
    return "HTTP/0.9" if _OLD_REQUEST_LINE.fullmatch(line) else "not HTTP"


def bad_byte(found: bytes, state: int) -> str:
    if found == b"\n":
        return "bare LF"
    if found[:1] == b"\r":
        return "bare CR"
    return "not HTTP" if state == _REQUEST else "control byte"


def _final_status(response: bytearray) -> int | None:
    """Return the status of the first response that is not an interim one; None if more bytes are needed.

    0 for what is no response of HTTP/1, or has too many interim ones: it is not 101, and that is what counts.
    """
    at = 0
    while True:
        line = bytes(response[at : at + 13])
        match = _STATUS_LINE.match(line)
        if match is None:
            return None if len(line) < 13 else 0
        status = int(match[1])
        if status >= 200 or status == 101:
            return status
        at = response.find(b"\r\n\r\n", at, _INTERIM_SIZE) + 4
        if at == 3:
            return None if len(response) < _INTERIM_SIZE else 0


def refusal(reason: str, hint: str = "") -> bytes:
    """Return the response to a client whose request was refused; the hint says which rule would allow it."""
    text = "".join(
        one if one.isascii() and (one.isprintable() or one == "\n") else "?"
        for one in f"Stockade refused this request: {reason}\n" + (f"{hint}\n" if hint else "")
    )
    head = (
        "HTTP/1.1 403 Forbidden\r\nContent-Type: text/plain; charset=us-ascii\r\n"
        f"Content-Length: {len(text)}\r\nCache-Control: no-store\r\nConnection: close\r\n\r\n"
    )
    return (head + text).encode("ascii")
