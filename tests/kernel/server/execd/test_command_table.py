"""The table of commands over a plain sandbox, without a server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

import pytest

from stockade import AsyncSandbox, Policy
from stockade.server.execd import commands
from stockade.server.execd.commands import CommandRequest, CommandTable
from stockade.server.execd.variables import SandboxVariables
from stockade.server.wire.errors import ApiError
from stockade.server.wire.events import EventResponse
from stockade.server.wire.line_endings import LineRule


async def no_file(path: str) -> int:
    raise FileNotFoundError(path)


async def events_of(response: EventResponse) -> list[dict[str, object]]:
    data = b"".join([piece async for piece in response.stream.pieces()])
    return [json.loads(line) for line in data.splitlines() if line]


def with_table(policy: Policy, act: Callable[[CommandTable], Awaitable[None]]) -> None:
    async def main() -> None:
        async with AsyncSandbox(policy) as box:
            table = CommandTable(box, SandboxVariables({}, no_file))
            try:
                await act(table)
            finally:
                await table.close()

    asyncio.run(main())


def test_without_bash_inside_commands_run_in_sh() -> None:
    async def act(table: CommandTable) -> None:
        for _ in range(2):
            answer = await table.start(CommandRequest(command='echo "$0${BASH+ bash}"'), LineRule.CUT)
            found = await events_of(answer)
            assert [event["text"] for event in found if event["type"] == "stdout"] == ["sh"]

    with_table(Policy(deny=["/bin/bash", "/usr/bin/bash"]), act)


def test_only_the_newest_commands_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "MOST_REMEMBERED", 2)

    async def act(table: CommandTable) -> None:
        identifiers = []
        for number in range(4):
            found = await events_of(await table.start(CommandRequest(argv=["true"]), LineRule.CUT))
            identifiers.append(str(found[0]["text"]))
            assert found[-1]["type"] == "execution_complete", number
        await asyncio.sleep(0)
        assert [table.status(one).exit_code for one in identifiers[2:]] == [0, 0]
        for one in identifiers[:2]:
            with pytest.raises(ApiError) as caught:
                table.status(one)
            assert caught.value.status == 404

    with_table(Policy(), act)


def test_too_many_commands_at_once_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "MOST_RUNNING", 1)

    async def act(table: CommandTable) -> None:
        await table.start(CommandRequest(argv=["sleep", "60"], background=True), LineRule.CUT)
        with pytest.raises(ApiError) as caught:
            await table.start(CommandRequest(argv=["true"]), LineRule.CUT)
        assert caught.value.status == 429 and caught.value.headers == {"Retry-After": "1"}

    with_table(Policy(), act)
