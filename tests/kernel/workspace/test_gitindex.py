"""Git's index, as git writes it, and as a program inside might."""

from __future__ import annotations

import os
import random
import subprocess
import time
from pathlib import Path

import pytest

import stockade
from stockade import ConflictError, Workspace
from stockade.workspace.version_control import git_index
from stockade.workspace.version_control.git_index import CHECKSUM, NotReadError, entries, same_files
from support.cli import stockade_command
from support.means import need_program

GIT = "git -c user.name=me -c user.email=me@example.org"


def sh(script: str, place: Path) -> str:
    done = subprocess.run(["sh", "-ec", script], cwd=place, capture_output=True, text=True, check=True)
    return done.stdout


@pytest.fixture
def repository(workspace: Path) -> Path:
    need_program("git")
    (workspace / "sub").mkdir()
    for name in ("a.py", "sub/b.py", "x" * 200):
        (workspace / name).write_text(f"{name}\n")
    sh(f"git init -q; git add -A; {GIT} commit -qm first", workspace)
    return workspace


def index(repository: Path) -> bytes:
    return (repository / ".git" / "index").read_bytes()


class TestReading:
    def test_names_what_git_names(self, repository: Path) -> None:
        sh("git update-index --skip-worktree a.py; git rm -q --cached sub/b.py", repository)
        listed = sh("git ls-files -s", repository).splitlines()
        found = [
            f"{int.from_bytes(one.mode, 'big'):o} {one.digest.hex()} 0\t{one.name.decode()}"
            for one in entries(index(repository))
        ]
        assert found == listed and len(found) == 2

    @pytest.mark.parametrize("script", [
        "git update-index --index-version 4", "git update-index --split-index",
    ])  # fmt: skip
    def test_refuses_other_forms(self, repository: Path, script: str) -> None:
        sh(script, repository)
        with pytest.raises(NotReadError):
            list(entries(index(repository)))
        assert not same_files(index(repository), index(repository))

    def test_no_other_bytes_make_it_fail_otherwise_or_take_long(self, repository: Path) -> None:
        seed = int(os.environ.get("STOCKADE_SEED", time.time_ns()))
        chance, real = random.Random(seed), index(repository)
        began, read = time.monotonic(), 0
        for _ in range(20000):
            bad = bytearray(real)
            for _ in range(chance.randint(1, 4)):
                where = chance.randrange(len(bad))
                how = chance.randrange(3)
                if how == 0:
                    bad[where] = chance.choice((0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)))
                elif how == 1:
                    del bad[where : where + chance.randint(1, 70)]
                else:
                    bad[where:where] = bad[: chance.randint(1, 70)]
                if not bad:
                    break
            try:
                names = [one.name for one in entries(bytes(bad))]
                assert all(names) and not any(b"\0" in name for name in names), seed
                read += 1
            except NotReadError:
                pass
        assert read and time.monotonic() - began < 60, seed

    @pytest.mark.parametrize("change", ["length", "padding", "count", "tail", "large"])
    def test_refuses_what_git_might_read_otherwise(self, repository: Path, change: str) -> None:
        data = bytearray(index(repository))
        if change == "length":  # git goes by the length, a reader by the zero after the name
            data[12 + 61] += 1
        elif change == "padding":
            data[12 + 62 + len("a.py") + 1] = 1
        elif change == "count":
            data[8:12] = b"\xff\xff\xff\xff"
        elif change == "tail":
            data[-CHECKSUM:-CHECKSUM] = b"link\0\0\0\0"
        else:
            data += bytes(git_index.LARGEST)
        with pytest.raises(NotReadError):
            list(entries(bytes(data)))


class TestComparing:
    def test_git_status_changes_nothing_that_counts(self, repository: Path) -> None:
        before = index(repository)
        for name in ("a.py", "sub/b.py"):
            os.utime(repository / name, (10**9, 10**9))
        sh("git status", repository)
        assert index(repository) != before and same_files(index(repository), before)

    @pytest.mark.parametrize("script", [
        "echo 2 > a.py; git add a.py", "git rm -q --cached a.py", "echo > new; git add new",
        "chmod +x a.py; git add a.py", "git update-index --skip-worktree a.py",
        "git update-index --assume-unchanged a.py", "echo > n; git add -N n",
    ])  # fmt: skip
    def test_what_a_user_says_to_git_does_count(self, repository: Path, script: str) -> None:
        before = index(repository)
        sh(script, repository)
        assert not same_files(index(repository), before)


class TestCommitting:
    def worked(self, repository: Path) -> Workspace:
        script = f"echo evil > AGENTS.md; echo 2 > a.py; git add -A; {GIT} commit -qm second"
        result = stockade.run(["sh", "-ec", script], stockade.Policy(workspace=str(repository)))
        assert result.ok, result
        return Workspace.open(result.workspace_id)

    def test_git_status_does_not_stand_against_it(self, repository: Path) -> None:
        left = self.worked(repository)
        assert {one.reason for one in left.commit().held} == {"executes", "repository"}
        before = index(repository)
        os.utime(repository / "sub" / "b.py", (10**9, 10**9))
        sh("git status", repository)
        assert index(repository) != before
        done = stockade_command("commit", left.id, "--allow", "AGENTS.md", cwd=repository)
        assert done.returncode == 0, done.stderr
        assert sh("git status --porcelain; git log --format=%s", repository) == "second\nfirst\n"

    def test_what_the_user_staged_does(self, repository: Path) -> None:
        left = self.worked(repository)
        left.commit()
        sh("echo mine > mine; git add mine", repository)
        with pytest.raises(ConflictError) as caught:
            left.commit(allow=["AGENTS.md"])
        assert caught.value.paths == (".git/index",)
        assert "--force .git/index commits the program's; none of your files changes" in caught.value.hint
        done = stockade_command(
            "commit", left.id, "--allow", "AGENTS.md", "--force", ".git/index", cwd=repository
        )
        assert done.returncode == 0, done.stderr
        assert (repository / "mine").read_text() == "mine\n"
