"""The work on one item: rounds of attempts until one passes, and its landing."""

from __future__ import annotations

import threading
import time

from stockade.errors import ConflictError, SetupError
from stockade.linux.plain_text import clean_line
from stockade.loop import events
from stockade.loop.events import AttemptOutcome, HeldFile
from stockade.loop.judge.judgement import make_baseline
from stockade.loop.judge.verify import is_hosts_fault
from stockade.loop.record import UNCOUNTED, AttemptRecord, ItemRecord, LoopError, file_name, with_error
from stockade.loop.work import landing
from stockade.loop.work.attempt import AttemptWork, RateLimitHit
from stockade.loop.work.core import TICK, LoopCore, StopLoopError, excess
from stockade.loop.work.prompt import make_prompt
from stockade.sandbox.workspace import Workspace

#: How long to wait after a rate limit that does not say it: doubled each time, up to the last.
FIRST_WAIT, LONGEST_WAIT = 30.0, 900.0
#: How many rate limits in a row an item may meet.
MOST_WAITS = 100


class ItemWork:
    """Works on one item in one thread of the loop."""

    def __init__(self, core: LoopCore, item: ItemRecord) -> None:
        self._core = core
        self._item = item
        self._id = item.item.id

    def work(self) -> None:
        """Work until the item has landed or failed, or the loop stops."""
        core, item = self._core, self._item
        core.save()
        core.tell(events.ItemStart, item=self._id, title=clean_line(item.item.title))
        waits = 0
        while not self._leave():
            if item.chosen:
                if self.land():
                    return
                continue
            most = item.item.attempts or core.settings.attempts
            reason = excess(core.used_by_item(item), core.settings.budget.item, "the item")
            if reason or item.failures >= most:
                last = next((one for one in reversed(item.attempts) if one.outcome not in UNCOUNTED), None)
                core.finish_item(
                    item, "failed", reason or ("" if last is None else with_error(last.reason, last.error))
                )
                return
            try:
                limit = self._run_round()
            except LoopError as error:  # its own verify command does not run
                core.finish_item(item, "failed", clean_line(str(error)))
                return
            waits = waits + 1 if limit is not None else 0
            if limit is not None and not self._wait(limit, waits):
                return

    def _leave(self) -> bool:
        """Whether the loop must stop working on the item now; its phase says how it goes on."""
        core, item = self._core, self._item
        with core.changed:
            if self._id in core.skipped and not item.committing:
                if item.chosen:
                    core.discard(item.attempt(item.chosen))
                    item.chosen = 0
                core.finish_item(item, "skipped", "a person skipped it")
                return True
            if core.halted or (core.pausing and not item.chosen):
                core.set_phase(item, "landing" if item.chosen else "waiting")
                return True
        return False

    def _wait(self, limit: RateLimitHit, waits: int) -> bool:
        """Wait as long as the model's server asks for. False if that happens too often."""
        core, item = self._core, self._item
        if waits > MOST_WAITS:
            core.finish_item(item, "failed", f"it met {waits} rate limits in a row: {limit.reason}")
            return False
        seconds = limit.seconds or min(LONGEST_WAIT, FIRST_WAIT * 2 ** (waits - 1))
        core.set_phase(item, "waiting")
        core.tell(
            events.RateLimitWait,
            item=self._id,
            attempt=limit.attempt,
            seconds=seconds,
            reason=limit.reason,
        )
        until = time.monotonic() + seconds
        with core.changed:
            while (left := until - time.monotonic()) > 0:
                if core.halted or core.pausing or self._id in core.skipped:
                    break
                core.changed.wait(min(left, TICK))
            if item.phase == "waiting":
                item.phase = "running"
        return True

    def _run_round(self) -> RateLimitHit | None:
        """Run the attempts of one round and choose the one that lands; return the rate limit it met."""
        core, item = self._core, self._item
        before = core.baseline(core.verify_command(item))
        last = next((one for one in reversed(item.attempts) if _says_something(one)), None)
        prompt = make_prompt(
            item.item,
            core.verify_command(item),
            core.judge_paths(item),
            "" if last is None else last.reason,
            "" if last is None else last.feedback,
        )
        with core.changed:
            first = len(item.attempts) + 1
            number = max((one.round for one in item.attempts), default=0) + 1
            made = [
                AttemptRecord(number=first + n, round=number, started=time.time(), landed=core.record.landed)
                for n in range(core.settings.best_of)
            ]
            item.attempts += made
            core.set_phase(item, "running")
        limits: list[RateLimitHit] = []
        won = threading.Event()

        def run(attempt: AttemptRecord) -> None:
            try:
                limit = AttemptWork(core, item, attempt, won).run(prompt, before)
                if limit is not None:
                    limits.append(limit)
            except StopLoopError:
                pass
            except Exception as error:  # whatever it is, it must stop the loop and be seen
                core.stop_by_error(error)

        threads = [threading.Thread(target=run, args=(attempt,), daemon=True) for attempt in made[1:]]
        for thread in threads:
            thread.start()
        run(made[0])
        for thread in threads:
            thread.join()
        self._choose(made)
        missed = all(one.outcome in ("rate-limited", "cancelled") for one in made)
        return limits[0] if limits and missed else None

    def _choose(self, made: list[AttemptRecord]) -> None:
        """Choose the passed attempt that lands: the one with the best score, or else the first."""
        core, item = self._core, self._item
        with core.changed:
            for one in made:
                if one.outcome is None:
                    AttemptWork(core, item, one).finish("cancelled", "the loop stopped")
            if passed := [one for one in made if one.outcome == "passed"]:
                best = max(passed, key=lambda one: one.score or 0.0)
                for one in passed:
                    if one is not best:
                        AttemptWork(core, item, one).finish("surpassed", f"attempt {best.number} is better")
                item.chosen = best.number
                core.set_phase(item, "landing")

    def land(self) -> bool:
        """Land the chosen attempt in its turn. False if the item needs another attempt."""
        core, item = self._core, self._item
        attempt = item.attempt(item.chosen)
        self._wait_for_turn()
        if self._leave():
            return True
        with core.landing:
            workspace = landing.open_workspace(attempt.workspace)
            stale = attempt.landed != core.record.landed
            if workspace is not None and stale and not item.committing:
                passed = self._judge_again(attempt, workspace)
                if not passed:
                    return self._leave()
            # A commit that was interrupted has taken some of the changes out of the workspace.
            digest = None if item.committing else attempt.digest
            with core.changed:
                item.committing = True
                if workspace is not None and not item.paths:
                    item.paths = tuple(change.path for change in workspace.changes())
                core.set_phase(item, "landing")
            try:
                done = landing.land(workspace, attempt.withheld, digest)
            except ConflictError as error:
                self._conflict(attempt, error)
                return self._leave()
            except SetupError as error:
                # The attempt has made something that cannot be committed, such as very deep directories.
                if is_hosts_fault(error):
                    raise
                words = clean_line(str(error))
                self._give_up(attempt, "rejected", "its changes cannot be committed", error=words)
                return self._leave()
            self._record_landing(attempt, done)
        self._finish_landing(attempt)
        return True

    def _wait_for_turn(self) -> None:
        """Wait for the items before this one that are being worked on: changes land in the items' order."""
        core, items = self._core, self._core.record.items
        with core.changed:
            before = {one.item.id for one in items[: items.index(self._item)]}
            while before & core.working and not (core.halted or self._id in core.skipped):
                core.changed.wait(TICK)

    def _judge_again(self, attempt: AttemptRecord, workspace: Workspace) -> bool:
        """Judge an attempt together with what has landed since it began; False if it does not land now."""
        core, item = self._core, self._item
        try:
            workspace.rebase()
        except ConflictError as error:
            self._conflict(attempt, error)
            return False
        attempt.diff, attempt.digest = landing.measure(workspace)
        work = AttemptWork(core, item, attempt)
        judged = work.judge(workspace, core.baseline(core.verify_command(item)), again=True)
        if judged is None:
            return False
        if not judged.judgement.passed:
            reason = f"together with what has landed meanwhile: {judged.judgement.reason}"
            output = "" if judged.run is None else judged.run.output
            self._give_up(attempt, "rejected", reason, output, judged.judgement.error)
            return False
        with core.changed:
            attempt.landed = core.record.landed
            core.save()
        return True

    def _conflict(self, attempt: AttemptRecord, error: ConflictError) -> None:
        core = self._core
        if not error.paths:
            self._give_up(attempt, "rejected", "something else changed its workspace after the judge saw it")
            return
        paths = tuple(clean_line(path) for path in error.paths)
        core.tell(events.LandingConflict, item=self._id, attempt=attempt.number, paths=paths)
        reason = f"the project changed in the same places: {', '.join(paths[:5])}"
        self._give_up(attempt, "conflict", reason, clean_line(str(error))[:4000])

    def _give_up(
        self,
        attempt: AttemptRecord,
        outcome: AttemptOutcome,
        reason: str,
        feedback: str = "",
        error: str = "",
    ) -> None:
        """Record that a chosen attempt does not land; the item needs another one."""
        core, item = self._core, self._item
        with core.changed:
            item.chosen, item.committing, item.paths = 0, False, ()
            core.set_phase(item, "running")
        AttemptWork(core, item, attempt).finish(outcome, reason, feedback, error)

    def _record_landing(self, attempt: AttemptRecord, done: landing.LandedChanges) -> None:
        core, item = self._core, self._item
        held = {one.path for one in done.held}
        judged = core.judged.pop((self._id, attempt.number), None)
        with core.changed:
            item.paths = done.paths or tuple(path for path in item.paths if path not in held)
            item.held = done.held
            item.git_pending = core.settings.git_commit
            item.reason, item.committing = attempt.reason, False
            core.record.landed += 1
            if judged is not None and judged.run is not None and not held and not judged.restored:
                # What the judge saw is what the project is now.
                command = core.verify_command(item)
                core.store.save_baseline(make_baseline(command, judged.run, core.record.landed))
            core.set_phase(item, "held" if done.held else "landed")

    def _finish_landing(self, attempt: AttemptRecord) -> None:
        """Make the git commit of a landed item, tell of it, and remove what its other attempts left."""
        core, item = self._core, self._item
        if item.git_pending:
            commit_to_git(core, item)
        for other in item.attempts:
            if other is not attempt:
                core.discard(other)
        core.tell(
            events.Landing,
            item=self._id,
            attempt=attempt.number,
            diff=attempt.diff,
            paths=tuple(clean_line(path) for path in item.paths[:1000]),
            receipts=attempt.receipts,
            git_commit=item.git_commit,
        )
        if item.held:
            files = tuple(HeldFile(clean_line(one.path), one.why) for one in item.held)
            event = core.tell(events.HeldBackFiles, item=self._id, workspace=attempt.workspace, files=files)
            core.notify(event, f"{clean_line(self._id)}: {len(files)} files wait for you")
        core.finish_item(item, item.phase, item.reason)


def commit_to_git(core: LoopCore, item: ItemRecord) -> None:
    """Make the git commit of a landed item, once."""
    attempt = item.attempt(item.chosen)
    receipt = attempt.receipts[0] if attempt.receipts else ""
    mark = f"Stockade-Attempt: {core.record.id}/{file_name(item.item.id)}/{attempt.number}"
    title = clean_line(item.item.title)[:200]
    message = f"{title}\n\nItem {clean_line(item.item.id)}\n\nStockade-Receipt: {receipt}\n{mark}\n"
    made = ""
    try:
        with core.landing:
            made = landing.git_commit(core.record.project, item.paths, message, mark)
    except LoopError as error:
        core.tell(events.LoopWarning, text=clean_line(f"{error}; {error.hint}"))
    with core.changed:
        item.git_commit, item.git_pending = made, False
        core.save()


def _says_something(attempt: AttemptRecord) -> bool:
    """Whether the next agent should know how an attempt ended."""
    return attempt.outcome not in (None, "cancelled", "rate-limited", "surpassed", "passed")
