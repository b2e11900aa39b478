"""What a program leaves in its workspace to get at the host through a commit.

The controls copy the layer as one would by hand, and show that the attack works without care.
"""

from __future__ import annotations

import contextlib
import os
import pty
import shutil
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import stockade
from stockade import ConflictError, Policy, Sandbox, SetupError, StockadeError, Workspace
from support.means import applies, need
from support.trees import changed, snapshot

IS_ROOT = os.geteuid() == 0
STOCKADE = str(Path(sys.executable).with_name("stockade"))


@pytest.fixture
def project(workspace: Path) -> Path:
    (workspace / "file").write_text("old\n")
    (workspace / "sub").mkdir()
    (workspace / "sub" / "inner").write_text("inner\n")
    return workspace


def copied_by_hand(workspace: Workspace) -> None:
    top = f"{workspace.layer}/upper"
    for path, _, names in os.walk(top):
        for name in names:
            shutil.copy(f"{path}/{name}", f"{workspace.path}/{os.path.relpath(path, top)}/{name}")


class TestLinks:
    """Threats 1, 4 and 5: nothing is read or written where a link leads."""

    def test_one_to_a_secret_is_committed_as_a_link_and_said(self, project: Path, hidden: Path) -> None:
        workspace = changed(project, f"ln -s {hidden}/secret data; rm file; ln -s {hidden}/secret file")
        found = workspace.diff(patch=True)
        assert b"the secret" not in found.patch and all(b"secret" not in one.text for one in found.files)
        done = workspace.commit()
        assert os.readlink(project / "data") == str(hidden / "secret") and (project / "file").is_symlink()
        assert [(note.path, note.what.partition(",")[0]) for note in done.notes] == [
            ("data", "a link out of the workspace"),
            ("file", "a link out of the workspace"),
        ]

    @pytest.mark.parametrize("target", ["../hidden", "sub/../../hidden", "/etc"])
    def test_out_of_the_workspace_are_said_also_by_a_detour(self, project: Path, target: str) -> None:
        (note,) = changed(project, f"mkdir d; ln -s {target} l").commit().notes
        assert note.path == "l"

    def test_the_host_put_on_the_way_afterwards(self, project: Path, hidden: Path) -> None:
        workspace = changed(project, "echo evil > sub/secret; echo evil > sub/new")
        (project / "sub").rename(project.parent / "away")
        (project / "sub").symlink_to(hidden)
        before = snapshot(hidden)
        with pytest.raises(ConflictError):
            workspace.commit()
        # By force the link is replaced, not followed.
        workspace.commit(force=["sub"])
        assert snapshot(hidden) == before
        assert not (project / "sub").is_symlink() and (project / "sub" / "new").read_text() == "evil\n"

    def test_control_a_copy_by_hand_follows_it(self, project: Path, hidden: Path) -> None:
        workspace = changed(project, "echo evil > sub/secret")
        (project / "sub").rename(project.parent / "away")
        (project / "sub").symlink_to(hidden)
        copied_by_hand(workspace)
        assert (hidden / "secret").read_text() == "evil\n"

    def test_put_on_the_way_after_everything_was_checked(self, project: Path, hidden: Path) -> None:
        workspace = changed(project, "echo evil > sub/secret; echo evil > file")
        before = snapshot(hidden)

        def swapped(*_: int) -> None:
            if not (project / "sub").is_symlink():
                (project / "sub").rename(project.parent / "away")
                (project / "sub").symlink_to(hidden)

        with pytest.raises(SetupError, match=r"the commit stopped at 'sub/secret'.* as before"):
            workspace.commit(progress=swapped)
        assert snapshot(hidden) == before and (project / "file").read_text() == "old\n"
        # What was begun can be done once the way is clear again.
        (project / "sub").unlink()
        (project.parent / "away").rename(project / "sub")
        workspace.commit(force=["sub"])
        assert (project / "sub" / "secret").read_text() == "evil\n"

    def test_swapped_all_the_time(self, project: Path, hidden: Path) -> None:
        before = snapshot(hidden)
        over = threading.Event()

        def swap() -> None:
            while not over.is_set():
                with contextlib.suppress(OSError):
                    os.rename(project / "sub", project.parent / "away")
                    os.symlink(hidden, project / "sub")
                    os.unlink(project / "sub")
                with contextlib.suppress(OSError):
                    os.rename(project.parent / "away", project / "sub")

        for turn in range(15):
            script = f"echo {turn} > sub/secret; mkdir -p sub/d; echo {turn} > sub/d/new; rm -f sub/inner"
            workspace = changed(project, script)
            over.clear()
            thread = threading.Thread(target=swap)
            thread.start()
            try:
                for _ in range(5):
                    with contextlib.suppress(StockadeError):
                        Workspace.open(workspace.id).commit(force=["."])
            finally:
                over.set()
                thread.join()
            assert snapshot(hidden) == before
            # For the next turn: the directory is where it was.
            with contextlib.suppress(OSError):
                os.rename(project.parent / "away", project / "sub")

    def test_in_place_of_the_workspace_itself(self, project: Path, hidden: Path) -> None:
        workspace = changed(project, "echo evil > secret")
        project.rename(project.parent / "away")
        project.symlink_to(hidden)
        before = snapshot(hidden)
        for action in (workspace.commit, workspace.changes, workspace.diff):
            with pytest.raises(StockadeError):
                action()  # type: ignore[operator]
        assert snapshot(hidden) == before

    def test_above_the_workspace(self, tmp_path: Path, hidden: Path) -> None:
        place = tmp_path / "above" / "project"
        place.mkdir(parents=True)
        workspace = changed(place, "echo evil > secret")
        (tmp_path / "above").rename(tmp_path / "away")
        (hidden / "project").mkdir()
        (tmp_path / "above").symlink_to(hidden)
        with pytest.raises(StockadeError, match="leads through a link"):
            workspace.commit()
        assert os.listdir(hidden / "project") == []

    @pytest.mark.parametrize("kind", ["link", "directory"])
    def test_in_place_of_the_staging_directory(self, project: Path, hidden: Path, kind: str) -> None:
        workspace = changed(project, "echo evil > secret; echo evil > two")
        before = snapshot(hidden)

        def swapped(done: int, _: int) -> None:
            if done == 1:
                (staging,) = project.glob(".stockade-commit-*")
                staging.rename(project.parent / "away")
                staging.symlink_to(hidden) if kind == "link" else shutil.copytree(hidden, staging)

        with pytest.raises(SetupError):
            workspace.commit(progress=swapped)
        assert snapshot(hidden) == before
        assert not (project / "secret").exists() and not (project / "two").exists()


class TestNewInodes:
    """Threats 2 and 3: nothing that somebody still holds appears in the host's tree."""

    def test_a_descriptor_that_was_kept_writes_nowhere(self, project: Path) -> None:
        workspace = changed(project, "echo new > new; echo x >> file")
        kept = [os.open(f"{workspace.layer}/upper/{name}", os.O_WRONLY) for name in ("new", "file")]
        try:
            workspace.commit()
            for descriptor in kept:
                os.pwrite(descriptor, b"evil", 0)
        finally:
            for descriptor in kept:
                os.close(descriptor)
        assert [(project / name).read_text() for name in ("new", "file")] == ["new\n", "old\nx\n"]

    def test_control_a_file_that_is_moved_can_still_be_written(self, project: Path) -> None:
        workspace = changed(project, "echo new > new")
        kept = os.open(f"{workspace.layer}/upper/new", os.O_WRONLY)
        os.rename(f"{workspace.layer}/upper/new", project / "new")
        os.pwrite(kept, b"evil", 0)
        os.close(kept)
        assert (project / "new").read_text() == "evil"

    def test_a_file_with_a_second_name_outside_is_left_alone_there(self, project: Path, hidden: Path) -> None:
        os.link(hidden / "secret", project / "shared")
        changed(project, "echo evil > shared; chmod 777 shared").commit()
        assert (hidden / "secret").read_text() == "the secret\n"
        assert stat.S_IMODE((hidden / "secret").stat().st_mode) == 0o644
        assert (project / "shared").read_text() == "evil\n"

    def test_names_of_one_file_are_names_of_one_new_file(self, project: Path) -> None:
        (project / "b").write_text("old")
        (project / "b").chmod(0o664)
        workspace = changed(project, "echo x > a; for n in c d e; do ln a $n; done; ln -f a b; ln a sub/b")
        kept = os.stat(f"{workspace.layer}/upper/a").st_ino
        workspace.commit()
        found = {os.stat(project / name).st_ino for name in ("a", "b", "c", "d", "e", "sub/b")}
        assert len(found) == 1 and found != {kept}

    def test_a_large_file_with_many_names_is_paid_once(self, project: Path) -> None:
        script = "head -c 4194304 /dev/urandom > a; for n in $(seq 50); do ln a $n; done"
        result = stockade.run(["sh", "-c", script], Policy(workspace=str(project), limits={"disk": "16M"}))
        assert result.usage.bytes_written == 4 << 20
        Workspace.open(result.workspace_id).commit()
        used = {
            (project / name).stat().st_ino: (project / name).stat().st_blocks for name in ("a", "1", "50")
        }
        assert list(used.values()) == [(4 << 20) // 512]
        assert (project / "50").stat().st_nlink == 51

    def test_names_that_may_not_be_written_by_the_same_people_are_apart(self, project: Path) -> None:
        (project / "ours").write_text("old")
        (project / "ours").chmod(0o664)
        changed(project, "echo x > a; chmod 666 a; ln -f a ours").commit()
        assert stat.S_IMODE((project / "ours").stat().st_mode) == 0o664
        assert stat.S_IMODE((project / "a").stat().st_mode) == 0o644


class TestWhatIsTakenAway:
    """Threat 17: set-uid bits, devices, foreign attributes: stripped or refused, and said."""

    @pytest.mark.parametrize(("mode", "words"), [("4755", ["set-uid"]), ("6755", ["set-uid", "set-gid"])])
    def test_bits_that_give_privileges(self, project: Path, mode: str, words: list[str]) -> None:
        done = changed(project, f"cp /bin/true tool; chmod {mode} tool; mkdir d; chmod 2777 d").commit()
        assert stat.S_IMODE((project / "tool").stat().st_mode) == 0o755
        assert stat.S_IMODE((project / "d").stat().st_mode) == 0o755
        assert [(note.path, note.what.split()[0]) for note in done.notes] == [
            ("d", "set-gid"),
            ("d", "write"),
            ("d", "write"),
            *(("tool", word) for word in words),
        ]

    def test_leave_to_write_that_nobody_had(self, project: Path) -> None:
        (project / "shared").write_text("ours")
        (project / "shared").chmod(0o664)
        (project / "sub").chmod(0o775)
        script = "chmod 666 file shared; chmod 777 sub; mkdir d; echo > d/new; chmod 777 d d/new"
        done = changed(project, script).commit()
        modes = {
            path: stat.S_IMODE((project / path).stat().st_mode) for path in ("file", "shared", "sub", "d")
        }
        assert modes == {"file": 0o644, "shared": 0o664, "sub": 0o775, "d": 0o755}
        assert stat.S_IMODE((project / "d" / "new").stat().st_mode) == 0o755
        assert {note.path for note in done.notes} == {"file", "shared", "sub", "d", "d/new"}
        assert {note.what for note in done.notes} == {
            "write permission for its group removed",
            "write permission for everybody removed",
        }
        assert done.closed, "bits that are never taken over would stay for ever"

    def test_of_the_workspace_itself_are_said_by_a_dot(self, project: Path) -> None:
        done = changed(project, "chmod 777 .").commit()
        assert project.stat().st_mode & 0o022 == 0
        assert [(note.path, note.what) for note in done.notes] == [
            (".", "write permission for its group removed"),
            (".", "write permission for everybody removed"),
        ]

    def test_a_umask_that_lets_the_group_write_lets_it_write_to_what_is_new(self, project: Path) -> None:
        workspace = changed(project, "echo > new; chmod 666 new")
        before = os.umask(0o002)
        try:
            workspace.commit()
        finally:
            os.umask(before)
        assert stat.S_IMODE((project / "new").stat().st_mode) == 0o664

    def test_control_a_copy_by_hand_keeps_them(self, project: Path) -> None:
        workspace = changed(project, "cp /bin/true tool; chmod 4755 tool")
        subprocess.run(["cp", "-a", f"{workspace.layer}/upper/tool", str(project)], check=True)
        assert (project / "tool").stat().st_mode & stat.S_ISUID

    def test_pipes_and_sockets(self, project: Path) -> None:
        script = (
            "import os, socket; os.mkfifo('p'); socket.socket(socket.AF_UNIX).bind('s'); os.unlink('file')"
        )
        done = changed(project, script + "; os.mkfifo('file')", python=True).commit()
        assert [(held.path, held.reason, held.detail) for held in done.held] == [
            ("file", "special", "it is a pipe"),
            ("p", "special", "it is a pipe"),
            ("s", "special", "it is a socket"),
        ]
        assert sorted(os.listdir(project)) == ["file", "sub"] and (project / "file").read_text() == "old\n"

    def test_a_device_of_roots(self, project: Path) -> None:
        applies(IS_ROOT, "only root makes devices")
        workspace = changed(project, "echo x > new")
        os.mknod(f"{workspace.layer}/upper/disk", 0o660 | stat.S_IFBLK, os.makedev(253, 0))
        (held,) = workspace.commit().held
        assert (held.path, held.detail) == ("disk", "it is a device") and not (project / "disk").exists()

    def test_no_program_makes_a_whiteout_or_marks_a_directory(self, project: Path) -> None:
        script = """
import os, stat
os.mkdir("d")
for path, mark in (("d", "opaque"), ("d", "redirect"), ("file", "metacopy"), ("sub", "opaque")):
    try:
        os.setxattr(path, f"user.overlay.{mark}", b"y")
    except OSError:
        pass
try:
    os.mknod("white", 0o600 | stat.S_IFCHR, 0)
except OSError:
    pass
open("file", "a").write("x")
"""
        done = changed(project, script, python=True).commit()
        assert (project / "sub" / "inner").exists() and not (project / "white").exists()
        for path in ("d", "file"):
            assert [name for name in os.listxattr(project / path) if "overlay" in name] == []
        assert all("dropped" in note.what for note in done.notes)

    def test_marks_that_no_layer_of_ours_has_are_refused(self, project: Path) -> None:
        workspace = changed(project, "echo x >> file; mkdir d")
        os.setxattr(f"{workspace.layer}/upper/d", "user.overlay.redirect", b"/etc")
        with pytest.raises(SetupError, match=r"user\.overlay\.redirect"):
            workspace.commit()
        assert (project / "file").read_text() == "old\n" and sorted(os.listdir(project)) == ["file", "sub"]

    def test_attributes_of_the_system(self, project: Path) -> None:
        applies(IS_ROOT, "only root sets them")
        workspace = changed(project, "cp /bin/true tool")
        capability = bytes.fromhex("0100000200200000002000000000000000000000")
        try:
            os.setxattr(f"{workspace.layer}/upper/tool", "security.capability", capability)
        except OSError:
            need(False, "the file system takes no file capabilities")
        os.setxattr(f"{workspace.layer}/upper/tool", "trusted.x", b"1")
        done = workspace.commit()
        assert sorted(note.what for note in done.notes) == [
            "attribute security.capability dropped",
            "attribute trusted.x dropped",
        ]
        assert os.listxattr(project / "tool") == []

    def test_a_whiteout_that_was_planted_in_the_host_tree_is_a_file_like_any_other(
        self, project: Path
    ) -> None:
        """In mode rw a program may leave one; it must not delete anything later."""
        try:
            os.mknod(project / "planted", 0o600 | stat.S_IFCHR, 0)
        except OSError:
            need(False, "the kernel lets nobody make a device 0:0")
        workspace = changed(project, "echo x >> file")
        assert [change.path for change in workspace.changes()] == ["file"]
        workspace.commit()
        assert stat.S_ISCHR(os.lstat(project / "planted").st_mode)


class TestWhatIsHeldBack:
    """Threats 6 and 7: what the policy protects, and what the host would run."""

    @pytest.mark.parametrize(
        ("script", "held"),
        [
            (
                "mkdir -p .git/hooks; echo x > .git/hooks/post-checkout",
                {".git/hooks", ".git/hooks/post-checkout"},
            ),
            ("mkdir .git; echo '[core]' > .git/config", {".git/config"}),
            ("echo 'curl evil' > .envrc", {".envrc"}),
            ("mkdir .vscode; echo {} > .vscode/tasks.json", {".vscode", ".vscode/tasks.json"}),
            ("mkdir .claude; echo {} > .claude/settings.json", {".claude", ".claude/settings.json"}),
            ("ln -s sub .vscode", {".vscode"}),
            ("mkdir .VSCode; echo {} > .VSCode/tasks.json", {".VSCode", ".VSCode/tasks.json"}),
        ],
    )
    def test_what_is_protected_stays_away_whatever_is_allowed(
        self, project: Path, script: str, held: set[str]
    ) -> None:
        before = snapshot(project)
        workspace = changed(project, script + "; echo x >> file")
        done = workspace.commit(allow_exec_config=True)
        assert {one.path for one in done.held if one.reason == "protected"} == held
        assert not done.closed and (project / "file").read_text() == "old\nx\n"
        now = snapshot(project)
        assert set(now) - set(before) <= {".git"}

    @pytest.mark.parametrize(
        "script", ["rm -r .git", "rm -r .git; ln -s sub .git", "mv .git away", "rm -r .git/hooks"]
    )
    def test_what_is_protected_is_not_taken_away_either(self, project: Path, script: str) -> None:
        (project / ".git" / "hooks").mkdir(parents=True)
        (project / ".git" / "hooks" / "pre-commit").write_text("mine\n")
        done = changed(project, script).commit()
        assert any(one.reason == "protected" for one in done.held)
        assert (project / ".git" / "hooks" / "pre-commit").read_text() == "mine\n"

    def test_the_list_is_the_one_that_was_recorded_or_given(self, project: Path) -> None:
        workspace = changed(project, "echo x > precious; echo y > .envrc")
        done = workspace.commit(protect=["precious"], allow_exec_config=True)
        assert [one.path for one in done.held] == ["precious"] and (project / ".envrc").exists()

    @pytest.mark.parametrize(
        "path",
        [
            ".github/workflows/ci.yml", ".gitlab-ci.yml", ".husky/pre-commit", ".pre-commit-config.yaml",
            "node_modules/.bin/tsc", "deep/down/node_modules/.bin/x", ".idea/workspace.xml", ".cursor/rules",
            ".mcp.json", "AGENTS.md", "sub/CLAUDE.md", ".bashrc", "sub/.envrc", "sub/.vscode/tasks.json",
            "sub/.git/config", "sub/.git/hooks/pre-commit", ".git/modules/x/config", ".git/modules/x/hooks/h",
            ".git/config.worktree", ".git/worktrees/x/gitdir", ".gitconfig", ".npmrc", ".cargo/config.toml",
            "venv/lib/python3/site-packages/x.pth", ".devcontainer/devcontainer.json", "sub/.Husky/x",
        ],
    )  # fmt: skip
    def test_what_the_host_would_run_needs_a_word(self, project: Path, path: str) -> None:
        workspace = changed(project, 'mkdir -p "$(dirname "$1")"; echo x > "$1"; echo x >> file', path)
        done = workspace.commit()
        held = [(one.path, one.reason) for one in done.held if one.reason != "repository"]
        assert held == [(path, "executes")]
        # Nor are directories made that would be empty without it.
        assert set(os.listdir(project)) <= {"file", "sub"} and os.listdir(project / "sub") == ["inner"]
        assert workspace.commit(allow_exec_config=True).closed
        assert (project / path).read_text() == "x\n"

    @pytest.mark.parametrize(
        "path",
        ["Makefile", "src/config", "hooks/x", "package.json", ".gitignore", ".github/ISSUE_TEMPLATE.md"],
    )
    def test_ordinary_files_do_not(self, project: Path, path: str) -> None:
        workspace = changed(project, 'mkdir -p "$(dirname "$1")"; echo x > "$1"', path)
        assert workspace.commit().closed

    @pytest.mark.parametrize(
        "script",
        [
            "mkdir -p bare/objects bare/refs; echo 'ref: x' > bare/HEAD; echo fsmonitor > bare/config",
            "echo 'gitdir: sub' > .git",
            "ln -s sub .git",
            "ln -s sub node_modules",
            "ln -s sub .github",
        ],
    )
    def test_neither_do_detours_to_it_pass(self, project: Path, script: str) -> None:
        done = changed(project, script).commit()
        assert {one.reason for one in done.held} in ({"executes"}, {"protected"})

    def test_removing_such_a_file_is_a_change_of_it(self, project: Path) -> None:
        (project / ".npmrc").write_text("x\n")
        assert [one.path for one in changed(project, "rm .npmrc").commit().held] == [".npmrc"]


def test_a_file_of_the_host_that_changed_since_is_never_overwritten(project: Path) -> None:
    """Threat 18."""
    workspace = changed(project, "echo evil > file; echo evil > sub/inner")
    (project / "file").write_text("mine\n")
    with pytest.raises(ConflictError):
        workspace.commit()
    assert (project / "file").read_text() == "mine\n" and (project / "sub" / "inner").read_text() == "inner\n"


def test_a_living_sandbox_and_a_commit_do_not_meet(project: Path, stockade_home: Path) -> None:
    with Sandbox(Policy(workspace=str(project)), on_exit="discard") as box:
        box.run(["touch", "new"]).check()
        (id,) = os.listdir(stockade_home / "workspaces")
        with pytest.raises(SetupError, match="in use"):
            Workspace.open(id).commit()
    assert not (project / "new").exists()


@contextlib.contextmanager
def terminal() -> Iterator[tuple[int, int]]:
    ours, theirs = pty.openpty()
    try:
        yield ours, theirs
    finally:
        os.close(ours)


@pytest.mark.parametrize("options", [[], ["--patch"], ["--stat"], ["--name-only"]])
def test_nothing_of_the_programs_reaches_the_terminal_as_a_command(project: Path, options: list[str]) -> None:
    script = "import os; e = '\\x1b]0;evil\\x07\\x1b[2J\\x9b'; open('n' + e, 'w').write(e + '\\r\\n')"
    workspace = changed(project, script + "; os.symlink(e, 'l'); open('file', 'a').write(e)", python=True)
    with terminal() as (ours, theirs):
        environ = {**os.environ, "TERM": "xterm", "NO_COLOR": "1", "PAGER": "cat"}
        with subprocess.Popen(
            [STOCKADE, "diff", *options, workspace.id], stdout=theirs, stderr=theirs, env=environ
        ) as process:
            os.close(theirs)
            shown = b""
            with contextlib.suppress(OSError):
                while piece := os.read(ours, 65536):
                    shown += piece
        assert process.returncode == 0
    assert b"evil" in shown
    assert b"\x1b" not in shown and b"\x07" not in shown and b"\xc2\x9b" not in shown


def test_a_repository_cannot_be_planted_in_two_commits(project: Path) -> None:
    """Threat 7: what git obeys lies there first, and what makes it a repository comes later."""
    payload = project / "payload"
    config = f'[core]\\n\\tbare = false\\n\\tworktree = .\\n\\tfsmonitor = "touch {payload} #"\\n'
    changed(project, f"mkdir -p x; printf '{config}' > x/config").commit()
    later = changed(project, "mkdir -p x/objects x/refs; echo 'ref: refs/heads/main' > x/HEAD")
    done = later.commit()
    assert [(held.path, held.reason) for held in done.held] == [("x/HEAD", "executes")]
    git = ["git", "-C", str(project / "x"), "config", "core.fsmonitor"]
    assert subprocess.run(git, capture_output=True, check=False).stdout == b""
    # The control: taken over all the same, git obeys it.
    later.commit(allow_exec_config=True)
    assert subprocess.run(git, capture_output=True, check=False).stdout == f"touch {payload} #\n".encode()
