"""`Loop`: work items, each with attempts in sandboxes, until a judge that no agent runs is satisfied.

Who runs where: the loop's threads are the supervisor. An agent runs in a sandbox over a fresh overlay of the
project, the verify command in another one over a fork of that overlay, git in a third. The notify command
alone runs outside, and only the user or a trusted file can name one.

The state on the disk is written before each step (`record`). A loop that was killed goes on from there: an
attempt that was under way starts anew and does not count, and the journal of the commit completes or undoes
a landing, which then leaves nothing to land again.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from stockade.errors import StockadeError
from stockade.linux.plain_text import clean_line
from stockade.loop import events
from stockade.loop.events import FINAL, DiffStat, LoopOutcome
from stockade.loop.items.item import WorkItem, order_items
from stockade.loop.recipes.recipe import AgentError, Recipe, recipe_for
from stockade.loop.record import ItemRecord, LoopError, LoopRecord, Store, new_store, project_lock
from stockade.loop.settings import LoopSettings
from stockade.loop.work import landing
from stockade.loop.work.core import TICK, Listener, LoopCore, StopLoopError, excess
from stockade.loop.work.item_work import ItemWork, commit_to_git
from stockade.policy.model import Policy
from stockade.policy.patterns import has_wildcard
from stockade.policy.values import literal

#: The exit codes of `stockade loop`.
EXIT_CODES: dict[LoopOutcome, int] = {
    "done": 0,
    "incomplete": 1,
    "held": 3,
    "over-budget": 4,
    "paused": 5,
    "sandbox-error": 70,
}
#: The fields of an item that a person can change while the loop runs.
EDITABLE = frozenset({"title", "body", "verify", "judge", "labels", "attempts"})


def check_policy(policy: Policy, project: str) -> Policy:
    """Return the policy of a loop over a project; refuse one under which attempts would not be apart."""
    rule = policy.workspace
    if rule is not None and rule.mode != "overlay":
        raise LoopError(
            f"workspace.mode = {str(rule.mode)!r}: a loop keeps every attempt apart until it has passed",
            hint='write mode = "overlay", or leave it out',
        )
    for path in policy.write:
        real = os.path.realpath(os.path.join(project, os.path.expanduser(path.removesuffix("?"))))
        if os.path.commonpath((real, project)) in (real, project):
            raise LoopError(
                f"write = {path!r}: lies in the project or contains it, so a failed attempt could change it",
                hint="remove it from the policy: what a passed attempt has changed lands anyway",
            )
    durable = rule is not None and rule.durable
    workspace = {"path": literal(project), "mode": "overlay", "durable": durable}
    return Policy(**{**policy.table(full=True), "workspace": workspace})


def check_request(settings: LoopSettings, items: Sequence[WorkItem], project: str) -> None:
    """Refuse a loop that could not work: without an agent or items, or without its judge's files."""
    if not items:
        raise LoopError("there are no items to work on", hint="docs/how-to/loop.md shows their forms")
    if not settings.verify and (plain := [item.id for item in items if not item.verify]):
        raise LoopError(
            f"nothing judges the item {clean_line(plain[0])}",
            hint="name the command that does: --verify 'pytest -q'",
        )
    for path in settings.judge:
        # A misspelled path would leave the tests to the agent.
        if not has_wildcard(path) and not os.path.lexists(os.path.join(project, path)):
            raise LoopError(
                f"the judge's file {clean_line(path)} is not in the project",
                hint="check its name; for files that do not exist yet, write a pattern: "
                f"'{clean_line(path.rstrip('/'))}/**'",
            )
    if settings.git_commit:
        landing.check_repository(project)
    recipe_for(settings.agent)


def create_loop(
    settings: LoopSettings,
    items: Sequence[WorkItem],
    policy: Policy,
    project: str,
    listener: Listener | None = None,
) -> Loop:
    """Make a new loop over a project: its state is on the disk, and nothing runs yet."""
    project = os.path.realpath(project)
    check_request(settings, items, project)
    record = LoopRecord(
        id="",
        project=project,
        created=time.time(),
        settings=settings,
        policy=check_policy(policy, project).table(full=True),
        items=[ItemRecord(item=item) for item in order_items(items)],
    )
    store = new_store()
    record.id = store.id
    store.save(record)
    return Loop(store, listener)


class Loop:
    """A loop over one project. `run` works until nothing is left to do, or the loop is paused or stopped.

    The listener gets every event, one at a time, from a thread of its own while the loop runs. It and every
    other thread may call the loop, whether it runs or not.
    """

    def __init__(self, store: Store, listener: Listener | None = None) -> None:
        self._core = LoopCore(store, listener)

    @property
    def id(self) -> str:
        """The loop's id, as `stockade loop status` shows it."""
        return self._core.record.id

    @property
    def store(self) -> Store:
        """The directory with the loop's state and logs."""
        return self._core.store

    @property
    def record(self) -> LoopRecord:
        """The loop's state. Read it; the calls below change it."""
        return self._core.record

    @property
    def recipe(self) -> Recipe:
        """How the agent is started."""
        return self._core.recipe

    @property
    def key(self) -> str:
        """Where the agent's key lives."""
        return self._core.recipe.describe_key(self._core.agent_policy)

    def listen(self, listener: Listener | None) -> None:
        """Call this function with every event from now on, instead of the one before."""
        self._core.dispatcher.listener = listener

    def run(self) -> events.LoopEnd:
        """Work on the items until nothing is left to do; return how that ended.

        Raises `AgentError` if the agent is not there, and `LoopError` if the verify command does not run or
        another loop works on the project. A sandbox that fails does not raise: it stops the loop.
        """
        core = self._core
        with project_lock(core.record.project), core.dispatcher.running():
            core.begin()
            try:
                resumed = any(one.attempts for one in core.record.items)
                self._recover()
                self._detect(resumed)
                self._work()
            except (AgentError, LoopError):
                raise
            except StopLoopError:
                pass
            except (StockadeError, OSError) as error:
                core.stop_by_error(error)
            return self._end()

    def pause(self) -> None:
        """Stop when the attempts that run now are over, with their judgement and landing."""
        with self._core.changed:
            if not self._core.pausing:
                self._core.tell(events.PauseRequest)
            self.request_pause()
            self._core.changed.notify_all()

    def kill(self) -> None:
        """Stop now: every process of every attempt ends. Attempts under way do not count."""
        self.request_kill()
        with self._core.changed:
            self._core.changed.notify_all()

    def request_pause(self) -> None:
        """Pause as `pause` does, without a lock or an event: a signal handler may call it."""
        self._core.pausing = True

    def request_kill(self) -> None:
        """Kill as `kill` does, without a lock: a signal handler may call it."""
        self._core.killed = self._core.pausing = True

    def retry(self, id: str) -> None:
        """Give an item its attempts again, and to those that were skipped because they depend on it."""
        core = self._core
        with core.changed:
            found = core.record.find(id)
            if found.chosen or found.phase not in ("failed", "skipped", "waiting"):
                raise LoopError(
                    f"{clean_line(id)} is {found.phase}", hint="only an item that failed or was skipped"
                )
            for other in core.record.items:
                if other is found or (other.phase == "skipped" and self._needs(other, found.item.id)):
                    other.phase, other.reason, other.first = "waiting", "", len(other.attempts) + 1
                    core.skipped.discard(other.item.id)
                    self._tell_change(other)
            core.save()
            core.changed.notify_all()

    def _needs(self, item: ItemRecord, id: str) -> bool:
        return any(other == id or self._needs(self.record.find(other), id) for other in item.item.depends_on)

    def skip(self, id: str) -> None:
        """Leave an item out; an attempt of it that runs is ended."""
        core = self._core
        with core.changed:
            found = core.record.find(id)
            if found.committing or found.phase in ("landed", "held"):
                raise LoopError(f"{clean_line(id)} has landed already", hint="undo its changes by hand")
            core.skipped.add(found.item.id)
            if found.item.id not in core.working and found.phase != "skipped":
                core.finish_item(found, "skipped", "a person skipped it")
            self._tell_change(found)
            core.changed.notify_all()

    def edit(self, id: str, **changes: Any) -> WorkItem:
        """Change the title, body, verify, judge, labels or attempts of an item, from its next attempt on."""
        if wrong := sorted(set(changes) - EDITABLE):
            raise LoopError(
                f"{wrong[0]} of an item cannot be changed", hint=f"{', '.join(sorted(EDITABLE))} can"
            )
        core = self._core
        with core.changed:
            found = core.record.find(id)
            plain = {**msgspec.to_builtins(found.item), **msgspec.to_builtins(changes)}
            try:
                found.item = msgspec.convert(plain, WorkItem)
            except msgspec.ValidationError as error:
                raise LoopError(f"{clean_line(id)}: {error}") from None
            core.save()
            self._tell_change(found)
            return found.item

    def release(self, id: str) -> None:
        """Let what depends on an item go on, if a person has committed or discarded what it held back."""
        core = self._core
        with core.changed:
            found = core.record.find(id)
            _release(found)
            core.save()
            self._tell_change(found)
            core.changed.notify_all()

    def _tell_change(self, found: ItemRecord) -> None:
        title = clean_line(found.item.title)
        self._core.tell(events.ItemChange, item=found.item.id, title=title, phase=found.phase)

    def _recover(self) -> None:
        """Bring the state of a loop that was killed to a point from which work can go on."""
        core = self._core
        for item in core.record.items:
            for attempt in item.attempts:
                if attempt.outcome is None:
                    attempt.outcome, attempt.reason = "cancelled", "the loop was ended during this attempt"
                    core.discard(attempt)
                core.remove(attempt.fork)
            if item.phase in ("running", "judging"):
                item.phase = "landing" if item.chosen else "waiting"
            _release(item)
        core.save()
        for item in core.record.items:
            if item.committing:
                # Before anything else lands: what is left in its workspace is compared with the project.
                ItemWork(core, item).land()
            elif item.git_pending:
                commit_to_git(core, item)

    def _detect(self, resumed: bool) -> None:
        """Make sure, before any agent starts, that this machine enforces the policy and has the agent."""
        from stockade.backends.selection import select
        from stockade.host import Host

        core = self._core
        chosen = select(core.agent_policy, Host.current())
        found = core.recipe.detect(core.agent_policy)
        core.tell(
            events.LoopStart,
            loop=self.id,
            project=core.record.project,
            agent=core.recipe.name,
            program=clean_line(found.program),
            version=found.version,
            backend=chosen.backend,
            mechanisms={str(name): one.mechanism for name, one in chosen.controls.items()},
            items=core.record.summaries(),
            resumed=resumed,
        )
        if text := core.recipe.missing_key(core.agent_policy):
            core.tell(events.LoopWarning, text=text)
        if any(one.phase not in FINAL and not one.item.verify for one in core.record.items):
            core.baseline(core.settings.verify)

    def _work(self) -> None:
        """Let threads work on the items until nothing is left that can be worked on."""
        core = self._core
        threads = [
            threading.Thread(target=self._worker, name=f"loop-{self.id}-{n}", daemon=True)
            for n in range(core.settings.parallel)
        ]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            for thread in threads:
                thread.join(TICK)
            self._take_requests()
            if not core.halted and (
                reason := excess(core.used_by_loop(), core.settings.budget.loop, "the loop")
            ):
                core.stop("over-budget", reason)

    def _take_requests(self) -> None:
        for request in self.store.requests():
            call = {"retry": self.retry, "skip": self.skip}.get(request.get("do", ""))
            if call is not None:
                try:
                    call(request.get("item", ""))
                except StockadeError as error:
                    self._core.tell(events.LoopWarning, text=clean_line(str(error)))

    def _worker(self) -> None:
        core = self._core
        try:
            while (item := self._take_item()) is not None:
                try:
                    ItemWork(core, item).work()
                finally:
                    with core.changed:
                        core.working.discard(item.item.id)
                        core.changed.notify_all()
        except StopLoopError:
            pass
        except (
            Exception
        ) as error:  # a defect of ours must stop the loop as a broken sandbox does, and be seen
            core.stop_by_error(error)

    def _take_item(self) -> ItemRecord | None:
        """Take the first item that can be worked on; wait while one may become so."""
        core = self._core
        with core.changed:
            while not (core.halted or core.pausing):
                self._skip_items()
                landed = {one.item.id for one in core.record.items if one.phase == "landed"}
                for one in core.record.items:
                    free = one.phase in ("waiting", "landing") and one.item.id not in core.working
                    if free and landed.issuperset(one.item.depends_on):
                        one.phase = "judging" if one.chosen else "running"
                        core.working.add(one.item.id)
                        return one
                if not core.working:
                    return None
                core.changed.wait(TICK)
            return None

    def _skip_items(self) -> None:
        """Skip the items that a person skipped, and those that depend on one that will not land."""
        core = self._core
        phases = {one.item.id: one.phase for one in core.record.items}
        for one in core.record.items:
            if one.phase != "waiting" or one.item.id in core.working:
                continue
            lost = [id for id in one.item.depends_on if phases[id] in ("failed", "skipped")]
            if one.item.id in core.skipped:
                core.finish_item(one, "skipped", "a person skipped it")
            elif lost:
                how = "failed" if phases[lost[0]] == "failed" else "was skipped"
                core.finish_item(one, "skipped", f"it depends on {clean_line(lost[0])}, which {how}")
            phases[one.item.id] = one.phase

    def _end(self) -> events.LoopEnd:
        core = self._core
        with core.changed:
            for one in core.record.items:
                if one.phase in ("running", "judging"):
                    one.phase = "landing" if one.chosen else "waiting"
            outcome, reason = self._outcome()
            core.record.outcome, core.record.reason = outcome, reason
            core.save()
            landed = [
                one.attempt(one.chosen).diff for one in core.record.items if one.phase in FINAL and one.chosen
            ]
        event = core.tell(
            events.LoopEnd,
            loop=self.id,
            outcome=outcome,
            reason=reason,
            exit_code=EXIT_CODES[outcome],
            items=core.record.summaries(),
            spending=core.used_by_loop(),
            diff=DiffStat(
                sum(one.files for one in landed),
                sum(one.added for one in landed),
                sum(one.removed for one in landed),
            ),
        )
        core.notify(event, f"the loop is over: {reason}")
        assert isinstance(event, events.LoopEnd)
        return event

    def _outcome(self) -> tuple[LoopOutcome, str]:
        phases = [one.phase for one in self.record.items]
        if self._core.stopped is not None:
            return self._core.stopped
        left = sum(phase not in FINAL for phase in phases)
        if left and self._core.pausing:
            return "paused", "you ended it" if self._core.killed else "you paused it"
        if "failed" in phases or "skipped" in phases:
            return "incomplete", f"{phases.count('failed')} failed, {phases.count('skipped')} skipped"
        if "held" in phases:
            return "held", "files wait for a person" + (
                f", and {left} of the items for these" if left else ""
            )
        return ("incomplete", f"{left} are left") if left else ("done", "every item has landed")


def _release(item: ItemRecord) -> None:
    """Let an item have landed if a person has committed or discarded what was held back of it."""
    if item.phase == "held" and landing.open_workspace(item.attempt(item.chosen).workspace) is None:
        item.phase, item.held = "landed", ()
