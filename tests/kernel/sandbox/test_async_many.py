"""Many runs at once in one event loop, beside whatever else the program does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from support.marks import HIDES, gone, marked

MANY = 200
#: Every warning is an error, asyncio checks itself, and what it could not report is a failure too.
STRICT = [sys.executable, "-X", "dev", "-W", "error"]
BEGIN = """
import asyncio, gc, os, signal, sys, threading
import stockade
from stockade import AsyncSandbox, Policy, Sandbox

failures = []
sys.unraisablehook = failures.append

def run(main):
    async def outer():
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: failures.append(context))
        loop.slow_callback_duration = 2  # the first use tries out what the host can do
        return await main()
    result = asyncio.run(outer(), debug=True)
    gc.collect()
    assert not failures, failures
    return result

def descriptors():
    return len(os.listdir("/proc/self/fd"))

run_one = lambda: run(one)
async def one():
    async with AsyncSandbox() as box:
        return (await box.run(["echo", "one"])).text
assert run_one() == "one\\n"
before = descriptors()
"""
END = """
assert descriptors() == before, (descriptors(), before)
assert threading.active_count() <= 1 + max(8, (os.cpu_count() or 1) + 4)
print("fine")
"""


def in_a_program(script: str) -> subprocess.CompletedProcess[str]:
    """A program of its own, so that nothing of pytest's hides a warning."""
    code = BEGIN + textwrap.dedent(script) + END
    done = subprocess.run([*STRICT, "-c", code], capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, done.stderr) == (0, ""), (done.stdout, done.stderr)
    assert done.stdout.endswith("fine\n")
    return done


def keys() -> int:
    """How many more keyrings this user may have; each sandbox takes one."""
    for line in Path("/proc/key-users").read_text().splitlines():
        uid, _, rest = line.strip().partition(":")
        if int(uid) == os.geteuid():
            used, most = rest.split()[2].split("/")
            return int(most) - int(used)
    return int(Path("/proc/sys/kernel/keys/maxkeys").read_text())


def test_two_hundred_sandboxes_at_once() -> None:
    count = min(MANY, keys() - 20)
    in_a_program(f"""
        async def each(n):
            async with AsyncSandbox() as box:
                result = await box.run(["sh", "-c", "cat; echo $N"], input=b"%d " % n, env={{"N": str(n)}})
                return result.text
        async def main():
            return await asyncio.gather(*map(each, range({count})))
        assert run(main) == [f"{{n}} {{n}}\\n" for n in range({count})]
    """)


def test_two_hundred_runs_in_one_sandbox() -> None:
    in_a_program(f"""
        async def main():
            async with AsyncSandbox(Policy(limits={{"tasks": 2000}})) as box:
                async def each(n):
                    result = await box.run(["sh", "-c", "sleep 0.5; echo $N"], env={{"N": str(n)}})
                    return result.text
                return await asyncio.gather(*map(each, range({MANY})))
        assert run(main) == [f"{{n}}\\n" for n in range({MANY})]
    """)


def test_two_hundred_started_processes() -> None:
    in_a_program(f"""
        async def main():
            async with AsyncSandbox(Policy(limits={{"tasks": 2000}})) as box:
                async def each(n):
                    async with await box.start(["cat"], stdin=-1) as process:
                        process.stdin.write(b"%d\\n" % n)
                        await process.stdin.drain()
                        line = await process.stdout.readline()
                        process.stdin.close()
                        assert (await process.wait(60)).ok
                        return line
                return await asyncio.gather(*map(each, range({MANY})))
        assert run(main) == [b"%d\\n" % n for n in range({MANY})]
    """)


def test_cancelling_one_disturbs_no_other() -> None:
    in_a_program("""
        async def main():
            async with AsyncSandbox() as box:
                runs = [asyncio.create_task(box.run(["sh", "-c", f"sleep 1; echo {n}"])) for n in range(40)]
                await asyncio.sleep(0.4)
                for run in runs[::2]:
                    run.cancel()
                return await asyncio.gather(*runs, return_exceptions=True)
        results = run(main)
        assert all(isinstance(result, asyncio.CancelledError) for result in results[::2]), results
        assert [result.text for result in results[1::2]] == [f"{n}\\n" for n in range(1, 40, 2)]
    """)


def test_a_launch_that_is_cancelled_leaves_nothing() -> None:
    in_a_program("""
        async def main():
            cancelled = 0
            for delay in range(24):
                box = AsyncSandbox()
                opening = asyncio.create_task(box.open())
                await asyncio.sleep(delay * 0.0003)
                opening.cancel()
                try:
                    await opening
                except asyncio.CancelledError:
                    cancelled += 1
                await box.close()
            assert cancelled > 2
        run(main)
    """)


def test_a_close_that_is_cancelled_closes_all_the_same() -> None:
    in_a_program("""
        async def main():
            for delay in (0, 0.0005, 0.001, 0.002, 0.004):
                box = AsyncSandbox()
                await box.open()
                running = asyncio.create_task(box.run(["sleep", "60"]))
                await asyncio.sleep(0.1)
                closing = asyncio.create_task(box.close())
                await asyncio.sleep(delay)
                closing.cancel()
                await asyncio.gather(closing, return_exceptions=True)
                assert (await running).outcome == "cancelled"
        run(main)
    """)


def test_a_start_that_is_cancelled_leaves_nothing() -> None:
    in_a_program("""
        async def main():
            async with AsyncSandbox() as box:
                for delay in range(20):
                    starting = asyncio.create_task(box.start(["sleep", "60"], stdin=-1))
                    await asyncio.sleep(delay * 0.0003)
                    starting.cancel()
                    try:
                        await (await starting).close()
                    except asyncio.CancelledError:
                        pass
                for _ in range(100):
                    if "sleep" not in (await box.run(["sh", "-c", "cat /proc/[0-9]*/comm"])).text.split():
                        return
                raise AssertionError
        run(main)
    """)


def test_a_process_that_nobody_refers_to_any_more_is_ended() -> None:
    in_a_program(f"""
        async def main():
            async with AsyncSandbox() as box:
                process = await box.start(["sh", "-c", {f"{HIDES}; echo up; sleep 60"!r}], grace=0.1)
                assert await process.stdout.readline() == b"up\\n"
                del process
                gc.collect()
                for _ in range(100):
                    if "sleep" not in (await box.run(["sh", "-c", "cat /proc/[0-9]*/comm"])).text.split():
                        return
                raise AssertionError
        run(main)
    """)


def test_a_short_wait_beside_a_long_one_is_told_in_time() -> None:
    in_a_program("""
        async def main():
            async with AsyncSandbox() as box:
                async with await box.start(["sleep", "60"]) as process:
                    long = asyncio.create_task(process.wait())
                    await asyncio.sleep(0.1)
                    try:
                        await process.wait(0.1)
                    except stockade.TimeoutError:
                        process.kill(0)
                    assert (await long).outcome == (await process.wait(0)).outcome == "cancelled"
        run(main)
    """)


def test_a_process_that_is_closed_ends_the_wait_of_another_task() -> None:
    in_a_program("""
        async def main():
            async with AsyncSandbox() as box:
                process = await box.start(["sleep", "60"])
                waiting = [asyncio.create_task(process.wait()) for _ in range(3)]
                await asyncio.sleep(0.1)
                await process.close()
                found = await asyncio.gather(*waiting, return_exceptions=True)
                assert all(isinstance(error, stockade.SetupError) for error in found), found
        run(main)
    """)


def test_a_timeout_of_asyncio_ends_the_run_first() -> None:
    in_a_program("""
        async def main():
            async with AsyncSandbox() as box:
                try:
                    await asyncio.wait_for(box.run(["sleep", "60"], grace=0.2), 0.3)
                except asyncio.TimeoutError:
                    pass
                else:
                    raise AssertionError
                names = (await box.run(["sh", "-c", "cat /proc/[0-9]*/comm"])).text.split()
                assert "sleep" not in names, names
        run(main)
    """)


def test_a_server_goes_on_answering_while_it_runs_commands() -> None:
    in_a_program("""
        import time
        async def main():
            longest = 0.0
            async with AsyncSandbox() as box:
                async def answer(reader, writer):
                    number = (await reader.readline()).strip().decode()
                    result = await box.run(["sh", "-c", f"sleep 0.3; echo {number}"])
                    writer.write(result.stdout)
                    writer.close()
                    await writer.wait_closed()
                async def ask(port, number):
                    reader, writer = await asyncio.open_connection("127.0.0.1", port)
                    writer.write(b"%d\\n" % number)
                    answered = await reader.read()
                    writer.close()
                    await writer.wait_closed()
                    return answered
                async def tick():
                    nonlocal longest
                    while True:
                        began = time.monotonic()
                        await asyncio.sleep(0.01)
                        longest = max(longest, time.monotonic() - began)
                ticking = asyncio.create_task(tick())
                server = await asyncio.start_server(answer, "127.0.0.1", 0)
                async with server:
                    port = server.sockets[0].getsockname()[1]
                    answers = await asyncio.gather(*(ask(port, n) for n in range(40)))
                ticking.cancel()
            assert answers == [b"%d\\n" % n for n in range(40)]
            assert longest < 2, longest
        run(main)
    """)


def test_a_notebook_may_use_both_faces_inside_its_running_loop() -> None:
    in_a_program("""
        def notebook(found):
            async def main():
                async with AsyncSandbox() as box:
                    # A cell without await, in a loop that is running already.
                    with Sandbox() as other:
                        found.append(other.run(["echo", "sync"]).text)
                    found.append((await box.run(["echo", "async"])).text)
                    found.append(stockade.run(["echo", "alone"]).text)
            run(main)
        found = []
        thread = threading.Thread(target=notebook, args=(found,))
        thread.start()
        thread.join()
        assert found == ["sync\\n", "async\\n", "alone\\n"], found
    """)


def test_the_host_programs_children_and_signals_are_its_own() -> None:
    in_a_program("""
        import subprocess
        ended = []
        signal.signal(signal.SIGCHLD, lambda *_: ended.append(1))
        async def main():
            async with AsyncSandbox() as box:
                told, tell = os.pipe()
                own = await asyncio.create_subprocess_exec("sh", "-c", "read _; exit 7", stdin=told)
                plain = subprocess.Popen(["sh", "-c", "read _; exit 8"], stdin=told)
                os.close(told)
                results = await asyncio.gather(*(box.run(["false"]) for _ in range(20)))
                assert [result.exit_code for result in results] == [1] * 20
                assert not ended, "the end of a program inside is no signal to the host program"
                os.close(tell)
                assert await own.wait() == 7
                assert plain.wait() == 8
        handler = signal.getsignal(signal.SIGCHLD)
        run(main)
        assert ended and signal.getsignal(signal.SIGCHLD) is handler
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert signal.set_wakeup_fd(-1) == -1
    """)


def test_one_that_nobody_closed_says_so_and_is_closed() -> None:
    in_a_program(f"""
        import warnings
        async def main():
            box = AsyncSandbox()
            await box.open()
            assert (await box.run(["sh", "-c", {HIDES!r}])).ok
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                del box
                gc.collect()
            assert ["not closed" in str(warning.message) for warning in caught] == [True], caught
        run(main)
    """)
    assert gone()


@pytest.mark.usefixtures("swept")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_outlives_the_program_that_had_many(number: signal.Signals) -> None:
    code = BEGIN + textwrap.dedent(f"""
        async def main():
            async with AsyncSandbox() as box:
                script = {f"{HIDES}; echo up; sleep 60"!r}
                up = lambda data: print("up", flush=True)
                await asyncio.gather(*(box.run(["sh", "-c", script], on_stdout=up) for _ in range(5)))
        run(main)
    """)
    with subprocess.Popen(
        [*STRICT, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as program:
        assert program.stdout is not None and program.stdout.readline() == b"up\n"
        assert marked()
        program.send_signal(number)
        program.wait(30)
        assert gone()
