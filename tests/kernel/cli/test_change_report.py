"""What a run says at its end: what it changed itself, nothing important folded away, and how to go on."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from stockade.cli.ui.change_list import SHOWN, change_lines
from stockade.result import Change
from stockade.workspace.diff.change_details import ChangeDetail
from support.cli import stockade_command
from support.means import need_program

GIT = "git -c user.name=me -c user.email=me@example.org"


def ran(*arguments: str, cwd: Path, code: int = 0) -> list[str]:
    """The lines that Stockade says at the end of a run."""
    done = stockade_command("run", *arguments, cwd=cwd)
    assert done.returncode == code, done.stderr
    return [line.removeprefix("stockade: ") for line in done.stderr.splitlines() if "stockade: " in line]


def test_a_new_directory_is_one_line_with_a_count_and_a_size(workspace: Path) -> None:
    script = (
        "mkdir -p build/deep small empty; echo 1 > small/one; "
        "for n in $(seq 40); do echo $n > build/deep/$n; done"
    )
    lines = ran("--", "sh", "-c", script, cwd=workspace)
    assert lines[:4] == [
        "45 changed paths kept aside, your files are unchanged",
        "  added     build/: 40 files, 111B",
        "  added     empty/",
        "  added     small/: 1 file (one), 2B",
    ]


def test_nothing_that_a_commit_treats_specially_hides_in_a_directory(workspace: Path) -> None:
    script = (
        "mkdir -p new/.vscode new/bin; for n in $(seq 30); do echo $n > new/$n; done; "
        "echo x > new/AGENTS.md; "
        "echo {} > new/.vscode/tasks.json; echo all: > new/Makefile; ln -s /etc/passwd new/bin/out"
    )
    lines = ran("--", "sh", "-c", script, cwd=workspace)
    special, rest = lines[1:5], lines[5:]
    held, runs = ": a commit holds it back: ", ": runs at your next command: "
    assert any(line.startswith(f"  added     new/AGENTS.md{held}") for line in special), lines
    assert any("new/.vscode/tasks.json" in line and held in line for line in special), lines
    assert any(line.startswith(f"  added     new/Makefile{runs}") for line in special), lines
    assert any("new/bin/out" in line for line in special), lines
    assert rest[0].startswith("  added     new/: 30 files, ")


def test_repositories_come_last_and_say_that_they_are_held_back(workspace: Path) -> None:
    need_program("git")
    subprocess.run(["git", "init", "-q"], cwd=workspace, check=True)
    script = f"echo x > AGENTS.md; echo y > zebra; git add -A; {GIT} commit -qm work"
    lines = [line for line in ran("--", "sh", "-c", script, cwd=workspace) if line.startswith("  ")]
    assert lines[0].startswith("  added     AGENTS.md: a commit holds it back: ")
    assert lines[1] == "  added     zebra"
    assert re.fullmatch(
        r"  added     \.git, where git records commits: \d+ paths: a commit holds it back: .*", lines[2]
    )
    assert len(lines) == 3


def test_verbose_gives_each_path_a_line(workspace: Path) -> None:
    lines = ran("-v", "--", "sh", "-c", "mkdir d; for n in $(seq 30); do echo > d/$n; done", cwd=workspace)
    assert [line for line in lines if line.startswith("  added")] == [
        f"  added     {path}" for path in sorted(["d", *(f"d/{n}" for n in range(1, 31))])
    ]


def test_json_stays_complete(workspace: Path) -> None:
    script = "mkdir d; for n in $(seq 30); do echo > d/$n; done"
    done = stockade_command("run", "--json", "--", "sh", "-c", script, cwd=workspace)
    assert len(json.loads(done.stdout)["changes"]) == 31
    again = stockade_command("run", "--json", "-w", "@", "--", "touch", "e", cwd=workspace)
    assert len(json.loads(again.stdout)["changes"]) == 32


class TestAContinuedWorkspace:
    def test_lists_what_this_run_changed_and_says_the_total(self, workspace: Path) -> None:
        (workspace / "old").write_text("1\n")
        ran("--", "sh", "-c", "mkdir d; echo 1 > d/a; echo 1 > b; echo 2 > old", cwd=workspace)
        lines = ran("-w", "@", "--", "sh", "-c", "echo 2 > d/a; echo 1 > c", cwd=workspace)
        assert lines[1:4] == [
            "2 changed paths in this run; the workspace keeps 5 aside, your files are unchanged",
            "  added     c",
            "  added     d/a",
        ]

    def test_says_so_if_the_run_changed_nothing(self, workspace: Path) -> None:
        ran("--", "touch", "a", cwd=workspace)
        lines = ran("-w", "@", "--", "true", cwd=workspace)
        assert lines[1] == "this run changed nothing; the workspace keeps 1 aside, your files are unchanged"
        assert not any(line.startswith("  ") for line in lines)

    def test_counts_the_changes_that_the_run_undid(self, workspace: Path) -> None:
        ran("--", "touch", "a", "b", cwd=workspace)
        lines = ran("-w", "@", "--", "rm", "b", cwd=workspace)
        assert lines[1].startswith("0 changed paths in this run, 1 earlier one undone; the workspace keeps 1")
        lines = ran("-w", "@", "--", "rm", "a", cwd=workspace)
        assert "1 earlier one undone; the workspace keeps 0 aside" in lines[1]

    def test_a_snapshot_before_the_run_does_not_count(self, workspace: Path) -> None:
        ran("--", "touch", "a", cwd=workspace)
        lines = ran("-w", "@", "--snapshot", "--", "touch", "b", cwd=workspace)
        assert [line for line in lines if line.startswith("  ")] == ["  added     b"]


class TestDiff:
    @pytest.fixture
    def committed(self, workspace: Path) -> Path:
        need_program("git")
        subprocess.run(["git", "init", "-q"], cwd=workspace, check=True)
        ran("--", "sh", "-c", f"echo y > zebra; git add -A; {GIT} commit -qm work", cwd=workspace)
        return workspace

    def test_shows_the_working_tree_first_and_folds_what_git_records(self, committed: Path) -> None:
        text = stockade_command("diff", cwd=committed).stdout
        assert text.startswith("added     zebra\n")
        assert re.search(r"\n\.git, where git records commits: \d+ paths  \(-v shows them\)\n$", text)
        stat = stockade_command("diff", "--stat", cwd=committed).stdout.splitlines()
        assert stat[0].startswith(" zebra ") and stat[1].startswith(" .git, where git records commits: ")

    @pytest.mark.parametrize("words", [("-v",), (".git",), ("--name-only",)])
    def test_shows_everything_if_asked(self, committed: Path, words: tuple[str, ...]) -> None:
        text = stockade_command("diff", *words, cwd=committed).stdout
        assert ".git/objects" in text and "-v shows them" not in text


class TestHowToGoOn:
    def test_a_run_that_kept_changes_says_how(self, workspace: Path, tmp_path: Path) -> None:
        words = "goes on from here; without -w the next run starts over"
        assert ran("--", "touch", "a", cwd=workspace)[-1] == f"`stockade run -w @ -- COMMAND` {words}"
        lines = ran("--", "touch", "b", cwd=workspace)  # now there are two
        id = lines[-2].split("`")[1].split()[-1]
        assert lines[-1] == f"`stockade run -w @{id} -- COMMAND` {words}"
        assert not any(words in line for line in ran("-w", f"@{id}", "--", "touch", "c", cwd=workspace))

    @pytest.mark.parametrize(
        ("command", "code"),
        [(["cat", "out.txt"], 1), (["sh", "-c", "cat <'out.txt'"], 2), (["./tool"], 127)],
    )
    def test_a_command_that_fails_on_a_kept_file_gets_a_hint(
        self, workspace: Path, command: list[str], code: int
    ) -> None:
        ran("--", "sh", "-c", "echo 1 > out.txt; echo '#!/bin/sh' > tool; chmod +x tool", cwd=workspace)
        (hint,) = [line for line in ran("--", *command, cwd=workspace, code=code) if "goes on from" in line]
        name = "tool" if code == 127 else "out.txt"
        assert re.fullmatch(
            rf"hint: {name} is not among your files, but workspace \w+ has it: `-w @` goes on from there",
            hint,
        )
        assert stockade_command("run", "-w", "@", "--", *command, cwd=workspace).returncode == 0

    def test_a_kept_file_of_a_directory_above_is_found_from_below(self, workspace: Path) -> None:
        (workspace / "sub").mkdir()
        ran("--", "touch", "sub/made", cwd=workspace)
        lines = ran("-w", "..", "--", "cat", "made", cwd=workspace / "sub", code=1)
        assert "sub/made is not among your files" in lines[-1]

    @pytest.mark.parametrize("command", [["cat", "other.txt"], ["cat", "removed"], ["false"]])
    def test_other_failures_get_none(self, workspace: Path, command: list[str]) -> None:
        (workspace / "removed").touch()
        ran("--", "sh", "-c", "echo 1 > out.txt; rm removed", cwd=workspace)
        (workspace / "removed").unlink()
        assert ran("--", *command, cwd=workspace, code=1) == []

    def test_a_success_or_a_quiet_run_gets_none(self, workspace: Path) -> None:
        ran("--", "touch", "out.txt", cwd=workspace)
        assert ran("--", "echo", "out.txt", cwd=workspace) == []
        assert ran("-q", "--", "cat", "out.txt", cwd=workspace, code=1) == []

    def test_a_link_that_a_program_left_leads_the_search_nowhere(
        self, workspace: Path, tmp_path: Path
    ) -> None:
        (tmp_path / "secret").mkdir()
        (tmp_path / "secret" / "file").touch()
        ran("--", "ln", "-s", str(tmp_path / "secret"), "link", cwd=workspace)
        assert not any("goes on" in line for line in ran("--", "cat", "link/file", cwd=workspace, code=1))


def test_a_list_of_directories_stays_short() -> None:
    changes = [Change(f"{n}{part}", "added") for n in range(100) for part in ("", "/a", "/b")]
    lines = change_lines(changes)
    assert len(lines) == SHOWN + 1 and lines[-1] == f"  and {3 * (100 - SHOWN)} more"


def test_many_paths_with_one_reason_share_a_line() -> None:
    changes = [ChangeDetail(f"nm/.bin/{n}", "added", link=True) for n in range(500)]
    assert change_lines([ChangeDetail("nm", "added", directory=True), *changes]) == [
        "  added     nm/.bin/0, nm/.bin/1, nm/.bin/2 and 497 more in nm/.bin: a link",
        "  added     nm/",
    ]


def test_a_directory_that_became_new_inside_another_folds_into_the_highest() -> None:
    paths = ["a", "a-b", "a/b", "a/b/c", "a/b/c/d"]
    assert change_lines([Change(path, "added") for path in paths]) == [
        "  added     a/: 1 file (b/c/d)",
        "  added     a-b",
    ]
