"""A commit that is killed at any moment: the host's tree is as before or as after, never between."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stockade import SetupError, Workspace
from stockade.linux import dirwalk
from stockade.workspace import journal
from support.kills import killed
from support.means import need_program
from support.trees import Tree, changed, snapshot

#: Each of the two users of the suite takes half of the moments.
FIRST = int(os.geteuid() != 0)
#: The calls by which a commit changes something, for the kernel.
KERNEL = """write pwrite64 rename renameat renameat2 link linkat unlink unlinkat mkdir mkdirat rmdir fsync
symlinkat ftruncate fchmod fchmodat fchown fchownat utimensat syncfs"""
SCRIPT = """
echo x >> file; echo new > new; rm gone; rm -r full; echo now-a-file > full
rm other; mkdir other; echo 1 > other/one; mkdir -p a/b; echo 2 > a/b/c; ln -s b a/link; chmod 500 a/b
mkdir -p shut/in; echo 4 > shut/in/four; chmod 500 shut/in shut
chmod 700 away; echo 5 >> away/five; chmod 500 away
ln -sfn a link; chmod 700 keep; echo 3 > keep/three; rm keep/one; mv keep/two moved; chmod 4755 new
"""


def tree(place: Path) -> None:
    place.mkdir()
    for name in ("file", "gone", "other"):
        (place / name).write_text(f"{name}\n")
    for name in ("full/one", "full/deep/two", "keep/one", "keep/two", "away/five"):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(f"{name}\n")
    (place / "full/deep").chmod(0o555)
    (place / "away").chmod(0o555)
    (place / "link").symlink_to("file")


class Ground:
    """A fresh tree and a fresh workspace of it, as often as wanted."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._count = 0
        first, project = self.made()
        self.before = snapshot(project)
        first.commit()
        self.after = snapshot(project)

    def made(self) -> tuple[Workspace, Path]:
        self._count += 1
        project = self._place / f"tree{self._count}"
        tree(project)
        return changed(project, SCRIPT), project

    def judged(self, workspace: Workspace, project: Path) -> Tree:
        """Start again: the tree is whole, and a further commit brings it to its end."""
        found = Workspace.list()
        if workspace.id in [one.id for one in found]:
            again = Workspace.open(workspace.id)
            middle = snapshot(project)
            assert middle in (self.before, self.after)
            assert again.commit().closed
        else:
            middle = snapshot(project)
        assert snapshot(project) == self.after
        assert workspace.id not in [one.id for one in Workspace.list()]
        return middle


@pytest.fixture
def ground(tmp_path: Path) -> Ground:
    return Ground(tmp_path)


@pytest.mark.timeout(300)
def test_killed_before_each_of_its_calls(ground: Ground, stockade_home: Path) -> None:
    ends = []
    for number in range(FIRST, 10_000, 2):
        workspace, project = ground.made()
        over = not killed(number, lambda workspace=workspace: Workspace.open(workspace.id).commit())
        ends.append(ground.judged(workspace, project) == ground.after)
        if over:
            break
    # What was left of a layer half removed went with the next one that was.
    assert os.listdir(stockade_home / "workspaces") == []
    # Before one moment everything is rolled back, after it everything is finished.
    assert ends == sorted(ends) and len(ends) > 30
    assert 10 < ends.index(True) < len(ends) - 10


@pytest.mark.timeout(300)
def test_killed_again_at_each_call_of_the_recovery(ground: Ground) -> None:
    moments: dict[str, list[int]] = {}
    for number in range(3 * FIRST, 10_000, 6):
        workspace, project = ground.made()
        if not killed(number, lambda workspace=workspace: Workspace.open(workspace.id).commit()):
            break
        if os.path.exists(f"{workspace.layer}/{journal.FILE}"):
            found = journal.read(workspace.layer)
            assert found is not None
            moments.setdefault(found.state, []).append(number)
        ground.judged(workspace, project)
    assert sorted(moments) == ["commit", "done", "staging"]
    for first in (moments["commit"][0], moments["commit"][-1], moments["staging"][-1], moments["done"][0]):
        for number in range(0, 10_000, 5):
            workspace, project = ground.made()
            assert killed(first, lambda workspace=workspace: Workspace.open(workspace.id).commit())
            over = not killed(number, lambda workspace=workspace: Workspace.open(workspace.id))
            ground.judged(workspace, project)
            if over:
                break


def commit_under(strace: str, options: list[str], workspace: Workspace) -> subprocess.CompletedProcess[str]:
    code = "import sys, stockade; stockade.Workspace.open(sys.argv[1]).commit()"
    command = [strace, "-f", "-qq", *options, sys.executable, "-B", "-c", code, workspace.id]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.timeout(300)
def test_killed_by_the_kernel_at_its_system_calls(ground: Ground) -> None:
    """The calls are counted by strace: none that changes something escapes the test above."""
    strace = need_program("strace")
    calls = ",".join(f"?{name}" for name in KERNEL.split())
    workspace, project = ground.made()
    seen = commit_under(strace, ["-e", f"trace={calls}"], workspace)
    assert seen.returncode == 0, seen.stderr
    ground.judged(workspace, project)
    count = len(re.findall(r"^(?:\[pid +\d+\] )?\w+\(", seen.stderr, re.MULTILINE))
    assert count > 60
    for number in range(1 + 6 * FIRST, count + 1, 12):
        workspace, project = ground.made()
        commit_under(strace, ["-e", f"inject={calls}:signal=KILL:when={number}"], workspace)
        ground.judged(workspace, project)


def test_what_the_host_changed_after_the_crash_is_kept_beside(ground: Ground) -> None:
    workspace, project = ground.made()
    number = 0
    while (project / "a").exists() is False:  # the first directory is made right after the decision
        workspace, project = ground.made()
        number += 10
        assert killed(number, lambda workspace=workspace: Workspace.open(workspace.id).commit())
    (project / "moved").write_text("mine\n")
    Workspace.open(workspace.id)
    assert (project / "moved").read_text() == "keep/two\n"
    (kept,) = project.glob("moved.kept-*")
    assert kept.read_text() == "mine\n"


def test_without_its_staging_directory_it_starts_anew(ground: Ground) -> None:
    workspace, project = ground.made()
    number = 0
    while not (project / "a").exists():
        workspace, project = ground.made()
        number += 10
        assert killed(number, lambda workspace=workspace: Workspace.open(workspace.id).commit())
    (staging,) = project.glob(".stockade-commit-*")
    subprocess.run(["rm", "-rf", str(staging)], check=True)
    assert Workspace.open(workspace.id).commit(force=["."]).closed
    assert snapshot(project) == ground.after


def failing(number: int) -> Callable[..., None]:
    """A rename that fails at its call of that number, and at none after it."""
    left, real = [number], os.rename

    def rename(*words: Any, **options: Any) -> None:
        # Those of the journal and of the layer are in the state, not in the tree.
        if not str(words[0]).startswith(journal.FILE) and not str(words[1]).startswith(dirwalk.REMOVED):
            left[0] -= 1
            if left[0] == -1:
                raise OSError(28, "No space left on device")
        real(*words, **options)

    return rename


def test_a_step_that_cannot_be_taken_makes_all_be_taken_back(
    ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(1000):
        workspace, project = ground.made()
        with monkeypatch.context() as patch:
            patch.setattr(os, "rename", failing(number))
            try:
                workspace.commit()
                break
            except SetupError as error:
                assert "No space left on device; it was undone, and your files are as before" in error.message
        assert snapshot(project) == ground.before
        assert workspace.commit().closed
        assert snapshot(project) == ground.after
    assert number > 10


@pytest.mark.timeout(300)
def test_killed_while_it_is_taken_back(ground: Ground) -> None:
    def commit(workspace: Workspace) -> None:
        os.rename = failing(9)
        with contextlib.suppress(SetupError):
            Workspace.open(workspace.id).commit()

    for number in range(2 * FIRST, 10_000, 4):
        workspace, project = ground.made()
        # The tripwire is laid first, so that a rename that fails does not count.
        over = not killed(number, lambda workspace=workspace: commit(workspace))
        if over:
            assert snapshot(project) == ground.before
        ground.judged(workspace, project)
        if over:
            break
    assert number > 60


def test_a_copy_that_fails_leaves_nothing(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    workspace, project = ground.made()

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "copy_file_range", full)
        with pytest.raises(Exception, match="No space left"):
            workspace.commit()
    assert snapshot(project) == ground.before
    assert workspace.commit().closed


def test_interrupted_by_hand_it_is_brought_to_an_end_by_the_next_command(ground: Ground) -> None:
    workspace, project = ground.made()
    assert killed(30, lambda: Workspace.open(workspace.id).commit())
    stockade = str(Path(sys.executable).with_name("stockade"))
    done = subprocess.run(
        [stockade, "diff", "--stat", workspace.id], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0 and f"an interrupted commit of workspace {workspace.id} was" in done.stderr
    assert snapshot(project) in (ground.before, ground.after)


OUTLIVES = """
import sys, time
from stockade import Policy, Sandbox
box = Sandbox(Policy(workspace=sys.argv[1]))
box.open()
box.run(["sh", "-c", "echo 1 > new"])
kept = box.start(["sh", "-c", "trap '' TERM HUP; echo 2 > new; while :; do sleep 0.1; done"])
while box.run(["cat", "new"]).text != "2\\n":
    pass
print(box.workspace.id, box._require_open()[0].number(), flush=True)
time.sleep(60)
"""


def lives(pid: str) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def test_what_a_killed_supervisor_left_is_dead_before_its_changes_are_taken_over(workspace: Path) -> None:
    """Programs have two seconds then, in which nothing holds the workspace any more."""
    with subprocess.Popen(
        [sys.executable, "-c", OUTLIVES, workspace], stdout=subprocess.PIPE, text=True
    ) as box:
        assert box.stdout is not None
        id, gate = box.stdout.readline().split()
        box.kill()
        box.wait()
    assert lives(gate)
    Workspace.open(id).snapshot()
    assert not lives(gate)
    assert [one.path for one in Workspace.open(id).commit().changes] == ["new"]
