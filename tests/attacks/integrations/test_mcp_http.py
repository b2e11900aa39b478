"""The HTTP face of `stockade mcp`: who may call it, from this machine and from web pages."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
from mcp import Client
from mcp.client.streamable_http import streamable_http_client

from support.mcp_client import text
from support.screen import STOCKADE


class HttpServer(NamedTuple):
    process: subprocess.Popen[str]
    address: str
    token: str

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    """A server on a free port, and the token that it made. Its sandbox is closed soon after each call."""
    tree = tmp_path_factory.mktemp("tree")
    environ = {**os.environ, "STOCKADE_HOME": str(tmp_path_factory.mktemp("state") / "state")}
    process = subprocess.Popen(
        [STOCKADE, "mcp", "--http", "0", "--idle", "200ms"],
        cwd=tree,
        env=environ,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    address, token = process.stdout.readline().strip(), process.stdout.readline().strip()
    yield HttpServer(process, address, token.removeprefix("Authorization: Bearer "))
    process.send_signal(signal.SIGTERM)
    process.wait(30)
    process.stdout.close()


LIST = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {
        "protocolVersion": "2025-11-25",
        "capabilities": {},
        "clientInfo": {"name": "x", "version": "1"},
    },
}
ACCEPT = {"Accept": "application/json, text/event-stream"}


def status(server: HttpServer, headers: dict[str, str] | list[tuple[str, str]]) -> int:
    given = [*ACCEPT.items(), *(headers.items() if isinstance(headers, dict) else headers)]
    return httpx.post(server.address, json=LIST, headers=given).status_code


async def test_a_client_with_the_token_can_use_the_tools(server: HttpServer) -> None:
    async with (
        httpx.AsyncClient(headers=server.headers) as http,
        Client(streamable_http_client(server.address, http_client=http)) as client,
    ):
        assert "stdout:\nhi\n" in await text(client, "run", argv=["echo", "hi"])


def test_it_listens_on_the_loopback_address_alone(server: HttpServer) -> None:
    assert server.address.startswith("http://127.0.0.1:") and len(server.token) > 40
    port = f"{int(server.address.split(':')[2].split('/')[0]):04X}"
    for table in ("tcp", "tcp6"):
        rows = [line.split() for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]]
        listening = [row[1] for row in rows if row[3] == "0A" and row[1].endswith(f":{port}")]
        assert set(listening) <= {f"0100007F:{port}"}


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Bearer"},
        {"Authorization": "Basic {token}"},
        {"Authorization": "Bearer {token}x"},
        {"Cookie": "Authorization=Bearer {token}"},
        [("Authorization", "Bearer wrong"), ("Authorization", "Bearer {token}")],
        [("Authorization", "Bearer {token}"), ("Authorization", "Bearer {token}")],
    ],
)
def test_without_the_token_nothing_is_answered(
    headers: dict[str, str] | list[tuple[str, str]], server: HttpServer
) -> None:
    pairs = headers.items() if isinstance(headers, dict) else headers
    assert status(server, [(key, value.replace("{token}", server.token)) for key, value in pairs]) == 401
    assert (
        httpx.get(server.address).status_code
        == httpx.get(f"{server.address}/x?token={server.token}").status_code
        == 401
    )


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Host": "evil.example:80"},
        {"Host": "127.0.0.1.evil.example"},
        {"Host": "localhost:1"},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1.evil.example"},
        {"Origin": "https://localhost:8000"},
    ],
)
def test_a_page_that_points_a_name_here_is_refused_even_with_the_token(
    headers: dict[str, str], server: HttpServer
) -> None:
    assert status(server, {**server.headers, **headers}) in (403, 421)
    assert status(server, server.headers) == 200, "the control"


def test_a_token_can_be_chosen_but_not_a_weak_one(tmp_path: Path) -> None:
    for token in ("short", "with a space in the middle", "with-a-control-\x01-character"):
        environ = {**os.environ, "STOCKADE_MCP_TOKEN": token}
        done = subprocess.run(
            [STOCKADE, "mcp", "--http", "0"],
            env=environ,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 125 and "STOCKADE_MCP_TOKEN" in done.stderr
