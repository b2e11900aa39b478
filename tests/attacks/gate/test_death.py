"""Killing the supervisor: whatever is in its sandboxes dies with it, however it was held."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from support import leaks

pytestmark = pytest.mark.usefixtures("swept")

PLAIN = """
import stockade
stockade.run(["sh", "-c", "echo started; setsid sleep 100 & sleep 100"],
             on_stdout=lambda part: print(part.decode(), end="", flush=True))
"""
#: A forked worker of the supervisor inherits every descriptor, and stays.
WITH_WORKER = """
import os, time
import stockade
box = stockade.Sandbox(stockade.Policy())
box.open()
worker = os.fork()
if not worker:
    os.dup2(os.open("/dev/null", os.O_RDWR), 1)  # the test waits for the supervisor's end of the pipe
    time.sleep(100)
print("worker", worker, flush=True)
box.run(["sh", "-c", "echo started; sleep 100"],
        on_stdout=lambda part: print(part.decode(), end="", flush=True))
"""
#: The thread that opened the sandbox ends; its end is not the supervisor's.
BY_THREAD = """
import threading, time
import stockade
box = stockade.Sandbox(stockade.Policy())
thread = threading.Thread(target=box.open)
thread.start()
thread.join()
time.sleep(0.3)
print(box.run(["echo", "started"]).text, end="", flush=True)
box.run(["sleep", "100"])
"""
LIVING = """
import time, stockade
box = stockade.Sandbox()
box.open()
runs = [box.start(["sh", "-c", "trap '' TERM HUP; setsid sleep 100 & sleep 100"]) for _ in range(3)]
print("started", flush=True)
time.sleep(100)
"""
ASYNC = """
import asyncio, stockade
async def main():
    async with stockade.AsyncSandbox() as box:
        runs = [asyncio.create_task(box.run(["sleep", "100"])) for _ in range(3)]
        print((await box.run(["echo", "started"])).text, end="", flush=True)
        await asyncio.gather(*runs)
asyncio.run(main())
"""
TERMINAL = """
import time, stockade
box = stockade.Sandbox()
box.open()
process = box.start(["sh", "-c", "stty -echo; echo ready; sleep 100"], pty=True)
process.stdout.readline()
print("started", flush=True)
time.sleep(100)
"""

WITHOUT = """
import subprocess
child = subprocess.Popen(["sleep", "100"])
print(child.pid)
print("started", flush=True)
child.wait()
"""


@contextlib.contextmanager
def supervisor(code: str) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """A supervising process that has a program running inside, and what it said before that."""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = []
        try:
            for line in process.stdout:
                if line == "started\n":
                    break
                said.append(line)
            else:
                pytest.fail(f"the supervisor did not start: {said}")
            yield process, said
        finally:
            process.kill()


@pytest.mark.usefixtures("swept")
@pytest.mark.parametrize("code", [PLAIN, BY_THREAD], ids=["run", "thread"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_everything_inside_dies_with_the_supervisor(code: str, number: int) -> None:
    before = set(map(str, leaks.family()))
    with supervisor(code) as (process, _):
        assert [p for p in leaks.family() if p.nested and not p.spare]
        process.send_signal(number)
        process.wait()
        assert leaks.settled(lambda: sorted(set(map(str, leaks.family())) - before), 2.0) == []


@pytest.mark.usefixtures("swept")
@pytest.mark.parametrize("code", [PLAIN, LIVING, ASYNC, TERMINAL], ids=["run", "living", "async", "terminal"])
def test_everything_inside_dies_with_a_supervisor_that_was_stopped_before(code: str) -> None:
    """It could do nothing any more, nor be told anything."""
    before = set(map(str, leaks.family()))
    with supervisor(code) as (process, _):
        process.send_signal(signal.SIGSTOP)
        time.sleep(0.1)
        assert [p for p in leaks.family() if p.nested and not p.spare]
        process.kill()
        process.wait()
        assert leaks.settled(lambda: sorted(set(map(str, leaks.family())) - before), 4.0) == []


@pytest.mark.usefixtures("swept")
def test_everything_inside_dies_although_a_worker_still_holds_the_sockets() -> None:
    with supervisor(WITH_WORKER) as (process, said):
        worker = int(said[0].split()[1])
        try:
            before = {p.pid for p in leaks.family() if p.spare}  # of our own gate
            assert [p for p in leaks.family() if p.nested and p.pid not in before]
            process.kill()
            process.wait()

            def left() -> list[str]:
                return [str(p) for p in leaks.family() if p.nested and p.pid not in before]

            assert leaks.settled(left, 2.0) == []
            os.kill(worker, 0)
        finally:
            os.kill(worker, signal.SIGKILL)


def test_without_a_sandbox_a_killed_parent_leaves_its_children_running() -> None:
    with supervisor(WITHOUT) as (process, said):
        process.kill()
        process.wait()
        time.sleep(0.2)
        os.kill(int(said[0]), 0)
        os.kill(int(said[0]), signal.SIGKILL)
