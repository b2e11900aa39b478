"""Which connections leave through which proxy of the host."""

from __future__ import annotations

import asyncio
import random
import socket

import pytest

from stockade.egress.dialer import DialError
from stockade.egress.upstream import UpstreamProxies, UpstreamProxy, open_tunnel
from stockade.errors import PolicyError
from stockade.runs.network.upstream_proxy import host_proxies

ENVIRON = {
    "https_proxy": "http://one.example:3128",
    "HTTP_PROXY": "two.example",
    "ALL_PROXY": "socks5h://u:p%40@three.example",
    "NO_PROXY": "internal.example, .lan,10.0.0.0/8 192.168.1.1 far.example:8080,2001:db8::/32,*.star.example",
}


def proxies(environ: dict[str, str]) -> UpstreamProxies:
    return UpstreamProxies(host_proxies(environ).settings())


@pytest.mark.parametrize(
    ("host", "port", "opaque", "chosen"),
    [
        ("api.example.com", 443, False, "one.example"),
        ("api.example.com", 8443, False, "one.example"),
        ("api.example.com", 80, False, "two.example"),
        ("api.example.com", 22, True, "three.example"),
        ("8.8.8.8", 443, True, "three.example"),
        ("internal.example", 443, False, ""),
        ("a.internal.example", 443, False, ""),
        ("notinternal.example", 443, False, "one.example"),
        ("x.lan", 443, False, ""),
        ("x.star.example", 443, False, ""),
        ("far.example", 8080, False, ""),
        ("far.example", 443, False, "one.example"),
        ("10.9.9.9", 443, True, ""),
        ("192.168.1.1", 443, True, ""),
        ("192.168.1.2", 443, True, "three.example"),
        ("2001:db8::7", 443, True, ""),
        ("127.0.0.1", 443, True, ""),
        ("::1", 443, True, ""),
    ],
)
def test_a_connection_takes_the_proxy_that_its_kind_has(
    host: str, port: int, opaque: bool, chosen: str
) -> None:
    is_address = host[0].isdigit() or ":" in host
    found = proxies(ENVIRON).choose(
        "" if is_address else host, host if is_address else "", port, opaque=opaque
    )
    assert (found.host if found else "") == chosen


def test_what_the_environment_says_is_read_as_other_programs_read_it() -> None:
    found = host_proxies(ENVIRON)
    assert found.proxies["all"] == ("socks5", "three.example", 1080, "u", "p@")
    assert found.ports == (80, 1080, 3128)
    assert "HTTPS_PROXY one.example:3128" in found.names and not any("p@" in one for one in found.names)
    assert not host_proxies({"REQUEST_METHOD": "GET", "HTTP_PROXY": "http://evil.example"}).proxies
    assert not host_proxies({"HTTPS_PROXY": "http://a.example", "no_proxy": "x,*"}).proxies
    with pytest.raises(PolicyError):
        host_proxies({"HTTPS_PROXY": "http://a.example:99999"})


def test_any_answer_of_a_proxy_is_a_connection_or_a_refusal() -> None:
    chance = random.Random(22)
    good = {
        "http": b"HTTP/1.1 200 OK\r\nVia: x\r\n\r\n",
        "socks5": b"\x05\x00" + b"\x05\x00\x00\x01" + bytes(6),
    }

    async def answered(scheme: str, answer: bytes) -> bool:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.setblocking(False)
            theirs.sendall(answer + b"greeting")
            theirs.shutdown(socket.SHUT_WR)
            proxy = UpstreamProxy(scheme, "p.example", 3128)
            try:
                await open_tunnel(asyncio.get_running_loop(), ours, proxy, "a.example", 443)
            except DialError as error:
                assert error.reason == "proxy refused"
                return False
            assert ours.recv(100) == b"greeting" or answer != good[scheme]
            return True

    async def everything() -> None:
        for scheme, answer in good.items():
            assert await answered(scheme, answer)
            for _ in range(300):
                data = bytearray(answer)
                at = chance.randrange(len(data))
                data[at : at + chance.randrange(3)] = chance.randbytes(chance.randrange(3))
                await answered(scheme, bytes(data))
        assert not await answered("http", b"HTTP/1.1 407 Authenticate\r\n\r\n")
        assert not await answered("socks5", b"\x05\xff")
        assert not await answered("http", b"X" * 20_000)

    asyncio.run(everything())
