"""How a workspace appears: writable for real, read-only, or copy-on-write; and what lies in and around it."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

import stockade
from stockade import Policy, PolicyError, Result, Sandbox
from support.means import applies


def sh(script: str, workspace: Path, mode: str = "overlay", **clauses: object) -> Result:
    policy = Policy(workspace={"path": str(workspace), "mode": mode}, **clauses)  # type: ignore[arg-type]
    return stockade.run(["sh", "-c", script], policy, timeout=60)


def tree(directory: Path) -> dict[str, str]:
    """Every path below a directory with what is there."""
    found = {}
    for path in sorted(directory.rglob("*")):
        kind = "dir" if path.is_dir() else path.read_text()
        found[str(path.relative_to(directory))] = f"{stat.S_IMODE(path.lstat().st_mode):o} {kind}"
    return found


def layers(state: Path) -> list[Path]:
    return sorted((state / "workspaces").iterdir()) if (state / "workspaces").exists() else []


@pytest.fixture
def project(workspace: Path) -> Path:
    (workspace / "a").write_text("a\n")
    (workspace / "sub").mkdir()
    (workspace / "sub" / "b").write_text("b\n")
    return workspace


class TestWritable:
    def test_changes_land_on_the_host(self, project: Path) -> None:
        result = sh("echo new > new; rm a; echo more >> sub/b", project, "rw", protect=[]).check()
        assert tree(project) == {"new": "644 new\n", "sub": "755 dir", "sub/b": "644 b\nmore\n"}
        assert result.changes == () and result.workspace_id == ""

    def test_a_new_file_belongs_to_the_caller(self, project: Path) -> None:
        sh("touch new", project, "rw", protect=[]).check()
        made = (project / "new").stat()
        assert (made.st_uid, made.st_gid) == (os.geteuid(), os.getegid())

    def test_nothing_of_it_is_kept_in_the_state(self, project: Path, stockade_home: Path) -> None:
        sh("touch new", project, "rw", protect=[]).check()
        assert layers(stockade_home) == []


class TestReadOnly:
    @pytest.mark.parametrize(
        "action", ["echo x > a", "touch new", "rm a", "mkdir d", "chmod 600 a", "mv a z"]
    )
    def test_every_change_is_refused(self, project: Path, action: str) -> None:
        before = tree(project)
        result = sh(action, project, "ro")
        assert result.exit_code != 0 and b"Read-only file system" in result.stderr
        assert tree(project) == before

    def test_everything_can_be_read(self, project: Path) -> None:
        assert sh("cat a sub/b", project, "ro").text == "a\nb\n"


class TestOverlay:
    def test_the_program_sees_its_changes_and_the_host_none(self, project: Path) -> None:
        before = tree(project)
        script = "echo new > new; rm a; echo more >> sub/b; ls; cat new sub/b"
        assert sh(script, project).text == "new\nsub\nnew\nb\nmore\n"
        assert tree(project) == before

    def test_it_is_the_default(self, project: Path) -> None:
        stockade.run(["rm", "a"], Policy(workspace=str(project))).check()
        assert (project / "a").exists()

    def test_changes_are_kept_aside_privately(self, project: Path, stockade_home: Path) -> None:
        result = sh("echo new > new", project).check()
        (layer,) = layers(stockade_home)
        assert layer.name == result.workspace_id
        assert (layer / "upper" / "new").read_text() == "new\n"
        for path in (stockade_home, layer):
            assert stat.S_IMODE(path.stat().st_mode) == 0o700, path

    def test_an_unchanged_workspace_leaves_nothing(self, project: Path, stockade_home: Path) -> None:
        result = sh("cat a", project).check()
        assert (result.changes, result.workspace_id) == ((), "")
        assert layers(stockade_home) == []

    def test_changes_that_were_undone_leave_nothing(self, project: Path, stockade_home: Path) -> None:
        assert sh("touch x; rm x", project).check().changes == ()
        assert layers(stockade_home) == []

    def test_discarded_changes_are_reported_and_not_kept(self, project: Path, stockade_home: Path) -> None:
        policy = Policy(workspace=str(project))
        result = stockade.run(["touch", "x"], policy, on_exit="discard")
        assert [change.path for change in result.changes] == ["x"]
        assert layers(stockade_home) == []

    def test_a_sandbox_discards_when_told_to(self, project: Path, stockade_home: Path) -> None:
        with Sandbox(Policy(workspace=str(project)), on_exit="discard") as box:
            box.run(["touch", "x"]).check()
        assert layers(stockade_home) == []

    def test_a_sandbox_keeps_by_default(self, project: Path, stockade_home: Path) -> None:
        with Sandbox(Policy(workspace=str(project))) as box:
            box.run(["touch", "x"]).check()
            assert box.run(["ls", "x"]).ok
        (layer,) = layers(stockade_home)
        assert (layer / "upper" / "x").exists()

    def test_a_run_that_could_not_start_leaves_nothing(self, project: Path, stockade_home: Path) -> None:
        assert stockade.run(["no-such-command"], Policy(workspace=str(project))).exit_code == 127
        with pytest.raises(PolicyError):
            stockade.run([], Policy(workspace=str(project)))
        assert layers(stockade_home) == []

    def test_what_a_timed_out_run_changed_is_kept(self, project: Path, stockade_home: Path) -> None:
        policy = Policy(workspace=str(project))
        result = stockade.run(["sh", "-c", "touch x; sleep 60"], policy, timeout=0.5)
        assert result.outcome == "timed-out"
        assert [change.path for change in result.changes] == ["x"]
        assert len(layers(stockade_home)) == 1

    def test_two_sandboxes_at_once_do_not_see_each_others_changes(self, project: Path) -> None:
        policy = Policy(workspace=str(project))
        with Sandbox(policy, on_exit="discard") as one, Sandbox(policy, on_exit="discard") as other:
            one.run(["sh", "-c", "echo one > who"]).check()
            other.run(["sh", "-c", "echo other > who"]).check()
            assert (one.run(["cat", "who"]).text, other.run(["cat", "who"]).text) == ("one\n", "other\n")
        assert not (project / "who").exists()

    def test_the_owner_and_mode_of_the_workspace_are_the_hosts(self, project: Path) -> None:
        project.chmod(0o750)
        assert sh("stat -c '%a %u %g' .", project).text == f"750 {os.geteuid()} {os.getegid()}\n"

    def test_root_sees_and_keeps_other_owners(self, project: Path) -> None:
        applies(os.geteuid() == 0, "an ordinary user has files of its own only")
        os.chown(project / "a", 12345, 54321)
        assert sh("echo x >> a; stat -c '%u %g' a", project).text == "12345 54321\n"


class TestProtected:
    @pytest.fixture
    def repository(self, project: Path) -> Path:
        (project / ".git" / "hooks").mkdir(parents=True)
        (project / ".git" / "config").write_text("[core]\n")
        return project

    PROTECT = (".git/hooks", ".git/config")

    @pytest.mark.parametrize(
        "action",
        [
            "echo x > .git/hooks/pre-commit",
            "echo x >> .git/config",
            "rm .git/config",
            "mv .git/config .git/other",
            "mv .git other",
            "rm -r .git/hooks",
            "ln -f a .git/config",
        ],
    )
    def test_what_exists_is_unwritable_in_a_writable_workspace(self, repository: Path, action: str) -> None:
        before = tree(repository)
        assert sh(action, repository, "rw", protect=self.PROTECT).exit_code != 0
        assert tree(repository) == before

    def test_the_rest_stays_writable(self, repository: Path) -> None:
        sh("echo x > sub/new; cat .git/config", repository, "rw", protect=self.PROTECT).check()
        assert (repository / "sub" / "new").read_text() == "x\n"

    def test_a_repository_is_read_only_as_a_whole(self, repository: Path) -> None:
        result = sh("echo x > .git/index", repository, "rw", protect=[])
        assert result.exit_code != 0 and b"Read-only file system" in result.stderr

    def test_one_that_is_unprotected_by_name_can_be_written_but_for_what_protect_names(
        self, repository: Path
    ) -> None:
        clauses = {"protect": self.PROTECT, "unprotect": [".git"]}
        sh("echo x > .git/index", repository, "rw", **clauses).check()
        assert (repository / ".git" / "index").read_text() == "x\n"
        assert not sh("echo x >> .git/config", repository, "rw", **clauses).ok

    def test_what_is_absent_is_refused_by_name(self, project: Path) -> None:
        with pytest.raises(PolicyError, match=r"\.envrc") as caught:
            sh("true", project, "rw")
        assert "overlay" in caught.value.hint
        assert "--unprotect .envrc --unprotect .vscode --unprotect .claude" in caught.value.hint
        assert ".git" not in caught.value.message
        sh("true", project, "rw", unprotect=[".envrc", ".vscode", ".claude"]).check()


class TestGrants:
    def test_a_writable_directory_in_a_read_only_workspace(self, project: Path) -> None:
        (project / "out").mkdir()
        result = sh("echo x > out/x; echo x > y", project, "ro", write=[str(project / "out")])
        assert result.exit_code != 0
        assert tree(project / "out") == {"x": "644 x\n"} and not (project / "y").exists()

    def test_a_writable_directory_in_an_overlay_is_written_for_real(self, project: Path) -> None:
        (project / "out").mkdir()
        result = sh("echo x > out/x; echo x > y", project, write=[str(project / "out")]).check()
        assert (project / "out" / "x").exists() and not (project / "y").exists()
        assert [change.path for change in result.changes] == ["y"]

    def test_a_read_only_directory_in_a_writable_workspace_cannot_be_replaced(self, project: Path) -> None:
        (project / "third" / "party").mkdir(parents=True)
        (project / "third" / "party" / "x").write_text("x\n")
        before = tree(project)
        script = "echo y > third/party/x; mv third other; mkdir -p third/party; echo z > third/party/x"
        sh(script, project, "rw", protect=[], read=[str(project / "third" / "party")])
        assert {path: kind for path, kind in tree(project).items() if path.startswith("third")} == {
            path: kind for path, kind in before.items() if path.startswith("third")
        }

    def test_a_file_can_be_granted(self, tmp_path: Path, project: Path) -> None:
        (tmp_path / "one").write_text("one\n")
        (tmp_path / "two").write_text("two\n")
        result = sh(
            f"cat {tmp_path}/one; echo more >> {tmp_path}/two; ls {tmp_path}",
            project,
            read=[str(tmp_path / "one")],
            write=[str(tmp_path / "two")],
        )
        assert result.text.splitlines() == ["one", "one", "two", "workspace"]
        assert (tmp_path / "two").read_text() == "two\nmore\n"

    def test_a_granted_directory_is_read_only(self, tmp_path: Path) -> None:
        (tmp_path / "data").mkdir()
        (tmp_path / "data" / "x").write_text("x\n")
        policy = Policy(read=[str(tmp_path / "data")])
        assert stockade.run(["cat", f"{tmp_path}/data/x"], policy).text == "x\n"
        assert stockade.run(["touch", f"{tmp_path}/data/y"], policy).exit_code != 0
        assert os.listdir(tmp_path / "data") == ["x"]

    def test_nothing_beside_a_grant_is_seen(self, tmp_path: Path) -> None:
        (tmp_path / "data").mkdir()
        (tmp_path / "secret").write_text("x")
        policy = Policy(read=[str(tmp_path / "data")])
        assert stockade.run(["ls", "-A", str(tmp_path)], policy).text == "data\n"

    def test_a_link_is_shown_where_it_leads(self, tmp_path: Path) -> None:
        (tmp_path / "real").mkdir()
        (tmp_path / "real" / "x").write_text("x\n")
        (tmp_path / "link").symlink_to("real")
        policy = Policy(read=[str(tmp_path / "link")])
        assert stockade.run(["cat", f"{tmp_path}/real/x"], policy).text == "x\n"

    def test_the_state_is_never_granted(self, stockade_home: Path, tmp_path: Path) -> None:
        stockade.run(["true"]).check()
        for path in (stockade_home, tmp_path):
            for clauses in ({"read": [str(path)]}, {"workspace": str(path)}):
                with pytest.raises(PolicyError, match="state"):
                    stockade.run(["true"], Policy(**clauses))  # type: ignore[arg-type]

    def test_the_state_is_not_seen_inside(self, project: Path, stockade_home: Path) -> None:
        result = sh(f"ls -d {stockade_home}; grep -c {stockade_home} /proc/self/mountinfo", project)
        assert result.text == "0\n"


class TestPlaces:
    @pytest.fixture(params=["home", "/tmp", "/var/tmp"])
    def place(self, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
        import shutil
        import tempfile

        parent = os.path.expanduser("~") if request.param == "home" else request.param
        directory = Path(tempfile.mkdtemp(prefix="stockade-place-", dir=parent))
        yield directory
        shutil.rmtree(directory)

    @pytest.mark.parametrize("mode", ["overlay", "ro", "rw"])
    def test_a_workspace_may_lie_there(self, place: Path, mode: str) -> None:
        (place / "x").write_text("x\n")
        assert sh("pwd; cat x", place, mode, protect=[]).text == f"{place}\nx\n"

    def test_it_alone_is_seen_there(self, place: Path) -> None:
        # The tests' own Python may lie there too.
        assert sh(f"ls -A {place.parent}", place, toolchain=False).text == f"{place.name}\n"

    def test_beside_it_can_be_written_privately(self, place: Path) -> None:
        assert sh(f"echo x > {place.parent}/beside && cat {place.parent}/beside", place).text == "x\n"
        assert not (place.parent / "beside").exists()


ODD = {
    "blank": "a b",
    "colon and comma": "a:b,c=d",
    "backslash": "a\\b\\040c",
    "newline": "a\nb",
    "carriage return": "a\rb",
    "tab": "a\tb",
    "quotes": "a'b\"c",
    "hash": "#a",
    "not UTF-8": os.fsdecode(b"a\xff\xfeb"),
    "unicode": "ä€😀",
    "255 bytes": "x" * 255,
    "dash": "-rf",
    "question mark": "a?",
    "deleted": "a (deleted)",
}


@pytest.mark.parametrize("name", ODD.values(), ids=ODD.keys())
@pytest.mark.parametrize("mode", ["overlay", "rw"])
def test_a_workspace_may_have_any_name(tmp_path: Path, name: str, mode: str) -> None:
    directory = tmp_path / name
    directory.mkdir()
    result = sh("echo x > y; pwd", directory, mode, protect=[]).check()
    assert result.stdout == os.fsencode(directory) + b"\n"
    assert (directory / "y").exists() is (mode == "rw")
    assert [change.path for change in result.changes] == (["y"] if mode == "overlay" else [])


@pytest.mark.parametrize("name", ODD.values(), ids=ODD.keys())
def test_a_grant_may_have_any_name(tmp_path: Path, name: str) -> None:
    directory = tmp_path / name
    directory.mkdir()
    (directory / "x").write_text("x\n")
    path = str(directory) + ("/." if name.endswith("?") else "")
    assert stockade.run(["cat", str(directory / "x")], Policy(read=[path])).text == "x\n"
