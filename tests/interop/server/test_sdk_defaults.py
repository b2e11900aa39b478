"""What the published SDKs and our own client send when the caller says nothing.

Upstream's SDK once sent defaults that were weaker than its server's. These tests keep what each client sends
for a create and an isolated session without options, so that a new version that names a mode, a profile or a
network is noticed.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opensandbox import Sandbox, SandboxSync
from opensandbox.config import ConnectionConfig, ConnectionConfigSync
from opensandbox.models.isolated import CreateIsolatedSessionRequest, IsolatedWorkspaceSpec

from stockade.client import Client
from support.javascript import javascript_sdk

IDENTIFIER = "6dd4b3a2-0f57-4c77-9a0a-4a2fb7e6b1aa"
MOMENT = "2026-01-01T00:00:00Z"
SCRIPT = Path(__file__).with_name("defaults.mjs")


class Recorder(ThreadingHTTPServer):
    """Answers as little as the SDKs need, and keeps what they send."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.bodies: dict[str, Any] = {}

    @property
    def domain(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"


class Answers(BaseHTTPRequestHandler):
    """The few answers of the recorder."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def _answer(self, status: int, body: object = None) -> None:
        data = b"" if body is None else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        domain = self.server.domain  # type: ignore[attr-defined]
        if "/endpoints/" in self.path:
            self._answer(200, {"endpoint": f"{domain}/execd"})
        else:
            self._answer(200, {})

    def do_DELETE(self) -> None:
        self._answer(204)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        kind = self.path.partition("?")[0].rpartition("/")[2]
        self.server.bodies[kind] = json.loads(body or b"{}")  # type: ignore[attr-defined]
        if kind == "sandboxes":
            made = {"id": IDENTIFIER, "status": {"state": "Running"}, "createdAt": MOMENT, "entrypoint": []}
            self._answer(202, made)
        elif kind == "session":
            self._answer(201, {"session_id": IDENTIFIER, "created_at": MOMENT})
        else:
            self._answer(204)


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    with Recorder() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


REQUEST = CreateIsolatedSessionRequest(workspace=IsolatedWorkspaceSpec(path="/workspace"))


def python_sync(domain: str) -> None:
    config = ConnectionConfigSync(domain=domain, api_key="k", disable_metrics=True)
    box = SandboxSync.create("host", connection_config=config)
    box.isolation.create(REQUEST)
    box.close()


def python_async(domain: str) -> None:
    async def main() -> None:
        config = ConnectionConfig(domain=domain, api_key="k", disable_metrics=True)
        box = await Sandbox.create("host", connection_config=config)
        await box.isolation.create(REQUEST)
        await box.close()

    asyncio.run(main())


def javascript(domain: str) -> None:
    environment = {**os.environ, "OPEN_SANDBOX_DOMAIN": domain, "OPENSANDBOX_DISABLE_METRICS": "1"}
    environment |= {"OPEN_SANDBOX_API_KEY": "k", "NODE_SDK": javascript_sdk()}
    subprocess.run(["node", str(SCRIPT)], env=environment, check=True, timeout=60)


def ours(domain: str) -> None:
    with Client(domain, key="k") as client:
        client.create().session("/workspace")


@pytest.mark.parametrize("sdk", [python_sync, python_async, javascript, ours])
def test_a_session_without_options_names_no_mode_profile_network_or_user(
    recorder: Recorder, sdk: Any
) -> None:
    sdk(recorder.domain)
    assert recorder.bodies["session"] == {"workspace": {"path": "/workspace"}}


#: What each client adds to a create of its own accord.
CREATED = {
    python_sync: {"timeout": 600, "resourceLimits": {"cpu": "1", "memory": "2Gi"}, "secureAccess": False,
                  "entrypoint": ["tail", "-f", "/dev/null"]},
    python_async: {"timeout": 600, "resourceLimits": {"cpu": "1", "memory": "2Gi"}, "secureAccess": False,
                   "entrypoint": ["tail", "-f", "/dev/null"]},
    javascript: {"timeout": 600, "resourceLimits": {"cpu": "1", "memory": "2Gi"}, "secureAccess": False,
                 "entrypoint": ["tail", "-f", "/dev/null"]},
    ours: {},
}  # fmt: skip


@pytest.mark.parametrize("sdk", CREATED)
def test_a_create_without_options_sends_these(recorder: Recorder, sdk: Any) -> None:
    sdk(recorder.domain)
    body = {name: value for name, value in recorder.bodies["sandboxes"].items() if value not in ({}, None)}
    assert body == {"image": {"uri": "host"}, **CREATED[sdk]}
