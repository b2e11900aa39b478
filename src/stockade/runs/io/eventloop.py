"""One core for the synchronous and the asynchronous API: steps that do not know how they wait.

What a sandbox does is written as steps: a generator that yields how long it is willing to wait (None: for
ever) and is resumed when a descriptor that it watches is ready, or the time is over. `drive` waits in this
thread, `async_eventloop.drive` in an event loop. An exception while waiting (Ctrl-C, a cancelled task) is
raised in the steps, which may go on for a while to clean up.
"""

from __future__ import annotations

import errno
import os
import select
import threading
from collections.abc import Callable, Generator
from typing import TypeVar

from stockade.linux import os_errors

T = TypeVar("T")
Steps = Generator[float | None, None, T]

READABLE, WRITABLE, URGENT = select.EPOLLIN, select.EPOLLOUT, select.EPOLLPRI


class Events:
    """Descriptors to watch, and which of them were ready after the last wait."""

    def __init__(self) -> None:
        with os_errors.setup_errors():
            self._poll = select.epoll()
        #: Regular files are always ready, so the kernel refuses to watch them.
        self._always: set[int] = set()
        #: Watched by poll(2): it takes none of the user's epoll watches, which a program inside can use up.
        self._apart: dict[int, int] = {}
        self.ready: list[int] = []

    def fileno(self) -> int:
        return self._poll.fileno()

    def watch(self, descriptor: int, what: int = READABLE) -> None:
        try:
            self._poll.register(descriptor, what)
        except PermissionError:
            self._always.add(descriptor)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            self._apart[descriptor] = what

    def forget(self, descriptor: int) -> None:
        """Stop watching. Call it before closing: a copy in a forked child would keep it watched."""
        if descriptor in self._always:
            self._always.remove(descriptor)
        elif descriptor in self._apart:
            del self._apart[descriptor]
        else:
            self._poll.unregister(descriptor)

    def wait(self, seconds: float | None) -> None:
        """Wait in this thread."""
        patience = 0 if self._always else seconds
        apart = self._wait_apart(patience) if self._apart else []
        found = self._poll.poll(0 if self._apart else patience)
        self.ready = [descriptor for descriptor, _ in found] + apart + list(self._always)

    def _wait_apart(self, seconds: float | None) -> list[int]:
        together = select.poll()
        together.register(self._poll.fileno(), select.POLLIN)
        for descriptor, what in self._apart.items():
            together.register(descriptor, what)
        ready = together.poll(None if seconds is None else max(0, seconds) * 1000)
        return [descriptor for descriptor, _ in ready if descriptor in self._apart]

    @property
    def busy(self) -> bool:
        """Whether a descriptor is watched that an event loop cannot wait for."""
        return bool(self._always or self._apart)

    def close(self) -> None:
        self._poll.close()

    def __enter__(self) -> Events:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def in_thread(work: Callable[[], T], events: Events) -> Steps[T]:
    """Do blocking work in a thread of its own, so that the driver of these steps can drive others meanwhile.

    The steps always wait for the work; an exception that arrives meanwhile is raised when it is done.
    """
    results: list[T] = []
    errors: list[BaseException] = []
    try:
        bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    except OSError:
        return work()

    def act() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)
        finally:
            os.eventfd_write(bell, 1)

    thread = threading.Thread(target=act, name="stockade-work", daemon=True)
    try:
        try:
            thread.start()
        except RuntimeError:  # the limit of threads is reached
            return work()
        raised: BaseException | None = None
        try:
            events.watch(bell)
            while not (results or errors):
                try:
                    yield None
                except GeneratorExit:
                    raise
                except BaseException as error:
                    raised = raised or error
            events.forget(bell)
        finally:
            thread.join()
    finally:
        if not thread.is_alive():  # a second Ctrl-C ends the wait, and the thread still has to write to it
            os.close(bell)
    if raised or errors:
        raise raised or errors[0]
    return results[0]


def drive(steps: Steps[T], events: Events) -> T:
    """Run all steps, waiting in this thread."""
    try:
        patience = next(steps)
        while True:
            try:
                events.wait(patience)
            except BaseException as error:
                events.ready = []
                patience = steps.throw(error)
            else:
                patience = next(steps)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]
