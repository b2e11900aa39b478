"""One attempt of an item, from the agent's start to the judge's verdict, as the loop records it."""

from __future__ import annotations

import threading
import time
import traceback

import msgspec

from stockade.errors import StockadeError
from stockade.linux.plain_text import clean_line
from stockade.loop import events
from stockade.loop.events import AttemptOutcome, Spending
from stockade.loop.judge.files import withheld_paths
from stockade.loop.judge.judgement import JudgeBaseline, JudgedRun, Judgement, judge_run
from stockade.loop.judge.verify import JudgeFilesError, fork_for_judge, is_hosts_fault, run_verify
from stockade.loop.record import UNCOUNTED, AttemptRecord, ItemRecord, file_name, with_error
from stockade.loop.work import landing
from stockade.loop.work.agent_run import AgentRun, AttemptListener, run_agent
from stockade.loop.work.core import LoopCore, excess
from stockade.sandbox.sandbox import Sandbox
from stockade.sandbox.workspace import Workspace

#: How often a budget is reported, in seconds.
REPORT_EVERY = 2.0
#: Caches that tools write by themselves: an attempt that changed only these has changed nothing.
CACHES = frozenset({"__pycache__", ".aider.tags.cache.v4", ".pytest_cache", ".mypy_cache", ".ruff_cache"})


class RateLimitHit(msgspec.Struct, frozen=True):
    """An attempt ended because the model's server asked to wait; 0 seconds if it did not say how long."""

    attempt: int
    seconds: float
    reason: str


class AttemptWork:
    """One attempt. `won` is set when another one of the same round has passed first."""

    def __init__(
        self, core: LoopCore, item: ItemRecord, attempt: AttemptRecord, won: threading.Event | None = None
    ) -> None:
        self._core = core
        self._item = item
        self._attempt = attempt
        self._won = won or threading.Event()
        self._id, self._number = item.item.id, attempt.number
        self._reported = 0.0

    def run(self, prompt: str, before: JudgeBaseline) -> RateLimitHit | None:
        """Run the agent and the judge, and record how that ended."""
        core, item = self._core, self._item
        logs = core.store.attempt_directory(self._id, self._number)
        most = item.item.attempts or core.settings.attempts
        core.tell(events.AttemptStart, item=self._id, attempt=self._number, log=logs, of=most)
        listener = AttemptListener(
            self._opened,
            lambda event: core.tell(events.AgentLine, item=self._id, attempt=self._number, text=event.text),
            lambda decision: core.tell(
                events.NetworkEvent, item=self._id, attempt=self._number, decision=decision
            ),
            self._may_go_on,
        )
        try:
            ran = run_agent(
                core.recipe,
                core.agent_policy,
                prompt,
                logs,
                listener,
                name=f"loop {core.record.id} {file_name(self._id)[:30]} {self._number}"[:64],
                who=core.who("attempt", item, self._number),
            )
        finally:
            with core.changed:
                core.active.pop((self._id, self._number), None)
        with core.changed:
            self._attempt.spending = ran.spending
            self._attempt.receipts = (ran.receipt,) if ran.receipt else ()
            core.save()
        return self._conclude(ran, before)

    def _opened(self, workspace: str) -> None:
        with self._core.changed:
            self._attempt.workspace = workspace
            self._core.save()

    def _may_go_on(self, used: Spending, idle: float) -> tuple[AttemptOutcome, str] | None:
        core = self._core
        with core.changed:
            core.active[self._id, self._number] = used
        item_used, loop_used = core.used_by_item(self._item), core.used_by_loop()
        if time.monotonic() - self._reported > REPORT_EVERY:
            self._reported = time.monotonic()
            core.tell(
                events.BudgetReport,
                item=self._id,
                attempt=self._number,
                used=used,
                item_used=item_used,
                loop_used=loop_used,
            )
        if self._must_end():
            return self._why_ended()
        budget = core.settings.budget
        if reason := excess(loop_used, budget.loop, "the loop"):
            core.stop("over-budget", reason)
            return "cancelled", reason
        if budget.attempt.time is not None and used.seconds > budget.attempt.time:
            return "out-of-time", f"the attempt took more than {budget.attempt.time:g} seconds"
        if budget.attempt.idle is not None and idle > budget.attempt.idle:
            return "idle", f"the agent printed nothing for {budget.attempt.idle:g} seconds"
        for spent, limits, whose in (
            (used, budget.attempt, "the attempt"),
            (item_used, budget.item, "the item"),
        ):
            if reason := excess(spent, limits, whose):
                return "over-budget", reason
        return None

    def _must_end(self) -> bool:
        return self._core.halted or self._id in self._core.skipped or self._won.is_set()

    def _why_ended(self) -> tuple[AttemptOutcome, str]:
        if self._core.halted:
            return "cancelled", "the loop stopped"
        if self._id in self._core.skipped:
            return "cancelled", "a person skipped the item"
        return "surpassed", "another attempt passed first"

    def _conclude(self, ran: AgentRun, before: JudgeBaseline) -> RateLimitHit | None:
        if ran.stopped is not None:
            self.finish(ran.stopped, ran.reason)
        elif ran.rate_limit is not None and ran.exit_code != 0:
            reason = f"the model's server answered {ran.rate_limit.status}"
            self.finish("rate-limited", reason)
            return RateLimitHit(self._number, ran.rate_limit.seconds or 0.0, reason)
        else:
            try:
                workspace = self._changed_workspace()
            except (StockadeError, OSError) as error:
                if is_hosts_fault(error):
                    raise
                self.finish("rejected", "its changes cannot be read", error=clean_line(str(error)))
                return None
            if workspace is not None:
                self._core.set_phase(self._item, "judging")
                self._finish_judged(self.judge(workspace, before), workspace)
            elif ran.exit_code == 0:
                self.finish("no-change", "the agent changed nothing")
            else:
                self.finish("crashed", f"the agent changed nothing and failed: {ran.reason or ran.ended}")
        return None

    def _changed_workspace(self) -> Workspace | None:
        """Return the workspace with the agent's changes and record their size; None if there are none."""
        workspace = landing.open_workspace(self._attempt.workspace) if self._attempt.workspace else None
        if workspace is None or not _has_effect(workspace):
            return None
        self._attempt.diff, self._attempt.digest = landing.measure(workspace)
        return workspace

    def _finish_judged(self, judged: JudgedRun | None, workspace: Workspace) -> None:
        if judged is None:
            self.finish(*self._why_ended())
        elif not judged.judgement.passed:
            feedback = "" if judged.run is None else judged.run.output
            self.finish("rejected", judged.judgement.reason, feedback, judged.judgement.error)
        else:
            if self._core.settings.best_of > 1:
                if self._core.settings.score:
                    self._attempt.score = self._score(workspace)
                else:
                    with self._core.changed:
                        if self._won.is_set():
                            self.finish(*self._why_ended())
                            return
                        self._won.set()
            self.finish("passed", judged.judgement.reason)

    def judge(self, workspace: Workspace, before: JudgeBaseline, *, again: bool = False) -> JudgedRun | None:
        """Run the judge; None if the attempt must end before there is a verdict."""
        judged = self._judge_fork(workspace, before, again=again)
        if judged is not None:
            core, verdict = self._core, judged.judgement
            core.judged[self._id, self._number] = judged
            core.tell(
                events.JudgeEnd,
                item=self._id,
                attempt=self._number,
                passed=verdict.passed,
                reason=with_error(verdict.reason, verdict.error),
            )
        return judged

    def _judge_fork(self, workspace: Workspace, before: JudgeBaseline, *, again: bool) -> JudgedRun | None:
        core, item = self._core, self._item
        command = core.verify_command(item)
        try:
            fork, restored = self._fork(workspace)
        except JudgeFilesError as error:
            return JudgedRun(Judgement(False, clean_line(error.message), clean_line(error.hint)))
        restored = tuple(path for path in restored if not _is_cache(path))
        changes = [change for change in workspace.changes() if not _is_cache(change.path)]
        touched = tuple(one.path for one in changes if one.path in restored and one.kind != "added")
        with core.changed:
            defaults = core.settings.judge_defaults
            self._attempt.withheld = tuple(withheld_paths(changes, restored, defaults=defaults))
        core.tell(
            events.JudgeStart,
            item=self._id,
            attempt=self._number,
            command=clean_line(command),
            restored=tuple(clean_line(path) for path in restored[:100]),
            again=again,
        )
        request = core.judge_request(command, "judge", item, self._number)
        place = core.store.attempt_directory(self._id, self._number)
        try:
            with open(f"{place}/judge.log", "ab") as log:
                run = run_verify(request, fork, self._tell_judge_line, self._must_end, log)
        except (StockadeError, OSError) as error:
            # An attempt may have made something that no sandbox can be raised over. The same sandbox without
            # the changes tells whose fault it is: if it fails too, the loop stops.
            with Sandbox(request.policy, on_exit="discard", name=request.name):
                core.store.log_error("".join(traceback.format_exception(error)))
            reason = "no sandbox can be raised over the changes"
            return JudgedRun(Judgement(False, reason, clean_line(str(error))))
        if self._must_end():
            return None
        with core.changed:
            self._attempt.receipts += (run.receipt,) if run.receipt else ()
        verdict = judge_run(
            run, before, strict=core.settings.strict or bool(item.item.verify), touched=touched
        )
        return JudgedRun(Judgement(verdict.passed, clean_line(verdict.reason)), run, restored)

    def _fork(self, workspace: Workspace) -> tuple[Workspace, tuple[str, ...]]:
        """Fork the attempt for the judge; the record names the fork, so that a killed loop leaves none."""
        core = self._core

        def on_fork(id: str) -> None:
            with core.changed:
                self._attempt.fork = id
                core.save()

        paths = core.judge_paths(self._item)
        return fork_for_judge(workspace, paths, on_fork, defaults=core.settings.judge_defaults)

    def _tell_judge_line(self, line: str) -> None:
        self._core.tell(events.JudgeLine, item=self._id, attempt=self._number, text=line)

    def _score(self, workspace: Workspace) -> float:
        """Return the number that the scoring command prints last; without one, the attempt comes last."""
        core, item = self._core, self._item
        fork, _ = self._fork(workspace)
        request = core.judge_request(core.settings.score, "score", item, self._number)
        request = msgspec.structs.replace(request, report="none")
        run = run_verify(request, fork, self._tell_judge_line, lambda: core.halted)
        words = run.output.split()
        try:
            score = float(words[-1]) if words and run.exit_code == 0 else float("-inf")
        except ValueError:
            return float("-inf")
        return max(score, float("-inf"))  # never NaN

    def finish(self, outcome: AttemptOutcome, reason: str, feedback: str = "", error: str = "") -> None:
        """Record and report how the attempt ended, and remove what no later step reads.

        The next agent reads `reason` and `feedback`; `error` is for the user alone.
        """
        core, attempt = self._core, self._attempt
        with core.changed:
            attempt.outcome, attempt.reason, attempt.feedback = outcome, reason, feedback
            attempt.error = error
            core.save()
        core.tell(
            events.AttemptEnd,
            item=self._id,
            attempt=self._number,
            outcome=outcome,
            reason=with_error(reason, error),
            counts=outcome not in UNCOUNTED,
            spending=attempt.spending,
            diff=attempt.diff,
            workspace=attempt.workspace,
            receipts=attempt.receipts,
        )
        if outcome in UNCOUNTED or outcome in ("no-change", "crashed"):
            core.discard(attempt)
        elif outcome != "passed":
            # Of the failed attempts only the last can still be read.
            for other in self._item.attempts:
                if other is not attempt and other.outcome not in (None, "passed"):
                    core.discard(other)


def _is_cache(path: str) -> bool:
    return not CACHES.isdisjoint(path.split("/"))


def _has_effect(workspace: Workspace) -> bool:
    """Whether anything changed besides caches."""
    return any(not _is_cache(change.path) for change in workspace.changes())
