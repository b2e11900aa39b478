"""Requests of HTTP/2: what a program gets from here, and what its server never sees."""

from __future__ import annotations

import h2.config
import h2.connection
import h2.events
import h2.settings
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


def test_a_program_cannot_have_a_large_table_of_headers_kept_for_it() -> None:
    """Its server would fill the table, with headers that are searched one by one for each response."""
    program, server = (
        h2.connection.H2Connection(h2.config.H2Configuration(client_side=one, header_encoding=None))
        for one in (True, False)
    )
    fields = [(f"x-{number}", "y" * 100) for number in range(200)]

    def answer(data: bytes) -> bytes:
        if data.startswith(b"PRI"):
            server.initiate_connection()
        for event in server.receive_data(data):
            if isinstance(event, h2.events.StreamEnded):
                server.send_headers(event.stream_id, [(":status", "200"), *fields], end_stream=True)
        return server.data_to_send()

    program.initiate_connection()
    program.update_settings({h2.settings.SettingCodes.HEADER_TABLE_SIZE: 1 << 24})
    for number in (1, 3, 5):
        program.send_headers(number, REQUEST, end_stream=True)
    found = pass_through(TWO, [program.data_to_send(), b""], answer, pause=0.2)
    heads = [
        len(event.headers)
        for event in program.receive_data(found.said)
        if isinstance(event, h2.events.ResponseReceived)
    ]
    assert heads == [201] * 3
    assert len(found.said) > 3 * 10_000, "headers of earlier responses were kept"
