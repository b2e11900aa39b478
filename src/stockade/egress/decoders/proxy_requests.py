"""What clients of a proxy ask for: HTTP CONNECT and SOCKS5, read from hostile bytes.

Only connections are asked for this way: SOCKS5's BIND and UDP ASSOCIATE are refused, and so is every HTTP
request but CONNECT. Each message has a bound, and nothing behind it is read: what a client sends after its
request belongs to the connection that it asked for.
"""

from __future__ import annotations

import socket
from typing import NamedTuple

from stockade.policy.net_errors import NetRuleError
from stockade.policy.net_names import normal_name

#: The longest head of a CONNECT request, and of a proxy's response.
HEAD_SIZE = 8192
VERSION, NO_AUTHENTICATION, NO_METHOD = 5, 0, 0xFF
CONNECT = 1
IPV4, NAME, IPV6 = 1, 3, 4
#: SOCKS5 replies, with the address that it need not have.
SUCCEEDED, NOT_ALLOWED, NO_COMMAND, NO_ADDRESS_TYPE = 0, 2, 7, 8
_TOKEN = frozenset(b"!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")


class ProxyRequestError(Exception):
    """A request that is none, or not one for a connection; `reply` is what the client gets."""

    def __init__(self, problem: str, reply: bytes = b"") -> None:
        super().__init__(problem)
        self.reply = reply


class ProxyTarget(NamedTuple):
    """Where a client wants to be connected to: a name in its one spelling, or an address."""

    name: str
    address: str
    port: int


def http_reply(status: str, text: str = "") -> bytes:
    """Return the answer to a client of the HTTP proxy; without text, the connection begins behind it."""
    if not text:
        return f"HTTP/1.1 {status}\r\n\r\n".encode()
    body = f"Stockade: {text}\n"
    head = f"Content-Type: text/plain\r\nContent-Length: {len(body)}\r\nConnection: close"
    return f"HTTP/1.1 {status}\r\n{head}\r\n\r\n{body}".encode("ascii", "replace")


def socks_reply(code: int) -> bytes:
    """Return the answer to a SOCKS5 request."""
    return bytes((VERSION, code, 0, IPV4)) + bytes(6)


def connect_target(head: bytes) -> ProxyTarget:
    """Return where a CONNECT request leads; `head` ends with its empty line."""
    lines = head.removesuffix(b"\r\n\r\n").split(b"\r\n")
    bad = http_reply("400 Bad Request", "this is no CONNECT request")
    if b"\0" in head or any(b"\r" in line or b"\n" in line for line in lines):
        raise ProxyRequestError("malformed", bad)
    words = lines[0].split(b" ")
    if len(words) != 3 or words[2] not in (b"HTTP/1.1", b"HTTP/1.0"):
        raise ProxyRequestError("malformed", bad)
    if words[0] != b"CONNECT":
        hint = "this proxy only answers CONNECT; plain HTTP needs no proxy inside"
        raise ProxyRequestError("method", http_reply("405 Method Not Allowed", hint))
    for line in lines[1:]:
        name, colon, _ = line.partition(b":")
        if not colon or not name or not _TOKEN.issuperset(name):
            raise ProxyRequestError("malformed", bad)
        if name.lower() in (b"content-length", b"transfer-encoding"):
            raise ProxyRequestError("body", bad)
    try:
        host, digits = _split(words[1].decode("ascii"))
        return _target(host, digits)
    except (UnicodeDecodeError, NetRuleError, ValueError):
        raise ProxyRequestError("target", bad) from None


def _split(place: str) -> tuple[str, str]:
    host, _, digits = place.rpartition(":")
    if host.startswith("[") and host.endswith("]") and ":" in host:
        return host[1:-1], digits
    if ":" in host or "[" in host:
        raise ValueError(place)
    return host, digits


def _target(host: str, digits: str) -> ProxyTarget:
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 5):
        raise ValueError(digits)
    return target(host, int(digits))


def target(host: str, port: int) -> ProxyTarget:
    """Return a host, which is a name or an address, and a port as a target, or raise ValueError."""
    if not 1 <= port <= 65535:
        raise ValueError(port)
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            packed = socket.inet_pton(family, host)
        except (OSError, ValueError):
            continue
        return ProxyTarget("", _address(packed), port)
    return ProxyTarget(normal_name(host), "", port)


def _address(packed: bytes) -> str:
    if packed[:12] == bytes(10) + b"\xff\xff":  # for the kernel it is the IPv4 address
        packed = packed[12:]
    return socket.inet_ntop(socket.AF_INET if len(packed) == 4 else socket.AF_INET6, packed)


def socks_method(methods: bytes) -> bytes:
    """Return the answer to a client's list of methods; raise ProxyRequestError if none of them is ours."""
    if NO_AUTHENTICATION not in methods:
        raise ProxyRequestError("authentication", bytes((VERSION, NO_METHOD)))
    return bytes((VERSION, NO_AUTHENTICATION))


def socks_address_size(head: bytes) -> int:
    """Return how many bytes of address and port follow the first five of a SOCKS5 request."""
    version, command, reserved, kind, first = head
    if version != VERSION or reserved:
        raise ProxyRequestError("malformed")
    if command != CONNECT:
        raise ProxyRequestError("command", socks_reply(NO_COMMAND))
    sizes = {IPV4: 3 + 2, IPV6: 15 + 2, NAME: first + 2}
    if kind not in sizes:
        raise ProxyRequestError("address", socks_reply(NO_ADDRESS_TYPE))
    return sizes[kind]


def socks_target(head: bytes, rest: bytes) -> ProxyTarget:
    """Return where a SOCKS5 request leads, from its first five bytes and the rest."""
    port = int.from_bytes(rest[-2:], "big")
    try:
        if head[3] == NAME:
            return target(rest[:-2].decode("ascii"), port)
        packed = head[4:] + rest[:-2]
        if not port:
            raise ValueError(port)
        return ProxyTarget("", _address(packed), port)
    except (UnicodeDecodeError, NetRuleError, ValueError):
        raise ProxyRequestError("target", socks_reply(NOT_ALLOWED)) from None
