"""Other file systems in a workspace: root sees them, and whoever names them; everybody else is told."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

import stockade
from stockade import Policy, PolicyError, Sandbox, SetupError, Workspace
from stockade.linux.mount_table import mounted_below
from stockade.linux.user import Caller
from stockade.resolve.resolution import resolve
from support.means import applies


@pytest.fixture
def project(workspace: Path) -> Iterator[Path]:
    """A workspace with a file system in it, and another one in that, under names that a table must escape."""
    applies(os.geteuid() == 0, "only root can mount")
    (workspace / "sub").mkdir()
    inner = workspace / "sub" / "a b\\c"
    inner.mkdir()
    mounted = []
    try:
        for place in (inner, inner / "deeper"):
            place.mkdir(exist_ok=True)
            subprocess.run(["mount", "-t", "tmpfs", "stockade-test", place], check=True)
            mounted.append(place)
            (place / "file").write_text(f"in {place.name}\n")
        yield workspace
    finally:
        for place in reversed(mounted):
            subprocess.run(["umount", place], check=True)


READ = """
cat sub/*/file sub/*/*/file; echo new > sub/new
for place in sub/*/ sub/*/*/; do touch "${place}new" && exit 1; done; true
"""


def test_root_sees_them_and_cannot_write_there(project: Path) -> None:
    with Sandbox(Policy(workspace=str(project))) as box:
        result = box.run(["sh", "-c", READ]).check()
        assert result.text == "in a b\\c\nin deeper\n"
        assert result.stderr.count(b"Read-only file system") == 2
        assert [one.path for one in result.changes] == ["sub/new"]
    workspace = Workspace.open(result.workspace_id)
    workspace.commit()
    assert (project / "sub" / "new").read_text() == "new\n"


def test_what_is_named_is_as_it_is_named(project: Path) -> None:
    inner = project / "sub" / "a b\\c"
    policy = Policy(workspace=str(project), write=[str(inner)])
    stockade.run(["sh", "-c", "cd sub/*/ && touch new deeper/new"], policy).check()
    assert (inner / "new").exists() and (inner / "deeper" / "new").exists()


@pytest.mark.parametrize("accept", [[], ["ipc"]])
def test_others_are_told_of_them(project: Path, stockade_home: Path, accept: list[str]) -> None:
    inner = str(project / "sub" / "a b\\c")
    caller = msgspec.structs.replace(Caller.current(), uid=65534, gid=65534)
    with pytest.raises(PolicyError, match="other file systems are mounted in it") as refused:
        resolve(Policy(workspace=str(project), accept=accept), caller, str(stockade_home))
    assert inner in refused.value.message and 'workspace.mode = "rw"' in (refused.value.hint or "")
    assert mounted_below(str(project)) == {inner: "tmpfs", f"{inner}/deeper": "tmpfs"}


def test_no_interface_to_the_kernel_is_shown_because_it_is_there(workspace: Path) -> None:
    applies(os.geteuid() == 0, "only root can mount")
    (workspace / "proc").mkdir()
    subprocess.run(["mount", "--bind", "/proc", workspace / "proc"], check=True)
    try:
        with pytest.raises(PolicyError, match="other file systems are mounted in it"):
            stockade.run(["true"], Policy(workspace=str(workspace)))
    finally:
        subprocess.run(["umount", workspace / "proc"], check=True)


def test_a_change_behind_a_mount_is_not_committed_over_it(workspace: Path) -> None:
    applies(os.geteuid() == 0, "only root can mount")
    (workspace / "sub").mkdir()
    (workspace / "sub" / "old").write_text("old\n")
    changed = stockade.run(
        ["sh", "-c", "echo new > sub/new; echo top > top"], Policy(workspace=str(workspace))
    )
    removed = stockade.run(["rm", "-r", "sub"], Policy(workspace=str(workspace)))
    subprocess.run(["mount", "-t", "tmpfs", "stockade-test", workspace / "sub"], check=True)
    try:
        for result in (changed, removed):
            with pytest.raises(SetupError, match="hidden by the mount at"):
                Workspace.open(result.workspace_id).commit()
        Workspace.open(changed.workspace_id).commit(["top"])
        assert sorted(path.name for path in workspace.iterdir()) == ["sub", "top"]
        assert not list((workspace / "sub").iterdir())
    finally:
        subprocess.run(["umount", workspace / "sub"], check=True)
    assert (workspace / "sub" / "old").read_text() == "old\n"


SHOWN = """
import sys
from stockade import Policy, PolicyError
from stockade.linux.user import Caller
from stockade.resolve.resolution import resolve
for path in sys.argv[2:]:
    try:
        resolve(Policy(read=[path]), Caller.current(), sys.argv[1]).close()
        print("shown")
    except PolicyError as error:
        print(error.message.split(": ")[-1])
"""


def test_the_state_is_shown_by_none_of_its_names(tmp_path: Path) -> None:
    """The host may have mounted its tree elsewhere as well, or a part of it."""
    for name in ("own/state/keys", "own/beside", "all", "deep/part"):
        (tmp_path / name).mkdir(parents=True)
    script = 'mount --bind own all && mount --bind own/state/keys deep/part && exec "$@"'
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-ec", script, "sh"]
    asked = ("all", "all/state/keys", "deep/part", "deep", "all/beside")
    command += [sys.executable, "-c", SHOWN, tmp_path / "own/state", *(tmp_path / name for name in asked)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    refused = f"Stockade's own state is in {tmp_path}/own/state"
    assert done.stdout.splitlines() == [refused] * 4 + ["shown"]
