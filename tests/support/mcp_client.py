"""The SDK's client, and the server in this process or in one of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from mcp import Client
from mcp.client.stdio import StdioServerParameters
from mcp_types import CallToolResult, ElicitResult

from stockade import Policy
from stockade.integrations.mcp.tools import make_server
from stockade.integrations.mcp.workbench import Workbench
from stockade.resolve.discovery import PolicySource
from support.screen import STOCKADE

#: Both eras of the protocol: with a handshake, and without.
MODES = ("legacy", "auto")


def workbench(tree: Path, **clauses: Any) -> Workbench:
    """A workbench over a tree."""
    return Workbench(PolicySource(Policy(workspace=str(tree), **clauses), ()))


class Answers:
    """Plays the user: notes the questions and gives one answer to all of them."""

    def __init__(self, action: str = "accept", commit: bool = True) -> None:
        self.action, self.commit = action, commit
        self.questions: list[str] = []

    async def __call__(self, context: Any, params: Any) -> ElicitResult:
        self.questions.append(params.message)
        content = {"commit": self.commit} if self.action == "accept" else None
        return ElicitResult(action=self.action, content=content)  # type: ignore[arg-type]


@contextlib.asynccontextmanager
async def connected(
    bench: Workbench, *, mode: str = "auto", user: Answers | None = None, allow_commit: bool = False
) -> AsyncIterator[Client]:
    """A client of a server in this process; the sandbox is closed at the end."""
    server = make_server(bench, allow_commit=allow_commit)
    try:
        async with Client(server, mode=mode, elicitation_callback=user) as client:
            yield client
    finally:
        await bench.close()


def server_process(tree: Path, *options: str) -> StdioServerParameters:
    """How a client starts the server as a process."""
    environ = {key: value for key, value in os.environ.items() if key in ("STOCKADE_HOME", "PATH", "HOME")}
    return StdioServerParameters(command=STOCKADE, args=["mcp", *options], cwd=str(tree), env=environ)


async def text(client: Client, tool: str, **arguments: Any) -> str:
    """What a tool answers, as one text; an error is an AssertionError."""
    answer = await client.call_tool(tool, arguments)
    assert not answer.is_error, words(answer)
    return words(answer)


async def refusal(client: Client, tool: str, **arguments: Any) -> str:
    """Why a tool refuses."""
    answer = await client.call_tool(tool, arguments)
    assert answer.is_error, words(answer)
    return words(answer)


def words(answer: CallToolResult) -> str:
    """The texts of an answer, one after the other."""
    return "\n".join(getattr(block, "text", "") for block in answer.content)


async def until(condition: Any, seconds: float = 30) -> None:
    """Wait until something is so."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.05)
