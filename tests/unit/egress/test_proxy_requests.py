"""What clients of the proxy inside may ask for, from any bytes."""

from __future__ import annotations

import asyncio
import random
import socket

import pytest

from stockade.egress.decoders.proxy_requests import (
    HEAD_SIZE,
    ProxyRequestError,
    ProxyTarget,
    connect_target,
    socks_address_size,
    socks_target,
)
from stockade.egress.proxy_service import ProxyRequest, read_request
from stockade.policy.net_names import normal_name

CONNECT = b"CONNECT api.example.com:443 HTTP/1.1\r\nHost: api.example.com\r\nUser-Agent: x\r\n\r\n"
SOCKS = b"\x05\x01\x00" + b"\x05\x01\x00\x03\x0fapi.example.com\x01\xbb"


@pytest.mark.parametrize(
    ("place", "target"),
    [
        ("API.example.com:443", ProxyTarget("api.example.com", "", 443)),
        ("10.0.0.1:80", ProxyTarget("", "10.0.0.1", 80)),
        ("[2001:db8::1]:80", ProxyTarget("", "2001:db8::1", 80)),
        ("[::ffff:127.0.0.1]:80", ProxyTarget("", "127.0.0.1", 80)),
    ],
)
def test_a_target_has_one_spelling(place: str, target: ProxyTarget) -> None:
    assert connect_target(f"CONNECT {place} HTTP/1.1\r\n\r\n".encode()) == target


def talk(data: bytes) -> tuple[ProxyRequest | None, bytes]:
    """Send bytes to the proxy; return what it took them for, and what it left of them."""

    async def serve() -> tuple[ProxyRequest | None, bytes]:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.setblocking(False)
            theirs.sendall(data)
            theirs.shutdown(socket.SHUT_WR)
            try:
                request = await read_request(asyncio.get_running_loop(), ours)
            except ProxyRequestError:
                return None, b""
            left = b""
            while more := ours.recv(65536):
                left += more
            return request, left

    return asyncio.run(serve())


@pytest.mark.parametrize("request_bytes", [CONNECT, SOCKS])
def test_nothing_behind_a_request_is_read(request_bytes: bytes) -> None:
    found, left = talk(request_bytes + b"behind\r\n\r\nit")
    assert found is not None and found.target == ProxyTarget("api.example.com", "", 443)
    assert left == b"behind\r\n\r\nit"


def test_any_bytes_are_a_proper_request_or_refused() -> None:
    chance = random.Random(48)
    passed = 0
    for number in range(3000):
        data = bytearray(chance.choice((CONNECT, SOCKS)) + b"tail")
        for _ in range(chance.randrange(4)):
            at = chance.randrange(len(data))
            data[at : at + chance.randrange(3)] = chance.randbytes(chance.randrange(3))
        for parse in (connect_target, _parse_socks):
            try:
                target = parse(bytes(data))
            except ProxyRequestError:
                continue
            assert 1 <= target.port <= 65535 and bool(target.name) is not bool(target.address)
            if target.name:
                assert normal_name(target.name) == target.name
        if number % 30 == 0:
            found, left = talk(bytes(data))
            passed += found is not None
            assert found is None or bytes(data).endswith(left)
    assert passed


def _parse_socks(data: bytes) -> ProxyTarget:
    head = data[3:8]
    if len(head) < 5:
        raise ProxyRequestError("short")
    size = socks_address_size(head)
    return socks_target(head, data[8 : 8 + size].ljust(size, b"\0"))


def test_a_head_without_end_is_bounded() -> None:
    found, _ = talk(b"CONNECT a.example:80 HTTP/1.1\r\n" + b"X: y\r\n" * HEAD_SIZE)
    assert found is None
