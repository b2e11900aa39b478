"""`Spawner`: many runs at once, looked after by one thread and asked about by their number.

Each run has a sandbox of its own. What happens in one is written as steps
(`sandbox.steps`), so one thread can take the next step of whichever run is
ready: there is no thread for a run, and nobody has to ask for anything to
happen. Each deadline is kept by the gate of its run.
"""

from __future__ import annotations

import atexit
import enum
import itertools
import os
import select
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from stockade.errors import NotFoundError, PolicyError, SetupError
from stockade.policy import Policy
from stockade.policy.model import DEFAULT
from stockade.receipt.account import Account, named
from stockade.sandbox import scarce
from stockade.sandbox.launch import prepare
from stockade.sandbox.process import late
from stockade.sandbox.result import Outcome, Result
from stockade.sandbox.sandbox import OnExit, command, one_shot, way, words
from stockade.sandbox.steps import Events, Steps
from stockade.sandbox.supervise import GRACE, Run

if TYPE_CHECKING:
    from stockade.receipt.statement import Who

MOST = 1000
CLOSED = "the spawner was closed"


class Stage(enum.StrEnum):
    """How far a run has come. Compares equal to its name."""

    PENDING = "pending"
    RUNNING = "running"
    COMPLETED = "completed"
    TIMED_OUT = "timed-out"
    KILLED = "killed"
    FAILED = "failed"

    @property
    def over(self) -> bool:
        """Whether there is a result to collect."""
        return self not in (Stage.PENDING, Stage.RUNNING)


class State(msgspec.Struct, frozen=True, kw_only=True):
    """Where a run stands. Which of the rest means something depends on the stage."""

    stage: Stage
    #: While it runs: the number of its first process on the host, and for how many seconds.
    pid: int | None = None
    elapsed: float = 0.0
    #: Of a completed one.
    exit_code: int | None = None
    #: Of one that was killed or has failed.
    reason: str = ""


class _Terminated(Exception):
    """Somebody wants the run to end."""


class _Job:
    """One run. Its steps and events belong to the thread alone."""

    def __init__(self, account: Account) -> None:
        self.account = account
        self.events = Events()
        self.steps: Steps[Result]
        #: When its next step is due if nothing happens before.
        self.due: float | None = None
        self.pid: int | None = None
        self.began = 0.0
        #: Why it is to end; empty while nobody wants that. And whether it has been told.
        self.because = ""
        self.begun = self.told = False
        self.result: Result | None = None
        self.failure: BaseException | None = None

    def started(self, pid: int) -> None:
        self.pid, self.began = pid, time.monotonic()

    @property
    def is_over(self) -> bool:
        return self.result is not None or self.failure is not None

    @property
    def wanted(self) -> bool:
        """Whether somebody wants it to end and it has not heard of that."""
        return bool(self.because) and self.begun and not self.told

    def step(self) -> bool:
        """Take the next step; whether there are more."""
        try:
            if self.wanted:
                self.told, self.events.ready = True, []
                self.account.because = self.because
                patience = self.steps.throw(_Terminated(self.because))
            else:
                # What was never begun would not be put away either.
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
        if isinstance(self.failure, _Terminated):
            return State(stage=Stage.KILLED, reason=self.because)
        if self.failure is not None:
            return State(stage=Stage.FAILED, reason=str(self.failure))
        if self.pid is None:
            return State(stage=Stage.PENDING)
        return State(stage=Stage.RUNNING, pid=self.pid, elapsed=time.monotonic() - self.began)


_STAGES = {
    Outcome.EXITED: Stage.COMPLETED,
    Outcome.TIMED_OUT: Stage.TIMED_OUT,
    Outcome.SETUP_FAILED: Stage.FAILED,
}


def _ended(result: Result) -> State:
    stage = _STAGES.get(result.outcome, Stage.KILLED)
    completed = stage is Stage.COMPLETED
    return State(
        stage=stage,
        exit_code=result.exit_code if completed else None,
        reason="" if completed else result.reason,
    )


class Spawner:
    """Starts commands, each in a sandbox of its own, and answers for them by number.

    >>> import stockade
    >>> with stockade.Spawner(stockade.Policy()) as spawner:
    ...     one = spawner.spawn(["echo", "hello"], timeout=60)
    ...     spawner.collect(one).text
    'hello\\n'

    A deadline fires whether or not anybody asks. A result is collected once; until then its state can be
    asked for. Safe to use from threads. Closing it ends whatever runs, and forgets what was not collected.
    """

    def __init__(
        self,
        policy: Policy | None = None,
        *,
        on_exit: OnExit = "keep",
        who: Who | Mapping[str, str] | None = None,
        most: int = MOST,
    ) -> None:
        if not isinstance(most, int) or isinstance(most, bool) or most < 1:
            raise PolicyError(f"most = {most!r}: is not a number of runs", hint="from 1")
        self.policy = DEFAULT if policy is None else policy
        self.most = most
        self._on_exit, self._who = way(on_exit), named(who)
        self._owner = os.getpid()
        #: Guards what follows, and is told of every end.
        self._change = threading.Condition()
        self._jobs: dict[int, _Job] = {}
        self._new: deque[_Job] = deque()
        self._ending = False
        self._numbers = itertools.count(1)
        with scarce.refused():
            self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            self._poll = select.epoll()
        self._poll.register(self._bell, select.EPOLLIN)
        self._thread = threading.Thread(target=self._look_after, name="stockade-spawner", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def __enter__(self) -> Spawner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def spawn(
        self,
        cmd: Sequence[str],
        *,
        input: bytes = b"",
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        timeout: float | None = None,
        grace: float = GRACE,
        who: Who | Mapping[str, str] | None = None,
    ) -> int:
        """Start a command and go on. What the policy or the host refuses is raised here."""
        argv = words(cmd)
        account = Account(self.policy, argv, named(who, self._who))
        with account.telling():
            with self._here():
                self._refuse()
            job = _Job(account)
            try:
                prepared = prepare(self.policy, command=argv)
            except BaseException:
                job.events.close()
                raise
            account.prepared = prepared
            try:
                one = command(
                    prepared, argv, given=input, env=env, cwd=cwd, timeout=timeout, grace=grace, kept=False,
                    cancelled_by=(_Terminated,), meanwhile=account.ready,
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
        """Where a run stands."""
        with self._here():
            return self._job(number).state()

    def terminate(self, number: int, reason: str = "terminated") -> None:
        """Have a run end: TERM, the grace it was given, KILL. One that is over stays as it is."""
        with self._here():
            job = self._job(number)
            if not job.because and not job.is_over:
                job.because = reason or "terminated"
        self._ring()

    def collect(self, number: int, timeout: float | None = None) -> Result:
        """The result of a run once it is over, and only once; what kept it from starting is raised.

        A `TimeoutError` after the timeout leaves it running, to be collected later.
        """
        with self._here():
            self._job(number)
            if not self._change.wait_for(lambda: self._over(number), timeout):
                raise late(timeout)
            job = self._job(number)  # unless somebody else has collected it meanwhile
            del self._jobs[number]
        if isinstance(job.failure, _Terminated):
            return Result(
                outcome=Outcome.CANCELLED, exit_code=130, reason=job.because, receipt=job.account.receipt
            )
        if job.failure is not None:
            raise job.failure
        assert job.result is not None
        return job.result

    def close(self) -> None:
        """End whatever runs. Harmless when repeated; a forked child only lets go of its copy."""
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
            self._poll.close()
            self._jobs.clear()
            self._change.notify_all()

    def _here(self) -> threading.Condition:
        """The lock, where there is somebody who lets go of it: a fork copies one that is held."""
        if self._owner != os.getpid():
            raise SetupError(
                "the spawner is that of the process this one was forked from",
                stage="spawner",
                hint="make one after the fork",
            )
        return self._change

    def _refuse(self) -> None:
        if self._ending:
            raise SetupError(CLOSED, stage="spawner")
        if len(self._jobs) >= self.most:
            raise SetupError(
                f"{len(self._jobs)} runs have not been collected, and no more are kept",
                stage="spawner",
                hint="collect() them, or make it with a larger most=",
            )

    def _job(self, number: int) -> _Job:
        if number not in self._jobs:
            raise NotFoundError(
                f"there is no run {number!r} here", hint="a result is collected once; then nothing is left"
            )
        return self._jobs[number]

    def _over(self, number: int) -> bool:
        return number not in self._jobs or self._jobs[number].is_over

    def _ring(self) -> None:
        with self._change:
            if self._bell >= 0:
                os.eventfd_write(self._bell, 1)

    def _run(self, job: _Job, run: Run) -> Steps[Result]:
        account = job.account
        assert account.prepared is not None
        with account.telling():
            return (yield from one_shot(account.prepared, lambda: run, account, job.events, self._on_exit))

    def _look_after(self) -> None:
        """What the thread does until the spawner is closed and nothing runs."""
        try:
            self._take_steps()
        except BaseException as error:
            # Whoever waits would wait for ever. What runs is ended, one after the other.
            with self._change:
                self._ending = True
                left = [job for job in self._jobs.values() if not job.is_over]
            for job in left:
                self._give_up(job, error)
            raise

    def _give_up(self, job: _Job, error: BaseException) -> None:
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
        running: dict[int, _Job] = {}
        while True:
            with self._change:
                fresh = list(self._new)
                self._new.clear()
                if self._ending and not running and not fresh:
                    return
            for job in fresh:
                if self._watched(job):
                    running[job.events.fileno()] = job
            ready = {number for number, _ in self._poll.poll(self._patience(running, fresh))}
            if self._bell in ready:
                os.eventfd_read(self._bell)
            now = time.monotonic()
            for number, job in tuple(running.items()):
                due = job.due is not None and job.due <= now
                if (job in fresh or due or number in ready or job.wanted) and not job.step():
                    del running[number]
                    self._finish(job)

    def _watched(self, job: _Job) -> bool:
        """Whether it can be looked after; else it is put away unbegun."""
        try:
            with scarce.refused():
                self._poll.register(job.events.fileno(), select.EPOLLIN)
        except SetupError as error:
            job.failure = error
            if job.account.prepared is not None:
                job.account.prepared.close(discard=True)
            job.events.close()
            with self._change:
                self._change.notify_all()
            return False
        return True

    def _patience(self, running: dict[int, _Job], fresh: list[_Job]) -> float | None:
        due = [job.due for job in running.values() if job.due is not None]
        if fresh:
            return 0
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _finish(self, job: _Job) -> None:
        self._poll.unregister(job.events.fileno())
        job.events.close()
        with self._change:
            self._change.notify_all()
