"""`limits.disk` with `workspace.durable`: a limit of the kernel's, and a killed supervisor loses nothing."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import stockade
from stockade import Policy, PolicyError, Sandbox, SetupError, Workspace
from stockade.runs.register import register
from stockade.workspace import disk_image
from support.means import applies, need

MIB = 1 << 20
IS_ROOT = os.geteuid() == 0
STOCKADE = str(Path(sys.executable).with_name("stockade"))
EDITS = "echo changed > a; rm gone; mkdir -p new/deep; ln -s a new/link; rm -r sub; mkdir sub; echo 2 > sub/y"
CHANGED = {
    "a": "modified", "gone": "deleted", "new": "added", "new/deep": "added", "new/link": "added",
    "sub/x": "deleted", "sub/y": "added",
}  # fmt: skip


@pytest.fixture
def tree(workspace: Path) -> Path:
    (workspace / "sub").mkdir()
    for name in ("a", "gone", "sub/x"):
        (workspace / name).write_text("host\n")
    return workspace


@pytest.fixture
def means(stockade_home: Path) -> Iterator[None]:
    """The machine can do it, and no loop device is left."""
    applies(IS_ROOT, "only root mounts an image")
    need(not disk_image.missing(), f"no images: {disk_image.missing()}")
    yield
    until = time.monotonic() + 5  # the kernel lets go of it a moment after the last mount
    while (found := _devices(stockade_home)) and time.monotonic() < until:
        time.sleep(0.01)
    assert not found


def _devices(home: Path) -> list[str]:
    found = [path.read_text().strip() for path in Path("/sys/block").glob("loop*/loop/backing_file")]
    return [path for path in found if path.startswith(str(home))]


def durable(tree: Path, disk: int = 16 * MIB) -> Policy:
    return Policy(workspace={"path": str(tree), "durable": True}, limits={"disk": disk}, protect=[])


def kinds(one: Workspace) -> dict[str, str]:
    return {change.path: change.kind for change in one.changes()}


def test_what_cannot_be_durable_is_refused_with_the_reason(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if IS_ROOT:
        monkeypatch.setattr(disk_image, "PROGRAMS", "/nonexistent")
    reason = "mkfs.ext4 is not installed" if IS_ROOT else "only root can mount an image"
    with pytest.raises(PolicyError, match=rf"workspace.durable = true.*loses them, because {reason}"):
        stockade.run(["true"], durable(tree))
    rule = {"path": str(tree), "durable": True}
    assert stockade.run(["true"], Policy(workspace=rule, protect=[]), timeout=60).ok


@pytest.mark.usefixtures("means")
def test_changes_are_as_without_a_limit(tree: Path) -> None:
    result = stockade.run(["sh", "-c", EDITS], durable(tree), timeout=60)
    assert result.ok, result.stderr
    assert "image" in result.controls["limits.disk"].mechanism
    kept = Workspace.open(result.workspace_id)
    assert kinds(kept) == CHANGED and not disk_image.is_left(kept.layer)
    kept.commit()
    assert (tree / "sub" / "y").read_text() == "2\n" and not (tree / "gone").exists()


@pytest.mark.usefixtures("means")
def test_one_that_changes_nothing_leaves_nothing(tree: Path, stockade_home: Path) -> None:
    assert stockade.run(["sh", "-c", "echo x > /tmp/x"], durable(tree), timeout=60).ok
    assert os.listdir(stockade_home / "workspaces") == []


@pytest.mark.usefixtures("means")
@pytest.mark.parametrize("place", ["second", "/tmp/second", "$HOME/second"])
def test_the_limit_is_of_everything_that_is_written(tree: Path, place: str) -> None:
    script = f"head -c 8M /dev/zero > first && head -c 8M /dev/zero > {place}"
    result = stockade.run(["sh", "-c", script], durable(tree), on_exit="discard", timeout=60)
    assert result.exit_code == 1 and b"No space left on device" in result.stderr
    assert stockade.run(["sh", "-c", script], durable(tree, 24 * MIB), on_exit="discard", timeout=60).ok


@pytest.mark.usefixtures("means")
def test_one_that_is_full_harms_no_other_and_owns_its_blocks_from_the_start(
    tree: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    with Sandbox(durable(tree), on_exit="discard") as full, Sandbox(durable(other), on_exit="discard") as box:
        info = os.stat(f"{box.workspace.layer}/image")
        assert info.st_blocks * 512 >= info.st_size == 16 * MIB and info.st_mode & 0o077 == 0
        assert full.run(["sh", "-c", "cat /dev/zero > big"], timeout=60).exit_code == 1
        assert box.run(["sh", "-c", "head -c 8M /dev/zero > big"], timeout=60).ok
        assert full.run(["sh", "-c", "rm big && echo x > small"], timeout=60).ok


@pytest.mark.usefixtures("means")
def test_a_program_gets_the_files_and_never_the_device(tree: Path) -> None:
    script = """
import os, stat
device = os.stat("/tmp").st_dev
assert device == os.stat(os.environ["HOME"]).st_dev and os.major(device) == 7
def tries():
    yield lambda: os.mknod("/tmp/disk", stat.S_IFBLK | 0o600, device)
    yield lambda: os.open(f"/dev/loop{os.minor(device)}", os.O_RDWR)
    yield lambda: os.open("/dev/loop-control", os.O_RDWR)
    yield lambda: os.listdir("/tmp/lost+found")
for number, attempt in enumerate(tries()):
    try: attempt()
    except OSError as error: print(number, error.strerror)
    else: print(number, "done")
print(sum(" - ext4 " in line and f" {os.major(device)}:{os.minor(device)} / " in line
          for line in open("/proc/self/mountinfo")))
"""
    result = stockade.run(["/usr/bin/python3", "-c", script], durable(tree), timeout=60)
    assert result.text.splitlines() == [
        "0 Permission denied",
        "1 No such file or directory",
        "2 No such file or directory",
        "3 No such file or directory",
        "0",
    ], result.stderr


KILLED = """
import os, signal, sys, stockade
from stockade import Policy
policy = Policy(workspace={"path": sys.argv[1], "durable": True}, limits={"disk": "16M"}, protect=[])
stockade.run(["sh", "-c", sys.argv[2] + "; echo up; sleep 60"], policy,
             on_stdout=lambda _: os.kill(os.getpid(), signal.SIGKILL))
"""


def kill_supervisor(tree: Path, edits: str) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(tree), edits], timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL


@pytest.mark.usefixtures("means", "swept")
@pytest.mark.parametrize("first", ["list", "sweep", "fork"])
def test_a_killed_supervisor_loses_nothing(tree: Path, stockade_home: Path, first: str) -> None:
    # What ignores TERM goes on for two more seconds, in the same file system.
    stubborn = "; (trap '' TERM; while :; do echo x >> /tmp/grows; done) & true"
    kill_supervisor(tree, EDITS + (stubborn if first == "fork" else ""))
    (id,) = os.listdir(stockade_home / "workspaces")
    assert disk_image.is_left(str(stockade_home / "workspaces" / id))
    if first == "list":
        words = [STOCKADE, "workspaces", "--json"]
        listed = subprocess.run(words, capture_output=True, timeout=60, check=True, text=True).stdout
        assert f'"{id}"' in listed and f'"changes":{len(CHANGED)}' in listed
    elif first == "sweep":
        assert register.sweep(str(stockade_home)) == [id]
        assert not disk_image.is_left(str(stockade_home / "workspaces" / id))
    else:
        (fork,) = Workspace.open(id).fork()
        assert kinds(fork) == CHANGED
        assert stockade.run(["cat", "sub/y"], resume=fork, timeout=60).text == "2\n"
        fork.discard()
    one = Workspace.open(id)
    assert kinds(one) == CHANGED and not disk_image.is_left(one.layer)
    one.commit()
    assert (tree / "a").read_text() == "changed\n" and not (tree / "gone").exists()


@pytest.mark.usefixtures("means", "swept")
def test_one_whose_supervisor_was_killed_before_it_changed_anything_is_swept(
    tree: Path, stockade_home: Path
) -> None:
    kill_supervisor(tree, "true")
    assert len(os.listdir(stockade_home / "workspaces")) == 1
    assert register.sweep(str(stockade_home))
    assert os.listdir(stockade_home / "workspaces") == []


@pytest.mark.usefixtures("means", "swept")
def test_one_whose_supervisor_was_killed_can_be_pruned(tree: Path, stockade_home: Path) -> None:
    kill_supervisor(tree, EDITS)
    time.sleep(1.1)  # ages are counted in whole seconds
    words = [STOCKADE, "workspaces", "prune", "--older-than", "1s", "--yes"]
    done = subprocess.run(words, capture_output=True, timeout=60, check=False, text=True)
    assert done.stdout == "1 workspace removed\n", done.stderr
    assert os.listdir(stockade_home / "workspaces") == []


@pytest.mark.usefixtures("means")
def test_a_mount_that_the_resident_gate_has_not_seen_is_no_hindrance(tree: Path, tmp_path: Path) -> None:
    assert stockade.run(["true"], durable(tree), timeout=60).ok
    place = tmp_path / "later"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "stockade-test", place], check=True)
    try:
        (place / "file").write_text("there\n")
        policy = Policy(
            workspace={"path": str(tree), "durable": True},
            limits={"disk": 16 * MIB},
            protect=[],
            read=[str(place)],
        )
        assert stockade.run(["cat", f"{place}/file"], policy, timeout=60).text == "there\n"
    finally:
        subprocess.run(["umount", place], check=True)


@pytest.mark.usefixtures("means")
def test_an_image_that_was_only_begun_is_nothing(tree: Path) -> None:
    result = stockade.run(["sh", "-c", EDITS], Policy(workspace=str(tree)), timeout=60)
    part = Path(Workspace.open(result.workspace_id).layer, disk_image.PART)
    part.write_bytes(b"not a file system")
    assert kinds(Workspace.open(result.workspace_id)) == CHANGED and not part.exists()


@pytest.mark.usefixtures("means")
def test_a_living_one_can_be_reviewed_snapshot_and_committed(tree: Path) -> None:
    with Sandbox(durable(tree)) as box:
        assert box.run(["sh", "-c", "echo one > new"]).ok
        assert kinds(box.workspace) == {"new": "added"}
        # Whoever opens it from elsewhere meanwhile must not take its image for one that was left.
        assert Workspace.open(box.workspace.id).in_use() and disk_image.is_left(box.workspace.layer)
        with open(f"{box.workspace.layer}/image", "rb") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the loop device has it
        box.workspace.snapshot("point")
        box.workspace.commit()
        assert (tree / "new").read_text() == "one\n"
        assert box.run(["sh", "-c", "echo two >> new; cat new"]).text == "one\ntwo\n"
        assert box.files.read("new") == b"one\ntwo\n"
    (left,) = Workspace.list()
    assert kinds(left) == {"new": "modified"} and [one.name for one in left.snapshots()] == ["point"]


@pytest.fixture
def small(stockade_home: Path) -> Iterator[Path]:
    """A state directory with room for 24 MiB."""
    applies(IS_ROOT, "only root mounts a small file system")
    place = stockade_home / "workspaces"
    stockade_home.mkdir(mode=0o700)
    place.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=24M,mode=0700", "tmpfs", str(place)]
    subprocess.run(words, check=True)
    try:
        yield place
    finally:
        until = time.monotonic() + 5  # for the loop device
        while subprocess.run(["umount", str(place)], check=False).returncode and time.monotonic() < until:
            time.sleep(0.05)


@pytest.mark.usefixtures("means")
def test_a_disk_that_has_no_room_for_it_is_told_before_the_start(tree: Path, small: Path) -> None:
    with pytest.raises(SetupError, match=r"cannot make an image.*No space left"):
        stockade.run(["true"], durable(tree, 64 * MIB), timeout=60)
    assert os.listdir(small) == []


@pytest.mark.usefixtures("means")
def test_what_a_full_disk_does_not_take_stays_in_the_image(tree: Path, small: Path) -> None:
    script = "head -c 10M /dev/urandom > big; echo x > new"
    result = stockade.run(["sh", "-c", script], durable(tree), timeout=60)
    assert result.ok and [one.path for one in result.lost] == ["."] and "still in" in result.lost[0].why
    with pytest.raises(SetupError, match=r"cannot copy the changes out.*No space left"):
        Workspace.open(result.workspace_id)
    subprocess.run(["mount", "-o", "remount,size=64M", str(small)], check=True)
    one = Workspace.open(result.workspace_id)
    assert kinds(one) == {"big": "added", "new": "added"}
    one.discard()
