"""How the client reads the events of a run."""

from __future__ import annotations

import json

import pytest

from stockade import Outcome
from stockade.client import ServerError, UnreachableError
from stockade.client.event_stream import EventCollector


def stream(*events: dict[str, object]) -> bytes:
    return b"".join(json.dumps({"timestamp": 1} | event).encode() + b"\n\n" for event in events)


INIT = {"type": "init", "text": "7"}
COMPLETE = {"type": "execution_complete", "execution_time": 1500}


def failure(name: str, value: str, *traceback: str) -> dict[str, object]:
    return {"type": "error", "error": {"ename": name, "evalue": value, "traceback": list(traceback)}}


def collected(data: bytes, step: int = 0) -> EventCollector:
    events = EventCollector()
    for start in range(0, len(data), step or len(data)):
        events.feed(data[start : start + (step or len(data))])
    return events


@pytest.mark.parametrize("step", [0, 1, 7])
def test_the_pieces_of_the_output_are_joined_however_the_stream_is_cut(step: int) -> None:
    data = stream(
        INIT,
        {"type": "stdout", "text": "a\n"},
        {"type": "stderr", "text": "é\r\n"},
        {"type": "stdout", "text": "\u2028b"},
        COMPLETE,
    )
    result = collected(data, step).result()
    assert (result.id, result.text, result.stderr_text, result.duration) == ("7", "a\n\u2028b", "é\r\n", 1.5)
    assert result.ok


def test_handlers_get_the_text_as_it_comes() -> None:
    texts: list[str] = []
    events = EventCollector(on_stdout=texts.append, on_stderr=lambda text: texts.append(f"! {text}"))
    events.feed(stream(INIT, {"type": "stdout", "text": "a"}, {"type": "stderr", "text": "b"}))
    assert texts == ["a", "! b"]


def test_a_failure_has_the_exit_code_that_the_server_gives() -> None:
    result = collected(stream(INIT, failure("CommandExecError", "3", "exit status 3"))).result()
    assert (result.outcome, result.exit_code, result.ok) == (Outcome.EXITED, 3, False)


def test_a_stream_that_is_cut_off_has_no_result() -> None:
    with pytest.raises(UnreachableError, match="before the run did"):
        collected(stream(INIT, {"type": "stdout", "text": "done"})).result()


def test_pings_and_unknown_events_mean_nothing() -> None:
    ping = {"type": "ping", "text": "pong"}
    assert collected(stream(INIT, ping, {"type": "weather", "text": "rain"}, COMPLETE)).result().text == ""


def test_an_event_that_is_no_json_is_an_error() -> None:
    with pytest.raises(ServerError, match="cannot be read"):
        EventCollector().feed(b"data: x\n")


def test_code_has_its_displays_and_its_last_value() -> None:
    picture = {"type": "result", "results": {"image/png": "aGk="}}
    value = {"type": "result", "results": {"text": "4"}}
    result = collected(stream(INIT, picture, value, COMPLETE)).code_result()
    assert result.value_text == "4" and result.displays[0] == {"image/png": "aGk="}


def test_code_that_raises_says_what() -> None:
    events = stream(INIT, failure("NameError", "name 'x' is not defined", "line 1"), COMPLETE)
    result = collected(events).code_result()
    assert result.error is not None and not result.ok
    assert (result.error.type, result.error.traceback) == ("NameError", ("line 1",))


def test_a_server_of_ours_says_how_the_run_ended() -> None:
    late = failure("CommandExecError", "124", "ended after 1 s, its time limit")
    late["error"]["outcome"] = "timed-out"
    result = collected(stream(INIT, late)).result()
    assert (result.outcome, result.exit_code) == (Outcome.TIMED_OUT, 124)
