"""Read the event streams of the server as a plain client does."""

from __future__ import annotations

import json
from typing import Any

import httpx

#: A client whose texts keep their line endings, and one whose texts do not.
KEEPS = {"User-Agent": "OpenSandbox-Python-SDK/1.1.1"}
CUTS = {"User-Agent": "OpenSandbox-Python-SDK/1.1.0"}


class EventsRead:
    """The events of one finished stream."""

    def __init__(self, answer: httpx.Response) -> None:
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"] == "text/event-stream"
        self.events: list[dict[str, Any]] = [json.loads(line) for line in answer.text.split("\n") if line]
        assert all(type(event["timestamp"]) is int for event in self.events)

    @property
    def types(self) -> list[str]:
        """The types of the events, without pings."""
        return [event["type"] for event in self.events if event["type"] != "ping"]

    @property
    def id(self) -> str:
        """What `init` said."""
        assert self.events[0]["type"] == "init"
        return str(self.events[0]["text"])

    def texts(self, stream: str = "stdout") -> list[str]:
        """The texts of one stream."""
        return [event["text"] for event in self.events if event["type"] == stream]

    @property
    def error(self) -> dict[str, Any]:
        """The error of the run, which is there once."""
        (found,) = [event["error"] for event in self.events if event["type"] == "error"]
        return dict(found)

    @property
    def exit_code(self) -> int:
        """The exit code as the SDKs find it; the stream must have exactly one terminal event, at its end."""
        ends = [kind for kind in self.types if kind in ("error", "execution_complete")]
        assert len(ends) == 1 and self.types[-1] == ends[0]
        return 0 if ends == ["execution_complete"] else int(self.error["evalue"])


def command(execd: httpx.Client, command: str, headers: dict[str, str] = KEEPS, **more: Any) -> EventsRead:
    """Run a command in the foreground."""
    return EventsRead(execd.post("/command", json={"command": command, **more}, headers=headers))
