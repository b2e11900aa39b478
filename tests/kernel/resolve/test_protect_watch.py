"""A host that replaces a protected file during a run.

The mount that kept the program from writing it goes away with the old file.
The gate sees that and ends everything.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import stockade
from stockade import Policy, Result, Sandbox
from support.marks import HIDES, gone, marked

#: Says that it is up, lets the host do its work, and writes whatever it can reach through the name.
WRITES = 'echo up; sleep 0.7; echo evil >> "$0"'


@pytest.fixture
def project(workspace: Path) -> Path:
    (workspace / ".git" / "hooks").mkdir(parents=True)
    for name in (".git/config", ".envrc"):
        (workspace / name).write_text("original\n")
    return workspace


def policy(project: Path) -> Policy:
    return Policy(
        workspace={"path": str(project), "mode": "rw"},
        protect=[".git/hooks", ".git/config", ".envrc"],
        unprotect=[".git"],
    )


def saved(path: Path) -> None:
    """As an editor saves: a new file, renamed over the old one."""
    new = path.with_name(path.name + "~")
    new.write_text("edited\n")
    new.rename(path)


def removed(path: Path) -> None:
    path.unlink()


def made_again(path: Path) -> None:
    path.rmdir()
    path.mkdir()


WORK: dict[str, tuple[str, Callable[[Path], None]]] = {
    "saved": (".envrc", saved),
    "saved below": (".git/config", saved),
    "removed": (".envrc", removed),
    "directory": (".git/hooks", made_again),
}


class Started:
    """Calls once, when the program says that it is up."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self.ended = 0.0

    def __call__(self, _: bytes) -> None:
        if not self.ended:
            self._work()
            self.ended = time.monotonic()


def judge(result: Result, path: Path) -> None:
    assert (result.outcome, result.exit_code) == ("denied", 126)
    assert str(path) in result.reason and "replaced on the host" in result.reason
    assert "overlay" in result.hint
    with pytest.raises(stockade.DeniedError):
        result.check()


@pytest.mark.parametrize("kind", WORK)
def test_the_run_is_ended_and_the_path_named(project: Path, kind: str) -> None:
    name, work = WORK[kind]
    started = Started(lambda: work(project / name))
    script = f"{HIDES}; echo up; sleep 60"
    result = stockade.run(["sh", "-c", script], policy(project), on_stdout=started, timeout=30)
    assert time.monotonic() - started.ended < 5
    judge(result, project / name)
    assert marked() == []


def test_nothing_is_written_once_it_is_ended(project: Path) -> None:
    path = project / ".envrc"
    started = Started(lambda: saved(path))
    result = stockade.run(["sh", "-c", WRITES, str(path)], policy(project), on_stdout=started, timeout=30)
    judge(result, path)
    time.sleep(1)
    assert path.read_text() == "edited\n"


@pytest.mark.parametrize("kind", WORK)
def test_in_a_living_sandbox_every_run_is_ended(project: Path, kind: str) -> None:
    name, work = WORK[kind]
    with Sandbox(policy(project)) as box:
        up = threading.Event()
        with ThreadPoolExecutor(1) as threads:
            script = ["sh", "-c", "echo up; sleep 60"]
            other = threads.submit(box.run, script, on_stdout=lambda _: up.set(), timeout=30)
            assert up.wait(10)
            started = Started(lambda: work(project / name))
            result = box.run(["sh", "-c", f"{HIDES}; echo up; sleep 60"], on_stdout=started, timeout=30)
            judge(result, project / name)
            judge(other.result(10), project / name)
        assert gone()
        later = box.run(["sh", "-c", f"echo evil >> {project / name}"], timeout=30)
        judge(later, project / name)


def test_in_a_living_sandbox_it_is_ended_also_while_nothing_runs(project: Path) -> None:
    path = project / ".envrc"
    with Sandbox(policy(project)) as box:
        box.run(["true"]).check()
        saved(path)
        time.sleep(0.3)
        result = box.run(["sh", "-c", f"echo evil >> {path}"], timeout=30)
        assert not result.ok
    assert path.read_text() == "edited\n"


def test_a_started_process_is_ended_and_told(project: Path) -> None:
    path = project / ".envrc"
    with Sandbox(policy(project)) as box, box.start(["sh", "-c", f"{HIDES}; echo up; sleep 60"]) as process:
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
        saved(path)
        judge(process.wait(10), path)
        assert gone()


@pytest.fixture
def busy_host(project: Path) -> Iterator[None]:
    """Somebody who works in the same directory all the time."""
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            saved(project / "other")
            (project / "d").mkdir()
            (project / "d").rmdir()
            time.sleep(0.005)

    thread = threading.Thread(target=work)
    thread.start()
    yield
    stop.set()
    thread.join()


@pytest.mark.usefixtures("busy_host")
def test_work_on_other_files_ends_nothing(project: Path) -> None:
    script = "for i in 1 2 3 4 5; do echo $i > x; mv x y; sleep 0.1; done; echo done"
    assert stockade.run(["sh", "-c", script], policy(project), timeout=30).text == "done\n"


def test_writing_into_a_protected_file_ends_nothing(project: Path) -> None:
    """It is the same file still, and so still covered."""
    path = project / ".envrc"
    started = Started(lambda: path.write_text("edited\n") and None)
    script = f"echo up; sleep 0.5; cat {path}; echo evil >> {path} || echo refused"
    result = stockade.run(["sh", "-c", script], policy(project), on_stdout=started, timeout=30)
    assert result.text == "up\nedited\nrefused\n" and result.ok


@pytest.mark.parametrize("kind", ["saved below", "directory"])
def test_in_a_repository_that_is_covered_as_a_whole_the_host_may_replace_what_it_likes(
    project: Path, kind: str
) -> None:
    name, work = WORK[kind]
    started = Started(lambda: work(project / name))
    whole = Policy(workspace={"path": str(project), "mode": "rw"}, protect=[".envrc"])
    script = f"echo up; sleep 0.7; touch {name} {name}/evil || echo refused"
    result = stockade.run(["sh", "-c", script], whole, on_stdout=started, timeout=30)
    assert result.ok and result.text == "up\nrefused\n"
    assert not (project / ".git/hooks/evil").exists()


def test_in_an_overlay_the_host_may_save_what_it_likes(project: Path) -> None:
    path = project / ".envrc"
    started = Started(lambda: saved(path))
    overlay = Policy(workspace=str(project), protect=[".envrc"])
    script = "echo up; sleep 0.3; echo on"
    result = stockade.run(["sh", "-c", script], overlay, on_stdout=started, timeout=30)
    assert result.ok and result.text == "up\non\n" and path.read_text() == "edited\n"


def test_a_protected_name_with_control_characters_is_named_in_full(workspace: Path) -> None:
    path = workspace / "a\x1b[2J\nb"
    path.write_text("")
    started = Started(lambda: saved(path))
    rw = Policy(workspace={"path": str(workspace), "mode": "rw"}, protect=[path.name])
    result = stockade.run(["sh", "-c", "echo up; sleep 60"], rw, on_stdout=started, timeout=30)
    judge(result, path)
