"""`AgentStream`: an agent's own output as readable lines, with its cost, tokens and rate limits.

The agent writes these bytes, and so does everything that it runs: they may hold anything. A line is bounded,
and so is what is kept of one; text is cleaned of what a terminal would obey; numbers are checked. All of it
can be forged from inside, so it serves people and budgets, never the judge. A forged cost ends an attempt
early or late; the loop's own limits of time and attempts hold whatever it says.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from stockade.linux.plain_text import clean_line
from stockade.loop.recipes.recipe import Output, Recipe

EventKind = Literal["text", "tool", "output", "note", "error"]

#: The most bytes of a line; a longer one is left out, and an event says so.
MOST_LINE = 1 << 20
#: The most characters of a readable line, and lines of one text.
MOST_SHOWN = 2000
MOST_LINES = 200
#: The largest cost, number of tokens or of turns that is believed.
MOST_NUMBER = 1e12
#: The longest wait that a rate limit asks for: a day.
MOST_WAIT = 86_400.0


class AgentEvent(msgspec.Struct, frozen=True):
    """One readable line: what the agent says, what it runs, what that printed, or what happened to it."""

    kind: EventKind
    text: str


class RateLimit(msgspec.Struct, frozen=True):
    """The model's host refused because of too many requests (429) or too much load (529).

    `seconds` is how long it asked to wait, if it said so.
    """

    status: int
    seconds: float | None = None


class _Lines:
    """Cuts a stream into lines, of which it holds one, bounded."""

    def __init__(self) -> None:
        self._line = bytearray()
        self._too_long = False

    def feed(self, data: bytes) -> Iterator[bytes | None]:
        """Yield the lines that a piece completes; None is one that was too long."""
        *lines, rest = data.split(b"\n")
        for line in lines:
            self._append(line)
            yield from self.finish()
        self._append(rest)

    def finish(self) -> Iterator[bytes | None]:
        """Yield the line so far, unless it is blank."""
        line, too_long = bytes(self._line).rstrip(b"\r"), self._too_long
        self._line.clear()
        self._too_long = False
        if too_long or line.strip():
            yield None if too_long else line

    def _append(self, data: bytes) -> None:
        room = MOST_LINE - len(self._line)
        self._too_long |= len(data) > room
        self._line += data[:room]


class AgentStream:
    """Reads the output of one agent, piece by piece.

    `cost_usd` is None as long as the agent has not said it. `rate_limited` is set while the last thing that
    the model's host said was to wait: an agent that tries again by itself and gets through clears it.
    """

    def __init__(self) -> None:
        self.cost_usd: float | None = None
        self.input_tokens = 0
        self.output_tokens = 0
        self.turns = 0
        self.rate_limited: RateLimit | None = None
        self._lines, self._error_lines = _Lines(), _Lines()

    def feed(self, data: bytes) -> list[AgentEvent]:
        """Take a piece of the agent's stdout and return the lines that it completes."""
        return [event for line in self._lines.feed(data) for event in self._read_bounded(line)]

    def feed_stderr(self, data: bytes) -> list[AgentEvent]:
        """Take a piece of the agent's stderr and return the lines that it completes."""
        return [event for line in self._error_lines.feed(data) for event in self._read_stderr(line)]

    def finish(self) -> list[AgentEvent]:
        """Return what the last lines say, which no newline has ended."""
        found = [event for line in self._lines.finish() for event in self._read_bounded(line)]
        found += self._left()
        return found + [event for line in self._error_lines.finish() for event in self._read_stderr(line)]

    def _read_bounded(self, line: bytes | None) -> Iterator[AgentEvent]:
        if line is None:
            yield AgentEvent("note", f"a line of more than {MOST_LINE >> 20} MiB was left out")
        else:
            yield from self._read(line)

    def _read_stderr(self, line: bytes | None) -> Iterator[AgentEvent]:
        if line is not None:
            yield from shown("note", line.decode("utf-8", "replace"))

    def _left(self) -> Iterator[AgentEvent]:
        """Yield what is still held of a text that comes in pieces."""
        yield from ()

    def _read(self, line: bytes) -> Iterator[AgentEvent]:
        """Read one line that is not empty: plain text, if no agent's reader knows better."""
        yield from shown("text", line.decode("utf-8", "replace"))

    def _limit(self, status: object, seconds: float | None = None) -> bool:
        """Note a rate limit, if this status is one."""
        # JSON may write it as 429.0, which equals 429.
        if not isinstance(status, int | float) or status not in (429, 529):
            return False
        known = None if self.rate_limited is None else self.rate_limited.seconds
        self.rate_limited = RateLimit(int(status), seconds if seconds is not None else known)
        return True


class _Json(AgentStream):
    """Reads JSON lines; a line that is none is plain text."""

    def _read(self, line: bytes) -> Iterator[AgentEvent]:
        try:
            event = msgspec.json.decode(line)
        except (msgspec.DecodeError, ValueError, RecursionError):
            event = None
        if isinstance(event, dict):
            yield from self._event(_Table(event))
        else:
            yield from super()._read(line)

    def _event(self, event: _Table) -> Iterator[AgentEvent]:
        raise NotImplementedError


class _Table:
    """A JSON object whose fields may be anything."""

    def __init__(self, fields: Any) -> None:
        self._fields: dict[str, Any] = fields if isinstance(fields, dict) else {}

    def raw(self, name: str) -> Any:
        return self._fields.get(name)

    def text(self, *names: str) -> str:
        """Return the first of these fields that is text."""
        return next((v for name in names if isinstance(v := self._fields.get(name), str)), "")

    def table(self, name: str) -> _Table:
        return _Table(self._fields.get(name))

    def tables(self, name: str) -> list[_Table]:
        value = self._fields.get(name)
        return [_Table(one) for one in value if isinstance(one, dict)] if isinstance(value, list) else []

    def number(self, name: str) -> float | None:
        """Return a field if it is a number that can be a cost, a count or a time."""
        value = self._fields.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        return float(value) if 0 <= value <= MOST_NUMBER and math.isfinite(value) else None

    def count(self, *names: str) -> int:
        """Return the sum of these fields, as far as they are numbers."""
        return sum(int(self.number(name) or 0) for name in names)

    def flat(self, name: str) -> str:
        """Return a field as text, also if it is a list of texts or blocks of text."""
        value = self._fields.get(name)
        if isinstance(value, list):
            return "\n".join(one if isinstance(one, str) else _Table(one).text("text") for one in value)
        return value if isinstance(value, str) else ""


class _Claude(_Json):
    """Claude Code's `--output-format stream-json`."""

    _message = ""
    #: The last text of the agent: the result repeats it.
    _said = ""

    def _event(self, event: _Table) -> Iterator[AgentEvent]:
        kind = event.text("type")
        if kind == "assistant":
            yield from self._assistant(event)
        elif kind == "user":
            self._message = ""
            for block in event.table("message").tables("content"):
                failed = block.raw("is_error") is True
                yield from shown("error" if failed else "output", block.flat("content"))
        elif kind == "result":
            yield from self._result(event)
        elif kind == "system" and event.text("subtype") == "init":
            yield from shown(
                "note", f"Claude Code {event.text('claude_code_version')}, {event.text('model')}"
            )
        elif kind == "system" and event.text("subtype") == "api_retry":
            delay, status = event.number("retry_delay_ms"), event.count("error_status")
            self._limit(status, None if delay is None else min(delay / 1000, MOST_WAIT))
            answer = f"answered {status}" if status else "did not answer"
            yield from shown("note", f"the model's host {answer}, trying again")

    def _assistant(self, event: _Table) -> Iterator[AgentEvent]:
        message = event.table("message")
        if event.text("error") == "rate_limit":
            self._limit(429)
        elif not event.text("error"):
            self.rate_limited = None
        # One message comes in several events, one for each of its blocks, each with the usage so far.
        if not self._message or message.text("id") != self._message:
            self._message = message.text("id")
            self.turns += 1
            self._add_usage(message.table("usage"))
        for block in message.tables("content"):
            if block.text("type") == "tool_use":
                yield from shown("tool", f"{block.text('name')} {_arguments(block.raw('input'))}")
            else:
                self._said = block.text("text")
                yield from shown("error" if event.text("error") else "text", self._said)

    def _result(self, event: _Table) -> Iterator[AgentEvent]:
        self.cost_usd = event.number("total_cost_usd")
        self.turns = event.count("num_turns")
        self.input_tokens = self.output_tokens = 0
        self._add_usage(event.table("usage"))
        if event.raw("is_error") is not True:
            self.rate_limited = None
            return
        self._limit(event.raw("api_error_status"))
        if (words := event.text("result", "subtype")) != self._said:
            yield from shown("error", words)

    def _add_usage(self, usage: _Table) -> None:
        self.input_tokens += usage.count(
            "input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens"
        )
        self.output_tokens += usage.count("output_tokens")


_STATUS = re.compile(r"\b(429|529)\b|rate.?limit|too many requests|resource.{0,10}exhausted", re.IGNORECASE)
_AGAIN = re.compile(r"(?:try again|retry) (?:in|after) (\d{1,6}(?:\.\d{1,6})?) ?(ms|s|m|h)?", re.IGNORECASE)
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


def _status(words: str) -> tuple[int, float | None]:
    """Return the status that an agent's error is about, 0 if it is no rate limit, and the wait it names."""
    found = _STATUS.search(words[:MOST_SHOWN])
    again = _AGAIN.search(words[:MOST_SHOWN])
    seconds = float(again[1]) * _UNITS[(again[2] or "s").lower()] if again else None
    wait = None if seconds is None else min(seconds, MOST_WAIT)
    return (int(found[1] or 429), wait) if found else (0, None)


class _Codex(_Json):
    """Codex's `exec --json`."""

    def _event(self, event: _Table) -> Iterator[AgentEvent]:
        kind, item = event.text("type"), event.table("item")
        if kind == "turn.completed":
            self.turns += 1
            self.rate_limited = None
            self.input_tokens += event.table("usage").count("input_tokens")
            self.output_tokens += event.table("usage").count("output_tokens")
        elif kind in ("error", "turn.failed"):
            words = event.text("message") or event.table("error").text("message")
            self._limit(*_status(words))
            yield from shown("error", words)
        elif kind == "item.started" and item.text("type") == "command_execution":
            yield from shown("tool", item.text("command"))
        elif kind == "item.completed":
            yield from self._item(item)

    def _item(self, item: _Table) -> Iterator[AgentEvent]:
        match item.text("type"):
            case "agent_message":
                self.rate_limited = None
                yield from shown("text", item.text("text"))
            case "command_execution":
                failed = item.raw("exit_code") not in (0, None)
                yield from shown("error" if failed else "output", item.text("aggregated_output"))
            case "file_change":
                for change in item.tables("changes"):
                    yield from shown("tool", f"{change.text('kind')} {change.text('path')}")
            case "error":
                yield from shown("error", item.text("message"))
            case "mcp_tool_call":
                yield from shown("tool", f"{item.text('server')} {item.text('tool')}")


class _Gemini(_Json):
    """Gemini CLI's `--output-format stream-json`; it says on stderr that it tries again."""

    #: What the agent says comes in pieces, which are joined to lines.
    _text = ""

    def _event(self, event: _Table) -> Iterator[AgentEvent]:
        kind = event.text("type")
        if kind == "message" and event.text("role") == "assistant":
            self.rate_limited = None
            self._text += event.flat("content")
            if event.raw("delta") is True and len(self._text) < MOST_SHOWN:
                return
        yield from self._left()
        match kind:
            case "tool_use":
                self.rate_limited = None
                self.turns += 1
                yield from shown("tool", f"{event.text('tool_name')} {_arguments(event.raw('parameters'))}")
            case "tool_result":
                failed = event.text("status") == "error"
                words = event.flat("output") or event.table("error").text("message")
                yield from shown("error" if failed else "output", words)
            case "error":
                yield from self._error(event.text("message"))
            case "init":
                yield from shown("note", f"Gemini CLI, {event.text('model')}")
            case "result":
                stats = event.table("stats")
                self.input_tokens = stats.count("input_tokens")
                self.output_tokens = stats.count("output_tokens")
                self.turns += 1
                if event.text("status") == "error":
                    yield from self._error(event.table("error").text("message"))

    def _left(self) -> Iterator[AgentEvent]:
        words, self._text = self._text, ""
        yield from shown("text", words)

    def _error(self, words: str) -> Iterator[AgentEvent]:
        self._limit(*_status(words))
        yield from shown("error", words)

    def _read_stderr(self, line: bytes | None) -> Iterator[AgentEvent]:
        if line is not None and (found := _GEMINI_RETRY.match(line)):
            self._limit(int(found[1]))
        yield from super()._read_stderr(line)


_GEMINI_RETRY = re.compile(rb"Attempt \d{1,9} failed with status (\d{3})\b")
_AIDER_COST = re.compile(
    rb"Tokens: ([\d.,]{1,12}[kM]?) sent,.{0,80}? ([\d.,]{1,12}[kM]?) received\."
    rb"(?: Cost: \$[\d.,]{1,12} message, \$([\d.,]{1,12}) session\.)?"
)


class _Aider(AgentStream):
    """Aider's text, with the line that sums up each answer."""

    def _read(self, line: bytes) -> Iterator[AgentEvent]:
        if line.startswith(b"litellm.RateLimitError"):
            self._limit(429)
        elif found := _AIDER_COST.match(line):
            self.rate_limited = None
            self.turns += 1
            self.input_tokens += int(_aider_number(found[1]))
            self.output_tokens += int(_aider_number(found[2]))
            if found[3]:
                self.cost_usd = _aider_number(found[3])
        yield from super()._read(line)


def _aider_number(written: bytes) -> float:
    scale = {b"k": 1e3, b"M": 1e6}.get(written[-1:], 1.0)
    try:
        return float(written.rstrip(b"kM").replace(b",", b"")) * scale
    except ValueError:  # dots alone
        return 0.0


_READERS: dict[Output, type[AgentStream]] = {
    "claude": _Claude,
    "codex": _Codex,
    "gemini": _Gemini,
    "aider": _Aider,
    "text": AgentStream,
}


def stream(recipe: Recipe) -> AgentStream:
    """Return a reader for the output of an agent that is started by this recipe."""
    return _READERS[recipe.output]()


def shown(kind: EventKind, words: str) -> Iterator[AgentEvent]:
    """Yield the lines of a text as events, cleaned and bounded."""
    lines = [line for line in words.split("\n", MOST_LINES) if line.strip()]
    for line in lines[:MOST_LINES]:
        cut = "…" if len(line) > MOST_SHOWN else ""
        yield AgentEvent(kind, clean_line(line[:MOST_SHOWN].rstrip()) + cut)
    if words.count("\n") > MOST_LINES:
        yield AgentEvent("note", f"… and {words.count(chr(10)) - MOST_LINES} more lines")


def _arguments(value: Any) -> str:
    """Return the arguments of a tool on one line: a lone command or path as it is."""
    if isinstance(value, dict):
        for name in ("command", "file_path", "path", "pattern", "url"):
            if isinstance(value.get(name), str):
                return str(value[name][:MOST_SHOWN])
    try:
        return msgspec.json.encode(value)[:MOST_SHOWN].decode("utf-8", "replace")
    except (TypeError, ValueError, RecursionError, msgspec.MsgspecError):
        return ""
