"""Sessions of TLS: whose they are, for how long, and how many."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from pathlib import Path
from typing import Any, cast

import pytest
from OpenSSL import SSL

from stockade.egress.termination.http_termination import HttpTermination, TerminatedPlace
from stockade.egress.termination.streams import CertificateError
from stockade.egress.termination.tls_sessions import SECONDS, SESSIONS, TlsSessions
from support.authority import Authority


def session() -> SSL.Session:
    return SSL.Session()


def test_a_session_is_for_its_server_alone_and_for_a_time_from_the_verification_on() -> None:
    time = [0.0]
    sessions, one = TlsSessions(lambda: time[0]), session()
    sessions.keep("a.test", 443, 0.0, one)
    found = sessions.find("a.test", 443)
    assert found is not None and found.session is one and found.verified == 0.0
    assert sessions.find("a.test", 8443) is None and sessions.find("b.test", 443) is None
    time[0] = SECONDS
    assert sessions.find("a.test", 443) is None


def test_the_number_of_sessions_is_bounded() -> None:
    sessions, one = TlsSessions(), session()
    for number in range(SESSIONS + 1):
        sessions.keep(f"n{number}.test", 443, sessions.clock(), one)
    found = [sessions.find(f"n{number}.test", 443) is not None for number in range(SESSIONS + 1)]
    assert found == [False, *[True] * SESSIONS]


def test_a_further_connection_to_a_server_resumes_its_session_and_one_to_another_does_not(
    tmp_path: Path,
) -> None:
    authority = Authority(tmp_path)
    contexts = {name: authority.server(name) for name in ("a.test", "b.test")}

    async def connect(shared: HttpTermination, name: str, certificate: str) -> bool:
        loop = asyncio.get_running_loop()
        outside, inside = socket.socketpair()
        outside.setblocking(False)
        serving = loop.run_in_executor(None, answer, contexts[certificate], inside)
        stream, _ = await shared._secure(TerminatedPlace("https", name, 443), outside, [b"http/1.1"])
        while (said := stream.read_now()) is None:
            await stream.wait()
        assert said == b"hello"
        stream.close()
        return await serving

    async def talk() -> list[bool]:
        loop = asyncio.get_running_loop()
        shared = HttpTermination(loop, cast(Any, None), cast(Any, None), authority.certificate.read_bytes())
        found = [await connect(shared, name, name) for name in ("a.test", "a.test", "b.test", "a.test")]
        # The session of one name is worth nothing for another: the certificate counts, and is the wrong one.
        with pytest.raises(CertificateError):
            await connect(shared, "c.test", "a.test")
        return found

    assert asyncio.run(talk()) == [False, True, False, True]


def test_a_server_that_sends_sessions_without_end_keeps_nothing_else_waiting(tmp_path: Path) -> None:
    """The library would go on for as long as there is one more, without a turn for other connections."""
    authority = Authority(tmp_path)
    context = authority.server("a.test")
    context.num_tickets = sent = 50

    async def talk() -> int:
        loop = asyncio.get_running_loop()
        shared = HttpTermination(loop, cast(Any, None), cast(Any, None), authority.certificate.read_bytes())
        outside, inside = socket.socketpair()
        outside.setblocking(False)
        serving = loop.run_in_executor(None, answer, context, inside)
        stream, _ = await shared._secure(TerminatedPlace("https", "a.test", 443), outside, [b"http/1.1"])
        turns = 0
        while stream.read_now() is None:
            await stream.wait()
            turns += 1
        stream.close()
        await serving
        return turns

    assert asyncio.run(talk()) >= sent


def test_a_connection_that_is_closed_twice_reads_nothing_of_the_next_one(tmp_path: Path) -> None:
    """The library knows a connection by the number of its descriptor, which the next connection gets."""
    authority = Authority(tmp_path)

    async def talk() -> bytes:
        loop = asyncio.get_running_loop()
        shared = HttpTermination(loop, cast(Any, None), cast(Any, None), authority.certificate.read_bytes())
        outside, inside = socket.socketpair()
        outside.setblocking(False)
        serving = loop.run_in_executor(None, answer, authority.server("a.test"), inside)
        stream, _ = await shared._secure(TerminatedPlace("https", "a.test", 443), outside, [b"http/1.1"])
        number, (program, server) = outside.fileno(), socket.socketpair()
        stream.close()
        await serving
        with program, server, socket.socket(fileno=os.dup2(server.fileno(), number)) as same:
            program.sendall(b"what another program says")
            stream.close()
            return same.recv(100)

    assert asyncio.run(talk()) == b"what another program says"


def answer(context: ssl.SSLContext, connection: socket.socket) -> bool:
    """Say hello; return whether the client has resumed a session."""
    try:
        with context.wrap_socket(connection, server_side=True) as end:
            end.sendall(b"hello")
            end.recv(1)
            return bool(end.session_reused)
    except OSError:
        return False
