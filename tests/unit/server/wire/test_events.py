"""The event stream of a run: its frames, its one end, and its patience with slow clients."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from stockade.server.wire import events
from stockade.server.wire.events import EventResponse, EventStream
from stockade.server.wire.line_endings import LONGEST_TEXT, LineRule


async def _collected(stream: EventStream) -> bytes:
    return b"".join([piece async for piece in stream.pieces()])


def sent(*, code: bool = False, rule: LineRule = LineRule.KEEP, act: Callable[[EventStream], None]) -> bytes:
    """Return the bytes of a stream on which `act` was called."""

    async def main() -> bytes:
        stream = EventStream(rule, code=code)
        act(stream)
        return await _collected(stream)

    return asyncio.run(main())


def parsed(data: bytes) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in data.split(b"\n") if line]
    for event in found:
        assert type(event.pop("timestamp")) is int
    return found


def test_each_event_is_one_bare_json_line_and_a_blank_one() -> None:
    def act(stream: EventStream) -> None:
        stream.init("an id")
        stream.stdout(b"hello\n")
        stream.complete(12.4)

    data = sent(act=act)
    assert data.startswith(b'{"type":"init","text":"an id","timestamp":')
    assert data.count(b"\n\n") == 3 and data.endswith(b"}\n\n")
    assert parsed(data) == [
        {"type": "init", "text": "an id"},
        {"type": "stdout", "text": "hello\n"},
        {"type": "execution_complete", "execution_time": 12},
    ]


def test_a_failure_is_one_error_with_the_exit_code_and_nothing_after_it() -> None:
    def act(stream: EventStream) -> None:
        stream.error("CommandExecError", "3", ["exited with 3"])
        stream.complete(1)
        stream.error("CommandExecError", "4")
        stream.stdout(b"late\n")

    assert parsed(sent(act=act)) == [
        {
            "type": "error",
            "error": {"ename": "CommandExecError", "evalue": "3", "traceback": ["exited with 3"]},
        }
    ]


def test_unfinished_lines_of_both_streams_come_before_the_end() -> None:
    def act(stream: EventStream) -> None:
        stream.stdout(b"out")
        stream.stderr(b"err")
        stream.complete(0)

    assert [event.get("text") for event in parsed(sent(act=act))] == ["out", "err", None]


def test_code_has_one_object_per_line_and_both_ends() -> None:
    def act(stream: EventStream) -> None:
        stream.execution_count(2)
        stream.result({"text": "4"})
        stream.error("NameError", "x", ["line"])
        stream.complete(5)

    data = sent(code=True, act=act)
    assert b"\n\n" not in data
    assert [event["type"] for event in parsed(data)] == [
        "execution_count",
        "result",
        "error",
        "execution_complete",
    ]


@pytest.mark.parametrize("letter", ["\x85", "\u2028", "\u2029", "\x0b", "\x0c", "\x1c", "\x1e"])
def test_no_character_of_the_output_can_end_a_line_of_the_stream(letter: str) -> None:
    def act(stream: EventStream) -> None:
        stream.stdout(f"a{letter}b\n".encode())
        stream.complete(0)

    data = sent(code=True, act=act)
    assert len(data.decode().splitlines()) == 2
    assert parsed(data)[0]["text"] == f"a{letter}b\n"


def test_a_name_with_bytes_that_are_no_text_does_not_break_the_stream() -> None:
    found = parsed(sent(act=lambda stream: stream.error("E", "caf\udce9", ["\udce9"])))
    assert found[0]["error"] == {"ename": "E", "evalue": "caf?", "traceback": ["?"]}


@pytest.mark.parametrize("letter", [b"\0", b"\xff", b"a", "é".encode()])
def test_no_line_of_the_stream_reaches_four_mebibytes(letter: bytes) -> None:
    def act(stream: EventStream) -> None:
        stream.stdout(letter * (3 * LONGEST_TEXT))
        stream.complete(0)

    data = sent(act=act)
    assert max(map(len, data.split(b"\n"))) < 4 << 20


def test_silence_is_filled_with_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "PING", 0.01)

    async def main() -> bytes:
        stream = EventStream(LineRule.KEEP)
        stream.init("id")
        collecting = asyncio.ensure_future(_collected(stream))
        await asyncio.sleep(0.1)
        stream.complete(0)
        return await collecting

    found = parsed(asyncio.run(main()))
    assert {"type": "ping", "text": "pong"} in found[1:-1]
    assert (found[0]["type"], found[-1]["type"]) == ("init", "execution_complete")


def test_a_slow_client_makes_the_sinks_full_until_it_has_read() -> None:
    async def main() -> None:
        stream = EventStream(LineRule.KEEP)
        resumed: list[str] = []
        stream.stdout.when_room(lambda: resumed.append("at once"))
        while not stream.stdout.full:
            stream.stdout(b"x" * 65535 + b"\n")
        assert stream.stderr.full
        stream.stderr.when_room(lambda: resumed.append("later"))
        assert resumed == ["at once"] and stream._size <= events.ROOM + (1 << 16)
        pieces = stream.pieces()
        while resumed == ["at once"]:
            await anext(pieces)
        assert not stream.stdout.full and stream._size <= events.ROOM // 2

    asyncio.run(main())


def test_a_million_empty_lines_wait_as_bytes_and_not_as_events() -> None:
    async def main() -> None:
        stream = EventStream(LineRule.KEEP)
        for _ in range(16):
            stream.stdout(b"\n" * 65536)
        assert sum(len(item.data) for item in stream._items if not isinstance(item, bytes)) == 1 << 20
        assert len(await anext(stream.pieces())) < 8 << 20

    asyncio.run(main())


class Wire:
    """The ASGI side of a client that reads, or leaves."""

    def __init__(self, leaves: asyncio.Event | None = None) -> None:
        self.messages: list[Any] = []
        self._leaves = leaves

    async def receive(self) -> Any:
        if self._leaves is None:
            await asyncio.get_running_loop().create_future()
        else:
            await self._leaves.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.messages.append(message)


def answer(stream: EventStream, gone: Callable[[], object], wire: Wire) -> Awaitable[None]:
    return EventResponse(stream, gone).to_asgi_response()({}, wire.receive, wire.send)  # type: ignore[arg-type]


def test_the_answer_ends_at_once_after_the_terminal_event() -> None:
    async def main() -> None:
        stream, wire, gone = EventStream(LineRule.KEEP), Wire(), list[str]()
        stream.init("id")
        asyncio.get_running_loop().call_later(0.01, stream.complete, 10)
        async with asyncio.timeout(1):
            await answer(stream, lambda: gone.append("gone"), wire)
        start, *bodies = wire.messages
        assert (b"content-type", b"text/event-stream") in start["headers"] and start["status"] == 200
        assert [body["more_body"] for body in bodies] == [True, True, False]
        assert gone == []

    asyncio.run(main())


def test_a_client_that_leaves_cancels_the_run_and_its_output_is_dropped() -> None:
    async def main() -> None:
        leaves, gone = asyncio.Event(), list[str]()
        stream, wire = EventStream(LineRule.KEEP), Wire(leaves)
        answering = asyncio.ensure_future(answer(stream, lambda: gone.append("gone"), wire))
        await asyncio.sleep(0.01)
        leaves.set()
        await answering
        assert gone == ["gone"]
        for _ in range(64):
            stream.stdout(b"x" * 65536)
        assert not stream.stdout.full and not stream._items

    asyncio.run(main())
