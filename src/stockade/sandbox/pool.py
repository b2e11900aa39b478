"""`Pool`: sandboxes made before they are needed.

Each sandbox serves one run and then ends, so that no run finds anything of an
earlier one; the pool only saves the waiting. Only if the policy says `reuse`
does a sandbox serve several runs, one after another: `pool_member` says what
happens in between. One thread opens new sandboxes, ends used ones and notices
those that died while idle. If none is ready, the caller opens one itself, so
that a pool is never slower than no pool.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Unpack

from stockade.errors import PolicyError, SetupError
from stockade.policy.model import PolicyLike, policy_or_default
from stockade.result import Outcome, Result
from stockade.runs.options import OnExit, RunOptions, refuse_unknown, valid_name
from stockade.sandbox import finalize
from stockade.sandbox.pool_member import PoolMember
from stockade.sandbox.sandbox import Sandbox

LARGEST = 1000
#: Seconds without a new sandbox after one could not be opened or died while idle: doubled with each further
#: failure, up to the longest, and back to the first after twice that time without a failure.
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
#: Seconds for which the thread leaves the processors to a run that has just begun.
PATIENCE = 0.005
#: Seconds between two looks at the idle sandboxes.
LOOK = 1.0

_log = logging.getLogger("stockade")


class Pool:
    """Warm sandboxes of one policy, `size` of them ready.

    >>> import stockade
    >>> with stockade.Pool(stockade.Policy(), size=2) as pool:
    ...     [pool.run(["echo", str(n)]).text for n in range(3)]
    ['0\\n', '1\\n', '2\\n']

    `on_exit` is as for `Sandbox`; every sandbox of the pool has its `name`. Threads may share a pool. Without
    `with`, call `close`. With `Policy(reuse={})` runs share sandboxes, and with them the files in the private
    directories.
    """

    def __init__(
        self,
        policy: PolicyLike | None = None,
        *,
        size: int = 8,
        on_exit: OnExit = "keep",
        name: str = "",
    ) -> None:
        valid_size(size, 1)
        #: What `stockade ps`, logs and receipts call each of its sandboxes.
        self.name = valid_name(name)
        self.policy = policy_or_default(policy)
        rule = self.policy.workspace
        if self.policy.reuse is not None and rule is not None and rule.mode == "overlay":
            raise PolicyError(
                "reuse: each run would see the changes of the others in its workspace",
                hint='leave reuse out, or write workspace.mode = "ro"',
            )
        self.size = size
        self._on_exit: OnExit = on_exit
        self._closed = False
        self._begin()
        finalize.call_before_closing(self.close)

    def _begin(self) -> None:
        self._owner = os.getpid()
        #: Guards the attributes below, and is notified of every change of them.
        self._change = threading.Condition()
        self._ready: deque[PoolMember] = deque()
        self._used: deque[PoolMember] = deque()
        #: How many sandboxes are in use and may come back.
        self._lent = 0
        self._taken = 0.0
        self._pause, self._failed = FIRST_PAUSE, float("-inf")
        self._keeper = threading.Thread(target=self._keep, name="stockade-pool", daemon=True)
        self._keeper.start()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        name = f" {self.name!r}" if self.name else ""
        state = "closed" if self._closed else f"{self.ready} of {self.size} ready"
        return f"<{type(self).__name__}{name}: {state}>"

    @property
    def ready(self) -> int:
        """How many sandboxes are ready."""
        return len(self._ready)

    def run(self, cmd: Sequence[str], **options: Unpack[RunOptions]) -> Result:
        """Run one command as `stockade.run` does: in its own sandbox, unless the policy says `reuse`.

        The options are `input`, `env`, `cwd`, `timeout`, `grace`, `on_stdout`, `on_stderr` and `who`.
        """
        refuse_unknown("run", options, RunOptions.__optional_keys__)
        slot = self._take(returns=self.policy.reuse is not None)
        again = False
        run = slot.box.run_last if self.policy.reuse is None else slot.box.run
        try:
            result = run(cmd, **options)
            again = (
                self.policy.reuse is not None and result.outcome is Outcome.EXITED and slot.kill_leftovers()
            )
            return result
        finally:
            self._give_back(slot, again=again, lent=self.policy.reuse is not None)

    @contextlib.contextmanager
    def acquire(self) -> Iterator[Sandbox]:
        """Lend a sandbox for the time of the `with` statement. It ends afterwards and is never used again."""
        slot = self._take(returns=False)
        try:
            yield slot.box
        except BaseException as error:
            slot.box._left_by(type(error))
            raise
        finally:
            self._give_back(slot)

    def close(self) -> None:
        """End every idle sandbox; those in use end when they come back. Harmless when repeated."""
        if self._owner != os.getpid():
            self._change = threading.Condition()  # a thread of the parent may have held it at the fork
        with self._change:
            if self._closed:
                return
            self._closed = True
            self._change.notify_all()
        atexit.unregister(self.close)
        try:
            if self._owner == os.getpid():
                self._keeper.join()
        finally:
            with self._change:
                slots = [*self._ready, *self._used]
                self._ready.clear()
                self._used.clear()
            for slot in slots:
                _end(slot)

    def _take(self, *, returns: bool) -> PoolMember:
        """Take a living sandbox out of the pool, or open one; without `returns` one that was never used.

        No other caller gets it until it is given back.
        """
        if self._owner != os.getpid():
            self._begin_again()
        while True:
            with self._change:
                if self._closed:
                    raise SetupError("the pool is closed", stage="pool")
                slot = next((one for one in self._ready if returns or not one.requests), None)
                if slot is not None:
                    self._ready.remove(slot)
                self._taken = time.monotonic()
                self._change.notify_all()
                self._lent += returns and slot is not None
            if slot is None:
                return self._open_for_caller(returns=returns)
            dead = slot.box.ended
            if not dead and not slot.spent(self.policy.reuse):
                return slot
            if dead:
                self._died()
            self._give_back(slot, lent=returns)

    def _open_for_caller(self, *, returns: bool) -> PoolMember:
        """Open a sandbox in the caller's thread because none was ready."""
        with self._change:
            self._lent += returns
        try:
            return self._open_member()
        except BaseException:
            with self._change:
                self._lent -= returns
            raise

    def _open_member(self) -> PoolMember:
        box = Sandbox(self.policy, on_exit=self._on_exit, name=self.name)
        box.open()
        return PoolMember(box)

    def _give_back(self, slot: PoolMember, *, again: bool = False, lent: bool = False) -> None:
        """Make a sandbox ready `again` if the policy allows that, else have the pool's thread end it."""
        slot.requests += 1
        slot.returned = time.monotonic()
        with self._change:
            self._lent -= lent
            if not self._closed and self._keeper.is_alive():
                if again and len(self._ready) < self.size and not slot.spent(self.policy.reuse):
                    self._ready.appendleft(slot)  # before the unused ones
                else:
                    self._used.append(slot)
                self._change.notify_all()
                return
        _end(slot)

    def _begin_again(self) -> None:
        """Start anew in a forked child: the sandboxes and the thread are the parent's."""
        for slot in (*self._ready, *self._used):
            slot.box.close()  # closes this process's copy only
        self._begin()

    def _keep(self) -> None:
        """Open and end sandboxes, in the pool's thread, until the pool is closed."""
        while (due := self._due()) is not None:
            ended, missing = due
            for slot in ended:
                _end(slot)
            if not missing:
                continue
            time.sleep(max(0.0, self._taken + PATIENCE - time.monotonic()))
            try:
                slot = self._open_member()
            except Exception as error:
                # A caller that opens one itself gets the error; the thread only tries again.
                self._fail()
                _log.warning(
                    "the pool could not open a sandbox; it tries again in %g s: %s", self._pause, error
                )
                continue
            with self._change:
                if not self._closed:
                    self._ready.append(slot)
                    continue
            _end(slot)

    def _fail(self) -> None:
        """Note a failure, so that nothing is opened for a while."""
        now = time.monotonic()
        well = now - self._failed > 2 * self._pause
        self._pause = FIRST_PAUSE if well else min(2 * self._pause, LONGEST_PAUSE)
        self._failed = now

    def _died(self) -> None:
        self._fail()
        _log.warning("an idle sandbox of the pool has died; the pool opens the next in %g s", self._pause)

    def _due(self) -> tuple[list[PoolMember], bool] | None:
        """Wait for work: sandboxes to end, and whether to open one. None if the pool is closed."""
        with self._change:
            while not self._closed:
                dead = [slot for slot in self._ready if slot.box.ended]
                if dead:
                    self._died()
                spent = [slot for slot in self._ready if slot.spent(self.policy.reuse)]
                ended = [*self._used, *dead, *(slot for slot in spent if slot not in dead)]
                self._used.clear()
                self._ready = deque(slot for slot in self._ready if slot not in ended)
                left = self._failed + self._pause - time.monotonic()
                missing = len(self._ready) + self._lent < self.size
                if ended or (missing and left <= 0):
                    return ended, missing and left <= 0
                # The next look finds those that die or grow too old meanwhile.
                self._change.wait(min(LOOK, left) if missing else LOOK)
            return None


def valid_size(size: int, least: int) -> int:
    """Validate a number of sandboxes and return it."""
    if not isinstance(size, int) or isinstance(size, bool) or not least <= size <= LARGEST:
        hint = f"write a number from {least} to {LARGEST}"
        raise PolicyError(f"size = {size!r}: is not a number of sandboxes", hint=hint)
    return size


def _end(slot: PoolMember) -> None:
    try:
        slot.box.close()
    except Exception as error:
        _log.warning("the pool could not close a sandbox: %s", error)
