"""Review and commit raced (threat 63): what `stockade diff` showed is what `stockade commit` takes over.

The controls commit by an id, or with `--unseen`, and show that the change would land.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import stockade
from stockade import ConflictError, Policy, PolicyError, Sandbox, SetupError, Workspace
from support.cli import calls_in
from support.means import applies
from support.trees import PYTHON, changed

Done = subprocess.CompletedProcess[str]
Call = Callable[..., Done]

#: Changes a file's bytes and nothing else that can be set: its size, its times and its mode are as before.
SAME_LOOK = """
import os, sys
before = os.stat(sys.argv[1])
with open(sys.argv[1], "r+b") as file:
    file.write(sys.argv[2].encode())
os.utime(sys.argv[1], ns=(before.st_atime_ns, before.st_mtime_ns))
"""
#: The same through a mapping whose pages were read first: no write is seen by tmpfs.
MAPPED = """
import mmap, sys
with open(sys.argv[1], "r+b") as file, mmap.mmap(file.fileno(), 0) as content:
    content[0]
    content[: len(sys.argv[2])] = sys.argv[2].encode()
"""


@pytest.fixture
def project(workspace: Path) -> Path:
    (workspace / "file").write_text("old\n")
    return workspace


@pytest.fixture
def call(project: Path) -> Call:
    """`stockade` with these arguments in the workspace."""
    return calls_in(project)


def goes_on(workspace: Workspace, script: str, *words: str, python: bool = False) -> None:
    """Another run in a workspace that there is."""
    command = [PYTHON, "-c", script] if python else ["sh", "-c", script, "sh"]
    result = stockade.run([*command, *words], resume=workspace, timeout=60)
    assert result.ok, result.stderr


class TestAnotherWorkspace:
    def test_of_another_directory_is_never_meant(self, project: Path, call: Call, tmp_path: Path) -> None:
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        there = changed(elsewhere, "echo evil > new")
        words = (
            "diff",
            "commit",
            "discard",
            "snapshot",
            "restore x",
            "fork",
            "merge @ @",
            "run -w @ -- true",
        )
        for line in words:
            done = call(*line.split())
            assert done.returncode == 125 and "`stockade workspaces` lists" in done.stderr, line
        assert not (elsewhere / "new").exists() and [one.id for one in Workspace.list()] == [there.id]

    def test_that_ended_after_the_review_is_not_committed(self, project: Path, call: Call) -> None:
        shown = changed(project, "echo good > file")
        assert "+good" in call("diff").stdout
        later = changed(project, "echo evil > file")
        assert Workspace.list()[0].id == later.id
        done = call("commit")
        assert done.returncode == 0 and f"workspace {shown.id} of {project}" in done.stderr
        assert (project / "file").read_text() == "good\n"

    def test_that_took_the_place_of_the_one_that_was_shown(self, project: Path, call: Call) -> None:
        shown = changed(project, "echo good > file")
        assert "+good" in call("diff").stdout
        shown.discard()
        later = changed(project, "echo evil > file")
        done = call("commit")
        assert done.returncode == 125 and "has not been shown" in done.stderr
        assert f"stockade commit {later.id}" in done.stderr
        assert (project / "file").read_text() == "old\n"


class TestTheSameWorkspace:
    @pytest.mark.parametrize(
        ("script", "python"),
        [
            ("echo evil > more", False),
            ("printf evil > file", False),
            ("chmod 755 file", False),
            ("rm file; ln -s /etc/passwd file", False),
            ("rm file", False),
            ("rm -r d; mkdir d; touch d/new", False),
            ("ln file second", False),
            ("mv new other", False),
            ("ln -sfn evil link", False),
            (SAME_LOOK, True),
            (MAPPED, True),
        ],
    )
    @pytest.mark.parametrize("named", [False, True])
    def test_changed_since_is_refused(
        self, project: Path, call: Call, script: str, python: bool, named: bool
    ) -> None:
        workspace = changed(project, "echo good > file; echo new > new; mkdir d; touch d/x; ln -s good link")
        assert "+good" in call("diff", *[workspace.id] * named).stdout
        goes_on(workspace, script, "new" if python else "", "evil", python=python)
        done = call("commit", *[workspace.id] * named)
        assert done.returncode == 125 and "has changed since `stockade diff` showed it" in done.stderr
        assert (project / "file").read_text() == "old\n" and os.listdir(project) == ["file"]
        assert call("commit", workspace.id, "--unseen").returncode == 0
        assert os.listdir(project) != ["file"]

    def test_unchanged_is_committed(self, project: Path, call: Call) -> None:
        (project / "gone").touch()
        workspace = changed(project, "echo good > file; mkdir -p a/b; touch a/b/c; rm gone; chmod 500 a/b")
        call("diff")
        goes_on(workspace, "cat file a/b/c; ls -laR .")
        assert call("workspaces").stdout.count(workspace.id) == 1
        workspace.snapshot("one")
        workspace.fork()
        assert call("commit").returncode == 0 and (project / "file").read_text() == "good\n"

    def test_unchanged_with_files_that_are_closed_to_their_owner(self, project: Path, call: Call) -> None:
        changed(project, "mkdir d; echo 1 > d/x; chmod 0 d/x d; echo 2 > file; chmod 0 file")
        call("diff")
        call("workspaces")
        assert call("commit").returncode == 0 and (project / "d").is_dir()
        (project / "d").chmod(0o700)

    def test_a_part_of_it_at_a_time(self, project: Path, call: Call) -> None:
        changed(project, "echo good > file; echo 1 > one; echo 2 > .npmrc")
        call("diff")
        assert call("commit", "one").returncode == 0
        assert call("commit").returncode == 1 and (project / "file").read_text() == "good\n"
        assert call("commit", "--allow-exec-config").returncode == 0 and (project / ".npmrc").exists()

    def test_a_restored_snapshot_counts_as_changed(self, project: Path, call: Call) -> None:
        workspace = changed(project, "echo evil > file")
        workspace.snapshot("evil")
        goes_on(workspace, "echo good > file")
        call("diff")
        workspace.restore("evil")
        assert call("commit").returncode == 125 and (project / "file").read_text() == "old\n"

    def test_shown_while_a_program_had_it(self, project: Path, call: Call) -> None:
        """It maps a page before the review and stores to it afterwards, which no clock notices."""
        with Sandbox(Policy(workspace=str(project))) as box:
            box.run(["sh", "-c", "printf 'good' > file"]).check()
            script = (
                "import mmap, sys\n"
                "with open('file', 'r+b') as file, mmap.mmap(file.fileno(), 0) as content:\n"
                "    content[:] = b'good'\n"
                "    print('ready', flush=True); sys.stdin.readline()\n"
                "    content[:] = b'evil'\n"
            )
            program = box.start([PYTHON, "-c", script], stdin=subprocess.PIPE)
            assert program.stdin is not None and program.stdout is not None
            assert program.stdout.readline() == b"ready\n"
            id = box.workspace.id if box.workspace else ""
            done = call("diff")
            assert "+good" in done.stdout and "run this again when it has ended" in done.stderr
            program.stdin.write(b"\n")
            program.stdin.close()
            assert program.wait().ok
        for words in (["commit"], ["commit", id]):
            done = call(*words)
            assert done.returncode == 125 and "a sandbox was using workspace" in done.stderr
            assert (project / "file").read_text() == "old\n"
        assert "+evil" in call("diff").stdout and call("commit").returncode == 0

    def test_only_a_part_was_shown(self, project: Path, call: Call) -> None:
        changed(project, "echo good > file; mkdir src; echo evil > src/x; echo y > src/y")
        assert "evil" not in call("diff", "file").stdout
        done = call("commit")
        assert done.returncode == 125 and "showed only file" in done.stderr
        assert os.listdir(project) == ["file"]
        assert call("commit", "src/x").returncode == 125
        assert call("commit", "file").returncode == 0 and (project / "file").read_text() == "good\n"
        call("diff", "src/x")
        assert call("commit", "src").returncode == 125
        call("diff", "src/y")
        assert call("commit", "src/x", "src/y").returncode == 0


@pytest.fixture
def state_in_memory(stockade_home: Path) -> Iterator[None]:
    """Workspaces on tmpfs, whose files keep their times when a mapping is written."""
    applies(os.geteuid() == 0, "only root can mount")
    stockade_home.mkdir(mode=0o700)
    place = stockade_home / "workspaces"
    place.mkdir(mode=0o700)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16M,mode=0700", "stockade-test", place], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", place], check=True)


class TestWhereTimesSayNothing:
    def test_a_mapping_on_tmpfs(self, state_in_memory: None, project: Path, call: Call) -> None:
        workspace = changed(project, "echo good > file")
        file = f"{workspace.layer}/upper/file"
        call("diff")
        before = os.stat(file)
        goes_on(workspace, MAPPED, "file", "evil", python=True)
        after = os.stat(file)
        # The control: nothing that the file is known by says so.
        assert before.st_ino == after.st_ino and before.st_size == after.st_size
        assert before.st_ctime_ns == after.st_ctime_ns
        assert Path(file).read_text() == "evil\n"
        assert call("commit").returncode == 125 and (project / "file").read_text() == "old\n"

    def test_nobody_was_in_it(self, state_in_memory: None, project: Path, call: Call) -> None:
        changed(project, "echo good > file; touch closed; chmod 0 closed")
        call("diff")
        assert call("commit").returncode == 0 and (project / "file").read_text() == "good\n"

    def test_a_closed_file(self, project: Path, call: Call) -> None:
        """Whoever looks at one that its owner cannot read changes its times."""
        workspace = changed(project, "echo good > new; chmod 0 new")
        call("diff")
        with contextlib.suppress(SetupError):
            goes_on(workspace, f"chmod 600 new; {PYTHON} -c '{SAME_LOOK}' new evil; chmod 0 new")
        assert call("commit").returncode == 125 and not (project / "new").exists()


class TestPython:
    def test_commit_expects_what_diff_showed(self, project: Path) -> None:
        workspace = changed(project, "echo good > file")
        shown = workspace.diff()
        assert shown.digest and workspace.diff().digest == shown.digest
        goes_on(workspace, SAME_LOOK, "file", "evil", python=True)
        with pytest.raises(ConflictError, match="has changed since"):
            workspace.commit(expect=shown.digest)
        assert (project / "file").read_text() == "old\n"
        workspace.commit(expect=workspace.diff().digest)
        assert (project / "file").read_text() == "evil\n"

    def test_a_file_rewritten_at_once(self, project: Path) -> None:
        workspace = changed(project, "echo good > file")
        for turn in range(5):
            shown = workspace.diff()
            goes_on(workspace, SAME_LOOK, "file", f"{turn:04}", python=True)
            with pytest.raises(ConflictError, match="has changed since"):
                workspace.commit(expect=shown.digest)

    def test_whatever_runs_meanwhile_what_lands_was_shown(self, project: Path) -> None:
        workspace = changed(project, "echo 0 > file")
        over = threading.Event()

        def keeps_changing() -> None:
            turn = 0
            while not over.wait(0.05):
                turn += 1
                with contextlib.suppress(SetupError):  # the other one has the workspace now
                    stockade.run(["sh", "-c", f"echo {turn} > file"], resume=workspace, timeout=60)

        changer = threading.Thread(target=keeps_changing)
        changer.start()
        landed = refused = 0
        try:
            until = time.monotonic() + 15
            while (landed < 5 or refused < 5) and time.monotonic() < until:
                shown = workspace.diff()
                text = [one.text.rpartition(b"+")[2] for one in shown.files]
                time.sleep(0.1 * (refused < landed))  # whoever reads takes time
                try:
                    if shown.digest and text:
                        workspace.commit(expect=shown.digest, keep=True)
                        landed += 1
                        assert [(project / "file").read_bytes()] == text
                except ConflictError as error:
                    assert "has changed since" in error.message
                    refused += 1
                except SetupError:
                    continue
        finally:
            over.set()
            changer.join()
        assert landed and refused

    def test_a_living_sandbox_has_no_state_to_expect(self, project: Path) -> None:
        with Sandbox(Policy(workspace=str(project))) as box:
            box.run(["touch", "new"]).check()
            assert box.workspace is not None
            shown = box.workspace.diff()
            assert shown.digest == "" and [one.path for one in shown.files] == ["new"]
            with pytest.raises(PolicyError, match="a sandbox used the workspace"):
                box.workspace.commit(expect=shown.digest)
            with pytest.raises(SetupError, match="while a sandbox lives in it"):
                box.workspace.commit(expect="0" * 40)
