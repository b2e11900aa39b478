"""`Pool`: sandboxes that are built before they are asked for.

Each is used once and then ended, so that nothing of one run can be met by the
next; what is saved is the waiting. Only where the policy says `reuse` may one
serve several runs, one after another: see `slots` for what is done in between.
One thread opens new ones, ends used ones and notices those that died while
nobody used them. Where none is ready, the caller opens one itself, so that a
pool is never slower than none.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from stockade.errors import PolicyError, SetupError
from stockade.live.slots import Slot
from stockade.policy import Policy
from stockade.sandbox import unclosed
from stockade.sandbox.result import Outcome, Result
from stockade.sandbox.sandbox import OnExit, Sandbox
from stockade.sandbox.streams import Sink
from stockade.sandbox.supervise import GRACE

if TYPE_CHECKING:
    from stockade.receipt.statement import Who

LARGEST = 1000
#: How long nothing is opened after a failure, or after one died that nobody used: doubled with every
#: further one, up to the longest, and back to the first when all went well for twice as long.
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
#: How long the thread lets a run that has just begun have the processors to itself.
PATIENCE = 0.005
#: How often those that wait are looked at.
LOOK = 1.0

_log = logging.getLogger("stockade")


class Pool:
    """Warm sandboxes of one policy, `size` of them ready.

    >>> import stockade
    >>> with stockade.Pool(stockade.Policy(), size=2) as pool:
    ...     [pool.run(["echo", str(n)]).text for n in range(3)]
    ['0\\n', '1\\n', '2\\n']

    `on_exit` is as for `Sandbox`. Safe to use from threads. Without `with`, call `close`. With
    `Policy(reuse={})` runs share sandboxes, and what they leave in the private directories.
    """

    def __init__(self, policy: Policy | None = None, *, size: int = 8, on_exit: OnExit = "keep") -> None:
        checked_size(size, 1)
        self.policy = Policy() if policy is None else policy
        rule = self.policy.workspace
        if self.policy.reuse is not None and rule is not None and rule.mode == "overlay":
            raise PolicyError(
                "reuse: each run would see the changes of the others in its workspace",
                hint='leave it out, or use workspace.mode = "ro"',
            )
        self.size = size
        self._on_exit: OnExit = on_exit
        self._closed = False
        self._begin()
        unclosed.first(self.close)

    def _begin(self) -> None:
        self._owner = os.getpid()
        #: Guards what follows, and is told of every change.
        self._change = threading.Condition()
        self._ready: deque[Slot] = deque()
        self._used: deque[Slot] = deque()
        #: How many are in use and may come back.
        self._lent = 0
        self._taken = 0.0
        self._pause, self._failed = FIRST_PAUSE, float("-inf")
        self._keeper = threading.Thread(target=self._keep, name="stockade-pool", daemon=True)
        self._keeper.start()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def ready(self) -> int:
        """How many sandboxes wait to be used."""
        return len(self._ready)

    def run(
        self,
        cmd: Sequence[str],
        *,
        input: bytes = b"",
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        timeout: float | None = None,
        grace: float = GRACE,
        on_stdout: Sink | None = None,
        on_stderr: Sink | None = None,
        who: Who | Mapping[str, str] | None = None,
    ) -> Result:
        """Run one command in a sandbox of its own, as `stockade.run` does, unless the policy says `reuse`."""
        slot = self._take(returns=self.policy.reuse is not None)
        again = False
        run = slot.box.run_last if self.policy.reuse is None else slot.box.run
        try:
            result = run(
                cmd, input=input, env=env, cwd=cwd, timeout=timeout, grace=grace, on_stdout=on_stdout,
                on_stderr=on_stderr, who=who,
            )  # fmt: skip
            again = self.policy.reuse is not None and result.outcome is Outcome.EXITED and slot.emptied()
            return result
        finally:
            self._give_back(slot, again=again, lent=self.policy.reuse is not None)

    @contextlib.contextmanager
    def acquire(self) -> Iterator[Sandbox]:
        """A sandbox for the time of the `with` statement. It is ended afterwards, and never used again."""
        slot = self._take(returns=False)
        try:
            yield slot.box
        except BaseException as error:
            slot.box._left_by(type(error))
            raise
        finally:
            self._give_back(slot)

    def close(self) -> None:
        """End every sandbox that waits; those in use end when they are given back. Harmless when repeated."""
        if self._owner != os.getpid():
            self._change = threading.Condition()  # the parent's may be held by a thread that is not here
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

    def _take(self, *, returns: bool) -> Slot:
        """A sandbox that lives, ready or new; one that does not return was never used.

        Nobody else has it until it is given back.
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
                return self._fresh(returns=returns)
            dead = slot.box.ended
            if not dead and not slot.spent(self.policy.reuse):
                return slot
            if dead:
                self._died()
            self._give_back(slot, lent=returns)

    def _fresh(self, *, returns: bool) -> Slot:
        """One that the caller opens because none was ready."""
        with self._change:
            self._lent += returns
        try:
            return self._opened()
        except BaseException:
            with self._change:
                self._lent -= returns
            raise

    def _opened(self) -> Slot:
        box = Sandbox(self.policy, on_exit=self._on_exit)
        box.open()
        return Slot(box)

    def _give_back(self, slot: Slot, *, again: bool = False, lent: bool = False) -> None:
        """Let it be used `again` if it may be, or ended; by the keeper while there is one."""
        slot.requests += 1
        slot.returned = time.monotonic()
        with self._change:
            self._lent -= lent
            if not self._closed and self._keeper.is_alive():
                if again and len(self._ready) < self.size and not slot.spent(self.policy.reuse):
                    self._ready.appendleft(slot)  # before those that nobody has used
                else:
                    self._used.append(slot)
                self._change.notify_all()
                return
        _end(slot)

    def _begin_again(self) -> None:
        """In a forked child: the sandboxes are the parent's, and so is the thread."""
        for slot in (*self._ready, *self._used):
            slot.box.close()  # lets go of this process's copy only
        self._begin()

    def _keep(self) -> None:
        """What the thread does until the pool is closed."""
        while (due := self._due()) is not None:
            ended, missing = due
            for slot in ended:
                _end(slot)
            if not missing:
                continue
            time.sleep(max(0.0, self._taken + PATIENCE - time.monotonic()))
            try:
                slot = self._opened()
            except Exception as error:
                # Whoever needs one is told; here it is only tried again.
                self._fail()
                _log.warning(
                    "a warm sandbox could not be opened, next attempt in %g s: %s", self._pause, error
                )
                continue
            with self._change:
                if not self._closed:
                    self._ready.append(slot)
                    continue
            _end(slot)

    def _fail(self) -> None:
        """Open nothing for a while."""
        now = time.monotonic()
        well = now - self._failed > 2 * self._pause
        self._pause = FIRST_PAUSE if well else min(2 * self._pause, LONGEST_PAUSE)
        self._failed = now

    def _died(self) -> None:
        self._fail()
        _log.warning("a warm sandbox has died, the next is opened in %g s", self._pause)

    def _due(self) -> tuple[list[Slot], bool] | None:
        """Wait for what is to be ended, or until one is missing and may be opened; None: it is all over."""
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
                # Those that die or grow too old while they wait are noticed after a moment.
                self._change.wait(min(LOOK, left) if missing else LOOK)
            return None


def checked_size(size: int, least: int) -> int:
    """A number of sandboxes, or why it is none."""
    if not isinstance(size, int) or isinstance(size, bool) or not least <= size <= LARGEST:
        hint = f"from {least} to {LARGEST}"
        raise PolicyError(f"size = {size!r}: is not a number of sandboxes", hint=hint)
    return size


def _end(slot: Slot) -> None:
    try:
        slot.box.close()
    except Exception as error:
        _log.warning("a sandbox of a pool could not be closed: %s", error)
