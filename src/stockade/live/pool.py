"""`Pool`: sandboxes that are built before they are asked for.

Each is used once and then ended, so that nothing of one run can be met by the
next; what is saved is the waiting. One thread opens new ones, ends used ones
and notices those that died while nobody used them. Where none is ready, the
caller opens one itself, so that a pool is never slower than none.
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
from stockade.policy import Policy
from stockade.sandbox.result import Result
from stockade.sandbox.sandbox import OnExit, Sandbox
from stockade.sandbox.streams import Sink
from stockade.sandbox.supervise import GRACE

if TYPE_CHECKING:
    from stockade.receipt.statement import Who

LARGEST = 1000
#: How long nothing is opened after a failure: doubled with every further one, up to the longest.
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

    `on_exit` is as for `Sandbox`. Safe to use from threads. Without `with`, call `close`.
    """

    def __init__(self, policy: Policy | None = None, *, size: int = 8, on_exit: OnExit = "keep") -> None:
        checked_size(size, 1)
        self.policy = Policy() if policy is None else policy
        self.size = size
        self._on_exit: OnExit = on_exit
        self._closed = False
        self._begin()
        atexit.register(self.close)

    def _begin(self) -> None:
        self._owner = os.getpid()
        #: Guards what follows, and is told of every change.
        self._change = threading.Condition()
        self._ready: deque[Sandbox] = deque()
        self._used: deque[Sandbox] = deque()
        self._taken = 0.0
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
        """Run one command in a sandbox of its own, as `stockade.run` does."""
        box = self._take()
        try:
            return box.run_last(
                cmd, input=input, env=env, cwd=cwd, timeout=timeout, grace=grace, on_stdout=on_stdout,
                on_stderr=on_stderr, who=who,
            )  # fmt: skip
        finally:
            self._give_back(box)

    @contextlib.contextmanager
    def acquire(self) -> Iterator[Sandbox]:
        """A sandbox for the time of the `with` statement. It is ended afterwards, and never used again."""
        box = self._take()
        try:
            yield box
        except BaseException as error:
            box._left_by(type(error))
            raise
        finally:
            self._give_back(box)

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
                boxes = [*self._ready, *self._used]
                self._ready.clear()
                self._used.clear()
            for box in boxes:
                _end(box)

    def _take(self) -> Sandbox:
        """A sandbox that lives: one that is ready, or a new one."""
        if self._owner != os.getpid():
            self._begin_again()
        while True:
            with self._change:
                if self._closed:
                    raise SetupError("the pool is closed", stage="pool")
                box = self._ready.popleft() if self._ready else None
                self._taken = time.monotonic()
                self._change.notify_all()
            if box is None:
                return self._opened()
            if not box.ended:
                return box
            self._give_back(box)

    def _opened(self) -> Sandbox:
        box = Sandbox(self.policy, on_exit=self._on_exit)
        box.open()
        return box

    def _give_back(self, box: Sandbox) -> None:
        """Let it be ended; by the keeper while there is one."""
        with self._change:
            if not self._closed and self._keeper.is_alive():
                self._used.append(box)
                self._change.notify_all()
                return
        _end(box)

    def _begin_again(self) -> None:
        """In a forked child: the sandboxes are the parent's, and so is the thread."""
        for box in (*self._ready, *self._used):
            box.close()  # lets go of this process's copy only
        self._begin()

    def _keep(self) -> None:
        """What the thread does until the pool is closed."""
        pause, later = FIRST_PAUSE, 0.0
        while (due := self._due(later)) is not None:
            ended, missing = due
            for box in ended:
                _end(box)
            if not missing:
                continue
            time.sleep(max(0.0, self._taken + PATIENCE - time.monotonic()))
            try:
                box = self._opened()
            except Exception as error:
                # Whoever needs one is told; here it is only tried again.
                _log.warning("a warm sandbox could not be opened, next attempt in %g s: %s", pause, error)
                later, pause = time.monotonic() + pause, min(2 * pause, LONGEST_PAUSE)
                continue
            pause = FIRST_PAUSE
            with self._change:
                if not self._closed:
                    self._ready.append(box)
                    continue
            _end(box)

    def _due(self, later: float) -> tuple[list[Sandbox], bool] | None:
        """Wait for what is to be ended, or until one is missing and may be opened; None: it is all over."""
        with self._change:
            while not self._closed:
                ended = [*self._used, *(box for box in self._ready if box.ended)]
                self._used.clear()
                self._ready = deque(box for box in self._ready if box not in ended)
                missing, left = len(self._ready) < self.size, later - time.monotonic()
                if ended or (missing and left <= 0):
                    return ended, missing and left <= 0
                # Those that die while they wait are noticed after a moment.
                self._change.wait(min(LOOK, left) if missing else LOOK)
            return None


def checked_size(size: int, least: int) -> int:
    """A number of sandboxes, or why it is none."""
    if not isinstance(size, int) or isinstance(size, bool) or not least <= size <= LARGEST:
        hint = f"from {least} to {LARGEST}"
        raise PolicyError(f"size = {size!r}: is not a number of sandboxes", hint=hint)
    return size


def _end(box: Sandbox) -> None:
    try:
        box.close()
    except Exception as error:
        _log.warning("a sandbox of a pool could not be closed: %s", error)
