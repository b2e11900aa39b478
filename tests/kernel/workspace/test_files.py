"""`box.files`: a sandbox's files from outside, as the program sees them."""

from __future__ import annotations

import io
import os
import stat
import time
from pathlib import Path

import pytest

from stockade import (
    DeniedError,
    LimitError,
    NotFoundError,
    PolicyError,
    StockadeError,
)
from stockade.errors import FileError
from stockade.linux import openat2
from stockade.workspace.files import tree_operations
from support.boxfiles import names, sandbox, sh

MODES = ["overlay", "rw"]


@pytest.mark.parametrize("mode", MODES)
def test_what_is_written_is_seen_inside_at_once_and_the_other_way_round(workspace: Path, mode: str) -> None:
    (workspace / "there").write_text("before\n")
    with sandbox(workspace, mode) as (box, files):
        assert files.read("there") == b"before\n"
        files.write("there", "from outside\n")
        assert sh(box, "cat there") == "from outside\n"
        sh(box, "echo from inside > there; mkdir new; echo x > new/file")
        assert files.read("there") == b"from inside\n"
        assert files.read(str(workspace / "new/file")) == b"x\n"
    assert (workspace / "there").read_text() == ("before\n" if mode == "overlay" else "from inside\n")


def test_a_reader_that_waits_inside_sees_a_file_appear_whole(workspace: Path) -> None:
    with sandbox(workspace) as (box, files):
        script = "until [ -e ready ]; do sleep 0.01; done; wc -c < ready"
        waiting = box.start(["sh", "-c", script])
        files.write("ready", b"x" * 3_000_000)
        assert waiting.stdout is not None and waiting.stdout.read().strip() == b"3000000"
        waiting.wait()


def test_a_file_that_was_deleted_inside_stays_deleted(workspace: Path) -> None:
    (workspace / "doomed").write_text("x")
    (workspace / "tree").mkdir()
    (workspace / "tree" / "old").write_text("x")
    with sandbox(workspace) as (box, files):
        sh(box, "rm doomed; rm -r tree; mkdir tree; touch tree/new .wh.planted")
        assert names(files.list()) == [".wh.planted", "tree"]
        assert names(files.list("tree")) == ["new"]
        assert "doomed" not in names(files.search("**"))
        with pytest.raises(NotFoundError, match="doomed"):
            files.read("doomed")
        with pytest.raises(NotFoundError):
            files.info("doomed")
        files.write("doomed", "again")
        assert sh(box, "cat doomed") == "again"


def test_a_file_that_the_api_deletes_is_gone_inside(workspace: Path) -> None:
    (workspace / "doomed").write_text("x")
    (workspace / "tree/deep").mkdir(parents=True)
    (workspace / "tree/deep/file").write_text("x")
    with sandbox(workspace) as (box, files):
        files.remove("doomed")
        files.remove("tree", recursive=True)
        assert sh(box, "ls -A") == ""
        files.mkdir("tree")
        assert sh(box, "ls -A tree") == ""
    assert (workspace / "tree/deep/file").exists()


def test_nothing_is_written_behind_the_mount(workspace: Path, stockade_home: Path) -> None:
    (workspace / "low").write_text("x")
    with sandbox(workspace) as (box, files):
        sh(box, "exec 3<low; rm low")
        files.write("low", "new")
        inside = sh(box, "stat -c %i low").strip()
        with openat2.held(os.dup(files._roots.workspace or -1)) as overlay:
            assert str(os.stat("low", dir_fd=overlay).st_ino) == inside


def test_relative_paths_count_from_the_workspace_or_the_home(workspace: Path) -> None:
    with sandbox(workspace) as (box, files):
        files.write("x", "1")
        assert files.info("x").path == str(workspace / "x")
        assert sh(box, f"cat {workspace}/x") == "1"
    with sandbox() as (box, files):
        files.write("x", "2")
        assert sh(box, "cat $HOME/x") == "2"


def test_a_write_replaces_and_keeps_the_permission_bits(workspace: Path) -> None:
    with sandbox(workspace) as (box, files):
        sh(box, "echo old > script; chmod 750 script; ln script other")
        files.write("script", "new")
        assert sh(box, "stat -c %a script; cat other") == "750\nold\n"
        files.write("script", "newer", mode=0o600)
        assert files.info("script").mode == 0o600
        assert names(files.list()) == ["other", "script"]


def test_the_bits_that_lend_rights_are_not_handed_on(workspace: Path) -> None:
    with sandbox(workspace, "rw") as (_, files):
        files.write("tool", "x")
        (workspace / "tool").chmod(0o4755)
        files.write("tool", "y")
        assert stat.S_IMODE((workspace / "tool").stat().st_mode) == 0o755
        with pytest.raises(PolicyError, match="4755"):
            files.chmod("tool", 0o4755)


def test_new_files_belong_to_the_user_inside_and_follow_the_umask(workspace: Path) -> None:
    before = os.umask(0o027)
    try:
        with sandbox(workspace) as (box, files):
            files.write("made/deep/file", "x", parents=True)
            mine = f"{os.getuid()} {os.getgid()}"
            said = sh(box, "stat -c '%u %g %a' made made/deep/file")
            assert said == f"{mine} 750\n{mine} 640\n"
    finally:
        os.umask(before)


def test_missing_directories_are_made_on_request_only(workspace: Path) -> None:
    with sandbox(workspace) as (_, files):
        with pytest.raises(NotFoundError, match="a/b/c"):
            files.write("a/b/c", "x")
        files.write("a/b/c", "x", parents=True)
        files.append("d/e", "x", parents=True)
        files.mkdir("f/g", parents=True)
        files.mkdir("f/g", parents=True)
        files.move("d/e", "h/i/j", parents=True)
        found = [info.path.removeprefix(f"{workspace}/") for info in files.search()]
        assert found == ["a", "a/b", "a/b/c", "d", "f", "f/g", "h", "h/i", "h/i/j"]
        with pytest.raises(FileExistsError, match="already"):
            files.mkdir("f/g")


def test_a_write_without_room_says_so_and_leaves_the_old_content(workspace: Path) -> None:
    with sandbox(workspace, "rw", limits={"disk": "1M"}) as (box, files):
        files.write("/tmp/x", "old")
        with pytest.raises(LimitError, match="/tmp/x: No space left"):
            files.write("/tmp/x", b"y" * (2 << 20))
        with pytest.raises(LimitError):
            files.upload(io.BytesIO(b"y" * (3 << 20)), "/tmp/x")
        assert sh(box, "cat /tmp/x; ls -A /tmp | grep '^\\.stockade-'; true") == "old"


@pytest.mark.parametrize("act", ["write", "append", "remove", "mkdir", "chmod", "move", "upload"])
def test_what_is_read_only_inside_is_read_only_here(workspace: Path, act: str) -> None:
    (workspace / "file").write_text("original")
    with sandbox(workspace, "ro") as (_, files):
        acts = {
            "write": lambda: files.write("file", "x"),
            "append": lambda: files.append("file", "x"),
            "remove": lambda: files.remove("file"),
            "mkdir": lambda: files.mkdir("new"),
            "chmod": lambda: files.chmod("file", 0o777),
            "move": lambda: files.move("file", "other"),
            "upload": lambda: files.upload(io.BytesIO(b"x"), "file"),
        }
        with pytest.raises(DeniedError, match="read-only") as refused:
            acts[act]()
        assert refused.value.hint
        assert files.read("file") == b"original"
    assert (workspace / "file").read_text() == "original"


def test_a_single_file_that_is_granted_is_written_in_place(workspace: Path, tmp_path: Path) -> None:
    granted = tmp_path / "granted"
    granted.write_text("a longer original")
    with sandbox(workspace, write=[str(granted)]) as (box, files):
        files.write(str(granted), "new")
        assert sh(box, f"cat {granted}") == "new"
        files.upload(io.BytesIO(b"newer"), str(granted))
        files.append(str(granted), "!")
    assert granted.read_text() == "newer!"


def test_protected_files_stay_as_they_are(workspace: Path) -> None:
    (workspace / ".envrc").write_text("original")
    with sandbox(workspace, "rw", protect=[".envrc"]) as (_, files):
        for act in (
            lambda: files.write(".envrc", "x"),
            lambda: files.append(".envrc", "x"),
            lambda: files.remove(".envrc"),
            lambda: files.move(".envrc", "y"),
            lambda: files.remove(str(workspace), recursive=True),
        ):
            with pytest.raises(DeniedError):
                act()
        assert files.read(".envrc") == b"original"
    assert (workspace / ".envrc").read_text() == "original"


def test_what_is_granted_inside_the_workspace_is_not_removed_with_it(workspace: Path) -> None:
    for name in ("tree/granted", "tree/other"):
        (workspace / name).mkdir(parents=True)
        (workspace / name / "file").write_text("x")
    granted = workspace / "tree/granted"
    with sandbox(workspace, "rw", write=[str(granted)]) as (box, files):
        for act in (
            lambda: files.remove("tree/granted", recursive=True),
            lambda: files.move("tree/granted", "tree/elsewhere"),
            lambda: files.move("tree/other", "tree/granted", overwrite=True),
            lambda: files.remove("tree", recursive=True),
        ):
            with pytest.raises(DeniedError, match="mounted by the policy"):
                act()
        assert sh(box, "cat tree/granted/file") == "x"
    assert (granted / "file").exists()


def test_append_adds_and_makes(workspace: Path) -> None:
    with sandbox(workspace) as (box, files):
        files.append("log", "one\n")
        sh(box, "echo two >> log")
        files.append("log", b"three\n")
        assert files.read("log") == b"one\ntwo\nthree\n"


def test_replace_counts(workspace: Path) -> None:
    with sandbox(workspace) as (box, files):
        sh(box, "printf 'a b a\\377a' > text; chmod 700 text")
        assert files.replace("text", "a", "xyz", count=2) == 2
        assert files.read("text") == b"xyz b xyz\xffa"
        assert files.replace("text", b"\xff", " ") == 1
        assert files.replace("text", "absent", "x") == 0
        assert files.info("text").mode == 0o700
        with pytest.raises(PolicyError):
            files.replace("text", "", "x")


def test_a_read_is_bounded_and_takes_parts(workspace: Path) -> None:
    with sandbox(workspace) as (box, files):
        sh(box, "printf 0123456789 > digits; truncate -s 1T huge")
        assert files.read("digits", offset=2, length=3) == b"234"
        assert files.read("digits", offset=8, length=30) == b"89"
        assert files.read("digits", offset=20) == b""
        with pytest.raises(LimitError, match="larger than 4") as refused:
            files.read("digits", limit=4)
        assert "limit" in refused.value.hint
        with pytest.raises(LimitError):
            files.read("huge")
        with pytest.raises(LimitError):
            files.download("huge", io.BytesIO())
        assert files.read("huge", offset=1 << 39, length=3) == b"\0\0\0"
        with pytest.raises(PolicyError):
            files.read("digits", offset=-1)


def test_upload_and_download_move_streams_and_files(workspace: Path, tmp_path: Path) -> None:
    content = os.urandom(3_000_000)
    there, back = tmp_path / "there", tmp_path / "back"
    there.write_bytes(content)
    with sandbox(workspace) as (box, files):
        assert files.upload(there, "a/b", parents=True, mode=0o640, sync=True) == len(content)
        assert sh(box, "wc -c < a/b; stat -c %a a/b") == "3000000\n640\n"
        assert files.download("a/b", back) == len(content)
        assert back.read_bytes() == content
        part = io.BytesIO()
        assert files.download("a/b", part, offset=10, length=20) == 20
        assert part.getvalue() == content[10:30]
        assert files.upload(io.BytesIO(b"tiny"), "tiny") == 4
        with pytest.raises(LimitError):
            files.upload(io.BytesIO(b"too much"), "tiny", limit=3)
        assert files.read("tiny") == b"tiny"
        with pytest.raises(NotFoundError):
            files.download("absent", tmp_path / "nothing")
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["back", "there"]


def test_a_download_replaces_a_link_instead_of_following_it(workspace: Path, tmp_path: Path) -> None:
    precious, target = tmp_path / "precious", tmp_path / "target"
    precious.write_text("original")
    target.symlink_to(precious)
    with sandbox(workspace) as (_, files):
        files.write("x", "new")
        files.download("x", target)
    assert precious.read_text() == "original" and target.read_text() == "new"


def test_info_says_everything(workspace: Path) -> None:
    start = time.time() - 5
    with sandbox(workspace) as (box, files):
        sh(
            box,
            "printf 123 > file; chmod 604 file; mkdir dir; mkfifo pipe; "
            "ln -s file link; ln -s /absent dangling",
        )
        said = files.info("file")
        user, group = sh(box, "stat -c '%U %G' file").split()
        assert (said.kind, said.size, said.mode, said.owner, said.group) == ("file", 3, 0o604, user, group)
        assert start < said.modified < time.time() + 5
        assert said.created is not None and start < said.created < time.time() + 5
        kinds = {info.path.rpartition("/")[2]: (info.kind, info.target) for info in files.list()}
        assert kinds == {
            "file": ("file", ""),
            "dir": ("directory", ""),
            "link": ("link", "file"),
            "pipe": ("pipe", ""),
            "dangling": ("link", "/absent"),
        }
        assert files.info("link").target == "file"
        assert files.info("/dev/null").kind == "device"
        found = {info.path.rpartition("/")[2]: info.target for info in files.search("**/*l*n*")}
        assert found == {"link": "file", "dangling": "/absent"}


def test_links_are_followed_where_content_is_meant_and_nowhere_else(workspace: Path) -> None:
    with sandbox(workspace) as (box, files):
        sh(
            box,
            "mkdir dir; echo x > dir/file; ln -s dir/file link; ln -s dir dirlink; ln -s dir/new dangling",
        )
        assert files.read("link") == b"x\n"
        files.write("link", "y")
        files.write("dangling", "made")
        files.chmod("link", 0o640)
        assert sh(box, "cat dir/file dir/new; stat -c %a dir/file; readlink link") == "ymade640\ndir/file\n"
        with pytest.raises(NotADirectoryError):
            files.list("dirlink")
        assert names(files.list("dirlink/")) == ["file", "new"]
        files.move("link", "moved")
        files.remove("dirlink", recursive=True)
        assert sh(box, "readlink moved; ls dir") == "dir/file\nfile\nnew\n"


def test_a_listing_is_bounded_and_says_when_it_is_cut(workspace: Path) -> None:
    with sandbox(workspace) as (box, files):
        sh(box, "for i in $(seq 30); do : > f$i; done")
        assert len(files.list()) == 30 and not files.list().cut
        cut = files.list(limit=10)
        assert len(cut) == 10 and "10" in cut.cut
        found = files.search("f*", limit=10)
        assert len(found) == 10 and found.cut
        assert not files.search("f*").cut


def test_a_search_matches_whole_paths(workspace: Path) -> None:
    with sandbox(workspace) as (box, files):
        sh(
            box,
            "mkdir -p src/a/b test .git; "
            "touch top.py src/x.py src/a/y.py src/a/b/z.py src/a/b/z.txt test/x.py .git/h.py",
        )

        def search(pattern: str, path: str = ".") -> list[str]:
            return [info.path.removeprefix(f"{workspace}/") for info in files.search(pattern, path)]

        assert search("*.py") == ["top.py"]
        assert search("src/*.py") == ["src/x.py"]
        assert search("src/**/*.py") == ["src/a/b/z.py", "src/a/y.py", "src/x.py"]
        assert search("**/x.py") == ["src/x.py", "test/x.py"]
        assert search("**/b/**") == ["src/a/b/z.py", "src/a/b/z.txt"]
        assert search("**/[yz].*", "src") == ["src/a/b/z.py", "src/a/b/z.txt", "src/a/y.py"]
        assert search(f"{workspace}/*/x.py") == ["src/x.py", "test/x.py"]
        assert search("**/h.py") == [".git/h.py"]
        assert search("src/**/**/z.txt") == ["src/a/b/z.txt"]
        assert search("nothing/**") == []
        with pytest.raises(PolicyError):
            files.search("/")
        with pytest.raises(NotFoundError):
            files.search("**", "absent")


def test_a_pattern_of_stars_takes_no_time(workspace: Path) -> None:
    with sandbox(workspace) as (_, files):
        files.write("a" * 200, "x")
        files.write("d/" * 30 + "a" * 200, "x", parents=True)
        before = time.monotonic()
        assert len(files.search("**/" * 20 + "*a" * 40 + "b")) == 0
        assert time.monotonic() - before < 5


def test_a_directory_that_cannot_be_read_is_named_by_a_search(workspace: Path) -> None:
    with sandbox(workspace) as (box, files):
        sh(box, "mkdir open closed; touch open/x closed/x; chmod 0 closed")
        found = files.search("**/x")
        assert names(found) == ["x"] and "closed" in found.cut
        with pytest.raises(DeniedError, match="closed"):
            files.list("closed")
        sh(box, "chmod 700 closed")


@pytest.mark.parametrize("name", [os.fsdecode(b"\xff\xfe \n"), "x" * 255, "-rf *", "ünï ☃", ".stockade-x"])
def test_any_name_works(workspace: Path, name: str) -> None:
    with sandbox(workspace) as (box, files):
        files.write(name, "x")
        files.append(name, "y")
        result = box.run(["cat", f"./{name}"])
        assert result.stdout == b"xy"
        assert names(files.list()) == [name] == names(files.search("**"))
        files.move(name, "plain")
        files.move("plain", name)
        files.mkdir("dir")
        files.write(f"dir/{name}", "z")
        files.remove("dir", recursive=True)
        files.remove(name)
        assert len(files.list()) == 0


def test_names_that_cannot_be_are_refused(workspace: Path) -> None:
    with sandbox(workspace) as (_, files):
        with pytest.raises(FileError, match="255"):
            files.write("x" * 256, "x")
        for path in ("", "nul\0byte", ".", "..", "/", "x/.."):
            with pytest.raises(StockadeError):
                files.write(path, "x")
        with pytest.raises(IsADirectoryError, match="directory"):
            files.read(".")


@pytest.mark.parametrize("mode", MODES)
def test_trees_deeper_than_a_path_can_name(workspace: Path, mode: str) -> None:
    deep = "d" * 100
    script = (
        "import os\n"
        f"for _ in range(300):\n    os.mkdir({deep!r}); os.chdir({deep!r})\n"
        "open('bottom', 'w').write('x')\n"
    )
    with sandbox(workspace, mode) as (box, files):
        assert box.run(["/usr/bin/python3", "-c", script]).ok
        bottom = f"{deep}/" * 300 + "bottom"
        assert files.read(bottom) == b"x"
        files.write(bottom, "y")
        found = files.search("**/bottom")
        assert [info.path for info in found] == [f"{workspace}/{bottom}"] and not found.cut
        files.move(deep, "/tmp/moved")  # another mount: copied
        assert files.read("/tmp/moved/" + f"{deep}/" * 299 + "bottom") == b"y"
        files.remove("/tmp/moved", recursive=True)
        assert len(files.list()) == 0 == len(files.search("/tmp/moved"))


def test_a_directory_with_many_files_is_removed(workspace: Path) -> None:
    with sandbox(workspace) as (box, files):
        sh(
            box,
            f"mkdir many; cd many; seq {tree_operations.BATCH * 2 + 5} | xargs touch; mkdir sub; touch sub/x",
        )
        with pytest.raises(FileError, match="not empty"):
            files.remove("many")
        files.remove("many", recursive=True)
        assert len(files.list()) == 0


@pytest.mark.parametrize("mode", MODES)
def test_a_directory_of_the_host_can_be_moved(workspace: Path, mode: str) -> None:
    (workspace / "old/sub").mkdir(parents=True)
    (workspace / "old/sub/file").write_text("x")
    (workspace / "old/sub/file").chmod(0o750)
    (workspace / "old/link").symlink_to("sub/file")
    os.utime(workspace / "old/sub/file", (1000, 1000))
    with sandbox(workspace, mode) as (box, files):
        files.move("old", "new")
        said = sh(box, "ls; cat new/link; readlink new/link; stat -c '%a %Y' new/sub/file")
        assert said == "new\nxsub/file\n750 1000\n"
        files.move("new", "/tmp/new")
        assert sh(box, "ls -A; cat /tmp/new/link") == "x"


def test_a_move_overwrites_only_on_request(workspace: Path) -> None:
    with sandbox(workspace) as (box, files):
        sh(box, "echo 1 > one; echo 2 > two; echo 3 > /tmp/three")
        for target in ("two", "/tmp/three"):
            with pytest.raises(FileExistsError, match="already"):
                files.move("one", target)
        files.move("one", "two", overwrite=True)
        files.move("two", "/tmp/three", overwrite=True)
        assert sh(box, "cat /tmp/three; ls -A") == "1\n"
        with pytest.raises(NotFoundError, match="absent"):
            files.move("absent", "x")


def test_holes_stay_holes_when_a_file_is_copied(workspace: Path) -> None:
    with sandbox(workspace) as (box, files):
        sh(box, "truncate -s 10G /tmp/sparse; echo x | dd of=/tmp/sparse bs=1 seek=5G conv=notrunc 2>&1")
        files.move("/tmp/sparse", "sparse")
        assert (
            sh(box, "stat -c %s sparse; [ $(stat -c %b sparse) -lt 5000 ] && echo few")
            == "10737418240\nfew\n"
        )
