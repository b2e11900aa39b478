"""The heads of requests of HTTP/1: each must name the host that its connection was opened to.

The bytes are hostile: if the end of a request is elsewhere here than for the server, a request for another
host passes as the body of an allowed one. So framing must be what every server reads in the same way: lines
end with CRLF, one Content-Length or exactly `chunked`, no folded headers, no chunk extensions. Whatever is
unusual is refused. Upgrades to anything but a WebSocket are refused, HTTP/2 without TLS among them.
"""

from __future__ import annotations

import re

_TOKEN = frozenset(b"!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
_REQUEST_LINE = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+) ([\x21-\x7e]+) HTTP/1\.([01])")
_OLD_REQUEST_LINE = re.compile(rb"[A-Z]+ [^ ]+")
_ABSOLUTE_TARGET = re.compile(rb"([A-Za-z]+)://([^/?#]*)((?:[/?][^#]*)?)")
_LENGTH = re.compile(rb"[0-9]{1,18}")
#: What must not be in a line; a CR may be the last byte so far.
BAD_IN_LINE = re.compile(rb"(?<!\r)\n|\r[^\n]|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
#: Headers that say where a request goes and where it ends.
DECISIVE = frozenset({b"host", b"content-length", b"transfer-encoding", b"upgrade"})


class RequestRefusedError(ValueError):
    """A request that is not sent on; the message is a short fixed reason."""

    def __init__(self, reason: str, host: str = "") -> None:
        super().__init__(reason)
        #: The other host that the request names, as printable ASCII; "" if that was not the reason.
        self.host = host


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


def bad_byte(found: bytes) -> str:
    """Return what to call a byte that no line may have."""
    if found == b"\n":
        return "bare LF"
    return "bare CR" if found[:1] == b"\r" else "control byte"
