"""The client of the server's measurements. The bench passes this file to a bare Python as text.

It gets the server's port and key as arguments, keeps one connection open, and makes one sandbox for what it
does. For each line on standard input, a job and a number, it does the job so many times and prints the
milliseconds of each as JSON: `sandbox` and `session` make one and end it, which does not count; `cycle` makes
a session and ends it, which counts; `run` is `echo` in a session, `command` the same in the sandbox. `hold`
makes so many sessions that live until the end.
"""

from __future__ import annotations

import http.client
import json
import sys
import time
from typing import Any

JSON = {"Content-Type": "application/json"}


class KeptConnection:
    """One connection to the server."""

    def __init__(self, port: int, key: str) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        self._headers = {"OPEN-SANDBOX-API-KEY": key}

    def call(self, method: str, path: str, content: object = None) -> bytes:
        """Make one call, and return the body of its answer."""
        body = None if content is None else json.dumps(content)
        headers = self._headers if body is None else {**self._headers, **JSON}
        self._connection.request(method, path, body, headers)
        answer = self._connection.getresponse()
        found = answer.read()
        if answer.status >= 300:
            raise SystemExit(f"{method} {path}: {answer.status} {found.decode(errors='replace')}")
        return found


def end_all(port: int, key: str) -> None:
    """End every sandbox of the server."""
    connection = KeptConnection(port, key)
    while items := json.loads(connection.call("GET", "/v1/sandboxes"))["items"]:
        for item in items:
            connection.call("DELETE", f"/v1/sandboxes/{item['id']}")


class BenchClient(KeptConnection):
    """A client that has a sandbox with a session."""

    def __init__(self, port: int, key: str) -> None:
        super().__init__(port, key)
        self.sandbox = self.make_sandbox()
        self._session = self.make_session()

    def make_sandbox(self) -> str:
        made = json.loads(self.call("POST", "/v1/sandboxes", {"image": {"uri": "host"}, "timeout": 3600}))
        return str(made["id"])

    def end_sandbox(self, id: str) -> None:
        self.call("DELETE", f"/v1/sandboxes/{id}")

    def make_session(self) -> str:
        wanted = {"workspace": {"path": "/workspace"}}
        return str(json.loads(self.call("POST", self._inside("/v1/isolated/session"), wanted))["session_id"])

    def end_session(self, id: str) -> None:
        self.call("DELETE", self._inside(f"/v1/isolated/session/{id}"))

    def run(self) -> None:
        answer = self.call(
            "POST", self._inside(f"/v1/isolated/session/{self._session}/run"), {"code": "echo hello"}
        )
        if b"hello" not in answer:
            raise SystemExit(f"a run answered {answer!r}")

    def command(self) -> None:
        self.call("POST", self._inside("/command"), {"command": "echo hello"})

    def _inside(self, path: str) -> str:
        return f"/sandboxes/{self.sandbox}/proxy/44772{path}"

    def job(self, name: str) -> float:
        """Do a job once; return its milliseconds."""
        began = time.perf_counter()
        made = self.make_sandbox() if name == "sandbox" else ""
        if name in ("session", "cycle"):
            made = self.make_session()
        if name == "run":
            self.run()
        if name == "command":
            self.command()
        taken = time.perf_counter() - began
        if name == "sandbox":
            self.end_sandbox(made)
        if name in ("session", "cycle"):
            self.end_session(made)
        if name == "cycle":
            taken = time.perf_counter() - began
        return taken * 1000


def main(port: str, key: str) -> None:
    caller = BenchClient(int(port), key)
    try:
        print("ready", flush=True)
        for line in sys.stdin:
            name, _, number = line.partition(" ")
            if name == "hold":
                found: Any = [caller.make_session() for _ in range(int(number))]
            else:
                found = [caller.job(name) for _ in range(int(number))]
            print(json.dumps(found), flush=True)
    finally:
        caller.end_sandbox(caller.sandbox)


if __name__ == "__main__":
    main(*sys.argv[1:])
