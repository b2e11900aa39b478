"""`Spawner`: many runs at once, served by one thread and identified by their numbers.

Each run has its own sandbox. A run is written as steps (`runs.io.eventloop`),
so one thread can take the next step of whichever run is ready: no run needs a
thread of its own, and runs proceed without being polled. The gate of each run
enforces its deadline.
"""

from __future__ import annotations

import atexit
import enum
import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Unpack

import msgspec

import stockade
from stockade.errors import NotFoundError, PolicyError, SetupError
from stockade.linux import os_errors
from stockade.policy.model import PolicyLike, policy_or_default
from stockade.receipt.account import Account, resolve_who
from stockade.result import Outcome, Result
from stockade.runs.command import command, still_running_error, words
from stockade.runs.io.eventloop import Events, Steps
from stockade.runs.options import OnExit, SpawnOptions, refuse_unknown, valid_name, valid_on_exit
from stockade.runs.prepare import prepare
from stockade.runs.supervise import Run
from stockade.sandbox.sandbox import one_shot

MOST = 1000
CLOSED = "the spawner was closed"


class SpawnStage(enum.StrEnum):
    """The stage of a run. Compares equal to its name."""

    PENDING = "pending"
    RUNNING = "running"
    COMPLETED = "completed"
    TIMED_OUT = "timed-out"
    KILLED = "killed"
    FAILED = "failed"

    @property
    def over(self) -> bool:
        """Whether the run has ended and can be collected."""
        return self not in (SpawnStage.PENDING, SpawnStage.RUNNING)


class State(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a run. Which other fields have a meaning depends on the stage."""

    stage: SpawnStage
    #: While it runs: the pid of its first process on the host, and the seconds since its start.
    pid: int | None = None
    elapsed: float = 0.0
    #: Set if it has completed.
    exit_code: int | None = None
    #: Set if it was killed or has failed.
    reason: str = ""


class _TerminateRequest(Exception):
    """The caller wants the run to end."""


class _SpawnerJob:
    """One run. Only the spawner's thread uses its steps and events."""

    def __init__(self, account: Account) -> None:
        self.account = account
        self.events = Events()
        self.steps: Steps[Result]
        #: When its next step is due if nothing happens before.
        self.due: float | None = None
        self.pid: int | None = None
        self.began = 0.0
        #: Why it is to end, or empty; whether its steps have begun, and whether they got the request to end.
        self.because = ""
        self.begun = self.got_request = False
        self.result: Result | None = None
        self.failure: BaseException | None = None

    def started(self, pid: int) -> None:
        self.pid, self.began = pid, time.monotonic()

    @property
    def is_over(self) -> bool:
        return self.result is not None or self.failure is not None

    @property
    def wanted(self) -> bool:
        """Whether it is to end and its steps have not got the request yet."""
        return bool(self.because) and self.begun and not self.got_request

    def step(self) -> bool:
        """Take the next step; return whether there are more."""
        try:
            if self.wanted:
                self.got_request, self.events.ready = True, []
                self.account.because = self.because
                patience = self.steps.throw(_TerminateRequest(self.because))
            else:
                # A generator that never began would not clean up either.
                self.begun = True
                self.events.wait(0)
                patience = next(self.steps)
        except StopIteration as done:
            self.result = done.value
        except BaseException as error:
            self.failure = error
        else:
            if self.events.busy or self.wanted:
                patience = 0.0
            self.due = None if patience is None else time.monotonic() + patience
            return True
        return False

    def state(self) -> State:
        if self.result is not None:
            return _ended(self.result)
        if isinstance(self.failure, _TerminateRequest):
            return State(stage=SpawnStage.KILLED, reason=self.because)
        if self.failure is not None:
            return State(stage=SpawnStage.FAILED, reason=str(self.failure))
        if self.pid is None:
            return State(stage=SpawnStage.PENDING)
        return State(stage=SpawnStage.RUNNING, pid=self.pid, elapsed=time.monotonic() - self.began)


_STAGES = {
    Outcome.EXITED: SpawnStage.COMPLETED,
    Outcome.TIMED_OUT: SpawnStage.TIMED_OUT,
    Outcome.SETUP_FAILED: SpawnStage.FAILED,
}


def _ended(result: Result) -> State:
    stage = _STAGES.get(result.outcome, SpawnStage.KILLED)
    completed = stage is SpawnStage.COMPLETED
    return State(
        stage=stage,
        exit_code=result.exit_code if completed else None,
        reason="" if completed else result.reason,
    )


class Spawner:
    """Starts commands, each in its own sandbox, and reports on them by number.

    >>> import stockade
    >>> with stockade.Spawner(stockade.Policy()) as spawner:
    ...     one = spawner.spawn(["echo", "hello"], timeout=60)
    ...     spawner.collect(one).text
    'hello\\n'

    A deadline fires whether or not you ask for the run. You can collect a result once, and query its state
    until then. Threads may share a spawner. Closing it ends all runs and drops uncollected results.
    """

    def __init__(
        self,
        policy: PolicyLike | None = None,
        *,
        on_exit: OnExit = "keep",
        who: stockade.receipt.Who | Mapping[str, str] | None = None,
        most: int = MOST,
    ) -> None:
        if not isinstance(most, int) or isinstance(most, bool) or most < 1:
            raise PolicyError(f"most = {most!r}: is not a number of runs", hint="write a number from 1 up")
        self.policy = policy_or_default(policy)
        self.most = most
        self._on_exit, self._who = valid_on_exit(on_exit), resolve_who(who)
        self._owner = os.getpid()
        #: Guards the attributes below, and is notified when a run ends.
        self._change = threading.Condition()
        self._jobs: dict[int, _SpawnerJob] = {}
        self._new: deque[_SpawnerJob] = deque()
        self._ending = False
        self._numbers = itertools.count(1)
        self._events = Events()
        try:
            with os_errors.setup_errors():
                self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        except BaseException:
            self._events.close()
            raise
        self._events.watch(self._bell)
        self._thread = threading.Thread(target=self._look_after, name="stockade-spawner", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def __enter__(self) -> Spawner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        count = len(self._jobs)
        return f"<Spawner: {'closed' if self._ending else f'{count} run' + ('s' if count != 1 else '')}>"

    def spawn(self, cmd: Sequence[str], **options: Unpack[SpawnOptions]) -> int:
        """Start a command and return its number. What the policy or the host refuses is raised here.

        The options are `input`, `env`, `cwd`, `timeout`, `grace`, `name` and `who`, as for `stockade.run`.
        """
        refuse_unknown("spawn", options, SpawnOptions.__optional_keys__)
        argv = words(cmd)
        name = valid_name(options.get("name", ""))
        account = Account(self.policy, argv, resolve_who(options.get("who"), self._who), name=name)
        with account.telling():
            with self._own_lock():
                self._refuse()
            job = _SpawnerJob(account)
            try:
                prepared = prepare(self.policy, command=argv, name=name)
            except BaseException:
                job.events.close()
                raise
            account.prepared = prepared
            try:
                one = command(
                    prepared, argv, options, kept=False, cancelled_by=(_TerminateRequest,),
                    meanwhile=account.ready,
                )  # fmt: skip
                program = msgspec.structs.replace(one.program, tell=True)
                run = msgspec.structs.replace(one, program=program, started=job.started)
                job.steps = self._run(job, run)
                with self._change:
                    self._refuse()
                    number = next(self._numbers)
                    self._jobs[number] = job
                    self._new.append(job)
            except BaseException:
                job.events.close()
                prepared.close(discard=True)
                raise
        self._ring()
        return number

    def state(self, number: int) -> State:
        """Return the state of a run."""
        with self._own_lock():
            return self._job(number).state()

    def terminate(self, number: int, reason: str = "terminated") -> None:
        """End a run: TERM, its grace, KILL. A run that has already ended stays as it is."""
        with self._own_lock():
            job = self._job(number)
            if not job.because and not job.is_over:
                job.because = reason or "terminated"
        self._ring()

    def collect(self, number: int, timeout: float | None = None) -> Result:
        """Wait for the end of a run and return its result, once; raise the error that kept it from starting.

        After a `TimeoutError` the run goes on, and you can collect it later.
        """
        with self._own_lock():
            self._job(number)
            if not self._change.wait_for(lambda: self._over(number), timeout):
                raise still_running_error(timeout)
            job = self._job(number)  # raises if another thread has collected it meanwhile
            del self._jobs[number]
        if isinstance(job.failure, _TerminateRequest):
            return Result(
                outcome=Outcome.CANCELLED, exit_code=130, reason=job.because, receipt=job.account.receipt
            )
        if job.failure is not None:
            raise job.failure
        assert job.result is not None
        return job.result

    def close(self) -> None:
        """End all runs. Harmless when repeated, and in a forked child, where it does nothing."""
        if self._owner != os.getpid():
            return
        with self._change:
            self._ending = True
            for job in self._jobs.values():
                job.because = job.because or CLOSED
        self._ring()
        atexit.unregister(self.close)
        self._thread.join()
        with self._change:
            if self._bell >= 0:
                os.close(self._bell)
                self._bell = -1
            self._events.close()
            self._jobs.clear()
            self._change.notify_all()

    def _own_lock(self) -> threading.Condition:
        """Return the lock; refuse in a forked child, whose copy of it may be held by no living thread."""
        if self._owner != os.getpid():
            raise SetupError(
                "the spawner belongs to the process that this one was forked from",
                stage="spawner",
                hint="make a Spawner after the fork",
            )
        return self._change

    def _refuse(self) -> None:
        if self._ending:
            raise SetupError(CLOSED, stage="spawner")
        if len(self._jobs) >= self.most:
            raise SetupError(
                f"the spawner is full: {len(self._jobs)} runs have not been collected",
                stage="spawner",
                hint="collect() them, or make the Spawner with a larger most=",
            )

    def _job(self, number: int) -> _SpawnerJob:
        if number not in self._jobs:
            raise NotFoundError(
                f"the spawner has no run {number!r}", hint="a result can be collected only once"
            )
        return self._jobs[number]

    def _over(self, number: int) -> bool:
        return number not in self._jobs or self._jobs[number].is_over

    def _ring(self) -> None:
        with self._change:
            if self._bell >= 0:
                os.eventfd_write(self._bell, 1)

    def _run(self, job: _SpawnerJob, run: Run) -> Steps[Result]:
        account = job.account
        assert account.prepared is not None
        with account.telling():
            return (yield from one_shot(account.prepared, lambda: run, account, job.events, self._on_exit))

    def _look_after(self) -> None:
        """Serve the runs, in the spawner's thread, until it is closed and none is left."""
        try:
            self._take_steps()
        except BaseException as error:
            # End the runs, one after the other, or callers would wait for ever.
            with self._change:
                self._ending = True
                left = [job for job in self._jobs.values() if not job.is_over]
            for job in left:
                self._give_up(job, error)
            raise

    def _give_up(self, job: _SpawnerJob, error: BaseException) -> None:
        failure = SetupError(f"the spawner has failed: {error}", stage="spawner")
        job.because = job.because or failure.message
        try:
            while not job.is_over and job.step():
                job.events.wait(None if job.due is None else max(0.0, job.due - time.monotonic()))
        finally:
            with self._change:
                if not job.is_over:
                    job.failure = failure
                self._change.notify_all()
            job.events.close()

    def _take_steps(self) -> None:
        running: dict[int, _SpawnerJob] = {}
        while True:
            with self._change:
                fresh = list(self._new)
                self._new.clear()
                if self._ending and not running and not fresh:
                    return
            for job in fresh:
                if self._start_watching(job):
                    running[job.events.fileno()] = job
            self._events.wait(self._patience(running, fresh))
            ready = set(self._events.ready)
            if self._bell in ready:
                os.eventfd_read(self._bell)
            now = time.monotonic()
            for number, job in tuple(running.items()):
                due = job.due is not None and job.due <= now
                if (job in fresh or due or number in ready or job.wanted) and not job.step():
                    del running[number]
                    self._finish(job)

    def _start_watching(self, job: _SpawnerJob) -> bool:
        """Watch a new run; if that fails, close it before it begins and return False."""
        try:
            with os_errors.setup_errors():
                self._events.watch(job.events.fileno())
        except SetupError as error:
            job.failure = error
            if job.account.prepared is not None:
                job.account.prepared.close(discard=True)
            job.events.close()
            with self._change:
                self._change.notify_all()
            return False
        return True

    def _patience(self, running: dict[int, _SpawnerJob], fresh: list[_SpawnerJob]) -> float | None:
        due = [job.due for job in running.values() if job.due is not None]
        if fresh:
            return 0
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _finish(self, job: _SpawnerJob) -> None:
        self._events.forget(job.events.fileno())
        job.events.close()
        with self._change:
            self._change.notify_all()
