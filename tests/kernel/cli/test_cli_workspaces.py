"""`stockade diff`, `commit`, `discard` and `workspaces`, as a user types them."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from stockade import Workspace
from support.means import need_program
from support.trees import changed, snapshot

STOCKADE = str(Path(sys.executable).with_name("stockade"))
Done = subprocess.CompletedProcess[str]
Call = Callable[..., Done]


@pytest.fixture
def project(workspace: Path) -> Path:
    (workspace / "file").write_text("old\n")
    (workspace / "other").write_text("other\n")
    return workspace


@pytest.fixture
def call(project: Path) -> Call:
    """`stockade` with these arguments in the workspace."""

    def start(*arguments: str, cwd: Path = project, input: str = "", **environ: str) -> Done:
        return subprocess.run(
            [STOCKADE, *arguments],
            cwd=cwd,
            input=input,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env={**os.environ, **environ},
        )

    return start


def on_a_terminal(*arguments: str, answer: bytes = b"", **environ: str) -> tuple[int, str]:
    """The exit code and what is seen on a terminal."""
    pid, terminal = pty.fork()
    if not pid:
        os.environ.update({"TERM": "xterm", "LESS": "FRX", **environ})
        os.execv(STOCKADE, [STOCKADE, *arguments])
    if answer:
        os.write(terminal, answer)
    shown = b""
    try:
        while piece := os.read(terminal, 65536):
            shown += piece
    except OSError:
        pass
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), shown.decode("utf-8", "replace")


def test_a_run_says_what_to_type_next(call: Call) -> None:
    done = call("run", "--", "sh", "-c", "echo x >> file")
    (workspace,) = Workspace.list()
    for word in ("diff", "commit", "discard"):
        assert f"`stockade {word} {workspace.id}`" in done.stderr


class TestDiff:
    def test_shows_lines(self, project: Path, call: Call) -> None:
        workspace = changed(project, "echo x >> file; rm other; chmod 755 file")
        done = call("diff", workspace.id)
        assert done.returncode == 0 and done.stderr == ""
        assert done.stdout == (
            "modified  file  mode 0644 → 0755\n@@ -1 +1,2 @@\n old\n+x\n\n"
            "deleted   other\n@@ -1 +0,0 @@\n-other\n\n"
        )

    def test_names_as_git_quotes_them_or_as_they_are(self, project: Path, call: Call) -> None:
        workspace = changed(project, "touch 'a b' \"$(printf 'new\\nline')\"")
        assert call("diff", "--name-only", workspace.id).stdout == 'a b\n"new\\nline"\n'
        assert call("diff", "-z", workspace.id).stdout == "a b\0new\nline\0"

    def test_counts(self, project: Path, call: Call) -> None:
        workspace = changed(project, "seq 300 > file; mv other moved; head -c 100 /dev/zero > zeros; mkdir d")
        lines = call("diff", "--stat", workspace.id).stdout.splitlines()
        assert [line.split("|")[0].strip() for line in lines[:-1]] == ["d/", "file", "other → moved", "zeros"]
        assert "301 +" in lines[1] and len(lines[1]) < 80 and "binary 0B → 100B" in lines[3]
        assert lines[-1] == " 4 paths changed, 300 added(+), 1 removed(-)"

    def test_as_json(self, project: Path, call: Call) -> None:
        workspace = changed(project, "echo x >> file")
        found = json.loads(call("diff", "--json", workspace.id).stdout)
        assert found["workspace"] == workspace.id and found["added"] == 1
        assert found["files"][0]["text"] == "@@ -1 +1,2 @@\n old\n+x\n"

    @pytest.mark.parametrize("option", ["--patch", "--git"])
    def test_as_a_patch_through_a_pipe(self, project: Path, option: str, tmp_path: Path) -> None:
        git = need_program("git")
        subprocess.run(["cp", "-a", str(project), str(tmp_path / "copy")], check=True)
        workspace = changed(project, "echo x >> file; printf '\\001\\000' > bin; mkfifo p")
        script = f"{STOCKADE} diff {option} {workspace.id} | {git} apply -"
        done = subprocess.run(
            ["sh", "-c", script], cwd=tmp_path / "copy", capture_output=True, text=True, check=True
        )
        assert "not in the patch, because its format cannot express it: p" in done.stderr
        workspace.commit(["file", "bin"])
        assert snapshot(tmp_path / "copy") == snapshot(project)

    def test_only_some_paths(self, project: Path, call: Call) -> None:
        workspace = changed(project, "echo x >> file; echo y >> other")
        assert call("diff", "--name-only", workspace.id, "other").stdout == "other\n"

    def test_in_colour_on_a_terminal(self, project: Path) -> None:
        workspace = changed(project, "echo x >> file")
        code, shown = on_a_terminal("diff", workspace.id, PAGER="cat")
        assert code == 0 and "\x1b[32m+x\x1b[0m" in shown and "\x1b[36m@@" in shown
        assert "\x1b" not in on_a_terminal("diff", workspace.id, PAGER="cat", NO_COLOR="1")[1]

    def test_through_a_pager_on_a_terminal(self, project: Path) -> None:
        workspace = changed(project, "echo x >> file")
        pager = {"PAGER": "sed 's/^/paged: /'", "NO_COLOR": "1"}
        assert "paged: modified  file" in on_a_terminal("diff", workspace.id, **pager)[1]
        assert "paged" not in on_a_terminal("diff", "--no-pager", workspace.id, **pager)[1]
        assert "modified  file" in on_a_terminal("diff", workspace.id, PAGER="no-such-pager")[1]

    def test_not_through_a_pager_elsewhere(self, project: Path, call: Call) -> None:
        workspace = changed(project, "echo x >> file")
        assert call("diff", workspace.id, PAGER="false").stdout.startswith("modified  file")

    def test_a_reader_that_has_seen_enough(self, project: Path) -> None:
        workspace = changed(project, "seq 100000 > file")
        script = f"{STOCKADE} diff {workspace.id} | head -1; echo ${{PIPESTATUS[0]}}"
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60, check=True)
        assert done.stdout.splitlines()[1] in ("141", "0") and done.stderr == ""

    def test_of_nothing(self, call: Call) -> None:
        done = call("diff")
        assert done.returncode == 125 and "no changes are kept" in done.stderr


class TestCommit:
    def test_says_what_it_did(self, project: Path, call: Call) -> None:
        workspace = changed(project, "echo x >> file; rm other; cp /bin/true tool; chmod 4755 tool")
        done = call("commit", workspace.id)
        assert done.returncode == 0
        assert done.stdout == (
            f"3 changes committed to {project}\n  modified  file\n  deleted   other\n  added     tool\n"
        )
        assert done.stderr == "stockade: tool: set-uid bit removed\n"
        assert Workspace.list() == []

    def test_says_what_was_held_back_and_ends_with_one(self, project: Path, call: Call) -> None:
        workspace = changed(project, "echo x >> file; echo y > .envrc; echo z > .npmrc")
        done = call("commit", workspace.id)
        assert done.returncode == 1
        assert "held back: .envrc: the policy protects .envrc" in done.stderr
        assert "held back: .npmrc: the package manager takes registries" in done.stderr
        assert f"stockade commit {workspace.id} --allow-exec-config" in done.stderr
        assert f"{workspace.layer}/upper" in done.stderr and "is kept" in done.stderr
        done = call("commit", workspace.id, "--allow-exec-config")
        assert done.returncode == 1 and (project / ".npmrc").exists() and not (project / ".envrc").exists()

    def test_refuses_a_conflict_until_it_is_named(self, project: Path, call: Call) -> None:
        workspace = changed(project, "echo x >> file")
        (project / "file").write_text("mine\n")
        done = call("commit", workspace.id)
        assert done.returncode == 125 and "file: it changed at" in done.stderr and "--force" in done.stderr
        assert (project / "file").read_text() == "mine\n"
        assert call("commit", workspace.id, "--force", "file").returncode == 0
        assert (project / "file").read_text() == "old\nx\n"

    def test_some_paths(self, project: Path, call: Call) -> None:
        workspace = changed(project, "echo x >> file; echo y >> other")
        (project / "other").write_text("mine\n")
        done = call("commit", workspace.id, "--force", "other", "other")
        assert done.stdout.startswith("1 change committed")
        assert (project / "file").read_text() == "old\n"

    def test_as_json(self, project: Path, call: Call) -> None:
        workspace = changed(project, "echo x >> file; mkfifo p")
        (project / "file").write_text("mine\n")
        done = call("commit", "--json", workspace.id)
        found = json.loads(done.stdout)
        assert done.returncode == 125 and found["conflicts"] == ["file"] and not found["ok"]
        done = call("commit", "--json", workspace.id, "--force", "file")
        found = json.loads(done.stdout)
        assert done.returncode == 1 and found["changes"] == [{"path": "file", "kind": "modified"}]
        assert found["held"] == [{"path": "p", "reason": "special", "detail": "it is a pipe"}]

    def test_keeps_the_workspace_if_asked(self, project: Path, call: Call) -> None:
        workspace = changed(project, "echo x >> file")
        assert call("commit", workspace.id, "--keep").returncode == 0
        assert [one.id for one in Workspace.list()] == [workspace.id]


class TestDiscard:
    def test_forgets_the_last_one(self, project: Path, call: Call) -> None:
        workspace = changed(project, "echo x >> file")
        done = call("discard")
        assert done.returncode == 0 and f"workspace {workspace.id} of {project} is discarded" in done.stdout
        assert Workspace.list() == [] and (project / "file").read_text() == "old\n"

    def test_forgets_several(self, project: Path, call: Call) -> None:
        ids = [changed(project, f"echo x > {turn}").id for turn in range(3)]
        done = call("discard", "--json", ids[0], f"@{ids[2]}")
        assert json.loads(done.stdout) == {"discarded": [ids[0], ids[2]]}
        assert [one.id for one in Workspace.list()] == [ids[1]]


class TestWorkspaces:
    def test_are_listed(self, project: Path, call: Call) -> None:
        workspace = changed(project, "echo x >> file; head -c 100000 /dev/urandom > big")
        head, line = call("workspaces").stdout.splitlines()
        assert head.split() == ["ID", "AGE", "SIZE", "CHANGES", "SNAPSHOTS", "OF"]
        id, _, size, count, points, path = line.split()
        assert (id, count, points, path) == (workspace.id, "2", "-", str(project)) and size.endswith("K")
        (found,) = json.loads(call("workspaces", "--json").stdout)
        assert found["id"] == workspace.id and found["changes"] == 2 and not found["in_use"]

    def test_none(self, call: Call) -> None:
        assert call("workspaces").stdout == "no changes are kept\n"

    def test_whose_tree_is_gone_are_listed_too(self, tmp_path: Path, call: Call) -> None:
        place = tmp_path / "gone"
        place.mkdir()
        changed(place, "touch x")
        place.rmdir()
        assert "tree is gone" in call("workspaces").stdout

    @pytest.fixture
    def old(self, project: Path) -> Workspace:
        workspace = changed(project, "echo x >> file")
        for path in (workspace.layer, f"{workspace.layer}/upper"):
            os.utime(path, (time.time() - 8 * 86400,) * 2)
        return workspace

    def test_old_ones_are_removed_after_a_yes(self, project: Path, call: Call, old: Workspace) -> None:
        new = changed(project, "echo y >> file")
        done = call("workspaces", "prune", "--older-than", "7d", "--yes")
        assert done.returncode == 0 and done.stdout == "1 workspace removed\n" and old.id in done.stderr
        assert [one.id for one in Workspace.list()] == [new.id]

    @pytest.mark.parametrize(("answer", "left"), [(b"y\n", 0), (b"n\n", 1), (b"\n", 1)])
    def test_a_terminal_is_asked(self, old: Workspace, answer: bytes, left: int) -> None:
        code, shown = on_a_terminal("workspaces", "prune", "--older-than", "7d", answer=answer)
        assert "Remove 1 workspace" in shown and len(Workspace.list()) == left and code == left

    def test_without_anybody_to_ask_nothing_is_removed(self, call: Call, old: Workspace) -> None:
        done = call("workspaces", "prune", "--older-than", "7d")
        assert done.returncode == 125 and "--yes" in done.stderr and len(Workspace.list()) == 1

    def test_young_ones_stay(self, call: Call, old: Workspace) -> None:
        assert call("workspaces", "prune", "--older-than", "9d", "--yes").stdout == "0 workspaces removed\n"

    @pytest.mark.parametrize("words", [["prune"], ["prune", "--older-than", "soon"], ["--older-than", "7d"]])
    def test_what_makes_no_sense_is_refused(self, call: Call, words: list[str]) -> None:
        done = call("workspaces", *words)
        assert done.returncode == 125 and "hint:" in done.stderr
