"""Committing a workspace: the host's tree becomes what the program saw, and nothing else."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

import stockade
from stockade import ConflictError, NotFoundError, Policy, PolicyError, Sandbox, SetupError, Workspace, state
from stockade.sandbox import workspace as workspaces
from stockade.workspace import metadata
from support.means import applies, need
from support.trees import changed, snapshot

IS_ROOT = os.geteuid() == 0


@pytest.fixture
def project(workspace: Path) -> Path:
    (workspace / "file").write_text("old\n")
    (workspace / "other").write_text("other\n")
    (workspace / "link").symlink_to("file")
    (workspace / "full" / "deep").mkdir(parents=True)
    (workspace / "full" / "one").write_text("1\n")
    (workspace / "full" / "deep" / "two").write_text("2\n")
    (workspace / "empty").mkdir()
    return workspace


def layers(state: Path) -> list[str]:
    return sorted(os.listdir(state / "workspaces"))


@pytest.mark.parametrize(
    "script",
    [
        "echo new > new",
        "echo x >> file",
        "rm file",
        "mkdir -p a/b/c; echo 1 > a/b/c/d",
        "rm -r full",
        "rmdir empty",
        "rm -r full; mkdir full; echo 3 > full/three",
        "rm -r full; echo file > full",
        "rm file; mkdir file; echo 1 > file/x",
        "rm link; mkdir link; echo 1 > link/x",
        "rm -r full; ln -s empty full",
        "rm file; ln -s other file",
        "ln -sfn other link",
        "ln -s /etc/passwd out",
        "chmod 600 file; chmod 711 full",
        "chmod 700 .",
        "mv file moved; mv full/one one; mv full gone",
        "rm full/deep/two; rmdir full/deep; touch full/deep",
        "mkdir d; touch d/f; chmod 500 d",
        "mkdir -p d/e; echo 1 > d/e/f; chmod 000 d/e/f d/e d",
        "chmod 555 full; chmod 000 file",
        "ln file hard; echo x >> hard",
        "head -c 3000000 /dev/urandom > big",
    ],
)
def test_afterwards_the_tree_is_as_the_program_left_it(
    project: Path, tmp_path: Path, stockade_home: Path, script: str
) -> None:
    plain = tmp_path / "plain"
    subprocess.run(["cp", "-a", str(project), str(plain)], check=True)
    if "urandom" not in script:
        subprocess.run(["sh", "-c", script], cwd=plain, check=True)
    workspace = changed(project, script)
    done = workspace.commit()
    if "urandom" not in script:
        assert snapshot(project) == snapshot(plain)
    else:
        assert (project / "big").stat().st_size == 3000000
    assert done.closed and done.held == () and done.changes
    assert layers(stockade_home) == []
    for tree in (project, plain):  # for whoever cleans up
        subprocess.run(["chmod", "-R", "u+rwX", str(tree)], check=True)


class TestWhatIsKept:
    def test_times_of_files_links_and_new_directories(self, project: Path) -> None:
        script = "mkdir d; touch d/f; ln -s x d/l; touch -h -d @1000000000.5 d/f d/l file; echo 1 > file"
        script += "; touch -d @1000000001.25 file; touch -d @999999999 d"
        changed(project, script).commit()
        times = {name: os.lstat(project / name).st_mtime_ns for name in ("d", "d/f", "d/l", "file")}
        second = 1_000_000_000
        assert times == {
            "d": 999999999 * second,
            "d/f": 1000000000 * second + second // 2,
            "d/l": 1000000000 * second + second // 2,
            "file": 1000000001 * second + second // 4,
        }

    def test_holes(self, project: Path) -> None:
        script = "truncate -s 64M holes; printf x | dd of=holes bs=1 seek=33000000 conv=notrunc 2>/dev/null"
        changed(project, script).commit()
        info = (project / "holes").stat()
        assert info.st_size == 64 << 20 and info.st_blocks * 512 < 1 << 20
        with open(project / "holes", "rb") as file:
            file.seek(33000000)
            assert file.read(2) == b"x\0"

    def test_attributes_of_the_user(self, project: Path) -> None:
        try:
            os.setxattr(project / "other", "user.colour", b"red")
        except OSError:
            need(False, "the file system has no user attributes")
        script = "import os; open('file', 'a').write('x'); os.setxattr('file', 'user.note', b'hi')"
        done = changed(project, script + "; open('other', 'a').write('x')", python=True).commit()
        assert os.getxattr(project / "file", "user.note") == b"hi"
        assert os.getxattr(project / "other", "user.colour") == b"red"
        assert [name for name in os.listxattr(project / "file") if "overlay" in name] == []
        assert done.notes == ()

    def test_for_root_the_owners(self, project: Path) -> None:
        applies(IS_ROOT, "only root's runs have files of several owners")
        os.chown(project / "file", 1234, 2345)
        os.chmod(project / "file", 0o666)
        os.chmod(project, 0o777)
        changed(project, "echo x >> file; echo n > new; mkdir d").commit()
        owners = [(project / name).stat() for name in ("file", "new", "d")]
        assert [(info.st_uid, info.st_gid) for info in owners] == [(1234, 2345), (0, 0), (0, 0)]

    def test_a_group_bit_that_the_host_gave_a_directory(self, project: Path) -> None:
        os.chmod(project / "full", 0o2755)
        done = changed(project, "chmod 2750 full; mkdir full/new").commit()
        assert stat.S_IMODE((project / "full").stat().st_mode) == 0o2750
        assert (project / "full" / "new").stat().st_mode & stat.S_ISGID
        assert done.notes == ()

    @pytest.mark.parametrize(
        "name", [b"new\nline", b"\x1b[2J", b"\xff\xfe", b"x" * 255, b" ", b"-rf", "ä€😀".encode(), b"a\\b"]
    )
    def test_any_name(self, project: Path, name: bytes) -> None:
        script = "import os, sys; n = os.fsencode(sys.argv[1]); os.mkdir(n)"
        script += "; open(n + b'/' + n, 'w').write('1')"
        changed(project, script, os.fsdecode(name), python=True).commit()
        assert Path(os.fsdecode(os.path.join(os.fsencode(project), name, name))).read_text() == "1"

    def test_a_deep_tree(self, project: Path) -> None:
        script = "import os\nfor _ in range(300): os.mkdir('d' * 20); os.chdir('d' * 20)"
        script += "\nopen('end', 'w').write('1')"
        workspace = changed(project, script, python=True)
        assert workspace.commit().closed
        here = os.open(project, os.O_RDONLY)
        for _ in range(300):
            below = os.open("d" * 20, os.O_RDONLY, dir_fd=here)
            os.close(here)
            here = below
        assert os.listdir(here) == ["end"]
        os.close(here)
        subprocess.run(["rm", "-rf", str(project / ("d" * 20))], check=True)

    def test_what_is_too_deep_is_refused_by_name(
        self, project: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(workspaces, "DEEPEST", 150)
        workspace = changed(
            project, "import os\nfor _ in range(200): os.mkdir('d'); os.chdir('d')", python=True
        )
        with pytest.raises(SetupError, match="too deep"):
            workspace.commit()
        assert sorted(os.listdir(project)) == ["empty", "file", "full", "link", "other"]

    def test_a_tree_of_very_many_files(self, project: Path) -> None:
        workspace = changed(project, "mkdir m; cd m; for i in $(seq 500); do echo $i > $i; done")
        seen: list[tuple[int, int]] = []
        done = workspace.commit(progress=lambda done, total: seen.append((done, total)))
        assert len(done.changes) == 501 and len(os.listdir(project / "m")) == 500
        assert seen == [(number, 500) for number in range(500)]


class TestChosenPaths:
    def test_only_these_are_taken(self, project: Path) -> None:
        workspace = changed(project, "echo 1 > new; echo x >> file; rm other; echo y >> full/one")
        done = workspace.commit(["file", "full"])
        assert [change.path for change in done.changes] == ["file", "full/one"]
        assert not done.closed and (project / "other").exists() and not (project / "new").exists()
        assert [change.path for change in workspace.changes()] == ["new", "other"]

    def test_a_second_commit_takes_the_rest(self, project: Path) -> None:
        workspace = changed(project, "mkdir d; echo 1 > d/a; echo 2 > d/b; chmod 700 full; echo 3 > full/new")
        workspace.commit(["d/a", "full/new"])
        assert workspace.commit().closed
        assert (project / "d" / "b").read_text() == "2\n"
        assert stat.S_IMODE((project / "full").stat().st_mode) == 0o700

    def test_a_new_directory_above_comes_along(self, project: Path) -> None:
        done = changed(project, "mkdir -p a/b; echo 1 > a/b/c; echo 2 > a/d").commit(["a/b/c"])
        assert [change.path for change in done.changes] == ["a", "a/b", "a/b/c"]

    def test_what_took_the_place_of_a_file_above_comes_along(self, project: Path) -> None:
        changed(project, "rm file; mkdir file; echo 1 > file/x; echo 2 > file/y").commit(["file/x"])
        assert sorted(os.listdir(project / "file")) == ["x"]

    def test_absolute_ones_are_welcome(self, project: Path) -> None:
        done = changed(project, "echo 1 > a; echo 2 > b").commit([str(project / "a"), "./b"])
        assert done.closed

    @pytest.mark.parametrize("path", ["../other", "/etc/passwd", "a/../../b"])
    def test_one_outside_is_refused(self, project: Path, path: str) -> None:
        with pytest.raises(PolicyError, match="is not in the workspace"):
            changed(project, "echo 1 > a").commit([path])

    def test_one_that_has_not_changed_is_refused(self, project: Path) -> None:
        with pytest.raises(NotFoundError, match="'file' has not changed"):
            changed(project, "echo 1 > a").commit(["file"])
        assert not (project / "a").exists()


class TestConflicts:
    """A file of the host that is not what the program saw is never overwritten."""

    @pytest.mark.parametrize(
        ("inside", "outside", "paths"),
        [
            ("echo x >> file", "echo mine > file", ("file",)),
            ("echo x >> file", "chmod 600 file", ("file",)),
            ("echo x >> file", "rm file", ("file",)),
            ("echo x >> file", "rm file; mkdir file", ("file",)),
            ("echo x >> file", "mv other file", ("file",)),
            ("echo x > new", "echo mine > new", ("new",)),
            ("echo x > new", "mv other new", ("new",)),
            ("echo x > new", "mkdir new", ("new",)),
            ("mkdir new", "echo mine > new", ("new",)),
            ("rm file", "echo mine > file", ("file",)),
            ("rm -r full", "echo mine > full/deep/two", ("full",)),
            ("rm -r full", "echo mine > full/deep/new", ("full",)),
            ("rm -r full; echo 1 > full", "echo mine > full/one", ("full",)),
            ("rm -r full; mkdir full", "echo mine > full/one", ("full/one",)),
            ("echo x > full/new", "rm -r full", ("full",)),
            ("echo x > full/new", "rm -r full; echo mine > full", ("full",)),
            ("echo x > full/one", "mv full away; mv empty full; echo mine > full/y", ("full", "full/one")),
            ("echo x > full/one", "mv full away; cp -a away full", ("full", "full/one")),
            ("chmod 700 full", "chmod 750 full", ("full",)),
            ("ln -sfn other link", "ln -sfn empty link", ("link",)),
        ],
    )
    def test_is_told_and_nothing_is_done(
        self, project: Path, inside: str, outside: str, paths: tuple[str, ...]
    ) -> None:
        workspace = changed(project, inside)
        subprocess.run(["sh", "-c", outside], cwd=project, check=True)
        before = snapshot(project)
        with pytest.raises(ConflictError) as caught:
            workspace.commit()
        assert set(caught.value.paths) <= set(paths) and caught.value.paths
        assert snapshot(project) == before
        assert "--force" in caught.value.hint

    @pytest.mark.parametrize(
        ("inside", "outside"),
        [
            ("echo x >> file", "echo mine > other; echo new > full/new"),
            ("echo x > full/new", "echo mine > full/other; rm full/one"),
            ("rm file", "rm file; touch elsewhere"),
            ("echo same > new; echo x >> file", "echo same > new"),
            ("mv file moved", "touch elsewhere"),
            ("echo x >> file", "cat file other > /dev/null; ls -R . > /dev/null"),
        ],
    )
    def test_what_the_host_did_elsewhere_is_none(self, project: Path, inside: str, outside: str) -> None:
        workspace = changed(project, inside)
        subprocess.run(["sh", "-c", outside], cwd=project, check=True)
        workspace.commit()
        if "x >> file" in inside:
            assert (project / "file").read_text() == "old\nx\n"

    def test_both_times_are_said(self, project: Path) -> None:
        workspace = changed(project, "echo x >> file")
        (project / "file").write_text("mine\n")
        with pytest.raises(ConflictError, match=r"file: it changed at .*, the workspace was opened at "):
            workspace.commit()

    def test_a_change_of_the_host_while_the_program_runs_is_one(self, project: Path) -> None:
        with Sandbox(Policy(workspace=str(project))) as box:
            (project / "file").write_text("mine\n")
            result = box.run(["sh", "-c", "echo x >> other; cat file > copy; echo x >> file"])
        with pytest.raises(ConflictError) as caught:
            Workspace.open(result.workspace_id).commit()
        assert caught.value.paths == ("file",)

    def test_a_file_that_was_written_just_before_is_none(self, project: Path) -> None:
        """Files get their times from a clock that stands still for milliseconds, unless looked at."""
        stamp = os.open(project / "file", os.O_RDONLY)
        first = os.fstat(stamp).st_ctime_ns
        os.fchmod(stamp, 0o640)
        fine = os.fstat(stamp).st_ctime_ns - first > 0 and os.fstat(stamp).st_ctime_ns % 1_000_000 != 0
        os.close(stamp)
        need(fine, "no multigrain timestamps: Linux 6.13 and ext4, xfs, btrfs or tmpfs have them")
        for turn in range(20):
            (project / "file").write_text(f"{turn}\n")
            changed(project, "echo x >> file").commit()

    def test_the_same_file_in_the_same_moment_after_is_one(self, project: Path, stockade_home: Path) -> None:
        state.ensure(str(stockade_home))
        for turn in range(50):
            layer = stockade_home / "workspaces" / f"turn{turn}"
            (layer / "upper").mkdir(parents=True)
            (layer / "upper" / "file").write_text("inside\n")
            metadata.write(str(layer), str(project), project.stat().st_ino, metadata.Rules())
            (project / "file").write_text(f"{turn}\n")
            with pytest.raises(ConflictError):
                Workspace.open(f"turn{turn}").commit()

    def test_a_tree_that_was_replaced_as_a_whole_is_one(self, project: Path) -> None:
        workspace = changed(project, "echo x > new")
        project.rename(project.parent / "away")
        subprocess.run(["cp", "-a", str(project.parent / "away"), str(project)], check=True)
        with pytest.raises(ConflictError, match="another directory replaced it"):
            workspace.commit()

    def test_a_clock_that_was_set_back_makes_every_time_doubtful(self, project: Path) -> None:
        workspace = changed(project, "echo x >> file")
        later = {"opened": time.time_ns() + 3600 * 10**9}
        pretend_record(workspace, **later)
        with pytest.raises(ConflictError, match="the clock is behind"):
            Workspace.open(workspace.id).commit()

    def test_a_clock_that_was_set_back_a_little_counts_as_much_earlier(self, project: Path) -> None:
        workspace = changed(project, "echo x >> file")
        # As if the clock had shown a minute more while the program ran, until after the file was written.
        pretend_record(workspace, since_boot=workspace.record.since_boot - 60 * 10**9)
        with pytest.raises(ConflictError, match="it changed at"):
            Workspace.open(workspace.id).commit()

    @pytest.mark.parametrize("force", [["file"], ["."], ["full", "file"]])
    def test_forced_by_name_it_is_overwritten(self, project: Path, force: list[str]) -> None:
        workspace = changed(project, "echo x >> file")
        (project / "file").write_text("mine\n")
        assert workspace.commit(force=force).closed
        assert (project / "file").read_text() == "old\nx\n"

    def test_another_name_forces_nothing(self, project: Path) -> None:
        workspace = changed(project, "echo x >> file; echo y >> other")
        (project / "file").write_text("mine\n")
        (project / "other").write_text("mine\n")
        with pytest.raises(ConflictError) as caught:
            workspace.commit(force=["other"])
        assert caught.value.paths == ("file",)

    @pytest.mark.parametrize("outside", ["rm -r full", "rm -r full; echo mine > full"])
    def test_a_directory_that_is_gone_is_made_again_by_force(self, project: Path, outside: str) -> None:
        workspace = changed(project, "echo x > full/deep/new")
        subprocess.run(["sh", "-c", outside], cwd=project, check=True)
        workspace.commit(force=["full"])
        assert sorted(snapshot(project / "full")) == ["", "deep", "deep/new"]

    def test_a_record_of_the_first_version_is_as_old_as_its_file(self, project: Path) -> None:
        workspace = changed(project, "echo x >> file; echo y > new")
        written = os.stat(f"{workspace.layer}/workspace.json")
        Path(workspace.layer, "workspace.json").write_text(f'{{"lower": "{project}"}}')
        os.utime(f"{workspace.layer}/workspace.json", ns=(written.st_atime_ns, written.st_mtime_ns))
        os.unlink(f"{workspace.layer}/seen")
        (project / "file").write_text("mine\n")
        old = Workspace.open(workspace.id)
        assert old.path == str(project)
        with pytest.raises(ConflictError):
            old.commit()
        assert old.commit(["new"]).changes


def pretend_record(workspace: Workspace, **values: int) -> None:
    import msgspec

    changed = msgspec.structs.replace(metadata.read(workspace.layer), **values)
    Path(workspace.layer, "workspace.json").write_bytes(msgspec.json.encode(changed))


class TestTheLock:
    def test_a_living_sandbox_keeps_a_commit_out(self, project: Path, stockade_home: Path) -> None:
        with Sandbox(Policy(workspace=str(project))) as box:
            box.run(["touch", "new"]).check()
            (id,) = layers(stockade_home)
            workspace = Workspace.open(id)
            assert workspace.in_use() and [change.path for change in workspace.changes()] == ["new"]
            for action in (workspace.commit, workspace.discard):
                with pytest.raises(SetupError, match=f"in use by process {os.getpid()} "):
                    action()
        assert workspace.commit().closed

    def test_a_commit_keeps_another_one_out(self, project: Path) -> None:
        workspace = changed(project, "touch new")

        def meanwhile(*_: int) -> None:
            with pytest.raises(SetupError, match="in use by process"):
                Workspace.open(workspace.id).commit()

        assert workspace.commit(progress=meanwhile).closed

    def test_another_process_is_named(self, project: Path) -> None:
        workspace = changed(project, "touch new")
        code = "import fcntl, os, sys; f = os.open(sys.argv[1], os.O_RDONLY); fcntl.flock(f, fcntl.LOCK_EX)"
        code += "; print(flush=True); sys.stdin.read()"
        command = [sys.executable, "-c", code, workspace.layer]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None and process.stdout.readline() == b"\n"
            with pytest.raises(SetupError, match=rf"in use by process {process.pid} \(python"):
                workspace.commit()
            process.communicate()
        assert workspace.commit().closed


class TestOpening:
    def test_by_the_beginning_of_its_id(self, project: Path) -> None:
        workspace = changed(project, "touch new")
        assert Workspace.open(workspace.id[:6]).id == workspace.id

    @pytest.mark.parametrize("id", ["", "zzz", "../..", "/", "."])
    def test_what_is_not_there(self, project: Path, id: str) -> None:
        changed(project, "touch new")
        with pytest.raises(NotFoundError, match="there is no workspace"):
            Workspace.open(id)

    def test_a_beginning_of_several_names_them(self, project: Path, stockade_home: Path) -> None:
        changed(project, "touch new")
        (stockade_home / "workspaces" / "abcd1").mkdir()
        (stockade_home / "workspaces" / "abcd2").mkdir()
        with pytest.raises(NotFoundError, match="abcd1, abcd2"):
            Workspace.open("abcd")

    def test_the_list_has_the_last_first(self, project: Path) -> None:
        ids = [changed(project, f"touch new{turn}").id for turn in range(3)]
        assert [workspace.id for workspace in Workspace.list()] == ids[::-1]

    def test_a_damaged_record_is_told(self, project: Path) -> None:
        workspace = changed(project, "touch new")
        Path(workspace.layer, "workspace.json").write_text("{")
        with pytest.raises(SetupError, match="it is damaged"):
            Workspace.open(workspace.id)
        assert Workspace.list() == []

    def test_without_the_tree_only_discarding_is_left(self, project: Path, stockade_home: Path) -> None:
        workspace = changed(project, "touch new")
        subprocess.run(["rm", "-r", str(project)], check=True)
        for action in (workspace.changes, workspace.diff, workspace.commit):
            with pytest.raises(NotFoundError, match="cannot be opened: No such file"):
                action()  # type: ignore[operator]
        workspace.discard()
        assert layers(stockade_home) == []

    def test_discarding_leaves_the_tree_alone(self, project: Path, stockade_home: Path) -> None:
        before = snapshot(project)
        changed(project, "rm -r full file; mkdir -p d/e; chmod 000 d/e d").discard()
        assert snapshot(project) == before and layers(stockade_home) == []

    def test_a_path_that_is_not_utf8(self, tmp_path: Path) -> None:
        place = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
        place.mkdir()
        changed(place, "touch new").commit()
        assert os.listdir(place) == ["new"]


def test_nothing_to_commit_closes_the_workspace(project: Path) -> None:
    workspace = changed(project, "touch new")
    (project / "new").touch()
    (project / "new").chmod(os.stat(f"{workspace.layer}/upper/new").st_mode & 0o777)
    done = workspace.commit()
    assert done.closed and done.changes == ()


def test_kept_if_asked_for(project: Path) -> None:
    workspace = changed(project, "touch new")
    assert not workspace.commit(keep=True).closed
    assert Workspace.open(workspace.id).changes() == []


def test_a_place_that_cannot_be_written_is_refused_before_anything_is_done(project: Path) -> None:
    applies(not IS_ROOT, "root writes everywhere")
    workspace = changed(project, "touch new")
    project.chmod(0o555)
    try:
        with pytest.raises(SetupError, match="you may not write to"):
            workspace.commit(force=["."])
    finally:
        project.chmod(0o755)
    assert workspace.commit().closed


def test_a_git_repository_is_as_git_left_it(project: Path) -> None:
    named = "git -c user.name=a -c user.email=b"
    first = f"git init -q; git add .; {named} commit -qm 1"
    subprocess.run(["sh", "-ec", first], cwd=project, check=True)
    script = "git checkout -q -b work; echo x >> file; git rm -q other; mkdir new; echo 1 > new/one"
    script += f"; git add -A; {named} commit -qm 2; git gc -q; git tag done"
    result = stockade.run(["sh", "-ec", script], Policy(workspace=str(project)), timeout=60)
    assert result.ok, result.stderr
    done = Workspace.open(result.workspace_id).commit()
    assert done.held == ()
    subprocess.run(["git", "fsck", "--strict"], cwd=project, check=True, capture_output=True)
    status = subprocess.run(["git", "status", "-bs"], cwd=project, capture_output=True, text=True, check=True)
    assert status.stdout == "## work\n"
