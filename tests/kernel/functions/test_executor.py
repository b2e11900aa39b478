"""`SandboxExecutor` is an executor as `concurrent.futures` means it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import (
    ALL_COMPLETED,
    FIRST_COMPLETED,
    FIRST_EXCEPTION,
    BrokenExecutor,
    CancelledError,
    Executor,
    Future,
    as_completed,
    wait,
)

import pytest

import stockade
from stockade import Policy, SandboxExecutor, SetupError
from support import jobs
from support.jobs import Greeter
from support.points import Point, unsaid


@pytest.fixture
def executor() -> Iterator[SandboxExecutor]:
    with SandboxExecutor(max_workers=2) as executor:
        yield executor


class TestTasks:
    def test_values_keywords_and_exceptions_are_in_the_future(self, executor: SandboxExecutor) -> None:
        assert isinstance(executor, Executor)
        good, named, bad = (
            executor.submit(pow, 2, 8), executor.submit(jobs.add, a=1, b=2), executor.submit(divmod, 1, 0)
        )  # fmt: skip
        assert good.result() == 256 and named.result(timeout=60) == 3
        with pytest.raises(ZeroDivisionError):
            bad.result()
        assert isinstance(bad.exception(), ZeroDivisionError) and bad.done()

    def test_functions_that_take_the_executors_own_words(self, executor: SandboxExecutor) -> None:
        assert executor.submit(dict, fn=1, self=2, policy=3).result() == {"fn": 1, "self": 2, "policy": 3}
        with pytest.raises(TypeError):
            executor.submit(fn=pow)  # type: ignore[call-arg]

    def test_a_callback_is_called_with_the_future(self, executor: SandboxExecutor) -> None:
        called: list[Future[int]] = []
        future = executor.submit(pow, 2, 3)
        future.add_done_callback(called.append)
        assert future.result() == 8
        executor.shutdown()
        assert called == [future]

    def test_a_result_that_takes_longer_than_one_waits(self, executor: SandboxExecutor) -> None:
        future = executor.submit(jobs.spin, 0.1)
        with pytest.raises(TimeoutError):
            future.result(timeout=0.01)
        assert future.result() is None

    def test_the_result_with_its_receipt(self, executor: SandboxExecutor) -> None:
        value, result = executor.submit_call(jobs.add, 1).result()
        assert value == 2 and result.receipt is not None and result.stdout == b"adding\n"

    def test_what_cannot_be_handed_in_is_the_futures_exception(self, executor: SandboxExecutor) -> None:
        lock = threading.Lock()
        assert isinstance(executor.submit(lambda: lock).exception(), SetupError)
        assert executor.submit(pow, 3, 3).result() == 27

    def test_each_has_a_sandbox_of_its_own(self, executor: SandboxExecutor) -> None:
        assert list(executor.map(jobs.make_ready, ["ready"])) == [None]
        assert executor.submit(jobs.is_ready).result() is False

    def test_what_it_needs_no_more_it_does_not_keep(self) -> None:
        with SandboxExecutor(max_workers=1, types=(Point,)) as executor:
            for chunksize in (1, 2):
                for point in executor.map(unsaid, range(2), chunksize=chunksize):
                    kept = weakref.ref(point)
                    del point
                    assert kept() is None
            greeter = Greeter("hello")
            kept_greeter = weakref.ref(greeter)
            assert executor.submit(greeter.greet, "ada").result() == "hello ada"
            del greeter
            end = time.monotonic() + 30
            while kept_greeter() is not None and time.monotonic() < end:
                time.sleep(0.01)
            assert kept_greeter() is None

    def test_in_an_event_loop(self, executor: SandboxExecutor) -> None:
        async def main() -> int:
            return await asyncio.get_running_loop().run_in_executor(executor, pow, 2, 5)

        assert asyncio.run(main()) == 32


class TestMap:
    def test_in_order_and_lazily_consumed(self, executor: SandboxExecutor) -> None:
        assert list(executor.map(pow, range(3), range(3))) == [1, 1, 4]
        found = executor.map(divmod, [1, 1], [1, 0])
        assert next(found) == (1, 0)
        with pytest.raises(ZeroDivisionError):
            next(found)

    def test_in_chunks(self, executor: SandboxExecutor) -> None:
        for chunksize in (2, 50):
            assert list(executor.map(pow, range(3), [2] * 3, chunksize=chunksize)) == [0, 1, 4]
        assert list(executor.map(jobs.count, [1, 2], chunksize=2)) == [[0], [0, 1]]

    def test_chunks_must_hold_something(self, executor: SandboxExecutor) -> None:
        for wrong in (0, -1):
            with pytest.raises(ValueError, match="chunksize"):
                executor.map(pow, [1], [1], chunksize=wrong)

    @pytest.mark.parametrize("chunksize", [1, 2])
    def test_a_timeout_counts_from_the_call(self, chunksize: int) -> None:
        with SandboxExecutor(max_workers=1, timeout=0.3, grace=0) as executor:
            found = executor.map(jobs.spin, [60] * chunksize, timeout=0.1, chunksize=chunksize)
            time.sleep(0.1)
            with pytest.raises(TimeoutError):
                list(found)


class TestWaiting:
    def test_wait_and_as_completed(self, executor: SandboxExecutor) -> None:
        quick, slow, bad = (
            executor.submit(pow, 1, 1), executor.submit(jobs.spin, 0.4), executor.submit(divmod, 1, 0),
        )  # fmt: skip
        done, left = wait([quick, slow], return_when=FIRST_COMPLETED)
        assert (done, left) == ({quick}, {slow})
        done, left = wait([slow, bad], return_when=FIRST_EXCEPTION)
        assert bad in done and left <= {slow}
        assert next(iter(as_completed([slow, quick]))) is quick
        assert wait([quick, slow, bad], return_when=ALL_COMPLETED).not_done == set()

    def test_as_completed_in_time(self, executor: SandboxExecutor) -> None:
        with pytest.raises(TimeoutError):
            list(as_completed([executor.submit(jobs.spin, 0.1)], timeout=0))


class TestShutdown:
    def test_after_it_nothing_is_taken(self) -> None:
        executor = SandboxExecutor(max_workers=1)
        future = executor.submit(pow, 2, 2)
        executor.shutdown()
        assert future.done() and future.result() == 4
        with pytest.raises(RuntimeError):
            executor.submit(pow, 2, 2)
        executor.shutdown()

    def test_without_waiting_what_was_taken_is_done(self) -> None:
        executor = SandboxExecutor(max_workers=1)
        futures = [executor.submit(jobs.spin, 0.1), executor.submit(pow, 2, 2)]
        executor.shutdown(wait=False)
        assert [future.result() for future in futures] == [None, 4]
        executor.shutdown()

    def test_at_the_end_of_the_interpreter_what_was_taken_is_done(self) -> None:
        code = (
            "import atexit, stockade\n"
            "executor = stockade.SandboxExecutor(max_workers=1)\n"
            "def late():\n"
            "    try: executor.submit(pow, 2, 2)\n"
            "    except RuntimeError: print('refused')\n"
            "atexit.register(late)\n"
            "for n in range(2): executor.submit(pow, 2, n).add_done_callback(lambda f: print(f.result()))"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert (done.stdout, done.stderr) == ("1\n2\nrefused\n", "")

    def test_in_a_forked_child_it_answers_nobody(self, executor: SandboxExecutor) -> None:
        assert executor.submit(pow, 2, 2).result() == 4
        child = os.fork()
        if not child:
            try:
                executor.submit(pow, 2, 2)
            except RuntimeError:
                os._exit(7)
            os._exit(8)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7

    def test_what_waits_can_be_cancelled(self) -> None:
        with SandboxExecutor(max_workers=1) as executor:
            running, *waiting = [executor.submit(jobs.spin, 0.1) for _ in range(3)]
            while not running.running():
                time.sleep(0.01)
            assert waiting[0].cancel() and not running.cancel()
            executor.shutdown(cancel_futures=True)
            assert running.result() is None
            for future in waiting:
                with pytest.raises(CancelledError):
                    future.result()

    def test_ctrl_c_ends_what_runs(self) -> None:
        with pytest.raises(KeyboardInterrupt), SandboxExecutor(max_workers=1) as executor:
            running, waiting = executor.submit(jobs.spin), executor.submit(jobs.spin)
            while not executor._talks:
                time.sleep(0.01)
            raise KeyboardInterrupt
        assert isinstance(running.exception(), stockade.CommandError) and waiting.cancelled()

    def test_no_more_than_max_workers_at_a_time(self) -> None:
        with SandboxExecutor(max_workers=1) as executor:
            futures = [executor.submit(jobs.spin, 0.1) for _ in range(2)]
            assert sum(thread.name.startswith("stockade_") for thread in threading.enumerate()) <= 1
            wait(futures)
        for wrong in (0, -1):
            with pytest.raises(ValueError, match="max_workers"):
                SandboxExecutor(max_workers=wrong)


class TestBroken:
    def test_a_dead_interpreter_breaks_its_own_task_and_hangs_nobody(self, executor: SandboxExecutor) -> None:
        futures = [executor.submit(jobs.die), executor.submit(pow, 2, 2), executor.submit(jobs.die, 0)]
        assert futures[1].result() == 4
        for future in (futures[0], futures[2]):
            error = future.exception()
            assert isinstance(error, BrokenExecutor) and isinstance(error, stockade.CommandError)
            assert error.result is not None and error.receipt is not None

    def test_a_limit_is_the_error_that_it_is(self) -> None:
        with SandboxExecutor(Policy(limits={"wall": "200ms"}), max_workers=1, grace=0) as executor:
            assert isinstance(executor.submit(jobs.spin).exception(), stockade.TimeoutError)

    def test_an_initializer_is_called_inside_before_each_task(self) -> None:
        with SandboxExecutor(max_workers=1, initializer=jobs.make_ready, initargs=("ready",)) as executor:
            assert [executor.submit(jobs.is_ready).result() for _ in range(2)] == [True, True]
        with pytest.raises(TypeError):
            SandboxExecutor(initializer="none")  # type: ignore[arg-type]

    def test_an_initializer_that_fails_breaks_the_executor(self) -> None:
        with SandboxExecutor(max_workers=1, initializer=jobs.fail, initargs=("ValueError", "no")) as executor:
            futures = [executor.submit(pow, 2, 2) for _ in range(3)]
            for future in futures:
                with pytest.raises(BrokenExecutor, match="the initializer failed: ValueError: no"):
                    future.result()
            with pytest.raises(BrokenExecutor):
                executor.submit(pow, 2, 2)
