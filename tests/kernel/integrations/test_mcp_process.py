"""`stockade mcp` as clients start it: a process with pipes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mcp import Client

from stockade.runs.register import register
from support.mcp_client import refusal, server_process, text
from support.screen import STOCKADE


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small project."""
    (tree := tmp_path / "tree").mkdir()
    (tree / "a.txt").write_text("one\n")
    return tree


class RawServer:
    """A server process, and its messages line by line."""

    def __init__(self, tree: Path, *options: str) -> None:
        self.process = subprocess.Popen(
            [STOCKADE, "mcp", *options], cwd=tree, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def send(self, method: str, number: int | None = None, **params: Any) -> None:
        message = {"jsonrpc": "2.0", "method": method, "params": params}
        if number is not None:
            message["id"] = number
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message).encode() + b"\n")
        self.process.stdin.flush()

    def answer(self, number: int) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if (message := json.loads(line)).get("id") == number:
                return message["result"]  # type: ignore[no-any-return]
        raise AssertionError("the server has gone")

    def initialize(self) -> dict[str, Any]:
        client = {"name": "test", "version": "1"}
        self.send("initialize", 1, protocolVersion="2025-11-25", capabilities={}, clientInfo=client)
        found = self.answer(1)
        self.send("notifications/initialized")
        return found

    def children(self) -> list[int]:
        return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if self._is_parent_of(pid)]

    def _is_parent_of(self, pid: int) -> bool:
        try:
            with open(f"/proc/{pid}/stat") as stream:
                return stream.read().rpartition(")")[2].split()[1] == str(self.process.pid)
        except OSError:
            return False


@pytest.fixture
def server(tree: Path, stockade_home: Path) -> Iterator[RawServer]:
    """A server over the project."""
    server = RawServer(tree)
    yield server
    if server.process.poll() is None:
        server.process.kill()
    for stream in (server.process.stdin, server.process.stdout):
        assert stream is not None
        stream.close()
    if server.process.wait() == -signal.SIGKILL:
        register.sweep(str(stockade_home))  # as the user's next command does


def test_initialize_is_answered_before_a_sandbox_is_opened(server: RawServer, stockade_home: Path) -> None:
    found = server.initialize()
    assert found["serverInfo"]["name"] == "stockade" and "sandbox" in found["instructions"]
    server.send("tools/list", 2)
    assert len(server.answer(2)["tools"]) == 13
    assert server.children() == [] and not (stockade_home / "workspaces").exists()
    server.send("tools/call", 3, name="run", arguments={"argv": ["echo", "inside"]})
    assert "inside" in json.dumps(server.answer(3)), "the control: now there is one"
    assert server.children() != []


@pytest.mark.parametrize("how", ["closes stdin", "SIGTERM", "SIGKILL"])
def test_when_the_client_goes_away_or_the_server_is_killed_nothing_is_left(
    how: str, server: RawServer, tmp_path: Path, stockade_home: Path
) -> None:
    server.initialize()
    code = "echo changed > a.txt; sleep 3333 & echo started"
    server.send("tools/call", 2, name="shell", arguments={"code": code})
    assert "started" in json.dumps(server.answer(2))
    server.send("tools/call", 3, name="run", arguments={"argv": ["sleep", "3334"]})
    if how == "closes stdin":
        assert server.process.stdin is not None
        server.process.stdin.close()
    else:
        server.process.send_signal(getattr(signal, how))
    assert server.process.wait(30) == {"closes stdin": 0, "SIGTERM": 143, "SIGKILL": -9}[how]
    # The leak checks of every test look for processes, mounts, cgroups and namespaces.
    listed = subprocess.run([STOCKADE, "ps"], capture_output=True, text=True, check=True).stdout
    assert "sleep" not in listed
    kept = subprocess.run([STOCKADE, "workspaces"], capture_output=True, text=True, check=True).stdout
    assert str(tmp_path / "tree") in kept, "the changes are there for the user"


async def test_a_policy_file_is_all_that_counts_and_the_server_speaks_over_pipes(
    tree: Path, tmp_path: Path
) -> None:
    policy = tmp_path / "agent.toml"
    policy.write_text('env = { FROM = "the policy" }\n')
    (tree / "sub").mkdir()
    parameters = server_process(tree / "sub", "-p", str(policy), "-w", str(tree))
    async with Client(parameters, mode="legacy") as client:
        found = await text(client, "run", argv=["sh", "-c", "echo $FROM; pwd; cat"], stdin="")
        assert f"the policy\n{tree}/sub\n" in found
        assert f"{tree}/sub\n" in await text(client, "shell", code="pwd")
        assert "sub" in await text(client, "python", code="import os; os.getcwd()")
        assert str(policy) in await text(client, "policy")
        assert "Unknown tool" in await refusal(client, "commit")


def test_a_wrong_policy_ends_the_start_with_an_error(tree: Path) -> None:
    (tree / "bad.toml").write_text("nett = []\n")
    for words, why in (
        (["-p", "bad.toml"], "nett"),
        (["--http", "x:y"], "--http"),
        (["--http", "99999"], "--http"),
        (["wrap"], "no command"),
    ):
        done = subprocess.run(
            [STOCKADE, "mcp", *words],
            cwd=tree,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            check=False,
        )
        assert done.returncode == 125 and why in done.stderr and done.stdout == ""


def test_without_the_extra_the_command_says_what_to_install(tree: Path) -> None:
    code = "import sys; sys.modules['mcp'] = None; from stockade.cli import main; sys.exit(main(['mcp']))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tree,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert done.returncode == 125 and "pip install 'stockade[mcp]'" in done.stderr


FOREIGN = """
import json, os, sys
for line in sys.stdin:
    asked = json.loads(line)
    if "id" in asked:
        found = {"protocolVersion": "2025-11-25", "capabilities": {"tools": {}},
                 "serverInfo": {"name": "foreign", "version": "1"}}
        if asked["method"] == "tools/list":
            found = {"tools": [{"name": "look", "inputSchema": {"type": "object"}}]}
        if asked["method"] == "tools/call":
            try:
                seen = open(SECRET).read()
            except OSError as error:
                seen = str(error)
            found = {"content": [{"type": "text", "text": seen}]}
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": found}), flush=True)
"""


async def test_a_foreign_server_runs_behind_the_policy(tree: Path, tmp_path: Path) -> None:
    secret = tmp_path / "home" / "key"
    secret.parent.mkdir()
    secret.write_text("private")
    (tree / "server.py").write_text(FOREIGN.replace("SECRET", repr(str(secret))))
    parameters = server_process(tree, "wrap", "--", "/usr/bin/python3", "server.py")
    async with Client(parameters, mode="legacy") as client:
        assert [tool.name for tool in (await client.list_tools()).tools] == ["look"]
        assert "No such file" in await text(client, "look")


def test_the_streams_of_a_wrapped_server_pass_byte_by_byte(tree: Path) -> None:
    every = bytes(range(256)) * 5000 + b"\r\n\0no end"
    done = subprocess.run(
        [STOCKADE, "mcp", "wrap", "--", "cat"], cwd=tree, input=every, capture_output=True, check=False
    )
    assert done.returncode == 0 and done.stdout == every
