"""`limits.disk`: the changes of an overlay workspace and the private /tmp, limited together by the kernel."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import stockade
from stockade import Policy, PolicyError, Sandbox, SetupError, Workspace, cli
from stockade.workspace import tree_copy
from support.means import applies

EDITS = (
    "echo changed > a; rm gone; mkdir -p new/deep; ln -s a new/link; rm -r sub; mkdir sub; echo 2 > sub/y; "
    "mkfifo pipe; chmod 600 kept; printf x > 'two words'; touch -d @1000000000 old; ln a hard; mkdir shut; "
    "echo s > shut/s; chmod 0 shut"
)
MIB = 1 << 20


@pytest.fixture
def tree(workspace: Path) -> Path:
    (workspace / "sub").mkdir()
    for name in ("a", "gone", "kept", "sub/x"):
        (workspace / name).write_text("host\n")
    return workspace


def limited(tree: Path, disk: int = 4 * MIB, **options: object) -> Policy:
    return Policy(workspace={"path": str(tree), **options}, limits={"disk": disk}, protect=[])


def listing(tree: Path) -> dict[str, tuple[int, int, bytes]]:
    """Every path below, with its type and mode, time, and content."""
    found = {}
    for path in sorted(tree.rglob("*")):
        info = path.lstat()
        content = os.readlink(path).encode() if path.is_symlink() else b""
        if path.is_file() and not path.is_symlink():
            content = path.read_bytes()
        found[str(path.relative_to(tree))] = (info.st_mode, int(info.st_mtime), content)
    return found


def test_what_was_changed_is_kept_when_the_sandbox_has_ended(tree: Path) -> None:
    result = stockade.run(["sh", "-c", EDITS], limited(tree), timeout=60)
    assert result.ok, result.stderr
    assert result.usage.bytes_written
    kept = Workspace.open(result.workspace_id)
    assert kept.changes() == list(result.changes)
    assert (tree / "a").read_text() == "host\n"


def test_a_commit_gives_what_one_without_a_limit_gives(tree: Path, tmp_path: Path) -> None:
    twin = tmp_path / "twin"
    subprocess.run(["cp", "-a", str(tree), str(twin)], check=True)
    edits = EDITS.replace("mkfifo pipe; ", "")  # no commit takes one over
    for place, policy in ((tree, limited(tree)), (twin, Policy(workspace=str(twin), protect=[]))):
        result = stockade.run(["sh", "-c", edits], policy, timeout=60)
        assert result.ok, result.stderr
        Workspace.open(result.workspace_id).commit()
        (place / "shut").chmod(0o700)
    now = {"a", "hard", "kept", "new", "new/deep", "new/link", "shut", "shut/s", "sub", "sub/y", "two words"}

    def without_times(place: Path) -> dict[str, object]:
        return {
            name: (mode, name in now or time, text) for name, (mode, time, text) in listing(place).items()
        }

    assert without_times(tree) == without_times(twin)


@pytest.mark.parametrize("place", ["big", "/tmp/big", "/dev/shm/big"])
def test_the_limit_is_of_the_changes_and_the_private_memory_together(tree: Path, place: str) -> None:
    script = f"head -c 3M /dev/zero > first && head -c 3M /dev/zero > {place}"
    result = stockade.run(["sh", "-c", script], limited(tree), on_exit="discard", timeout=60)
    assert result.exit_code == 1 and b"No space left on device" in result.stderr
    result = stockade.run(["sh", "-c", script], limited(tree, 8 * MIB), on_exit="discard", timeout=60)
    assert result.ok, result.stderr


def test_files_are_counted_too(tree: Path) -> None:
    script = "i=0; while true > f$i; do i=$((i+1)); done 2>/dev/null; echo $i"
    result = stockade.run(["sh", "-c", script], limited(tree), on_exit="discard", timeout=60)
    assert 0 < int(result.text) < 4 * MIB // 4096 + 1024


def test_one_that_is_full_does_not_harm_another(tree: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    with Sandbox(limited(tree), on_exit="discard") as full, Sandbox(limited(other), on_exit="discard") as box:
        assert full.run(["sh", "-c", "cat /dev/zero > big"], timeout=60).exit_code == 1
        assert box.run(["sh", "-c", "head -c 3M /dev/zero > big"], timeout=60).ok
        # And what is full goes on when there is room again.
        assert full.run(["sh", "-c", "rm big && echo x > small"], timeout=60).ok


def test_a_living_sandbox_can_be_reviewed_and_committed(tree: Path) -> None:
    with Sandbox(limited(tree)) as box:
        assert box.run(["sh", "-c", "echo one > new"]).ok
        assert [(c.kind, c.path) for c in box.workspace.changes()] == [("added", "new")]
        box.workspace.commit()
        assert (tree / "new").read_text() == "one\n"
        assert box.run(["sh", "-c", "echo two >> new; cat new"]).text == "one\ntwo\n"
        assert box.files.read("new") == b"one\ntwo\n"
    (left,) = Workspace.list()
    assert [(c.kind, c.path) for c in left.changes()] == [("modified", "new")]
    left.commit()
    assert (tree / "new").read_text() == "one\ntwo\n" and Workspace.list() == []


def test_an_unchanged_one_leaves_nothing(tree: Path, stockade_home: Path) -> None:
    result = stockade.run(["cat", "a"], limited(tree), timeout=60)
    assert result.ok and not result.workspace_id and os.listdir(stockade_home / "workspaces") == []


def test_the_plan_says_that_a_killed_supervisor_loses_it(tree: Path) -> None:
    from stockade.runs.prepare import prepare

    prepared = prepare(limited(tree), dry=True)
    try:
        words = [op.describe() for op in prepared.plan.ops]
    finally:
        prepared.close(discard=True)
    assert any("a killed supervisor loses them" in line for line in words)


def test_one_that_is_continued_is_refused(tree: Path) -> None:
    first = stockade.run(["sh", "-c", "echo x > new"], Policy(workspace=str(tree)), timeout=60)
    kept = Workspace.open(first.workspace_id)
    with pytest.raises(PolicyError, match="cannot limit a workspace that a run continues"):
        stockade.run(["true"], limited(tree), resume=kept)


KILLED = """
import os, signal, sys, stockade
from stockade import Policy
policy = Policy(workspace=sys.argv[1], limits={"disk": "4M"}, protect=[])
stockade.run(["sh", "-c", "echo x > new; echo up; sleep 60"], policy,
             on_stdout=lambda _: os.kill(os.getpid(), signal.SIGKILL))
"""


@pytest.mark.usefixtures("swept")
def test_a_killed_supervisor_leaves_the_tree_as_it_was(tree: Path) -> None:
    before = listing(tree)
    done = subprocess.run([sys.executable, "-c", KILLED, str(tree)], timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    assert listing(tree) == before


def test_a_run_whose_changes_cannot_be_kept_says_so_and_is_not_lost(tree: Path, stockade_home: Path) -> None:
    applies(os.geteuid() != 0, "root writes everywhere")

    def lock(_: bytes) -> None:
        (layer,) = (stockade_home / "workspaces").iterdir()
        layer.chmod(0o500)

    try:
        result = stockade.run(
            ["sh", "-c", "echo x > new; echo up; exit 3"], limited(tree), on_stdout=lock, timeout=60
        )
        assert (result.outcome, result.exit_code, result.text) == ("exited", 3, "up\n")
        assert [(one.path, one.why) for one in result.lost] == [(".", "Permission denied")]
    finally:
        for layer in (stockade_home / "workspaces").iterdir():
            layer.chmod(0o700)


#: Tries to take everything else along: names too deep to be copied, beside things that can be.
DEEP = """
import os
for name in ("before", "zz-after"): open(name, "w").write(name)
os.mkdir("m"); open("m/beside", "w").write("beside"); os.chdir("m")
for _ in range(30): os.mkdir("d"); os.chdir("d")
"""


@pytest.fixture
def shallow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real depth takes seconds."""
    monkeypatch.setattr(tree_copy, "DEEPEST", 20)


@pytest.mark.usefixtures("shallow")
def test_what_is_too_deep_is_lost_alone(tree: Path) -> None:
    result = stockade.run(["/usr/bin/python3", "-c", DEEP], limited(tree, 16 * MIB), timeout=60)
    assert result.ok
    (lost,) = result.lost
    assert lost.path.startswith("m/d/d") and "too deep" in lost.why
    kept = Workspace.open(result.workspace_id)
    assert {"before", "m/beside", "zz-after"} <= {change.path for change in kept.changes()}
    done = kept.commit(["before", "m/beside"])
    assert (tree / "m" / "beside").read_text() == "beside"
    assert [note.path for note in done.notes] == [lost.path], "whoever takes the rest over is told"
    kept.discard()


@pytest.mark.usefixtures("shallow")
def test_what_is_not_all_there_is_not_committed_unasked(tree: Path) -> None:
    policy = limited(tree, 16 * MIB)
    result = stockade.run(["/usr/bin/python3", "-c", DEEP], policy, on_exit="commit", timeout=60)
    assert result.ok and result.committed is None and "too deep" in result.commit_error
    assert not (tree / "before").exists()
    Workspace.open(result.workspace_id).discard()
    box = Sandbox(policy, on_exit="commit")
    with pytest.raises(SetupError, match=r"nothing was committed.*too deep"), box:
        box.run(["/usr/bin/python3", "-c", DEEP])
    assert not (tree / "before").exists()
    with pytest.raises(SetupError, match=r"could not be saved.*too deep"), Sandbox(policy) as box:
        box.run(["/usr/bin/python3", "-c", DEEP])
    for left in Workspace.list():
        left.discard()


def test_a_full_disk_loses_what_does_not_fit_and_keeps_the_rest(tree: Path, stockade_home: Path) -> None:
    applies(os.geteuid() == 0, "only root mounts a small file system")
    small = stockade_home / "workspaces"
    stockade_home.mkdir(mode=0o700)
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2M,mode=0700", "tmpfs", str(small)], check=True)
    try:
        script = "head -c 100000 /dev/zero > a; head -c 6M /dev/zero > big; head -c 100000 /dev/zero > z"
        result = stockade.run(["sh", "-c", script], limited(tree, 16 * MIB), timeout=60)
        assert result.ok and [one.path for one in result.lost] == ["big"]
        kept = {change.path for change in Workspace.open(result.workspace_id).changes()}
        assert kept == {"a", "z"}
    finally:
        subprocess.run(["umount", str(small)], check=True)


MANY_ATTRIBUTES = """
import os
open("plain", "w").close()
open("marked", "w").close()
for number in range(8):
    os.setxattr("marked", f"user.{number}", b"v" * 1000)
"""


def test_attributes_that_do_not_fit_are_not_taken_for_a_full_disk(
    tree: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tmpfs takes more of them than one block, which is all that ext4 has for those of a file."""
    if not _refuses_many_attributes(tree):
        applies(False, "the file system of the state takes so many attributes")
    monkeypatch.chdir(tree)
    (tree.parent / "limited.toml").write_text('protect = []\n[limits]\ndisk = "4M"\n')
    words = ["run", "-p", str(tree.parent / "limited.toml"), "-w", ".", "--", "/usr/bin/python3", "-c"]
    assert cli.main([*words, MANY_ATTRIBUTES]) == 0
    said = capsys.readouterr().err
    assert "could not be saved when the sandbox ended: marked (its attributes do not fit" in said
    assert "fewer or smaller attributes" in said and "space" not in said


def _refuses_many_attributes(place: Path) -> bool:
    trial = place.parent / "trial"
    trial.touch()
    try:
        for number in range(8):
            os.setxattr(trial, f"user.{number}", b"v" * 1000)
    except OSError as error:
        return error.errno == errno.ENOSPC
    return False
