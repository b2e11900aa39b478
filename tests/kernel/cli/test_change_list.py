"""What a user reads about a commit: the files that matter, whatever git wrote beside them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from stockade.cli.ui.change_list import SHOWN, change_lines, held_lines
from stockade.result import Change
from stockade.workspace.holdback.holdback import HoldBack
from support.cli import stockade_command
from support.means import need_program

GIT = "git -c user.name=me -c user.email=me@example.org"
WORK = (
    "for n in $(seq 12); do echo $n > file$n; done; echo evil > AGENTS.md; mkdir -p .vscode; "
    f"echo '{{}}' > .vscode/tasks.json; git add -A; {GIT} commit -qm work"
)


@pytest.fixture
def repository(workspace: Path) -> Path:
    need_program("git")
    (workspace / "a.py").write_text("1\n")
    script = f"git init -q; git add -A; {GIT} commit -qm first"
    subprocess.run(["sh", "-c", script], cwd=workspace, check=True)
    return workspace


def test_objects_of_git_bury_neither_changes_nor_what_is_held_back(repository: Path) -> None:
    ran = stockade_command("run", "--", "sh", "-c", WORK, cwd=repository)
    assert ran.returncode == 0, ran.stderr
    lines = ran.stderr.splitlines()
    for name in ("AGENTS.md", ".vscode/tasks.json", "file12"):
        assert any(line.startswith("stockade:   added") and name in line for line in lines)
    (git,) = (line for line in lines if "  .git" in line)
    assert git.startswith("stockade:   modified  .git, where git records commits: ")
    assert " more" not in ran.stderr
    id = ran.stderr.rpartition("`stockade discard ")[2].partition("`")[0]
    done = stockade_command("commit", id, cwd=repository)
    held = [line for line in done.stderr.splitlines() if "held back: " in line]
    assert done.returncode == 1 and len(held) == 4
    assert {line.split(": ")[2] for line in held[:3]} == {"AGENTS.md", ".vscode", ".vscode/tasks.json"}
    assert held[3].startswith("stockade: held back: .git (") and " names " in held[3]
    assert f"to commit the repository without those files: stockade commit {id} --allow .git" in done.stderr


def test_what_git_runs_has_a_line_of_its_own() -> None:
    paths = [f".git/objects/{n:02x}/x" for n in range(50)] + [".git/hooks/pre-commit", ".git/config", "x"]
    lines = change_lines([Change(path, "added") for path in paths])
    assert [line.split()[1] for line in lines[:3]] == [".git/hooks/pre-commit", ".git/config", "x"]
    assert lines[3:] == ["  added     .git, where git records commits: 50 paths"]


def test_a_new_repository_has_few_lines(workspace: Path) -> None:
    need_program("git")
    ran = stockade_command(
        "run", "--discard", "--", "sh", "-c", "git init -q; echo x > AGENTS.md", cwd=workspace
    )
    lines = [line.removeprefix("stockade:   ") for line in ran.stderr.splitlines()]
    assert "added     AGENTS.md" in lines and "added     .git/config" in lines
    assert not any(".sample" in line or "objects" in line for line in lines)
    assert any(line.startswith("added     .git, where git records commits: ") for line in lines)


def test_each_repository_has_one_line() -> None:
    paths = [f"{top}/.git/{name}" for top in ("a", "b/c") for name in ("index", "refs/heads/main")]
    lines = change_lines([Change(path, "modified") for path in paths])
    assert lines == [f"  modified  {top}/.git, where git records commits: 2 paths" for top in ("a", "b/c")]


def test_a_list_stays_short() -> None:
    many = [Change(f"{n}/.git/index", "added") for n in range(100)] + [
        Change(f"{n}", "added") for n in range(99)
    ]
    lines = change_lines(many)
    assert len(lines) == 2 * SHOWN + 2
    assert (
        lines[SHOWN] == f"  and {99 - SHOWN} more" and lines[-1] == f"  and {100 - SHOWN} more repositories"
    )
    assert change_lines([]) == []


def test_many_files_of_one_reason_get_one_line() -> None:
    held = [HoldBack(f".venv/lib/{n}", "executes", "python runs it") for n in range(3000)]
    held += [
        HoldBack("AGENTS.md", "executes", "agents obey it"),
        HoldBack("x\n", "special", "it is a socket"),
    ]
    assert held_lines(held) == (
        [
            (".venv/lib/0, .venv/lib/1, .venv/lib/2 and 2997 more in .venv/lib", "python runs it"),
            ("AGENTS.md", "agents obey it"),
            ("x\\n", "it is a socket"),
        ],
        0,
    )
    spread = [HoldBack(f"{n}/AGENTS.md", "executes", "agents obey it") for n in range(SHOWN + 1)]
    assert held_lines(spread[:2])[0] == [
        ("0/AGENTS.md", "agents obey it"), ("1/AGENTS.md", "agents obey it"),
    ]  # fmt: skip
    assert held_lines(spread)[0][0][0].endswith(f"and {SHOWN - 2} more in the workspace")


def test_many_reasons_are_cut_and_counted() -> None:
    held = [HoldBack(f"{n}", "executes", f"tool {n} runs it") for n in range(100)]
    held += [HoldBack(f"{n}/.git/index", "repository", f"{n}/.git names {n}") for n in range(100)]
    lines, more = held_lines(held)
    assert len(lines) == 2 * SHOWN and more == 200 - 2 * SHOWN
