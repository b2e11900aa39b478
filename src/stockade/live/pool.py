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
import select
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence

from stockade.errors import PolicyError, SetupError, StockadeError
from stockade.policy import Policy
from stockade.sandbox.result import Result
from stockade.sandbox.sandbox import OnExit, Sandbox
from stockade.sandbox.streams import Sink
from stockade.sandbox.supervise import GRACE

LARGEST = 1000
#: How long nothing is opened after a failure: doubled with every further one, up to the longest.
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
#: How long the thread lets a run that has just begun have the processors to itself.
PATIENCE = 0.005

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
        if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= LARGEST:
            raise PolicyError(f"size = {size!r}: is not a number of sandboxes", hint=f"from 1 to {LARGEST}")
        self.policy = Policy() if policy is None else policy
        self.size = size
        self._on_exit: OnExit = on_exit
        self._closed = False
        self._begin()
        atexit.register(self.close)

    def _begin(self) -> None:
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._ready: deque[Sandbox] = deque()
        self._used: deque[Sandbox] = deque()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
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
    ) -> Result:
        """Run one command in a sandbox of its own, as `stockade.run` does."""
        box = self._take()
        try:
            return box.run_last(
                cmd, input=input, env=env, cwd=cwd, timeout=timeout, grace=grace, on_stdout=on_stdout,
                on_stderr=on_stderr,
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
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        if self._owner == os.getpid():
            os.eventfd_write(self._wake, 1)
            self._keeper.join()
        for box in (*self._ready, *self._used):
            _end(box)
        self._ready.clear()
        self._used.clear()
        os.close(self._wake)

    def _take(self) -> Sandbox:
        """A sandbox that lives: one that is ready, or a new one."""
        if self._closed:
            raise SetupError("the pool is closed", stage="pool")
        if self._owner != os.getpid():
            self._begin_again()
        while self._ready:
            with self._lock:
                box = self._ready.popleft() if self._ready else None
            os.eventfd_write(self._wake, 1)
            if box is not None and not box.ended:
                return box
            if box is not None:
                self._give_back(box)
        return self._opened()

    def _opened(self) -> Sandbox:
        box = Sandbox(self.policy, on_exit=self._on_exit)
        box.open()
        return box

    def _give_back(self, box: Sandbox) -> None:
        """Let it be ended; by the keeper while there is one."""
        with self._lock:
            if not self._closed:
                self._used.append(box)
                os.eventfd_write(self._wake, 1)
                return
        _end(box)

    def _begin_again(self) -> None:
        """In a forked child: the sandboxes are the parent's, and so is the thread."""
        for box in (*self._ready, *self._used):
            box.close()  # lets go of this process's copy only
        os.close(self._wake)
        self._begin()

    def _keep(self) -> None:
        """What the thread does until the pool is closed."""
        pause, later = FIRST_PAUSE, 0.0
        while not self._closed:
            while self._used:
                _end(self._used.popleft())
            self._drop_dead()
            now = time.monotonic()
            if len(self._ready) < self.size and now >= later:
                try:
                    box = self._opened()
                except (StockadeError, OSError) as error:
                    # Whoever needs one is told; here it is only tried again.
                    _log.warning("a warm sandbox could not be opened, next attempt in %g s: %s", pause, error)
                    later, pause = now + pause, min(2 * pause, LONGEST_PAUSE)
                else:
                    pause = FIRST_PAUSE
                    with self._lock:
                        self._ready.append(box)
                continue
            self._wait(later - now if len(self._ready) < self.size else None)

    def _drop_dead(self) -> None:
        """Take out what ended while it waited."""
        with self._lock:
            dead = [box for box in self._ready if box.ended]
            for box in dead:
                self._ready.remove(box)
        for box in dead:
            _end(box)

    def _wait(self, seconds: float | None) -> None:
        """Wait until there is something to do."""
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        with self._lock:
            for box in self._ready:
                if (gate := box.gate) is not None:
                    poll.register(gate, select.POLLIN)
        poll.poll(None if seconds is None else seconds * 1000)
        if not self._closed:
            time.sleep(PATIENCE)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)


def _end(box: Sandbox) -> None:
    try:
        box.close()
    except (StockadeError, OSError) as error:
        _log.warning("a sandbox of a pool could not be closed: %s", error)
