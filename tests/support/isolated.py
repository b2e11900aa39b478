"""Isolated sessions of a server under test: create one, run code in it, read its events."""

from __future__ import annotations

import io
import json
import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from support.server import ServedSandbox, ServerUnderTest

SESSIONS = "/v1/isolated/session"
#: A client whose texts keep their line endings.
USER_AGENT = {"User-Agent": "OpenSandbox-Python-SDK/1.1.1"}
#: The longest that something may take that happens by itself.
SECONDS = 20.0


class FinishedRun:
    """What a client knows about a run when its stream has ended."""

    def __init__(self, events: list[dict[str, Any]]) -> None:
        self.events = events

    @property
    def kinds(self) -> list[str]:
        return [event["type"] for event in self.events if event["type"] != "ping"]

    @property
    def stdout(self) -> str:
        return "".join(event["text"] for event in self.events if event["type"] == "stdout")

    @property
    def stderr(self) -> str:
        return "".join(event["text"] for event in self.events if event["type"] == "stderr")

    @property
    def error(self) -> dict[str, Any]:
        """The error, or {}."""
        return next((event["error"] for event in self.events if event["type"] == "error"), {})

    @property
    def exit_code(self) -> int:
        """As the published SDK finds it."""
        return int(self.error["evalue"]) if self.error else 0


class SessionUnderTest:
    """One session of a sandbox."""

    def __init__(self, sandbox: ServedSandbox, id: str) -> None:
        self.sandbox, self.id, self.http = sandbox, id, sandbox.execd
        self.path = f"{SESSIONS}/{id}"

    def run(self, code: str, **fields: Any) -> FinishedRun:
        """Run code and read its stream to the end."""
        answer = self.http.post(f"{self.path}/run", json={"code": code, **fields}, headers=USER_AGENT)
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].startswith("text/event-stream")
        return FinishedRun(events_of(answer.text))

    def text(self, code: str, **fields: Any) -> str:
        """Run code that must succeed, and return what it prints."""
        found = self.run(code, **fields)
        assert not found.error, (found.error, found.stderr)
        return found.stdout

    def background(self, code: str, **fields: Any) -> str:
        """Start code in the background and return the path of the run."""
        answer = self.http.post(f"{self.path}/run", json={"code": code, "background": True, **fields})
        assert answer.status_code == 202, answer.text
        return f"{self.path}/runs/{answer.json()['run_id']}"

    def state(self) -> dict[str, Any]:
        """Return what the server says about it."""
        answer = self.http.get(self.path)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def archive(self, **query: str) -> dict[str, bytes | None]:
        """Return the diff's archive: the content of each file, None for other entries."""
        answer = self.http.get(f"{self.path}/diff", params=query)
        assert answer.status_code == 200, answer.text
        with tarfile.open(fileobj=io.BytesIO(answer.content), mode="r:gz") as tar:
            return {one.name: file.read() if (file := tar.extractfile(one)) else None for one in tar}

    def changes(self) -> dict[str, str]:
        """Return the kind of each changed path of the only overlay."""
        (overlay,) = self.http.get(f"{self.path}/diff", params={"format": "json"}).json()["overlays"]
        return {one["path"]: one["kind"] for one in overlay["changes"]}

    def commit(self, **fields: Any) -> httpx.Response:
        """Commit its changes."""
        return self.http.post(f"{self.path}/commit", json=fields)

    def delete(self) -> None:
        """End it."""
        answer = self.http.delete(self.path)
        assert answer.status_code in (200, 404), answer.text


def events_of(text: str) -> list[dict[str, Any]]:
    """Return the events of a stream: JSON objects, each followed by a blank line."""
    return [json.loads(line) for line in text.split("\n\n") if line]


def create(sandbox: ServedSandbox, **body: Any) -> httpx.Response:
    """Ask for a session on /workspace, or on what the body says."""
    if not {"workspace", "overlays"} & set(body):
        body["workspace"] = {"path": "/workspace"}
    return sandbox.execd.post(SESSIONS, json=body)


@contextmanager
def isolated(sandbox: ServedSandbox, **body: Any) -> Iterator[SessionUnderTest]:
    """Make a session, and delete it afterwards."""
    answer = create(sandbox, **body)
    assert answer.status_code == 201, answer.text
    session = SessionUnderTest(sandbox, answer.json()["session_id"])
    try:
        yield session
    finally:
        session.delete()


@contextmanager
def warm_sandbox(server: ServerUnderTest, **body: Any) -> Iterator[ServedSandbox]:
    """Make a sandbox that has had a session: its helpers run already, so no test seems to leave them."""
    with server.sandbox(**body) as sandbox:
        with isolated(sandbox):
            pass
        yield sandbox


def until(condition: Any, what: str) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.02)
