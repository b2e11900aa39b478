"""A run that begins while nothing else is inside has no keeper: the first process attends to it.

Whatever such a run has started, and however it hides that, ends with it; what belongs to other runs does not.
"""

from __future__ import annotations

import asyncio
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from attacks.arena import PYTHON, command_of
from attacks.gate.test_keepers_watched import RESTLESS
from stockade import AsyncSandbox, Result, Sandbox
from support import leaks
from support.marks import MARK, gone, marked

WAYS = ("double", "sibling", "subreaper", "group")
#: A shell's own number and its parent's.
SELF = ["sh", "-c", "echo $$ $PPID"]
SLEEPS = "pgrep -ax sleep | cut -d' ' -f3 | sort | tr '\\n' ' '"


@pytest.fixture
def box() -> Iterator[Sandbox]:
    with Sandbox() as box:
        yield box


def sleeping(box: Sandbox) -> str:
    """How long each `sleep` inside sleeps."""
    return box.run(["sh", "-c", SLEEPS], timeout=30).text


def wait_for_sleeping(box: Sandbox, expected: str) -> None:
    """Wait until these sleep: a shell prints before it starts the last one."""
    deadline = time.monotonic() + 10
    while (found := sleeping(box)) != expected and time.monotonic() < deadline:
        time.sleep(0.01)
    assert found == expected


def hiding(*ways: str) -> list[str]:
    return command_of("siblings", MARK, *ways)[0]


def test_one_run_after_another_is_a_child_of_the_first_process(box: Sandbox) -> None:
    assert [box.run(SELF).text for _ in range(3)] == ["2 1\n", "3 1\n", "4 1\n"]


@pytest.mark.parametrize("way", [*WAYS, "all of them"])
def test_a_run_ends_in_time_with_whatever_it_hides(box: Sandbox, way: str) -> None:
    ways = WAYS if way == "all of them" else (way,)
    began = time.monotonic()
    result = box.run([*hiding(*ways, "stay")], timeout=1, grace=0.1)
    assert (result.outcome, result.text) == ("timed-out", "up\n")
    assert marked() == []
    assert time.monotonic() - began < 10
    assert box.run(SELF).text.endswith(" 1\n")


def test_outside_they_live_on() -> None:
    """The control: nothing ends them with the process that started them."""
    with subprocess.Popen(hiding("double", "subreaper", "stay"), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == b"up\n"
            assert leaks.settled(lambda: [] if len(marked()) == 4 else [str(marked())]) == []
        finally:
            process.kill()
            process.wait()
            left = marked()
            for pid in left:
                subprocess.run(["kill", "-9", str(pid)], check=True)
        assert len(left) == 3
        assert gone()


def test_a_run_that_forks_without_end_ends_in_time_and_the_sandbox_goes_on(box: Sandbox) -> None:
    result = box.run([PYTHON, "-c", RESTLESS, MARK], timeout=0.5, grace=0.1)
    assert (result.outcome, result.text) == ("timed-out", "up\n")
    assert marked() == []
    assert box.run(SELF).text.endswith(" 1\n")


def test_what_a_run_leaves_by_itself_stays_and_later_runs_have_keepers(box: Sandbox) -> None:
    assert box.run(hiding(*WAYS), timeout=30).text == "up\n"
    left = 8
    assert leaks.settled(lambda: [] if len(marked()) == left else [str(marked())]) == []
    for _ in range(2):
        # Its end ends nothing of theirs.
        assert box.run(["sleep", "60"], timeout=0.1, grace=0.1).outcome == "timed-out"
        assert len(marked()) == left
        assert not box.run(SELF).text.endswith(" 1\n")
    box.run(["pkill", "-9", "-f", MARK])
    assert gone()


def running(box: Sandbox, script: str, timeout: float = 60) -> tuple[threading.Thread, list[Result]]:
    """A run in a thread of its own, which has begun when it has printed something."""
    began, results = threading.Event(), list[Result]()

    def run() -> None:
        command = ["sh", "-c", script]
        results.append(box.run(command, timeout=timeout, grace=0.1, on_stdout=lambda _: began.set()))

    thread = threading.Thread(target=run)
    thread.start()
    assert began.wait(30)
    return thread, results


def test_its_end_spares_other_runs_and_what_they_left(box: Sandbox) -> None:
    own, ended = running(box, "setsid sleep 1111 >/dev/null & echo $PPID; sleep 2222", timeout=2.5)
    box.run(["sh", "-c", "setsid sleep 3333 >/dev/null 2>&1 &"])
    other, cancelled = running(box, "setsid sleep 4444 >/dev/null & echo $PPID; sleep 5555")
    wait_for_sleeping(box, "1111 2222 3333 4444 5555 ")
    own.join()
    assert (ended[0].outcome, ended[0].text) == ("timed-out", "1\n")
    assert sleeping(box) == "3333 4444 5555 "
    box.run(["pkill", "-x", "sleep"])
    other.join()
    assert cancelled[0].outcome == "signalled" or cancelled[0].exit_code == 143


def test_the_end_of_another_run_spares_it_and_what_it_started(box: Sandbox) -> None:
    own, ended = running(box, "setsid sleep 1111 >/dev/null & echo $PPID; exec sleep 2222")
    script = "setsid sleep 3333 >/dev/null & echo $PPID; sleep 4444"
    assert box.run(["sh", "-c", script], timeout=0.5, grace=0.1).outcome == "timed-out"
    assert sleeping(box) == "1111 2222 "
    box.run(["pkill", "-f", "sleep 2222"])
    own.join()
    assert (ended[0].outcome, ended[0].text) == ("signalled", "1\n")
    # What it has left is the sandbox's now, and no run's end ends it.
    assert box.run(["sleep", "60"], timeout=0.1, grace=0.1).outcome == "timed-out"
    assert sleeping(box) == "1111 "


def test_each_run_is_counted_for_itself(box: Sandbox) -> None:
    code = "import time\nwhile time.process_time() < 0.5: pass"
    long, short = box.run([PYTHON, "-c", code]).usage, box.run(["true"]).usage
    assert long.cpu >= 0.5 > 5 * short.cpu
    assert short.context_switches <= long.context_switches


def test_runs_that_begin_at_the_same_time_all_end_well(box: Sandbox) -> None:
    script = "(setsid sleep 0.01 &); echo $1"

    def run(number: int) -> tuple[str, str]:
        result = box.run(["sh", "-c", script, "sh", str(number)], timeout=60)
        return result.outcome, result.text

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(run, range(80))) == [("exited", f"{number}\n") for number in range(80)]
    assert gone()


def test_a_run_whose_caller_goes_away_ends_with_whatever_it_hides() -> None:
    async def main() -> str:
        async with AsyncSandbox() as box:
            up = asyncio.Event()
            task = asyncio.create_task(
                box.run(hiding(*WAYS, "stay"), grace=0.1, on_stdout=lambda _: up.set())
            )
            await up.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert marked() == []
            return (await box.run(SELF)).text

    assert asyncio.run(main()).endswith(" 1\n")
