"""Requests of a program that speaks HTTP/1 to a server that speaks HTTP/2."""

from __future__ import annotations

import h2.config
import h2.connection
import h2.events
import h2.settings
import pytest
from hpack import Encoder as HpackEncoder

from stockade.egress.termination.http2_side import WINDOW
from support.http_pipes import ONE_TO_TWO, Passage, pass_through

HOST = b"a.test"


def head(method: str = "GET", target: str = "/ok/x", more: str = "") -> bytes:
    return f"{method} {target} HTTP/1.1\r\nHost: a.test\r\n{more}\r\n".encode()


class Server:
    """A server that answers each request once it has ended, and HTTP/1.1 with a WebSocket."""

    answers = True

    def __init__(
        self, *, window: int = 65535, leaves: bool = False, length: bool = True, body: bytes = b"ok"
    ) -> None:
        self._window, self._leaves, self._length, self._body = window, leaves, length, body
        self.requests: list[tuple[dict[bytes, bytes], bytes, dict[bytes, bytes]]] = []
        self.connections = self.pings = 0
        self._open: dict[int, tuple[dict[bytes, bytes], bytearray, dict[bytes, bytes]]] = {}

    def answer(self, data: bytes) -> bytes:
        if data.startswith(b"GET "):
            return (
                b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\nframe"
            )
        if data.startswith(b"PRI"):
            self.connections += 1
            config = h2.config.H2Configuration(client_side=False, header_encoding=None)
            self._http = h2.connection.H2Connection(config)
            self._http.initiate_connection()
            self._http.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: self._window})
            self._http.ping(b"12345678")
        for event in self._http.receive_data(data):
            self._take(event)
        return self._http.data_to_send()

    def _take(self, event: h2.events.Event) -> None:
        if isinstance(event, h2.events.RequestReceived):
            self._open[event.stream_id] = dict(event.headers), bytearray(), {}
        elif isinstance(event, h2.events.DataReceived):
            self._open[event.stream_id][1].extend(event.data)
            self._http.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        elif isinstance(event, h2.events.TrailersReceived):
            self._open[event.stream_id][2].update(event.headers)
        elif isinstance(event, h2.events.PingAckReceived):
            self.pings += 1
        elif isinstance(event, h2.events.StreamEnded):
            fields, body, trailers = self._open.pop(event.stream_id)
            self.requests.append((fields, bytes(body), trailers))
            if not self.answers:
                return
            more = [(b"content-length", b"%d" % len(self._body))] if self._length else []
            self._http.send_headers(event.stream_id, [(b":status", b"200"), (b"x", b"y"), *more])
            self._http.send_data(event.stream_id, self._body, end_stream=self._length)
            if not self._length:
                self._http.send_headers(event.stream_id, [(b"x-sum", b"1")], end_stream=True)
            if self._leaves:
                self._http.close_connection()


def talk(server: Server, *sent: bytes) -> Passage:
    return pass_through(ONE_TO_TWO, sent, server.answer, pause=0.05)


def test_all_requests_share_one_connection_with_bodies_or_without() -> None:
    server = Server()
    hidden = head("DELETE", "/admin")
    found = talk(
        server,
        head() + head("POST", more=f"Content-Length: {len(hidden)}\r\n") + hidden,
        head("POST", more="Transfer-Encoding: chunked\r\n") + b"3\r\nabc\r\n0\r\nX-Sum: 1\r\n\r\n" + head(),
    )
    assert server.connections == 1 and server.pings == 1
    assert [(one[b":method"], body) for one, body, _ in server.requests] == [
        (b"GET", b""), (b"POST", hidden), (b"POST", b"abc"), (b"GET", b""),
    ]  # fmt: skip
    assert {one[b":path"] for one, _, _ in server.requests} == {b"/ok/x"}
    assert server.requests[1][0][b"content-length"] == b"%d" % len(hidden)
    assert server.requests[2][2] == {b"x-sum": b"1"}
    assert {one[b":authority"] for one, _, _ in server.requests} == {HOST}
    assert found.said == b"HTTP/1.1 200 OK\r\nx: y\r\ncontent-length: 2\r\n\r\nok" * 4


def test_a_long_body_waits_for_the_servers_window() -> None:
    server = Server(window=1000)
    body = bytes(range(256)) * 1000
    found = talk(server, head("POST", more=f"Content-Length: {len(body)}\r\n") + body)
    assert server.requests[0][1] == body and found.said.endswith(b"ok")


def test_a_program_may_send_all_of_its_body_before_it_reads_a_long_response() -> None:
    """What opens the window for its body comes behind the response, which nobody takes yet."""
    server, left, size = Server(window=1000), [1 << 20], 1 << 20

    def answer(data: bytes) -> bytes:
        said = server.answer(data)
        http = server._http
        if server._open and left[0] == size:
            http.send_headers(1, [(b":status", b"200"), (b"content-length", b"%d" % size)])
        while server.requests or server._open:
            room = min(http.local_flow_control_window(1), 16384, left[0])
            if room <= 0:
                break
            left[0] -= room
            http.send_data(1, b"x" * room, end_stream=not left[0])
        return said + http.data_to_send()

    server.answers = False
    sent = head("POST", more=f"Content-Length: {size}\r\n") + bytes(size)
    found = pass_through(ONE_TO_TWO, [sent], answer, reads_last=True)
    assert len(server.requests[0][1]) == size and found.said.count(b"x") == size


def test_a_response_without_a_length_comes_in_chunks_with_its_trailers() -> None:
    found = talk(Server(length=False), head())
    assert found.said.endswith(b"transfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\nx-sum: 1\r\n\r\n")


def test_a_connection_carries_more_than_its_window() -> None:
    server = Server(body=b"x" * 16384)
    found = talk(server, head() * (WINDOW // 16384 + 2))
    assert server.connections == 1 and found.said.count(b"x" * 16384) == WINDOW // 16384 + 2


def test_a_server_that_wants_no_more_gets_the_next_request_on_another_connection() -> None:
    server = Server(leaves=True)
    found = talk(server, head() + head() + head())
    assert server.connections == 3 and found.said.count(b"HTTP/1.1 200") == 3


def test_a_websocket_has_a_connection_with_http1() -> None:
    server = Server()
    found = talk(server, head(), head(more="Connection: Upgrade\r\nUpgrade: websocket\r\n"), b"bytes")
    assert found.reached[1].endswith(b"upgrade: websocket\r\n\r\nbytes")
    assert found.said.endswith(b"\r\n\r\nframe") and b"HTTP/1.1 101" in found.said


@pytest.mark.parametrize(
    "fields",
    [
        [(b":status", b"200"), (b"te", b"a-value-of-a-secret")],
        [(b":status", b"200"), (b"x-echo", b" a-value-of-a-secret")],
        [(b":status", b"200"), (b"x echo a-value-of-a-secret", b"")],
        [(b":status", b"200"), (b"content-length", b"a-value-of-a-secret")],
        [(b":status", b"000"), (b"x-echo", b"y")],
    ],
)
def test_a_refusal_of_a_response_says_nothing_of_what_is_in_it(fields: list[tuple[bytes, bytes]]) -> None:
    block = HpackEncoder().encode(fields)
    settings, frame = bytes.fromhex("000000040000000000"), len(block).to_bytes(3) + b"\x01\x05\0\0\0\x01"

    found = pass_through(ONE_TO_TWO, [head()], lambda _: settings + frame + block)
    assert found.said.startswith(b"HTTP/1.1 502") and b"secret" not in found.said


def test_a_response_that_http2_does_not_allow_is_refused() -> None:
    def answer(data: bytes) -> bytes:
        return b"\x00\x00\x00\x04\x00\x00\x00\x00\x00" + b"\x00\x00\x01\x01\x05\x00\x00\x00\x01\x80"

    found = pass_through(ONE_TO_TWO, [head()], answer)
    assert found.said.startswith(b"HTTP/1.1 502") and found.judged[-1].reason == "bad response"
