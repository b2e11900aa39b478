"""Requests to a resolver that does not answer."""

from __future__ import annotations

import asyncio
import socket

import pytest

from stockade.egress import dialer
from stockade.egress.dialer import REQUESTS, DialError, ResolverClient


def test_names_that_wait_are_asked_for_once_others_have_timed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialer, "RESOLVER_TIMEOUT", 0.05)
    ours, resolver = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    async def ask() -> list[list[str] | BaseException]:
        client = ResolverClient(asyncio.get_running_loop(), ours)
        names = [f"n{number}.example" for number in range(REQUESTS + 1)]
        requests = [asyncio.ensure_future(client.addresses(name)) for name in names]
        return await asyncio.wait_for(asyncio.gather(*requests, return_exceptions=True), 5)

    with ours, resolver:
        failures = asyncio.run(ask())
        assert [str(one) for one in failures if isinstance(one, DialError)] == ["timed out"] * (REQUESTS + 1)
        assert len([resolver.recv(300) for _ in range(REQUESTS + 1)]) == REQUESTS + 1
