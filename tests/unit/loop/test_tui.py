"""The screen of a loop, driven as a user drives it: keys go in, a screen comes out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot
from textual.widgets import Input, TabbedContent, TextArea

from stockade.errors import SetupError
from stockade.loop import events
from stockade.loop.events import DiffStat, HeldFile, Spending
from stockade.loop.items.item import WorkItem
from stockade.loop.recipes.recipe import AgentError
from stockade.loop.tui.app import LoopApp
from stockade.loop.tui.dialogs import Question
from stockade.loop.tui.event_queue import MOST_LINES, EventQueue
from stockade.result import Decision
from support.scripted_loop import ScriptedLoop, screen_text

ITEMS = [
    WorkItem(id="parser", title="Let the parser accept comments", body="They begin with #."),
    WorkItem(id="docs", title="Describe comments", depends_on=("parser",)),
]
NOW = 1000.0
EVIL = "\x1b]52;c;cm0gLXJm\x07\x9b2J\u202e[bold red]markup[/] $(x)"


class Table:
    """The loop, its screen and the user's hands."""

    def __init__(self, app: LoopApp, loop: ScriptedLoop, pilot: Pilot[None]) -> None:
        self.app, self.loop, self.pilot = app, loop, pilot

    async def sees(self, *words: str) -> str:
        """Wait until all of these are on the screen."""
        return await self.until(lambda: all(word in screen_text(self.app) for word in words), words)

    async def until(self, true: Callable[[], bool], why: Any = "") -> str:
        end = time.monotonic() + 10
        while not true():
            assert self.app._exception is None, self.app._exception
            assert time.monotonic() < end, f"{why} is not on the screen:\n{screen_text(self.app)}"
            await self.pilot.pause(0.05)
        return screen_text(self.app)

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)


@asynccontextmanager
async def table(directory: Path, size: tuple[int, int] = (80, 24)) -> AsyncIterator[Table]:
    loop = ScriptedLoop(directory, ITEMS)
    app = LoopApp(loop)
    async with app.run_test(size=size, notifications=True) as pilot:
        yield Table(app, loop, pilot)
    app.end_loop(10)
    assert not app.running


def attempt_events() -> list[events.LoopEvent]:
    about: dict[str, Any] = {"time": NOW, "item": "parser", "attempt": 1}
    denied = Decision(time=NOW, name="evil.example", port=443, verdict="denied", reason="no rule allows it")
    return [
        events.ItemStart(time=NOW, item="parser", title=ITEMS[0].title),
        events.AttemptStart(**about, log="/x", of=3),
        events.AgentLine(**about, text="Bash make test"),
        events.NetworkEvent(**about, decision=denied),
        events.BudgetReport(
            **about, used=Spending(12.0, 100, 50, 0.25), item_used=Spending(30.0, 200, 50, 0.5),
            loop_used=Spending(60.0, 300, 50, 0.75),
        ),
        events.JudgeStart(**about, command="make test", restored=("tests",), again=False),
        events.JudgeLine(**about, text="1 failed"),
        events.JudgeEnd(**about, passed=False, reason="test_comment failed"),
        events.AttemptEnd(
            **about, outcome="rejected", reason="test_comment failed", counts=True,
            spending=Spending(12.0, 100, 50, 0.25), diff=DiffStat(1, 5, 2), workspace="", receipts=(),
        ),
    ]  # fmt: skip


async def test_the_head_names_backend_and_mechanisms_and_the_list_has_every_item(tmp_path: Path) -> None:
    async with table(tmp_path) as user:
        await user.sees("looking for the walls and the agent", "no walls yet", "parser", "docs")
        user.loop.put(user.loop.start_event())
        shown = await user.sees("native: mount namespace, egress, seccomp filter", "claude-code 2.1")
        assert "Let the parser accept comm" in shown and "Describe comments" in shown
        assert all(len(line) <= 80 for line in shown.split("\n")) and len(shown.split("\n")) == 24


async def test_output_judge_network_and_budget_of_an_attempt_are_shown(tmp_path: Path) -> None:
    async with table(tmp_path) as user:
        user.loop.put(user.loop.start_event(), *attempt_events())
        await user.sees("Bash make test", "attempt 1 of 3", "rejected", "+5 -2")
        await user.press("2")
        await user.sees("$ make test", "from the base: tests", "1 failed", "rejected: test_comment failed")
        await user.press("3")
        await user.sees("denied   evil.example:443 no rule allows it")
        await user.press("4")
        await user.sees("12 of 3600 seconds, 150 tokens, $0.25", "$0.50", "$0.75", "seccomp filter")


async def test_attempts_can_be_told_apart(tmp_path: Path) -> None:
    async with table(tmp_path) as user:
        user.loop.put(user.loop.start_event(), *attempt_events())
        second: dict[str, Any] = {"time": NOW + 1, "item": "parser", "attempt": 2}
        user.loop.put(events.AttemptStart(**second, log="/x", of=3))
        user.loop.put(events.AgentLine(**second, text="the second time"))
        shown = await user.sees("attempt 2 of 3", "the second time")
        assert "Bash make test" not in shown
        await user.press("left_square_bracket")
        await user.sees("attempt 1 of 3", "Bash make test")
        await user.press("down")
        await user.sees("docs: no attempt yet")


async def test_nothing_that_an_agent_writes_controls_the_terminal_or_is_markup(tmp_path: Path) -> None:
    async with table(tmp_path) as user:
        about: dict[str, Any] = {"time": NOW, "item": "parser", "attempt": 1}
        user.loop.put(
            events.AttemptStart(**about, log="/x", of=1),
            events.AgentLine(**about, text=EVIL),
            events.ItemChange(time=NOW, item="docs", title=EVIL, phase="failed"),
            events.RateLimitWait(**about, seconds=1.0, reason=EVIL),
            events.AttemptEnd(
                **about, outcome="crashed", reason=EVIL, counts=True, spending=Spending(), diff=DiffStat(),
                workspace="", receipts=(),
            ),
        )  # fmt: skip
        shown = await user.sees("[bold red]markup[/]", "crashed")
        assert shown.replace("\n", "").isprintable()
        assert "\\x1b]52;c;cm0gLXJm\\x07\\x9b2J\\u202e[bold red]markup[/]" in shown.replace("\n", "")


async def test_keys_pause_kill_retry_and_skip(tmp_path: Path) -> None:
    async with table(tmp_path) as user:
        user.loop.put(user.loop.start_event(), *attempt_events())
        await user.sees("rejected")
        await user.press("p")
        await user.sees("pausing when the attempt is over")
        await user.press("r", "s", "k")
        await user.until(lambda: not user.app.running)
        assert user.loop.calls == [("run",), ("pause",), ("retry", "parser"), ("skip", "parser"), ("kill",)]
        await user.sees("paused · 0a1b2c")
        await user.press("g")
        await user.until(lambda: user.app.running)
        assert user.loop.calls[-1] == ("run",), "g continues it"


async def test_an_item_can_be_edited_and_q_is_a_letter_there(tmp_path: Path) -> None:
    async with table(tmp_path) as user:
        user.loop.put(user.loop.start_event())
        await user.sees("native")
        await user.press("e")
        await user.sees("title of parser", "They begin with #.")
        user.app.screen.query_one("#title", Input).value = "Comments"
        user.app.screen.query_one("#body", TextArea).focus()
        await user.press("q")
        assert "q" in user.app.screen.query_one("#body", TextArea).text
        await user.press("ctrl+s")
        await user.until(lambda: bool(user.loop.calls[1:]))
        ((_, item, changes),) = user.loop.calls[1:]
        assert item == "parser" and changes["title"] == "Comments" and set(changes) == {"title", "body"}
        await user.press("e", "escape")
        assert len(user.loop.calls) == 2, "nothing is changed when the user goes back"


@pytest.mark.parametrize("key", ["q", "ctrl+c"])
async def test_leaving_while_it_runs_asks_once(key: str, tmp_path: Path) -> None:
    async with table(tmp_path) as user:
        user.loop.put(user.loop.start_event())
        await user.sees("native")
        await user.press(key)
        await user.sees("The loop is running.", "stockade loop resume")
        await user.press("ctrl+c", "ctrl+q")
        assert sum(isinstance(screen, Question) for screen in user.app.screen_stack) == 1
        await user.press("n")
        await user.until(lambda: len(user.app.screen_stack) == 1)
        assert user.app.running, "no is no"
        await user.press(key, "y")
        await user.until(lambda: not user.app.is_running)
    assert user.loop.calls == [("run",), ("kill",)]


async def test_leaving_while_it_is_paused_asks_and_after_the_end_does_not(tmp_path: Path) -> None:
    async with table(tmp_path) as user:
        user.loop.put(user.loop.start_event(), user.loop.end_event("paused"))
        await user.until(lambda: not user.app.running)
        await user.sees("paused · 0a1b2c")
        await user.press("q")
        await user.sees("The loop is paused.")
        await user.press("n", "g")
        await user.until(lambda: user.app.running)
        user.loop.put(user.loop.end_event("done"))
        await user.sees("done · 0a1b2c")
        await user.press("q")
        await user.until(lambda: not user.app.is_running)


async def test_leaving_during_the_probe_raises_nothing_and_nor_do_events_that_come_later(
    tmp_path: Path,
) -> None:
    async with table(tmp_path) as user:
        await user.press("q", "y")
        await user.until(lambda: not user.app.is_running)
    user.loop.listener(user.loop.start_event())
    for event in attempt_events():
        user.loop.listener(event)
    user.app._take_events()
    user.app._later(user.app._tell, "too late")
    user.app.end_loop(0)


@pytest.mark.parametrize(
    "error",
    [
        AgentError("there is no program claude", hint="install it: npm install\nand more"),
        SetupError("the walls could not be raised", stage="mount"),
        RuntimeError("several\nlines\x1b[31m"),
    ],
)
async def test_an_error_is_one_line_on_the_screen_and_once_in_the_log_and_the_list_is_there_again(
    error: Exception, tmp_path: Path
) -> None:
    async with table(tmp_path) as user:
        user.loop.put(error)
        await user.until(lambda: not user.app.running)
        await user.sees(str(error).split("\n", 1)[0][:20])
        (told,) = list(user.app._notifications)
        assert "\n" not in told.message and told.message.isprintable()
        assert str(tmp_path / "errors.log") in told.message
        log = (tmp_path / "errors.log").read_text()
        assert log.count("Traceback") == 1 and type(error).__name__ in log
        shown = await user.sees("parser", "docs", "stopped")
        assert "Traceback" not in shown
        await user.press("q")
        await user.until(lambda: not user.app.is_running)


async def test_a_sandbox_failure_that_the_loop_tells_is_one_line_too(tmp_path: Path) -> None:
    async with table(tmp_path) as user:
        user.loop.put(
            events.SandboxFailure(time=NOW, message="no user namespaces", hint="", log="/state/errors.log"),
            user.loop.end_event("sandbox-error"),
        )
        await user.sees("no user namespaces", "sandbox-error", "parser")
        assert len(list(user.app._notifications)) == 1 and not (tmp_path / "errors.log").exists()


async def test_a_key_that_has_nothing_to_act_on_says_so(tmp_path: Path) -> None:
    async with table(tmp_path) as user:
        await user.press("d")
        await user.sees("there are no changes to show")
        await user.press("c")
        await user.sees("nothing of this item was held back")


async def test_files_that_wait_for_a_person_are_announced(tmp_path: Path) -> None:
    async with table(tmp_path) as user:
        files = (HeldFile(".git/hooks/pre-commit", "git runs it"),)
        user.loop.put(events.HeldBackFiles(time=NOW, item="parser", workspace="abc", files=files))
        await user.sees("parser: files wait for you (1): press c", "! held")


@pytest.mark.parametrize("size", [(40, 12), (200, 60)])
async def test_it_fits_the_terminal(size: tuple[int, int], tmp_path: Path) -> None:
    async with table(tmp_path, size) as user:
        user.loop.put(user.loop.start_event(), *attempt_events())
        await user.until(lambda: user.app.board.items["parser"].count == 1)
        lines = (await user.sees("parser")).split("\n")
        assert len(lines) == size[1] and max(map(len, lines)) <= size[0]


async def test_a_flood_of_output_neither_blocks_the_loop_nor_fills_the_memory(tmp_path: Path) -> None:
    queue = EventQueue()
    for number in range(20_000):
        queue.put(events.AgentLine(time=float(number), item="parser", attempt=1, text=str(number)))
    queue.put(events.PauseRequest(time=0.0))
    taken = queue.take()
    assert len(taken) == MOST_LINES + 1 and isinstance(taken[-1], events.PauseRequest)
    assert queue.take() == []
    async with table(tmp_path) as user:
        about: dict[str, Any] = {"time": NOW, "item": "parser", "attempt": 1}
        user.loop.put(*(events.AgentLine(**about, text=f"line {n}") for n in range(2500)))
        await user.sees("line 2499")
        assert user.app.query_one(TabbedContent).active == "output"
        await asyncio.sleep(0)
