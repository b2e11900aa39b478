"""`stockade run -w @ID`, `--commit`, `snapshot`, `restore`, `fork` and `merge`, as a user types them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from stockade import Workspace

STOCKADE = str(Path(sys.executable).with_name("stockade"))
Done = subprocess.CompletedProcess[str]
Call = Callable[..., Done]


@pytest.fixture
def call(workspace: Path) -> Call:
    """`stockade` with these arguments in the workspace."""
    (workspace / "file").write_text("old\n")

    def start(*arguments: str, cwd: Path = workspace) -> Done:
        return subprocess.run(
            [STOCKADE, *arguments], cwd=cwd, capture_output=True, text=True, timeout=60, check=False
        )

    return start


def begun(call: Call) -> Workspace:
    """A first run has changed something."""
    assert call("run", "--", "sh", "-c", "echo 1 >> file").returncode == 0
    return Workspace.list()[0]


def test_a_run_goes_on_in_an_earlier_workspace(call: Call, workspace: Path, tmp_path: Path) -> None:
    first = begun(call)
    second = call("run", "-w", f"@{first.id[:5]}", "--", "sh", "-c", "cat file; echo 2 >> file", cwd=tmp_path)
    assert second.stdout == "old\n1\n" and first.id in second.stderr
    third = call("run", "-q", "-w", "@", "--", "cat", "file")
    assert third.stdout == "old\n1\n2\n" and not third.stderr
    assert (workspace / "file").read_text() == "old\n"
    shown = call("run", "--json", "-w", "@", "--", "pwd")
    assert json.loads(shown.stdout)["workspace"] == first.id
    assert json.loads(shown.stdout)["stdout"] == f"{workspace}\n"


def test_a_plan_for_a_workspace_is_that_of_its_directory(call: Call, workspace: Path, tmp_path: Path) -> None:
    first = begun(call)
    before = first.changed
    shown = call("plan", "-w", f"@{first.id}", "--", "true", cwd=tmp_path)
    assert f"show {workspace} copy-on-write" in shown.stdout
    assert first.changed == before


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("-w", "@ffff"), "there is no workspace 'ffff'"),
        (("-w", "@", "--mode", "rw"), "is an overlay"),
        (("-w", "@", "--deny", "file"), "an earlier run"),
    ],
)
def test_what_does_not_fit_is_refused(call: Call, arguments: tuple[str, ...], reason: str) -> None:
    first = begun(call)
    refused = call("run", *arguments, "--", "true")
    assert refused.returncode == 125 and reason in refused.stderr
    assert [change.path for change in first.changes()] == ["file"]


def test_a_run_can_commit(call: Call, workspace: Path) -> None:
    done = call("run", "--commit", "--", "sh", "-c", "echo 2 > file; echo out; exit 3")
    assert done.returncode == 3 and done.stdout == "out\n"
    assert "1 changed path, 1 committed to your files" in done.stderr
    assert (workspace / "file").read_text() == "2\n" and not Workspace.list()


def test_a_commit_that_is_refused_is_an_error_line_and_keeps_the_exit_code(
    call: Call, workspace: Path
) -> None:
    begun(call)
    (workspace / "file").write_text("the host's\n")
    done = call("run", "-w", "@", "--commit", "--", "sh", "-c", "exit 3")
    assert (
        done.returncode == 3 and "error: not committed" in done.stderr and "file: it changed" in done.stderr
    )
    as_json = json.loads(call("run", "-w", "@", "--commit", "--json", "--", "true").stdout)
    assert as_json["ok"] and as_json["committed"] is None and "file" in as_json["commit_error"]
    assert (workspace / "file").read_text() == "the host's\n" and len(Workspace.list()) == 1


def test_what_is_held_back_is_told(call: Call, workspace: Path) -> None:
    done = call("run", "--commit", "--", "sh", "-c", "mkdir .vscode; echo 1 > .vscode/tasks.json; touch new")
    assert done.returncode == 0 and "held back: .vscode/tasks.json" in done.stderr
    assert sorted(os.listdir(workspace)) == ["file", "new"] and len(Workspace.list()) == 1


def test_snapshot_and_restore(call: Call) -> None:
    first = begun(call)
    assert call("snapshot").stdout == f"snapshot 1 of workspace {first.id}\n"
    assert json.loads(call("snapshot", first.id, "named", "--json").stdout)["snapshot"] == "named"
    call("run", "-w", "@", "--snapshot", "--", "sh", "-c", "echo 2 >> file")
    listed = call("snapshot", "--list").stdout.splitlines()
    assert [line.split()[0] for line in listed] == ["NAME", "1", "named", "run-1"]
    assert call("run", "-w", "@", "--", "cat", "file").stdout == "old\n1\n2\n"
    assert call("restore", "named").stdout == f"workspace {first.id} is as it was at snapshot named\n"
    assert call("run", "-w", "@", "--", "cat", "file").stdout == "old\n1\n"
    assert json.loads(call("restore", first.id, "1", "--json").stdout)["restored"] == "1"
    assert call("snapshot", "@", "--drop", "run-1").returncode == 0
    (about,) = json.loads(call("workspaces", "--json").stdout)
    assert about["snapshots"] == ["1", "named"]
    assert "SNAPSHOTS" in call("workspaces").stdout
    missing = call("restore", "nothing")
    assert missing.returncode == 125 and "existing snapshots: 1, named" in missing.stderr


def test_fork_and_merge(call: Call, workspace: Path) -> None:
    first = begun(call)
    ids = call("fork", first.id, "-n", "2").stdout.split()
    assert len(ids) == 2
    for number, id in enumerate(ids):
        call("run", "-w", f"@{id}", "--", "sh", "-c", f"echo {number} > new{number}; echo {number} > both")
    refused = call("merge", first.id, *ids)
    assert refused.returncode == 125 and "the same paths differently: both" in refused.stderr
    as_json = json.loads(call("merge", first.id, *ids, "--json").stdout)
    assert not as_json["ok"] and as_json["conflicts"] == ["both"]
    merged = call("merge", first.id, ids[0])
    assert (
        merged.stdout == f"2 changes merged into workspace {first.id}\n  added     both\n  added     new0\n"
    )
    call("commit", first.id)
    assert sorted(os.listdir(workspace)) == ["both", "file", "new0"]
    assert len(json.loads(call("fork", ids[1], "--json").stdout)["forks"]) == 1
