"""Drive the steps of a run with asyncio."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from typing import TypeVar

from stockade.runs.io.eventloop import Events, Steps

T = TypeVar("T")
#: How often to poll, in seconds, if the user's epoll watches are used up.
UNWATCHED = 0.01


def watch(descriptor: int, ready: Callable[[], object]) -> bool:
    """Have the running event loop call `ready` when a descriptor is ready; False if it can watch no more."""
    try:
        asyncio.get_running_loop().add_reader(descriptor, ready)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        return False
    return True


async def drive(work: Steps[T], events: Events) -> T:
    """Run all steps, waiting in the running event loop."""
    loop = asyncio.get_running_loop()
    waiter: asyncio.Future[None] | None = None

    def wake() -> None:
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    watched = watch(events.fileno(), wake)
    try:
        patience = next(work)
        while True:
            waiter = loop.create_future()
            timer = None
            if not watched:
                patience = UNWATCHED if patience is None else min(patience, UNWATCHED)
            if events.busy or patience is not None:
                timer = loop.call_later(0 if events.busy else patience or 0, wake)
            try:
                await waiter
            except BaseException as error:
                events.ready = []
                patience = work.throw(error)
            else:
                events.wait(0)
                patience = next(work)
            finally:
                if timer is not None:
                    timer.cancel()
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]
    finally:
        loop.remove_reader(events.fileno())
