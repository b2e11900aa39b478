"""One way to speak to `Sandbox` and `AsyncSandbox`, so that one test holds for both."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Protocol

from stockade import AsyncSandbox, Policy, Result, Sandbox


class Face(Protocol):
    """A sandbox that is open: `run` waits for the result, `begin` does not."""

    def run(self, script: str | list[str], **options: Any) -> Result: ...

    def begin(self, script: str | list[str], **options: Any) -> Future[Result]: ...

    def cancel(self, running: Future[Result]) -> None: ...

    def close(self) -> None: ...


def words(script: str | list[str]) -> list[str]:
    return ["sh", "-c", script] if isinstance(script, str) else script


class Synchronous:
    """Each run in a thread of its own; it is cancelled by what its callback raises."""

    def __init__(self, policy: Policy | None) -> None:
        self.box = Sandbox(policy)
        self.box.open()
        self._threads = ThreadPoolExecutor(16)
        self._told: dict[Future[Result], threading.Event] = {}

    def run(self, script: str | list[str], **options: Any) -> Result:
        return self.box.run(words(script), **options)

    def begin(self, script: str | list[str], **options: Any) -> Future[Result]:
        told = threading.Event()

        def look(_: bytes) -> None:
            if told.is_set():
                raise KeyboardInterrupt

        self.box._require_open()
        running = self._threads.submit(self.run, script, **{"on_stdout": look, **options})
        self._told[running] = told
        return running

    def cancel(self, running: Future[Result]) -> None:
        self._told[running].set()

    def close(self) -> None:
        self.box.close()
        self._threads.shutdown()


class Asynchronous:
    """Everything in one event loop, in a thread of its own, with asyncio's own checks switched on."""

    def __init__(self, policy: Policy | None) -> None:
        self._loop = asyncio.new_event_loop()
        self._loop.set_debug(True)
        self._loop.slow_callback_duration = 5
        self._failures: list[dict[str, Any]] = []
        self._loop.set_exception_handler(lambda _, context: self._failures.append(context))
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

        async def open_() -> AsyncSandbox:
            box = AsyncSandbox(policy)
            await box.open()
            return box

        try:
            self.box = self._wait(open_())
        except BaseException:
            self._stop()
            raise

    def _wait(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(120)

    def run(self, script: str | list[str], **options: Any) -> Result:
        found: Result = self._wait(self.box.run(words(script), **options))
        return found

    def begin(self, script: str | list[str], **options: Any) -> Future[Result]:
        if self._loop.is_closed():
            asyncio.run(self.box.run(words(script), **options))
        return asyncio.run_coroutine_threadsafe(self.box.run(words(script), **options), self._loop)

    def cancel(self, running: Future[Result]) -> None:
        running.cancel()

    def close(self) -> None:
        if self._loop.is_closed():
            return
        self._wait(self.box.close())
        self._stop()
        assert self._failures == []

    def _stop(self) -> None:
        async def rest() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            await asyncio.gather(*others, return_exceptions=True)

        self._wait(rest())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


FACES: dict[str, Callable[[Policy | None], Face]] = {"sync": Synchronous, "async": Asynchronous}


@contextmanager
def opened(kind: str, policy: Policy | None = None) -> Iterator[Face]:
    face = FACES[kind](policy)
    try:
        yield face
    finally:
        face.close()
