"""The output of agents as readable lines, on streams that the real programs wrote to a fake model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stockade.loop.recipes.recipe import recipe_for
from stockade.loop.recipes.streams import MOST_LINE, AgentEvent, AgentStream, RateLimit, stream
from support.paths import ROOT

RECORDED = ROOT / "tests" / "fixtures" / "agents"
COMMAND = "sed -i 's/a - b/a + b/' adding.py && cat adding.py"


def read(program: str, *data: bytes) -> tuple[AgentStream, list[tuple[str, str]]]:
    reader = stream(recipe_for([program]))
    events = [event for piece in data for event in reader.feed(piece)] + reader.finish()
    return reader, [(event.kind, event.text) for event in events]


def replay(name: str) -> tuple[AgentStream, list[tuple[str, str]]]:
    data = next(RECORDED.glob(f"{name}.*")).read_bytes()
    whole = read(name.partition("-")[0], data)
    byte_by_byte = read(name.partition("-")[0], *(data[at : at + 1] for at in range(len(data))))
    assert whole[1] == byte_by_byte[1], "where the stream is cut makes no difference"
    return whole


def line(**event: Any) -> bytes:
    return json.dumps(event).encode() + b"\n"


def test_claude_code_says_what_it_does_and_what_it_costs() -> None:
    reader, events = replay("claude-ok")
    assert events[1:] == [
        ("tool", f"Bash {COMMAND}"),
        ("output", "def add(a, b):"),
        ("output", "    return a + b"),
        ("text", "All done."),
    ]
    assert (reader.cost_usd, reader.input_tokens, reader.output_tokens, reader.turns) == (0.00035, 20, 10, 2)
    assert reader.rate_limited is None


def test_codex_says_what_it_does_and_how_many_tokens_it_took_but_no_cost() -> None:
    reader, events = replay("codex-ok")
    assert ("tool", f'/bin/sh -lc "{COMMAND}"') in events and events[-1] == ("text", "All done.")
    assert (reader.cost_usd, reader.input_tokens, reader.output_tokens, reader.turns) == (None, 20, 10, 1)


def test_gemini_cli_says_what_it_does() -> None:
    reader, events = replay("gemini-ok")
    assert events[1] == ("tool", f"run_shell_command {COMMAND}") and events[-1] == ("text", "All done.")
    assert (reader.cost_usd, reader.input_tokens, reader.output_tokens) == (None, 20, 10)


def test_aider_says_its_cost_in_its_text() -> None:
    reader, events = replay("aider-ok")
    assert (reader.cost_usd, reader.input_tokens, reader.output_tokens) == (0.0075, 2500, 3)
    assert ("text", "All done.") in events and reader.rate_limited is None
    reader, _ = read(
        "aider",
        b"Tokens: 4.2k sent, 1.1k cache hit, 120 received. Cost: $0.01 message, $0.01 session.\n"
        b"Tokens: 1,000 sent, 30 received. Cost: $0.02 message, $0.03 session.\n"
        b"Tokens: ... sent, ,, received.\n",
    )
    assert (reader.cost_usd, reader.input_tokens, reader.output_tokens) == (0.03, 5200, 150)


@pytest.mark.parametrize(
    ("name", "limit"),
    [
        ("claude-429", RateLimit(429, 7.0)),
        ("claude-529", RateLimit(529, 7.0)),
        ("codex-429", RateLimit(429)),
        ("aider-429", RateLimit(429)),
    ],
)
def test_a_rate_limit_is_seen_in_the_agents_own_events(name: str, limit: RateLimit) -> None:
    assert replay(name)[0].rate_limited == limit


def test_gemini_cli_says_on_stderr_that_it_has_to_wait() -> None:
    reader = stream(recipe_for(["gemini"]))
    reader.feed_stderr(b"Attempt 2 failed with status 429. Retrying with backoff... _ApiError: {}\n")
    assert reader.rate_limited == RateLimit(429)


def test_an_agent_that_tries_again_and_gets_through_is_not_limited() -> None:
    retry = line(type="system", subtype="api_retry", error_status=429, retry_delay_ms=1000)
    answer = line(type="assistant", message={"content": [{"type": "text", "text": "Hello."}]})
    assert read("claude", retry)[0].rate_limited == RateLimit(429, 1.0)
    assert read("claude", retry, answer)[0].rate_limited is None


def test_words_of_the_model_are_no_rate_limit() -> None:
    text = [{"type": "text", "text": "429 rate limit, try again in 5s"}]
    assert read("claude", line(type="assistant", message={"content": text}))[0].rate_limited is None
    said = {"type": "agent_message", "text": "429 rate limit"}
    assert read("codex", line(type="item.completed", item=said))[0].rate_limited is None
    assert read("./plain", b"429 rate limit\n")[0].rate_limited is None


@pytest.mark.parametrize("lie", [-1, 1e300, "5", True, None, [1], {"a": 1}])
def test_a_number_that_cannot_be_one_is_not_believed(lie: object) -> None:
    reader, _ = read(
        "claude", line(type="result", total_cost_usd=lie, num_turns=lie, usage={"input_tokens": lie})
    )
    assert (reader.cost_usd, reader.turns, reader.input_tokens) == (None, 0, 0)


def test_a_wait_is_a_day_at_most() -> None:
    reader, _ = read("codex", line(type="error", message="429, try again in 999999h"))
    assert reader.rate_limited == RateLimit(429, 86_400.0)


@pytest.mark.parametrize("program", ["claude", "codex", "gemini", "aider", "./plain"])
def test_nothing_that_a_terminal_would_obey_gets_through(program: str) -> None:
    evil = "\x1b]52;c;cm0gLXJm\x07\x9b31m\u202eright to left\r\x00\u200b"
    data = b"".join(
        [
            evil.encode() + b"\xff\xfe\n",
            line(type="assistant", message={"content": [{"type": "text", "text": evil}]}),
            line(type="assistant", message={"content": [{"type": "tool_use", "name": evil, "input": evil}]}),
            line(type="item.completed", item={"type": "agent_message", "text": evil}),
            line(type="message", role="assistant", content=evil),
            line(type="tool_use", tool_name=evil, parameters={"command": evil}),
            line(type="error", message=evil),
            line(type="result", is_error=True, result=evil, status="error", error={"message": evil}),
        ]
    )  # fmt: skip
    _, events = read(program, data)
    assert events and all(text.isprintable() for _, text in events)


def test_a_line_without_end_is_left_out_and_takes_no_more_memory_than_a_line() -> None:
    reader = stream(recipe_for(["claude"]))
    for _ in range(50):
        assert reader.feed(b'{"type":' * 10_000) == []
    assert len(reader._lines._line) == MOST_LINE
    assert reader.feed(b"\n") == [AgentEvent("note", "a line of more than 1 MiB was left out")]
    assert reader.feed(b"after\n") == [AgentEvent("text", "after")]


def test_a_text_of_many_lines_is_cut_and_says_so() -> None:
    _, events = read("claude", line(type="assistant", message={"content": [{"text": "x\n" * 1000}]}))
    assert len(events) == 201 and events[-1] == ("note", "… and 800 more lines")


def test_output_that_the_user_wants_as_text_is_text() -> None:
    recipe = recipe_for(["claude", "--output-format", "text"])
    assert recipe.output == "text"
    assert "stream-json" not in recipe.describe()


def test_recordings_are_there() -> None:
    assert {path.stem for path in Path(RECORDED).iterdir()} == {
        "aider-ok", "aider-429", "claude-ok", "claude-429", "claude-529", "codex-ok", "codex-429", "gemini-ok"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("status", "limit"),
    [(b"429.0", 429), (b'"429"', None), (b"-1e300", None), (b"null", None), (b"[" * 993 + b"]" * 993, None)],
)
def test_a_status_of_any_type_is_a_rate_limit_or_nothing(status: bytes, limit: int | None) -> None:
    for event in (
        b'{"type": "system", "subtype": "api_retry", "error_status": %s}\n',
        b'{"type": "result", "is_error": true, "api_error_status": %s}\n',
    ):
        found = read("claude", event % status)[0].rate_limited
        assert (None if found is None else found.status) == limit
