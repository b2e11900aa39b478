"""The proxies of the host, through which connections leave if the supervisor's environment names them.

The egress process dials the proxy instead of the server and asks it for the server by name: HTTP CONNECT, or
SOCKS5. Then the proxy resolves the name, and where it leads cannot be checked here. Which proxy a connection
takes: `http` for port 80, `https` for other ports of rules that look into the connection, and `all` for those
and for everything else. What `no_proxy` names, and this machine itself, is dialled directly.
"""

from __future__ import annotations

import asyncio
import base64
import socket
from collections.abc import Mapping, Sequence
from ipaddress import ip_address, ip_network
from typing import Any, NamedTuple

from stockade.egress.decoders.proxy_requests import CONNECT, NAME, VERSION, ProxyRequestError
from stockade.egress.dialer import DialError
from stockade.egress.proxy_service import read_exactly, read_head

_USER_PASSWORD, _NONE = 2, 0
#: How long the address in a SOCKS5 answer is, by its kind.
_SIZES = {1: 4, 4: 16}


class UpstreamProxy(NamedTuple):
    """A proxy of the host; `user` and `password` are secrets."""

    scheme: str
    host: str
    port: int
    user: str = ""
    password: str = ""


class UpstreamProxies:
    """Which connections go through which proxy."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._proxies = {kind: UpstreamProxy(*found) for kind, found in settings.get("proxies", {}).items()}
        self._direct: Sequence[str] = settings.get("no_proxy", ())

    def choose(self, name: str, address: str, port: int, *, opaque: bool) -> UpstreamProxy | None:
        """Return the proxy for a connection; None to dial it directly."""
        if not self._proxies or self._is_direct(name or address, port):
            return None
        kind = "" if opaque else "http" if port == 80 else "https"
        return self._proxies.get(kind) or self._proxies.get("all")

    def _is_direct(self, host: str, port: int) -> bool:
        try:
            found = ip_address(host)
        except ValueError:
            found = None
        if found is not None and found.is_loopback:
            return True
        return any(_covers(entry, host, found, port) for entry in self._direct)


def _covers(entry: str, host: str, address: Any, port: int) -> bool:
    """Whether an entry of `no_proxy` names a host: `*`, a name and all below it, an address, a network."""
    if entry == "*":
        return True
    if address is not None:
        try:
            return address in ip_network(entry.strip("[]"), strict=False)
        except ValueError:
            pass
    place, colon, digits = entry.rpartition(":")
    if colon and digits.isdigit():
        if int(digits) != port:
            return False
        entry = place.strip("[]")
    wanted = entry.removeprefix("*").strip(".").lower()
    return bool(wanted) and (host == wanted or host.endswith(f".{wanted}"))


async def open_tunnel(
    loop: asyncio.AbstractEventLoop, connection: socket.socket, proxy: UpstreamProxy, host: str, port: int
) -> None:
    """Let a proxy connect to a host; raise DialError if it does not."""
    try:
        if proxy.scheme == "http":
            await _http(loop, connection, proxy, host, port)
        else:
            await _socks(loop, connection, proxy, host, port)
    except ProxyRequestError:
        raise DialError("proxy refused") from None


async def _http(
    loop: asyncio.AbstractEventLoop, connection: socket.socket, proxy: UpstreamProxy, host: str, port: int
) -> None:
    place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    request = f"CONNECT {place} HTTP/1.1\r\nHost: {place}\r\n"
    if proxy.user or proxy.password:
        secret = base64.b64encode(f"{proxy.user}:{proxy.password}".encode()).decode()
        request += f"Proxy-Authorization: Basic {secret}\r\n"
    connection.send(f"{request}\r\n".encode())
    head = await read_head(loop, connection)
    words = head.split(b"\r\n", 1)[0].split(b" ")
    if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or words[1] != b"200":
        raise ProxyRequestError("refused")


async def _socks(
    loop: asyncio.AbstractEventLoop, connection: socket.socket, proxy: UpstreamProxy, host: str, port: int
) -> None:
    method = _USER_PASSWORD if proxy.user or proxy.password else _NONE
    connection.send(bytes((VERSION, 1, method)))
    if await read_exactly(loop, connection, 2) != bytes((VERSION, method)):
        raise ProxyRequestError("refused")
    if method == _USER_PASSWORD:
        user, password = proxy.user.encode()[:255], proxy.password.encode()[:255]
        connection.send(bytes((1, len(user))) + user + bytes((len(password),)) + password)
        if (await read_exactly(loop, connection, 2))[1]:
            raise ProxyRequestError("refused")
    # A name or an address as text: proxies take both, and the address is one that the rules name.
    asked = host.encode("ascii")
    connection.send(bytes((VERSION, CONNECT, 0, NAME, len(asked))) + asked + port.to_bytes(2, "big"))
    version, code, _, kind = await read_exactly(loop, connection, 4)
    if version != VERSION or code:
        raise ProxyRequestError("refused")
    size = _SIZES.get(kind)
    if size is None:
        (size,) = await read_exactly(loop, connection, 1)
    await read_exactly(loop, connection, size + 2)
