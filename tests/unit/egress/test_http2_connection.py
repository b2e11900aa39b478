"""Requests of HTTP/2: what a program gets from here, and what its server never sees."""

from __future__ import annotations

import h2.config
import h2.connection
import h2.events
import pytest

from support.http_pipes import HOST, TWO, pass_through

REQUEST = [(":method", "POST"), (":scheme", "https"), (":authority", HOST), (":path", "/ok/x")]


@pytest.mark.parametrize(("value", "statuses"), [("100-continue", [b"100", b"204"]), ("more", [b"400"])])
def test_expect_is_answered_here(value: str, statuses: list[bytes]) -> None:
    program, server = (
        h2.connection.H2Connection(h2.config.H2Configuration(client_side=one, header_encoding=None))
        for one in (True, False)
    )
    seen: list[dict[bytes, bytes]] = []

    def answer(data: bytes) -> bytes:
        if data.startswith(b"PRI"):
            server.initiate_connection()
        for event in server.receive_data(data):
            if isinstance(event, h2.events.RequestReceived):
                seen.append(dict(event.headers))
                server.send_headers(event.stream_id, [(":status", "100")])
            elif isinstance(event, h2.events.StreamEnded):
                server.send_headers(event.stream_id, [(":status", "204")], end_stream=True)
        return server.data_to_send()

    program.initiate_connection()
    program.send_headers(1, [*REQUEST, ("expect", value)])
    first = program.data_to_send()
    program.send_data(1, b"hello", end_stream=True)
    found = pass_through(TWO, [first, program.data_to_send(), b""], answer, pause=0.2)
    heads = [
        dict(event.headers)[b":status"]
        for event in program.receive_data(found.said)
        if isinstance(event, h2.events.ResponseReceived | h2.events.InformationalResponseReceived)
    ]
    assert heads == statuses
    assert [b"expect" in one for one in seen] == [False] * (len(statuses) - 1)
