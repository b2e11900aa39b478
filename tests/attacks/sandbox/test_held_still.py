"""Programs that go on, or are woken, while somebody copies their workspace: nothing half of it counts."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from stockade import Policy, Sandbox, SetupError, Workspace
from support.trees import PYTHON

#: Writes the same to two files whenever a timer of its own wakes it, and stops itself again. Neither their
#: sizes nor their times tell.
WOKEN = """
import ctypes, os, signal, struct
libc, number = ctypes.CDLL(None), 0
def wake(*_):
    global number
    number += 1
    for name in ("one", "two"):
        file = os.open(name, os.O_RDWR | os.O_CREAT)
        os.pwrite(file, b"%08d" % number, 0); os.close(file); os.utime(name, (1, 1))
signal.signal(signal.SIGCONT, wake)
event, timer = ctypes.create_string_buffer(64), ctypes.c_void_p()
struct.pack_into("Pii", event, 0, 0, signal.SIGCONT, 0)
assert libc.timer_create(1, event, ctypes.byref(timer)) == 0
every = struct.pack("llll", 0, 150_000_000, 0, 150_000_000)
assert libc.timer_settime(timer, 0, every, None) == 0
while True: os.kill(os.getpid(), signal.SIGSTOP)
"""
BUSY = """
import os
number = 0
while True:
    number += 1
    with open("part", "w") as file: file.write(str(number))
    os.rename("part", "one")
"""
#: Never the same process for longer than a moment.
HOPS = """
import os
number = 0
while True:
    number += 1
    with open("part", "w") as file: file.write(str(number))
    os.rename("part", "one")
    if os.fork(): os._exit(0)
"""


#: On a busy machine it may be awake whenever it is looked at.
REFUSED = "ran while the sandbox was frozen|does not stop"


def count(box: Sandbox) -> str:
    with contextlib.suppress(FileNotFoundError):
        return Path(box.workspace.layer, "upper", "one").read_text()
    return ""


def changed_since(box: Sandbox, before: str) -> str:
    """The next thing the program writes."""
    until = time.monotonic() + 20
    while (now := count(box)) in ("", before):
        assert time.monotonic() < until, "the program does not go on"
        time.sleep(0.001)
    return now


def asleep(box: Sandbox) -> bool:
    """Whether both files are written and their times, which would tell, put back."""
    files = [Path(box.workspace.layer, "upper", name) for name in ("one", "two")]
    return len({file.read_bytes() for file in files}) == 1 and {file.stat().st_mtime for file in files} == {1}


@pytest.mark.parametrize("action", ["commit", "snapshot", "fork"])
def test_what_was_copied_while_a_timer_woke_its_program_is_worth_nothing(
    workspace: Path, action: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stockade.workspace import tree_copy

    real = tree_copy.content
    with (
        Sandbox(Policy(workspace=str(workspace)), on_exit="discard") as box,
        box.start([PYTHON, "-c", WOKEN]) as process,
    ):
        changed_since(box, "")

        def slow(*arguments: int) -> None:
            changed_since(box, count(box))
            until = time.monotonic() + 20
            while not asleep(box) and time.monotonic() < until:
                time.sleep(0.001)
            real(*arguments)

        monkeypatch.setattr(tree_copy, "content", slow)
        act: dict[str, Callable[[], object]] = {
            "commit": box.workspace.commit,
            "snapshot": lambda: box.workspace.snapshot("torn"),
            "fork": lambda: box.workspace.fork(2),
        }
        with pytest.raises(SetupError, match=REFUSED):
            act[action]()
        assert os.listdir(workspace) == [], "something was committed"
        assert not box.workspace.snapshots() and len(Workspace.list()) == 1
        process.kill(0)


def test_a_program_that_stopped_again_is_found_out(workspace: Path) -> None:
    with (
        Sandbox(Policy(workspace=str(workspace)), on_exit="discard") as box,
        box.start([PYTHON, "-c", WOKEN]) as process,
    ):
        changed_since(box, "")
        with pytest.raises(SetupError, match=REFUSED), box.workspace._alone():
            changed_since(box, count(box))
            time.sleep(0.01)  # it sleeps most of the time
        process.kill(0)


def test_what_a_finished_run_left_behind_is_stopped_and_goes_on_afterwards(workspace: Path) -> None:
    with Sandbox(Policy(workspace=str(workspace)), on_exit="discard") as box:
        box.run(["sh", "-c", '"$@" > /dev/null 2>&1 &', "sh", PYTHON, "-c", BUSY])
        now = changed_since(box, "")
        for _ in range(3):
            with box.workspace._alone():
                now = count(box)
                time.sleep(0.05)
                assert count(box) == now
            now = changed_since(box, now)
        box.workspace.commit()
        assert (workspace / "one").read_text().isdigit()


def test_a_program_that_is_never_the_same_process_is_still_or_refused(workspace: Path) -> None:
    held = 0
    with (
        Sandbox(Policy(workspace=str(workspace)), on_exit="discard") as box,
        box.start([PYTHON, "-c", HOPS]) as process,
    ):
        changed_since(box, "")
        for _ in range(5):
            with contextlib.suppress(SetupError), box.workspace._alone():
                now = count(box)
                time.sleep(0.05)
                assert count(box) == now
                held += 1
            changed_since(box, count(box))
        process.kill(0)
    assert held, "it was always refused"


def test_a_sandbox_that_is_closed_meanwhile_commits_nothing(workspace: Path) -> None:
    closing: list[threading.Thread] = []
    box = Sandbox(Policy(workspace=str(workspace)))
    with box, box.start(["sh", "-c", "echo x > file; echo up; exec sleep 60"]) as process:
        assert process.stdout is not None and process.stdout.read(3) == b"up\n"
        one = box.workspace

        def close(done: int, of: int) -> None:
            if not closing:
                closing.append(threading.Thread(target=box.close))
                closing[0].start()
                process.wait(20)

        with pytest.raises(SetupError, match="ran while"):
            one.commit(progress=close)
        closing[0].join()
    assert os.listdir(workspace) == []
    assert [one.id for one in Workspace.list()] == [one.id], "the changes are kept"


def test_whoever_asks_for_the_roots_and_for_a_refusal_at_once_both_get_an_answer(workspace: Path) -> None:
    with Sandbox(Policy(workspace=str(workspace))) as box:
        inner = box._require_open()[0]
        until, failed = time.monotonic() + 1, []

        def ask() -> None:
            try:
                while time.monotonic() < until:
                    assert inner.last_words() is None
            except Exception as error:
                failed.append(error)

        asking = threading.Thread(target=ask)
        asking.start()
        try:
            while time.monotonic() < until:
                for root in inner.roots():
                    os.close(root)
        finally:
            asking.join()
        assert not failed
