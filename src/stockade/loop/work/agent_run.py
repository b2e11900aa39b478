"""One attempt: an agent with a prompt in a sandbox of its own, over a fresh overlay of the project."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable
from typing import BinaryIO

import msgspec

from stockade.errors import StockadeError
from stockade.linux.plain_text import clean_line
from stockade.loop.events import AttemptOutcome, Spending
from stockade.loop.recipes.recipe import AgentError, Recipe
from stockade.loop.recipes.streams import AgentEvent, AgentStream, RateLimit, stream
from stockade.loop.work.watch import watch
from stockade.policy.model import Policy
from stockade.result import Decision
from stockade.sandbox.sandbox import Sandbox

#: How much of an agent's output is logged, of each stream.
MOST_LOGGED = 64 << 20
#: How often to look at the network's decisions, in seconds.
LOOK = 0.5


class AgentRun(msgspec.Struct, frozen=True, kw_only=True):
    """How an agent's run in its sandbox ended. Without a `workspace` it has changed nothing."""

    exit_code: int
    ended: str = ""
    stopped: AttemptOutcome | None = None
    reason: str = ""
    rate_limit: RateLimit | None = None
    spending: Spending = Spending()
    workspace: str = ""
    receipt: str = ""


class AttemptListener(msgspec.Struct, frozen=True):
    """What an attempt calls while it runs.

    `opened` gets the id of the workspace before the agent starts. `may_go_on` gets what was spent and the
    seconds without output; it returns how the attempt ends and why, or None.
    """

    opened: Callable[[str], object]
    line: Callable[[AgentEvent], object]
    decision: Callable[[Decision], object]
    may_go_on: Callable[[Spending, float], tuple[AttemptOutcome, str] | None]


def run_agent(
    recipe: Recipe,
    policy: Policy,
    prompt: str,
    logs: str,
    listener: AttemptListener,
    *,
    name: str,
    who: dict[str, str],
) -> AgentRun:
    """Run an agent in a new sandbox until it ends or must not go on. Errors of the sandbox are raised."""
    with contextlib.ExitStack() as stack:
        raw, errors, readable = (
            stack.enter_context(_Log(f"{logs}/{one}")) for one in ("agent.jsonl", "agent.stderr", "agent.log")
        )
        with open(f"{logs}/prompt.md", "w", encoding="utf-8", errors="replace") as file:
            file.write(prompt)
        box = Sandbox(policy, on_exit="keep", name=name, who=who)
        box.open()
        stack.callback(box.close)
        listener.opened(box.workspace.id)
        return _watch_agent(recipe, box, prompt, (raw, errors, readable), listener)


def _watch_agent(
    recipe: Recipe, box: Sandbox, prompt: str, logs: tuple[_Log, _Log, _Log], listener: AttemptListener
) -> AgentRun:
    raw, errors, readable = logs
    reader, began = stream(recipe), time.monotonic()
    why: list[tuple[AttemptOutcome, str]] = []
    cursors: dict[int, int] = {}
    looked = [0.0]

    def tell(events: list[AgentEvent]) -> None:
        for event in events:
            readable.write(f"{event.text}\n".encode("utf-8", "replace"))
            listener.line(event)

    def on_stdout(piece: bytes) -> None:
        raw.write(piece)
        tell(reader.feed(piece))

    def on_stderr(piece: bytes) -> None:
        errors.write(piece)
        tell(reader.feed_stderr(piece))

    def look() -> None:
        for decision in box.net.decisions(cursors):
            listener.decision(decision)

    def stop(idle: float) -> str:
        if time.monotonic() - looked[0] > LOOK:
            looked[0] = time.monotonic()
            look()
        if (found := listener.may_go_on(_spending(reader, began), idle)) is not None:
            why.append(found)
            return found[1] or found[0]
        return ""

    try:
        process = recipe.start(box, prompt, stderr=subprocess.PIPE)
    except AgentError as error:
        return AgentRun(exit_code=125, reason=clean_line(str(error)), ended="the agent was not started")
    _, result = watch(process, on_stdout, on_stderr, stop)
    tell(reader.finish())
    with contextlib.suppress(StockadeError):
        look()
    stopped, reason = why[0] if why else (None, "")
    return AgentRun(
        exit_code=result.exit_code,
        ended=clean_line(result.reason) or f"exit code {result.exit_code}",
        stopped=stopped,
        reason=reason,
        rate_limit=reader.rate_limited,
        spending=_spending(reader, began),
        receipt="" if result.receipt is None else result.receipt.id,
    )


def _spending(reader: AgentStream, began: float) -> Spending:
    return Spending(
        time.monotonic() - began, reader.input_tokens, reader.output_tokens, reader.cost_usd or 0.0
    )


class _Log:
    """A log file that grows to a limit and says that more was left out."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._room = MOST_LOGGED
        self._file: BinaryIO | None = None

    def __enter__(self) -> _Log:
        self._file = open(self._path, "wb", buffering=0, opener=_private)
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def write(self, piece: bytes) -> None:
        if self._file is None or self._room <= 0:
            return
        self._room -= len(piece)
        self._file.write(piece if self._room > 0 else piece + b"\n... the rest was left out\n")


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)
