"""Shells for people in a sandbox that a program on asyncio holds."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from stockade import AsyncSandbox
from stockade.sandbox.attach_listener import AttachListener
from stockade.sessions.attach import protocol
from stockade.sessions.attach.protocol import (
    AttachAcceptance,
    AttachRefusal,
    FromHolder,
    TerminalEnd,
    TerminalEndReport,
)
from support.kept import HELLO, asked, closed, connected, heard


@pytest.fixture
async def box() -> AsyncIterator[AsyncSandbox]:
    async with AsyncSandbox({}) as made:
        yield made


async def test_the_first_client_gets_a_shell_and_the_next_one_joins_it(
    box: AsyncSandbox, stockade_home: Path
) -> None:
    listener = AttachListener(box)

    def visit() -> None:
        first, second = connected(stockade_home), connected(stockade_home)
        assert asked(first, HELLO) == AttachAcceptance(box.id, 1)
        os.write(first[1], b"stty -echo; echo $((6 * 7))\n")
        heard(first[1], b"42")
        assert asked(second, HELLO) == AttachAcceptance(box.id, 1)
        os.write(second[1], b"echo $((7 * 8)); exit 5\n")
        for one in (first, second):
            heard(one[1], b"56")
        message, file = first[0].receive(FromHolder)
        assert message == TerminalEnd()
        report = msgspec.json.decode(protocol.content_of(file), type=TerminalEndReport)
        assert (report.outcome, report.exit_code) == ("exited", 5)
        os.close(second[0].receive(FromHolder)[1])
        closed(first)
        closed(second)

    await asyncio.to_thread(visit)
    await listener.close()


async def test_what_is_not_a_request_is_refused_and_the_listener_goes_on(
    box: AsyncSandbox, stockade_home: Path
) -> None:
    listener = AttachListener(box)

    def visit() -> None:
        for wrong in (
            msgspec.structs.replace(HELLO, version=0),
            msgspec.structs.replace(HELLO, terminal=7),
            msgspec.structs.replace(HELLO, look=True),
        ):
            one = connected(stockade_home)
            assert isinstance(asked(one, wrong), AttachRefusal)
            closed(one)
        silent, gone = connected(stockade_home), connected(stockade_home)
        closed(gone)
        one = connected(stockade_home)
        assert isinstance(asked(one, HELLO), AttachAcceptance)
        closed(one)
        closed(silent)

    await asyncio.to_thread(visit)
    await listener.close()


async def test_its_shells_end_with_it_and_the_sandbox_lives_on(
    box: AsyncSandbox, stockade_home: Path
) -> None:
    listener = AttachListener(box)
    one = await asyncio.to_thread(connected, stockade_home)
    await asyncio.to_thread(asked, one, HELLO)
    os.write(one[1], b"echo $$ > /tmp/pid; echo $((6 * 7))\n")
    await asyncio.to_thread(heard, one[1], b"42")
    await listener.close()
    assert not (await box.run(["sh", "-c", "kill -0 $(cat /tmp/pid)"])).ok
    assert not list((stockade_home / "run").glob("*/*.attach"))
    closed(one)
