"""A living server for the tests of a module: `stockade serve` as a process with a state directory of its own.

    @pytest.fixture(scope="module")
    def server(tmp_path_factory):
        yield from module_server(tmp_path_factory)

`server.sandbox()` makes a sandbox and deletes it; its `execd` and `egress` are HTTP clients with its token.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from stockade.server.directory import server_directory
from support import leaks
from support.installs import SYSTEM_PATH

KEY = "test-key-0123456789abcdef"
KEY_HEADER = "OPEN-SANDBOX-API-KEY"
SECONDS = 60.0
#: Connections are not kept: one that stays open would look like something that a test left behind.
LIMITS = httpx.Limits(max_keepalive_connections=0)


class ServedSandbox:
    """One sandbox of a test."""

    def __init__(self, server: ServerUnderTest, answer: dict[str, Any]) -> None:
        self.server = server
        self.answer = answer
        self.id: str = answer["id"]
        found = server.http.get(f"/v1/sandboxes/{self.id}/endpoints/44772").json()
        self.token: str = found["headers"]["X-EXECD-ACCESS-TOKEN"]
        self.execd = self._client(44772)
        self.egress = self._client(18080)

    def _client(self, port: int) -> httpx.Client:
        base = f"{self.server.url}/sandboxes/{self.id}/proxy/{port}"
        headers = {"X-EXECD-ACCESS-TOKEN": self.token}
        return httpx.Client(base_url=base, headers=headers, timeout=SECONDS, limits=LIMITS, verify=False)

    def close(self) -> None:
        """Close the clients and delete the sandbox, if it is still there."""
        self.execd.close()
        self.egress.close()
        self.server.http.delete(f"/v1/sandboxes/{self.id}")


class ServerUnderTest:
    """`stockade serve` on a port of its own."""

    def __init__(self, directory: Path, config: str = "", environ: dict[str, str] | None = None) -> None:
        self.home = directory / "state"
        self.key = KEY
        self.config = directory / "serve.toml"
        self.config.write_text(config)
        self.environ = {
            "PATH": SYSTEM_PATH,
            "HOME": os.environ.get("HOME", "/"),
            "STOCKADE_HOME": str(self.home),
            "STOCKADE_SERVER_CONFIG": str(self.config),
            **({"TMPDIR": os.environ["TMPDIR"]} if "TMPDIR" in os.environ else {}),
            **(environ or {}),
        }
        #: Words before the command that starts it.
        self.prefix: tuple[str, ...] = ()
        self.port = 0
        self.url = ""
        self.lines: list[str] = []
        self.process: subprocess.Popen[str] | None = None
        self.http = httpx.Client(verify=False)

    def keep_key(self) -> None:
        """Register the client's key. The variable does it too, but then the zygote takes longer to start."""
        digest = hashlib.sha256(self.key.encode()).hexdigest()
        keys = Path(server_directory(str(self.home))) / "keys.json"
        keys.touch(0o600)
        keys.write_text(json.dumps([{"name": "default", "digest": digest, "made": ""}]))

    def popen(self) -> subprocess.Popen[str]:
        """Start the process."""
        return subprocess.Popen(
            [*self.prefix, sys.executable, "-m", "stockade", "serve", "--listen", f"127.0.0.1:{self.port}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            env=self.environ,
            text=True,
        )

    def start(self) -> None:
        """Start it, on the same port as before if it ran already."""
        if self.key and not self.home.exists():
            self.keep_key()
        self.process = self.popen()
        assert self.process.stdout is not None
        self.lines = []
        for line in self.process.stdout:
            self.lines.append(line.strip())
            if line.startswith("serving on "):
                break
        else:
            pytest.fail(f"the server ended with exit code {self.process.wait()}: {self.lines}")
        self.url = self.lines[-1].removeprefix("serving on ")
        self.port = int(self.url.rpartition(":")[2])
        self.http.close()
        headers = {KEY_HEADER: self.key}
        self.http = httpx.Client(
            base_url=self.url, headers=headers, timeout=SECONDS, limits=LIMITS, verify=False
        )

    def stop(self, number: int = signal.SIGTERM) -> None:
        """End the server; its sandboxes live on."""
        self.http.close()
        if self.process is not None:
            self.process.send_signal(number)
            self.process.wait(SECONDS)
            assert self.process.stdout is not None
            self.process.stdout.close()
            self.process = None

    def close(self) -> None:
        """Delete every sandbox, then end the server."""
        if self.process is None:
            self.start()
        for item in self.http.get("/v1/sandboxes", params={"pageSize": 200}).json()["items"]:
            self.http.delete(f"/v1/sandboxes/{item['id']}")
        self.stop()

    def create(self, **body: Any) -> httpx.Response:
        """Ask for a sandbox; the image is the host's unless the body says otherwise."""
        return self.http.post("/v1/sandboxes", json={"image": {"uri": "host"}, "timeout": 600, **body})

    @contextlib.contextmanager
    def sandbox(self, **body: Any) -> Iterator[ServedSandbox]:
        """Make a sandbox, and delete it afterwards."""
        answer = self.create(**body)
        assert answer.status_code == 202, answer.text
        found = ServedSandbox(self, answer.json())
        try:
            yield found
        finally:
            found.close()


def module_server(
    factory: pytest.TempPathFactory, config: str = "", environ: dict[str, str] | None = None
) -> Iterator[ServerUnderTest]:
    """Yield a running server for a module's fixture."""
    server = ServerUnderTest(factory.mktemp("server"), config, environ)
    server.start()
    assert server.process is not None
    pid = server.process.pid
    try:
        with server.sandbox():
            pass  # from now on the zygote is ready, and has the name that the leak checks will see
        with leaks.shared(pid):
            yield server
    finally:
        server.close()


def zygote_of(server: ServerUnderTest) -> int:
    """Return the process that a server's supervisors are forked from."""
    assert server.process is not None
    pid = server.process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return next(int(child) for child in children if "zygote" in Path(f"/proc/{child}/comm").read_text())


def wait_until(true: Any, seconds: float = 10.0) -> None:
    """Wait until a function returns something true."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)
