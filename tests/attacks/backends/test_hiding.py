"""Hiding from the end: out of every session and group, deaf, unparented. Nothing of a run outlives it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable

import pytest

import stockade
from attacks import arena
from stockade import AsyncSandbox, Policy, Sandbox
from stockade.sandbox.sandbox import RunExtras, run_once
from support import leaks

#: What a way of ending a run leaves of it is looked for by this name.
HIDING = [*arena.command_of("limits", "hide")[0]]


def left() -> list[str]:
    """What runs inside and is no gate."""
    return [
        str(process)
        for process in leaks.family()
        if process.nested and process.name not in (leaks.GATE, leaks.SPARE)
    ]


def hidden() -> bool:
    """Whether all three of its processes are there."""
    return len(left()) >= 3


def await_hidden() -> None:
    end = time.monotonic() + 20
    while not hidden() and time.monotonic() < end:
        time.sleep(0.01)
    assert hidden()


def by_time() -> str:
    return stockade.run(HIDING, timeout=1, grace=0.1).outcome


def by_cancelling() -> str:
    """As Ctrl-C does."""
    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        await_hidden()
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        return run_once(HIDING, None, {"grace": 0.1}, RunExtras(cancelled_by=(KeyboardInterrupt,))).outcome
    finally:
        thread.join()


def by_time_in_a_living_sandbox() -> str:
    with Sandbox(Policy()) as box:
        outcome = box.run(HIDING, timeout=1, grace=0.1).outcome
        assert left() == []
        assert box.run(["echo", "alive"], timeout=10).text == "alive\n"
    return outcome


def by_killing_in_a_living_sandbox() -> str:
    with Sandbox(Policy()) as box, box.start(HIDING) as process:
        await_hidden()
        process.kill(0.1)
        outcome = process.wait(20).outcome
        assert left() == []
    return outcome


def by_letting_go_of_the_process() -> str:
    with Sandbox(Policy()) as box:
        with box.start(HIDING, grace=0.1):
            await_hidden()
        assert leaks.settled(left, 5) == []
    return "cancelled"


def by_closing_the_sandbox() -> str:
    with Sandbox(Policy()) as box:
        process = box.start(HIDING)
        await_hidden()
    with process:
        return process.wait(10).outcome


def by_time_in_async() -> str:
    async def main() -> str:
        async with AsyncSandbox(Policy()) as box:
            outcome = (await box.run(HIDING, timeout=1, grace=0.1)).outcome
            assert left() == []
        return outcome

    return asyncio.run(main())


def by_cancelling_the_task() -> str:
    async def main() -> str:
        async with AsyncSandbox(Policy()) as box:
            task = asyncio.create_task(box.run(HIDING, grace=0.1))
            await asyncio.to_thread(await_hidden)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert left() == []
            assert (await box.run(["echo", "alive"], timeout=10)).text == "alive\n"
        return "cancelled"

    return asyncio.run(main())


ENDINGS: list[tuple[Callable[[], str], str]] = [
    (by_time, "timed-out"),
    (by_cancelling, "cancelled"),
    (by_time_in_a_living_sandbox, "timed-out"),
    (by_killing_in_a_living_sandbox, "cancelled"),
    (by_letting_go_of_the_process, "cancelled"),
    (by_closing_the_sandbox, "cancelled"),
    (by_time_in_async, "timed-out"),
    (by_cancelling_the_task, "cancelled"),
]


@pytest.mark.parametrize(("end", "outcome"), ENDINGS, ids=lambda value: getattr(value, "__name__", ""))
def test_nothing_of_a_run_outlives_its_end(end: Callable[[], str], outcome: str) -> None:
    assert end() == outcome
    assert leaks.settled(left, 2) == []


def test_outside_a_killed_group_leaves_what_has_hidden() -> None:
    before = {process.pid for process in leaks.family()}
    with subprocess.Popen(HIDING, process_group=0) as process:
        time.sleep(1)
        os.killpg(process.pid, signal.SIGKILL)
    strays = [p.pid for p in leaks.family() if p.pid not in before and not p.zombie]
    assert strays
    for pid in strays:
        os.kill(pid, signal.SIGKILL)
