"""The first message of a TLS client: which server it names, before a byte of it is sent on.

The egress process feeds a `HelloReader` with what a client sends until the
reader returns a `ClientHello` or raises. The bytes are hostile: whoever accepts a
hello that a TLS server reads differently lets a program reach another name
than the rules allow. So everything ambiguous is refused: two names, the same
extension twice, lengths that disagree, another kind of record in between.

A stream that does not begin like TLS raises `NotTlsError` at its first byte or
two: on ports other than 443 that is simply another protocol. A hello in the
format of SSL 2 is among these; it can name no server.

With Encrypted Client Hello, the name is the outer one: the one that an
observer of the network sees. Browsers send such an extension with random
content too (GREASE), which looks the same on purpose, so `ClientHello.ech` alone is
no reason to refuse. The key for a real one comes from DNS records that the
name server of a sandbox never answers with.

Only the first hello is read. If a server asks for a second one, a program can
put another name in it; that, like another name inside the encrypted stream, is
between the program and a server that the rules allow.
"""

from __future__ import annotations

from typing import NamedTuple

#: All bytes of a hello with its record headers. A hello with post-quantum keys has about 1,800.
HELLO_SIZE = 65536

_CHANGE_CIPHER_SPEC, _ALERT, _HANDSHAKE, _APPLICATION_DATA = range(20, 24)
_RECORD_TYPES = (_CHANGE_CIPHER_SPEC, _ALERT, _HANDSHAKE, _APPLICATION_DATA)
_RECORD_HEADER, _RECORD_SIZE = 5, 16384
_MAJOR_VERSION, _LAST_MINOR_VERSION = 3, 4
_CLIENT_HELLO, _HANDSHAKE_HEADER = 1, 4
_SERVER_NAME, _ALPN, _ECH, _ESNI = 0, 16, 0xFE0D, 0xFFCE
_HOST_NAME, _ECH_OUTER = 0, 0
_HOST_BYTES = frozenset(b"abcdefghijklmnopqrstuvwxyz0123456789-_.")


class HelloError(ValueError):
    """A hello that is refused; the message is a short fixed reason."""


class NotTlsError(HelloError):
    """The client speaks something else than TLS."""


class ClientHello(NamedTuple):
    """What a client says about the server that it wants."""

    #: In lower case without a final dot; "" if the client names no server.
    name: str
    ech: bool
    alpn: tuple[bytes, ...]


class HelloReader:
    """Reads one hello from the start of a stream, which may come in any pieces."""

    def __init__(self) -> None:
        #: Everything that was fed, to be sent on when the verdict is there.
        self.received = bytearray()
        self._at = 0
        self._message = bytearray()
        self._hello: ClientHello | None = None
        #: Not the error itself: its traceback would keep the reader alive.
        self._refused: tuple[type[HelloError], str] | None = None

    def feed(self, data: bytes) -> ClientHello | None:
        """Return the hello, or None if more bytes are needed; raises HelloError."""
        if self._refused is not None:
            kind, reason = self._refused
            raise kind(reason)
        self.received += data
        if self._hello is None:
            try:
                self._hello = self._read()
            except HelloError as error:
                self._refused = (type(error), str(error))
                raise
        return self._hello

    def _read(self) -> ClientHello | None:
        received = self.received
        if self._at == 0 and not _begins_like_tls(received):
            return None
        while len(received) - self._at >= _RECORD_HEADER:
            length = _record_length(received, self._at)
            end = self._at + _RECORD_HEADER + length
            if end > HELLO_SIZE:
                raise HelloError("hello too long")
            if len(received) < end:
                return None
            self._message += received[self._at + _RECORD_HEADER : end]
            self._at = end
            size = _message_size(self._message)
            if size is not None and len(self._message) >= size:
                if len(self._message) > size:
                    raise HelloError("more than a hello in its record")
                return _decode(bytes(self._message[_HANDSHAKE_HEADER:]))
        return None


def _begins_like_tls(data: bytearray) -> bool:
    """Return False if that cannot be said yet.

    Records other than a handshake are no other protocol: some servers let a client send an alert first.
    """
    if not data:
        return False
    if data[0] not in _RECORD_TYPES:
        raise NotTlsError("not TLS")
    if len(data) < 2:
        return False
    if data[1] != _MAJOR_VERSION:
        raise NotTlsError("not TLS")
    if data[0] != _HANDSHAKE:
        raise HelloError("not a hello first")
    return True


def _record_length(data: bytearray, at: int) -> int:
    kind, major, minor = data[at : at + 3]
    if kind != _HANDSHAKE:
        raise HelloError("another record in a hello")
    if major != _MAJOR_VERSION or minor > _LAST_MINOR_VERSION:
        raise HelloError("version of a record")
    length = data[at + 3] << 8 | data[at + 4]
    if not 0 < length <= _RECORD_SIZE:
        raise HelloError("length of a record")
    return length


def _message_size(message: bytearray) -> int | None:
    """Return the size of the handshake message with its header, once it is known."""
    if message[0] != _CLIENT_HELLO:
        raise HelloError("not a hello first")
    if len(message) < _HANDSHAKE_HEADER:
        return None
    size = _HANDSHAKE_HEADER + int.from_bytes(message[1:4], "big")
    if size > HELLO_SIZE:
        raise HelloError("hello too long")
    return size


class _Fields:
    """Cuts fields off bytes; every length must fit."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def __bool__(self) -> bool:
        return self._at < len(self._data)

    def take(self, size: int) -> bytes:
        end = self._at + size
        if end > len(self._data):
            raise HelloError("lengths in the hello")
        taken = self._data[self._at : end]
        self._at = end
        return taken

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "big")

    def vector(self, size: int) -> bytes:
        """Take as many bytes as the length says that is written before them in `size` bytes."""
        return self.take(self.number(size))

    def last_vector(self, size: int) -> bytes:
        """Take a vector that ends where the data ends."""
        taken = self.vector(size)
        if self:
            raise HelloError("lengths in the hello")
        return taken


def _decode(body: bytes) -> ClientHello:
    fields = _Fields(body)
    if fields.number(2) >> 8 != _MAJOR_VERSION:
        raise HelloError("version of the hello")
    fields.take(32)
    session, suites, compressions = fields.vector(1), fields.vector(2), fields.vector(1)
    if len(session) > 32 or len(suites) < 2 or len(suites) % 2 or not compressions:
        raise HelloError("lengths in the hello")
    extensions = _extensions(_Fields(fields.last_vector(2))) if fields else {}
    name = _server_name(extensions[_SERVER_NAME]) if _SERVER_NAME in extensions else ""
    if _ECH in extensions and extensions[_ECH][:1] != bytes([_ECH_OUTER]):
        raise HelloError("an inner hello outside")
    alpn = _protocols(extensions[_ALPN]) if _ALPN in extensions else ()
    return ClientHello(name, _ECH in extensions or _ESNI in extensions, alpn)


def _extensions(fields: _Fields) -> dict[int, bytes]:
    found: dict[int, bytes] = {}
    while fields:
        kind = fields.number(2)
        if kind in found:
            raise HelloError("an extension twice")
        found[kind] = fields.vector(2)
    return found


def _server_name(data: bytes) -> str:
    names = _Fields(_Fields(data).last_vector(2))
    if names.number(1) != _HOST_NAME:
        raise HelloError("kind of a server name")
    name = names.vector(2)
    if names:
        raise HelloError("several server names")
    return _normal_name(name)


def _normal_name(raw: bytes) -> str:
    lower = raw.lower()
    if not _HOST_BYTES.issuperset(lower):
        raise HelloError("bytes of a server name")
    name = lower.decode("ascii").removesuffix(".")
    labels = name.split(".")
    if len(name) > 253 or not all(0 < len(label) < 64 for label in labels):
        raise HelloError("labels of a server name")
    # What resolvers read as an IPv4 address, in any of its spellings: 127.1, 0x7f.1, 2130706433.
    if labels[-1].isdecimal() or labels[-1].startswith("0x"):
        raise HelloError("an address as server name")
    return name


def _protocols(data: bytes) -> tuple[bytes, ...]:
    fields = _Fields(_Fields(data).last_vector(2))
    found = list[bytes]()
    while fields:
        found.append(fields.vector(1))
    if not found or not all(found):
        raise HelloError("lengths in the hello")
    return tuple(found)
