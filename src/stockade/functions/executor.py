"""`SandboxExecutor`: a `concurrent.futures.Executor` that runs each task in its own sandbox."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import BrokenExecutor, Executor, Future, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

import msgspec

import stockade
from stockade.functions.channel import FunctionChannel
from stockade.functions.reply import FunctionError, WorkerDiedError
from stockade.functions.sandboxed_function import MAX_RESULT, Call, Options, make_call, options
from stockade.functions.worker_start import OnExit
from stockade.policy.model import PolicyLike
from stockade.receipt.statement import Who
from stockade.runs.io.streams import Sink
from stockade.runs.supervise import GRACE

P = ParamSpec("P")
T = TypeVar("T")


class BrokenSandboxError(WorkerDiedError, BrokenExecutor):
    """The interpreter of a task ended before the task did, or the initializer failed."""


class SandboxExecutor(Executor):
    """Runs tasks as `ProcessPoolExecutor` does, each in its own sandbox, `max_workers` at a time.

    >>> from stockade import SandboxExecutor
    >>> with SandboxExecutor(max_workers=2) as executor:
    ...     list(executor.map(pow, [2, 3], [5, 2])), executor.submit(divmod, 7, 2).result()
    ([32, 9], (3, 1))

    Arguments and results are as for `sandboxed`. A task whose interpreter dies gets a `BrokenExecutor` as
    its exception; the others go on, because they share nothing. Each sandbox calls
    `initializer(*initargs)` before its task; if it fails, the executor is broken for good.
    """

    def __init__(
        self,
        policy: PolicyLike | None = None,
        max_workers: int | None = None,
        *,
        initializer: Callable[..., Any] | None = None,
        initargs: tuple[Any, ...] = (),
        timeout: float | None = None,
        grace: float = GRACE,
        trust_results: bool = False,
        types: Iterable[type] = (),
        max_result: int | str = MAX_RESULT,
        executable: str = "",
        on_exit: OnExit = "keep",
        who: Who | Mapping[str, str] | None = None,
        on_stdout: Sink | None = None,
        on_stderr: Sink | None = None,
        warm: stockade.functions.WarmPython | None = None,
    ) -> None:
        if initializer is not None and not callable(initializer):
            raise TypeError("initializer must be a callable")
        self._how = options(
            policy, timeout=timeout, grace=grace, trust_results=trust_results, types=types,
            max_result=max_result, executable=executable, on_exit=on_exit, who=who, on_stdout=on_stdout,
            on_stderr=on_stderr, warm=warm,
            initializer=None if initializer is None else (initializer, tuple(initargs)),
        )  # fmt: skip
        self.policy = self._how.start.policy
        self._threads = ThreadPoolExecutor(_cores(max_workers), thread_name_prefix="stockade")
        self._broken: FunctionError | None = None
        #: The running calls.
        self._talks: set[FunctionChannel] = set()
        self._ended = False
        self._process = os.getpid()

    def __repr__(self) -> str:
        state = "broken" if self._broken else "shut down" if self._ended else "open"
        return f"<SandboxExecutor: {state}>"

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Call `fn(*args, **kwargs)` in a sandbox and return a future of its value or exception."""
        self._check()
        return self._threads.submit(lambda: self._run_task(fn, args, kwargs, self._how).value)

    def submit_call(self, fn: Callable[P, Any], /, *args: P.args, **kwargs: P.kwargs) -> Future[Call]:
        """Call as `submit` does; the future has the value and the `Result` with its receipt."""
        self._check()
        return self._threads.submit(lambda: self._run_task(fn, args, kwargs, self._how))

    def map(
        self,
        fn: Callable[..., T],
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int = 1,
    ) -> Iterator[T]:
        """Map as `Executor.map` does; `chunksize` calls share one sandbox."""
        if chunksize < 1:
            raise ValueError("chunksize must be >= 1.")
        if chunksize == 1:
            return super().map(fn, *iterables, timeout=timeout)
        many = msgspec.structs.replace(self._how, many=True)
        chunks = _chunks(zip(*iterables, strict=False), chunksize)
        self._check()
        end = None if timeout is None else time.monotonic() + timeout
        futures = [
            self._threads.submit(lambda chunk=chunk: self._run_task(fn, (chunk,), {}, many).value)  # type: ignore[misc]
            for chunk in chunks
        ]
        return _each(_results(futures, end))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Accept no more tasks, as `Executor.shutdown`; running tasks go on."""
        self._threads.shutdown(wait, cancel_futures=cancel_futures)

    def terminate_workers(self) -> None:
        """End every running task, cancel those that wait, and accept no more."""
        self._ended = True
        self.shutdown(wait=False, cancel_futures=True)
        for talk in list(self._talks):
            talk.abandon()

    def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> bool | None:
        """Wait for every task; end them first after an exception such as Ctrl-C."""
        if kind is not None and not issubclass(kind, Exception):
            self.terminate_workers()
        self.shutdown(wait=True)
        return None

    def _run_task(self, fn: Callable[..., Any], args: Any, kwargs: Mapping[str, Any], how: Options) -> Call:
        self._check()
        ours: list[FunctionChannel] = []

        def begun(talk: FunctionChannel) -> None:
            ours.append(talk)
            self._talks.add(talk)
            if self._ended:
                talk.abandon()

        try:
            return make_call(fn, args, kwargs, msgspec.structs.replace(how, begun=begun))
        except FunctionError as error:
            unready = error.stage == "initializer" and how.initializer is not None
            if isinstance(error, WorkerDiedError) or unready:
                broken = BrokenSandboxError(error.message, hint=error.hint)
                vars(broken).update({name: vars(error).get(name) for name in ("result", "receipt")})
                broken.traceback = error.traceback
                if unready:
                    self._broken = broken
                raise broken from error.__cause__
            raise
        finally:
            self._talks.difference_update(ours)

    def _check(self) -> None:
        if self._process != os.getpid():  # a fork copies no threads, so no task would ever run
            raise RuntimeError(
                "the executor belongs to the process that made it: make another one in this process"
            )
        if self._broken is not None:
            raise BrokenSandboxError(self._broken.message, hint="make another executor") from self._broken


def _cores(given: int | None) -> int:
    """Return the number of available processors by default; ThreadPoolExecutor validates a given number."""
    return len(os.sched_getaffinity(0)) if given is None else given


def _chunks(items: Iterable[Any], size: int) -> Iterator[tuple[Any, ...]]:
    found = iter(items)
    while chunk := tuple(itertools.islice(found, size)):
        yield chunk


def _each(chunks: Iterator[list[Any]]) -> Iterator[Any]:
    """Yield the values of all chunks, without keeping a reference to a value that was yielded."""
    for chunk in chunks:
        chunk.reverse()
        while chunk:
            yield chunk.pop()


def _results(futures: list[Future[Any]], end: float | None) -> Iterator[Any]:
    """Yield the results in order; cancel the rest if the caller stops early."""
    futures.reverse()
    try:
        while futures:
            futures[-1].exception(None if end is None else end - time.monotonic())
            yield futures.pop().result()
    finally:
        for future in futures:
            future.cancel()
