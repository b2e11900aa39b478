"""What the threads of a loop share: its record, its listener, what it has used, and whether it must stop."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import shutil
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from stockade.errors import StockadeError
from stockade.linux.plain_text import clean_line
from stockade.loop import events
from stockade.loop.events import LoopEvent, LoopOutcome, Phase, Spending
from stockade.loop.judge.judgement import JudgeBaseline, JudgedRun, make_baseline
from stockade.loop.judge.verify import JudgeRequest, run_verify
from stockade.loop.recipes.recipe import Recipe, recipe_for
from stockade.loop.record import AttemptRecord, ItemRecord, LoopError, Store, policy_of
from stockade.loop.settings import Budget
from stockade.loop.work import landing
from stockade.loop.work.notify import notify
from stockade.policy.merging import merge
from stockade.policy.model import Policy
from stockade.policy.values import literal

Listener = Callable[[LoopEvent], object]
#: How often waiting threads look around, in seconds.
TICK = 0.2
#: The exit code of a shell that does not find a command.
NOT_FOUND = 127
#: How many events may wait for the listener before lines of output are left out.
MOST_WAITING = 10_000


class StopLoopError(Exception):
    """Ends a thread of the loop; the loop knows why."""


class Dispatcher:
    """Calls the listener with events, one at a time, in a thread that holds no lock of the loop.

    So a listener may call the loop. If it is slower than the agents, it misses lines of their output.
    """

    def __init__(self, listener: Listener | None) -> None:
        self.listener = listener
        self._queue: queue.SimpleQueue[LoopEvent | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def tell(self, event: LoopEvent) -> None:
        """Pass an event on: at once if the loop does not run, or else soon."""
        if self._thread is None:
            self._call(event)
        elif self._queue.qsize() < MOST_WAITING or not isinstance(event, events.AgentLine | events.JudgeLine):
            self._queue.put(event)

    def _call(self, event: LoopEvent) -> None:
        if self.listener is not None:
            self.listener(event)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Call the listener from another thread meanwhile; at the end it has got every event."""
        self._thread = threading.Thread(target=self._dispatch, name="loop-events", daemon=True)
        self._thread.start()
        try:
            yield
        finally:
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    def _dispatch(self) -> None:
        while (event := self._queue.get()) is not None:
            try:
                self._call(event)
            except Exception:
                logging.getLogger("stockade").exception("the listener of a loop failed")


class LoopCore:
    """The state of a running loop. `changed` guards the record; every change of it is on the disk at once."""

    def __init__(self, store: Store, listener: Listener | None) -> None:
        self.store = store
        self.record = store.read()
        self.settings = self.record.settings
        self.recipe: Recipe = recipe_for(self.settings.agent)
        self.dispatcher = Dispatcher(listener)
        self.changed = threading.Condition(threading.RLock())
        #: Held while an item lands, and while a baseline is taken: the project must stay as it is.
        self.landing = threading.RLock()
        self.pausing = self.killed = False
        self.stopped: tuple[LoopOutcome, str] | None = None
        #: The ids of items that a person skipped.
        self.skipped: set[str] = set()
        #: What the attempts that run now have used, by item and number.
        self.active: dict[tuple[str, int], Spending] = {}
        #: The ids of items that a thread works on.
        self.working: set[str] = set()
        #: The last judgement of an attempt, by item and number.
        self.judged: dict[tuple[str, int], JudgedRun] = {}
        self.began = time.monotonic()
        self._earlier = self.record.elapsed
        self._policy = policy_of(self.record)

    def begin(self) -> None:
        """Forget why the loop stopped the last time."""
        self.pausing = self.killed = False
        self.stopped = None
        self.began, self._earlier = time.monotonic(), self.record.elapsed

    @property
    def agent_policy(self) -> Policy:
        """The policy of attempts: the loop's, and what the agent needs besides."""
        return with_toolchain(self.recipe.extend(self._policy), self.recipe.command[0])

    def judge_policy(self, command: str) -> Policy:
        """Return the policy of a judge: the loop's alone, so the agent's key and hosts are not there.

        It shows the tests that lie beside the project, which attempts do not see.
        """
        tests = {
            literal(path): None
            for one in self.record.items
            if self.verify_command(one) == command
            for path in one.item.judge_reads
            if self._in_project(path) is None
        }
        policy = merge(self._policy, {"read": list(tests)}) if tests else self._policy
        return with_toolchain(policy, (command.split() or ["sh"])[0])

    def tell(self, kind: type[LoopEvent], **fields: Any) -> LoopEvent:
        """Make an event of this kind, which happens now, and pass it to the listener."""
        event = kind(time=time.time(), **fields)
        self.dispatcher.tell(event)
        return event

    def notify(self, event: LoopEvent, message: str) -> None:
        """Run the notify command, if there is one."""
        if self.settings.notify:
            problem = notify(self.settings.notify, event, message, self.record.project)
            if problem:
                self.tell(events.LoopWarning, text=problem)

    def save(self) -> None:
        """Write the record to the disk."""
        with self.changed:
            self.record.elapsed = self._earlier + time.monotonic() - self.began
            self.store.save(self.record)

    def set_phase(self, item: ItemRecord, phase: Phase) -> None:
        """Record what the loop does with an item now."""
        with self.changed:
            item.phase = phase
            self.save()
            self.changed.notify_all()

    def finish_item(self, item: ItemRecord, phase: Phase, reason: str) -> None:
        """Record and tell that the loop has nothing more to do for an item."""
        item.reason = reason
        self.set_phase(item, phase)
        event = self.tell(events.ItemEnd, item=item.item.id, phase=phase, reason=reason)
        self.notify(event, f"{clean_line(item.item.id)}: {phase}. {reason}")

    @property
    def halted(self) -> bool:
        """Whether everything must end now."""
        return self.killed or self.stopped is not None

    def stop(self, outcome: LoopOutcome, reason: str) -> None:
        """End everything now; the first reason counts."""
        with self.changed:
            if self.stopped is None:
                self.stopped = (outcome, reason)
            self.changed.notify_all()

    def stop_by_error(self, error: Exception) -> None:
        """Stop because a sandbox failed, or Stockade did. No item has failed by that."""
        path = self.store.log_error("".join(traceback.format_exception(error)))
        message = clean_line(str(error)) or type(error).__name__
        if not isinstance(error, StockadeError | OSError):
            message = f"{type(error).__name__}: {message}"
        with self.changed:
            first = self.stopped is None or self.stopped[0] != "sandbox-error"
            self.stopped = ("sandbox-error", message)
            self.changed.notify_all()
        if first:
            hint = clean_line(getattr(error, "hint", ""))
            event = self.tell(events.SandboxFailure, message=message, hint=hint, log=path)
            self.notify(event, f"the loop stopped: {message}")

    def used_by_loop(self) -> Spending:
        """Return what all attempts have used; the time is that of the loop itself."""
        with self.changed:
            total = sum(self.active.values(), self.record.spending)
            return msgspec.structs.replace(total, seconds=self._earlier + time.monotonic() - self.began)

    def used_by_item(self, item: ItemRecord) -> Spending:
        """Return what the attempts of an item have used."""
        with self.changed:
            now = [one for name, one in self.active.items() if name[0] == item.item.id]
            return sum(now, item.spending)

    def verify_command(self, item: ItemRecord) -> str:
        return item.item.verify or self.settings.verify

    def judge_paths(self, item: ItemRecord) -> tuple[str, ...]:
        """Return the paths of an item's judge; of a path that is a link, also where it leads."""
        named = [os.path.normpath(one) for one in (*self.settings.judge, *item.item.judge)]
        reached = [os.path.join(self.record.project, one) for one in named]
        tests = [self._in_project(one) for one in (*reached, *item.item.judge_reads)]
        return tuple(dict.fromkeys((*named, *(one for one in tests if one not in (None, ".")))))

    def _in_project(self, path: str) -> str | None:
        """Return a path relative to the project; None if it does not lie there."""
        inside = os.path.relpath(os.path.realpath(path), os.path.realpath(self.record.project))
        return None if inside.split("/")[0] == ".." else inside

    def judge_request(
        self, command: str, action: str, item: ItemRecord | None = None, number: int = 0
    ) -> JudgeRequest:
        """Return a request to run a command as the judge runs it."""
        return JudgeRequest(
            command=command,
            policy=self.judge_policy(command),
            report=self.settings.report,
            timeout=self.settings.verify_timeout,
            name=f"loop {self.record.id} {action}",
            who=self.who(action, item, number),
        )

    def who(self, action: str, item: ItemRecord | None = None, number: int = 0) -> dict[str, str]:
        """Return who asks for a run, for its receipt."""
        words = "" if item is None else f"item {clean_line(item.item.id)[:200]}, attempt {number}"
        action = f"{action} of loop {self.record.id}"
        return {"agent": self.recipe.name, "category": "loop", "action": action, "words": words}

    def baseline(self, command: str) -> JudgeBaseline:
        """Return what a verify command says about the project as it is; run it if that is not known."""
        with self.landing:
            known = self.store.baseline(command)
            if known is not None and known.landed == self.record.landed:
                return known
            self.tell(events.BaselineStart, command=clean_line(command))
            request = self.judge_request(command, "baseline")
            run = run_verify(request, None, lambda line: None, lambda: self.halted)
            if self.halted:
                raise StopLoopError
            if run.exit_code == NOT_FOUND and not run.ended:
                last = run.output.strip().splitlines()[-1:] or [command]
                raise LoopError(
                    f"the verify command does not run: {clean_line(last[0])}",
                    hint="`stockade run -- COMMAND` shows what is missing inside; a policy can show it",
                )
            made = make_baseline(command, run, self.record.landed)
            self.store.save_baseline(made)
            self.tell(
                events.BaselineEnd,
                command=clean_line(command),
                exit_code=made.exit_code,
                reported=made.reported,
                passed=len(made.passed),
                failed=len(made.failed),
            )
            if made.failed and command == self.settings.verify and not self.settings.strict:
                self.tell(
                    events.LoopWarning,
                    text="an attempt may leave the tests that fail now as they are; "
                    "--strict asks for exit code 0",
                )
            return made

    def discard(self, attempt: AttemptRecord) -> None:
        """Remove what an attempt has changed; what cannot be removed stays, for `stockade workspaces`."""
        for id in (attempt.workspace, attempt.fork):
            self.remove(id)

    def remove(self, id: str) -> None:
        """Remove a workspace, if there is one of this id and it can be removed."""
        if id:
            with contextlib.suppress(StockadeError, OSError):
                if (found := landing.open_workspace(id)) is not None:
                    found.discard()


def excess(used: Spending, budget: Budget, whose: str) -> str:
    """Return what has been used up of a budget, in words; "" if nothing has."""
    if budget.time is not None and used.seconds > budget.time:
        return f"{whose} has used its {budget.time:g} seconds"
    if budget.tokens is not None and used.tokens > budget.tokens:
        return f"{whose} has used its {budget.tokens} tokens"
    if budget.cost is not None and used.cost_usd > budget.cost:
        return f"{whose} has used its {budget.cost:g} US dollars"
    return ""


def with_toolchain(policy: Policy, program: str) -> Policy:
    """Return the policy with the install of one more program shown, if the policy shows those of commands."""
    if policy.toolchain is False or shutil.which(program) is None:
        return policy
    known = () if policy.toolchain is True else policy.toolchain
    return msgspec.structs.replace(policy, toolchain=tuple(dict.fromkeys((*known, program))))
