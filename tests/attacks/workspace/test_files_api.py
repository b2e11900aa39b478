"""`box.files` against a program that lays traps for it: nothing leads out, nothing makes it wait.

Each trap is first walked into the naive way: by the path on the host, or by a
path below the descriptor of the sandbox's root, which is not the kernel's idea
of a root.
"""

from __future__ import annotations

import contextlib
import io
import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stockade import DeniedError, LimitError, NotFoundError, Sandbox, StockadeError
from stockade.linux import openat2
from stockade.sandbox import Process
from stockade.workspace.files import atomic_write
from stockade.workspace.files.files import Files
from support.boxfiles import sandbox, sh
from support.means import applies, need_program

PYTHON = "/usr/bin/python3"
IS_ROOT = os.geteuid() == 0
#: No call may take longer, whatever lies in its way.
SOON = openat2.PATIENCE + 3

SWAP = """
import ctypes, sys
libc = ctypes.CDLL(None)
print("swapping", flush=True)
while True:
    libc.renameat2(-100, b"dir", -100, b"link", 2)
"""
LEASE = """
import fcntl, os, signal, sys, time
signal.signal(signal.SIGIO, signal.SIG_IGN)
file = os.open("leased", os.O_RDWR | os.O_CREAT)
os.write(file, b"x")
fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
print("held", flush=True)
time.sleep(float(sys.argv[1]))
"""
PLANT = """
import os
print("planting", flush=True)
while True:
    for name in os.listdir("."):
        if name.startswith(".stockade-"):
            try:
                os.unlink(name)
                os.symlink("OUTSIDE/planted", name)
            except OSError:
                pass
"""


@contextlib.contextmanager
def working(box: Sandbox, program: str, *words: str) -> Iterator[Process]:
    """A program inside that has begun its work."""
    process = box.start([PYTHON, "-c", program, *words])
    try:
        assert process.stdout is not None and process.stdout.readline(), process.wait().stderr
        yield process
    finally:
        process.kill()
        process.wait()


def naively(files: Files, path: str | Path, flags: int = os.O_RDONLY) -> bytes:
    """Open below the root's descriptor without openat2, and read a little."""
    assert files._roots.root is not None
    with openat2.held(
        os.open(str(path).lstrip("/"), flags | os.O_NONBLOCK, dir_fd=files._roots.root)
    ) as file:
        return os.read(file, 100) if flags == os.O_RDONLY else b""


def stuck(program: str) -> bool:
    """Whether a program on the host is still waiting after a moment."""
    child = subprocess.Popen([sys.executable, "-c", program])
    try:
        child.wait(1)
        return False
    except subprocess.TimeoutExpired:
        return True
    finally:
        child.kill()
        child.wait()


def acts(files: Files, path: str) -> dict[str, Callable[[], object]]:
    """Every call that takes a path."""
    return {
        "read": lambda: files.read(path),
        "write": lambda: files.write(path, "x"),
        "write-parents": lambda: files.write(f"{path}/a/b", "x", parents=True),
        "append": lambda: files.append(path, "x"),
        "list": lambda: files.list(f"{path}/"),
        "info": lambda: files.info(path),
        "search": lambda: files.search("**", path),
        "move-from": lambda: files.move(path, "stolen"),
        "move-to": lambda: files.move("mine", path, overwrite=True),
        "remove": lambda: files.remove(path),
        "remove-tree": lambda: files.remove(path, recursive=True),
        "mkdir": lambda: files.mkdir(path),
        "mkdir-parents": lambda: files.mkdir(f"{path}/a/b", parents=True),
        "chmod": lambda: files.chmod(path, 0o777),
        "replace": lambda: files.replace(path, "s", "x"),
        "upload": lambda: files.upload(io.BytesIO(b"x"), path),
        "download": lambda: files.download(path, io.BytesIO()),
    }


def state_of(directory: Path) -> dict[str, tuple[int, str]]:
    return {
        str(path): (path.stat().st_mode, path.read_text() if path.is_file() else "")
        for path in (directory, *directory.rglob("*"))
    }


@pytest.mark.parametrize("act", list(acts(None, "")))  # type: ignore[arg-type]
@pytest.mark.parametrize("leaf", ["secret", "missing"])
@pytest.mark.parametrize("mode", ["rw", "overlay"])
def test_no_call_goes_through_an_ancestor_that_is_a_link(
    workspace: Path, hidden: Path, mode: str, leaf: str, act: str
) -> None:
    before = state_of(hidden)
    with sandbox(workspace, mode) as (box, files):
        sh(box, f"ln -s {hidden} ancestor; ln -s ../{hidden.name} climbing; echo x > mine")
        for path in (f"ancestor/{leaf}", f"climbing/{leaf}", str(hidden / leaf)):
            # The private /tmp has room for directories of that name, and they are the sandbox's own.
            refused = (NotFoundError, DeniedError)
            with contextlib.suppress(*refused) if "parents" in act else pytest.raises(refused):
                acts(files, path)[act]()
            assert state_of(hidden) == before
        # The absolute link leads out of a descriptor that is only a directory to the kernel.
        assert naively(files, workspace / "ancestor/secret") == b"the secret\n"


def test_the_naive_write_through_an_ancestor_link_lands_outside(workspace: Path, hidden: Path) -> None:
    with sandbox(workspace, "rw") as (box, files):
        sh(box, f"ln -s {hidden} ancestor")
        naively(files, workspace / "ancestor/one", os.O_WRONLY | os.O_CREAT)
        (workspace / "ancestor/two").write_text("x")
    assert sorted(os.listdir(hidden)) == ["one", "secret", "two"]


@pytest.mark.parametrize("mode", ["rw", "overlay"])
def test_a_link_to_a_secret_of_the_host_shows_nothing(
    workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    key = tmp_path / "home/.ssh/id_rsa"
    key.parent.mkdir(parents=True)
    key.write_text("a private key\n")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    with sandbox(workspace, mode) as (box, files):
        sh(box, f"ln -s {key} key; ln -s /etc/shadow shadow; ln -s key chain; ln -s {key.parent} dir")
        for path in ("key", "chain", "dir/id_rsa", "shadow", str(key), "/etc/shadow"):
            with pytest.raises((NotFoundError, DeniedError)):
                files.read(path)
            with pytest.raises((NotFoundError, DeniedError)):
                files.append(path, "x")
        assert naively(files, workspace / "key") == b"a private key\n"
        assert [info.kind for info in files.list()] == ["link"] * 4
    assert key.read_text() == "a private key\n"


def test_dots_stop_at_the_root(workspace: Path, hidden: Path) -> None:
    chain = "../" * 60
    with sandbox(workspace, "overlay") as (_, files):
        for path in (f"{chain}{hidden}/secret", f"/{chain}{hidden}/secret", f"{chain}etc/shadow"):
            with pytest.raises((NotFoundError, DeniedError)):
                files.read(path)
        with pytest.raises(DeniedError):
            files.write(f"{chain}planted", "x")
        assert files.read(f"{chain}etc/passwd") == files.read("/etc/passwd")
    assert Path(f"{workspace}/{chain}{hidden}/secret").read_text() == "the secret\n"


MAGIC = [
    "/proc/self/root",
    "/proc/1/root",
    "/proc/1/cwd",
    "/proc/self/cwd",
    "/proc/thread-self/root",
    "/dev/fd/0",
]


@pytest.mark.parametrize("magic", MAGIC)
def test_magic_links_are_not_followed(workspace: Path, hidden: Path, magic: str) -> None:
    with sandbox(workspace, "overlay") as (box, files):
        sh(box, f"ln -s {magic} door")
        for way in (magic, "door"):
            for path in (f"{way}{hidden}/secret", f"{way}/etc/shadow", f"{way}{workspace}/x"):
                for act in ("read", "write", "mkdir", "remove-tree", "list"):
                    with pytest.raises((NotFoundError, DeniedError)):
                        acts(files, path)[act]()
        # In the host's own /proc, where an absolute link naively leads, that is the host's root.
        if magic == "/proc/self/root":
            assert naively(files, f"{workspace}/door{hidden}/secret") == b"the secret\n"


@pytest.mark.parametrize(
    "file", ["/proc/1/environ", "/proc/1/maps", "/proc/version", "/proc/kcore", "/proc/kmsg"]
)
def test_windows_on_the_kernel_are_not_read_on_the_programs_behalf(workspace: Path, file: str) -> None:
    with sandbox(workspace, "overlay") as (box, files):
        sh(box, f"ln -s {file} out.txt")
        for path in (file, "out.txt"):
            before = time.monotonic()
            for act in ("read", "append", "write", "download"):
                with pytest.raises((DeniedError, NotFoundError)):
                    acts(files, path)[act]()
            assert time.monotonic() - before < SOON
        if file == "/proc/version":
            assert naively(files, file) == naively(files, workspace / "out.txt") != b""


NODES = {
    "pipe": "mkfifo node",
    "socket": f"{PYTHON} -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"node\")'",
    "tty": "ln -s /dev/tty node",
    "zero": "ln -s /dev/zero node",
    "ptmx": "ln -s /dev/ptmx node",
    "random": "ln -s /dev/random node",
}


@pytest.mark.parametrize("kind", NODES)
def test_what_is_no_file_is_refused_at_once(workspace: Path, kind: str) -> None:
    with sandbox(workspace, "rw") as (box, files):
        sh(box, NODES[kind])
        before = time.monotonic()
        for act in ("read", "write", "append", "upload", "download", "replace", "chmod"):
            with pytest.raises(DeniedError, match="device") as refused:
                acts(files, "node")[act]()
            assert refused.value.hint
        assert time.monotonic() - before < 1
        assert files.info("node").kind in ("pipe", "socket", "link")
        files.remove("node")


def test_the_naive_open_of_a_pipe_waits(workspace: Path) -> None:
    with sandbox(workspace, "rw") as (box, _):
        sh(box, "mkfifo node")
        assert stuck(f"open({str(workspace / 'node')!r})")


@contextlib.contextmanager
def leasing(workspace: Path, seconds: str) -> Iterator[None]:
    """A process of the host's holds a lease; one inside is not let."""
    command = [sys.executable, "-c", LEASE, seconds]
    with subprocess.Popen(command, cwd=workspace, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"held\n"
        try:
            yield
        finally:
            process.kill()


def test_a_lease_makes_nobody_wait_for_long(workspace: Path) -> None:
    with sandbox(workspace, "rw") as (_, files), leasing(workspace, "60"):
        before = time.monotonic()
        with pytest.raises(DeniedError, match="lease"):
            files.read("leased")
        assert time.monotonic() - before < SOON
        # Replacing it and looking at it take no lease away.
        files.write("leased", "new")
        assert files.read("leased") == b"new"
        assert time.monotonic() - before < 2 * SOON


def test_the_naive_open_of_a_leased_file_waits(workspace: Path) -> None:
    with leasing(workspace, "60"):
        assert stuck(f"open({str(workspace / 'leased')!r})")


def test_a_lease_that_is_given_up_is_waited_for(workspace: Path) -> None:
    with sandbox(workspace, "rw") as (_, files), leasing(workspace, "0.5"):
        assert files.read("leased") == b"x"


@pytest.mark.parametrize("path", ["dir/file", "dir/sub/../file", "dir/../dir/file"])
@pytest.mark.parametrize("mode", ["rw", "overlay"])
def test_a_directory_that_is_swapped_for_a_link_never_leads_out(
    workspace: Path, tmp_path: Path, mode: str, path: str
) -> None:
    outside = tmp_path / "outside"
    (outside / "sub").mkdir(parents=True)
    (outside / "keep").write_text("original")
    outcomes = {"ok": 0, "refused": 0}
    with sandbox(workspace, mode) as (box, files):
        sh(box, f"mkdir -p dir/sub; ln -s {outside} link; touch dir/keep")
        with working(box, SWAP):
            until = time.monotonic() + 2
            turn = 0
            while time.monotonic() < until or turn < 1000:
                for name in ("write", "append", "upload", "mkdir", "chmod", "remove-tree"):
                    target = path if name != "chmod" else "dir/keep"
                    try:
                        acts(files, target)[name]()
                        outcomes["ok"] += 1
                    except StockadeError:
                        outcomes["refused"] += 1
                turn += 1
    assert sorted(os.listdir(outside)) == ["keep", "sub"] and not os.listdir(outside / "sub")
    assert (outside / "keep").read_text() == "original"
    assert stat.S_IMODE((outside / "keep").stat().st_mode) != 0o777
    assert outcomes["ok"] > 100 and outcomes["refused"] > 100, outcomes


def test_the_naive_write_loses_the_race(workspace: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    with sandbox(workspace, "rw") as (box, _):
        sh(box, f"mkdir dir; ln -s {outside} link")
        with working(box, SWAP):
            until = time.monotonic() + 20
            while time.monotonic() < until and not os.listdir(outside):
                # Checked, then used: as one does without the kernel's help.
                if not os.path.islink(workspace / "dir"):
                    with contextlib.suppress(OSError):
                        (workspace / "dir/file").write_text("x")
    assert os.listdir(outside) == ["file"]


def test_a_temporary_file_that_is_swapped_for_a_link_pretend(
    workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the file system has no files without a name."""
    monkeypatch.setattr(atomic_write, "_NAMELESS", os.O_RDONLY | os.O_CREAT | os.O_DIRECTORY)
    outside = tmp_path / "outside"
    outside.mkdir()
    with sandbox(workspace, "rw") as (box, files), working(box, PLANT.replace("OUTSIDE", str(outside))):
        until = time.monotonic() + 2
        while time.monotonic() < until:
            with contextlib.suppress(StockadeError):
                files.upload(io.BytesIO(b"x" * 10_000), "file")
            with contextlib.suppress(StockadeError):
                files.append("file", "y")
    assert os.listdir(outside) == []


def test_a_tree_that_changes_while_it_is_removed_takes_nothing_along(workspace: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    (outside / "a").mkdir(parents=True)
    (outside / "a/precious").write_text("x")
    script = f"mkdir -p tree/dir/a tree/x; touch tree/dir/a/precious; ln -s {outside} tree/link"
    with sandbox(workspace, "rw") as (box, files):
        for _ in range(20):
            sh(box, script)
            swapping = 'import os; os.chdir("tree")\n' + SWAP
            with working(box, swapping), contextlib.suppress(StockadeError):
                files.remove("tree", recursive=True)
            with contextlib.suppress(NotFoundError):
                files.remove("tree", recursive=True)
    assert (outside / "a/precious").exists()


def test_other_names_of_a_file_keep_their_content(workspace: Path, tmp_path: Path) -> None:
    for name in ("ours", "naive"):
        (tmp_path / name).write_text("original")
        os.link(tmp_path / name, workspace / name)
    with sandbox(workspace, "rw") as (_, files):
        files.write("ours", "changed")
        files.replace("ours", "changed", "again")
        naively(files, workspace / "naive", os.O_WRONLY | os.O_TRUNC)
    assert (tmp_path / "ours").read_text() == "original" and (workspace / "ours").read_text() == "again"
    assert (tmp_path / "naive").read_text() == ""


def test_a_readable_file_is_not_made_writable_by_a_hard_link(workspace: Path, granted: Path) -> None:
    with sandbox(workspace, "rw", read=[str(granted)]) as (box, files):
        assert not box.run(["ln", str(granted / "file"), "mine"]).ok
        sh(box, f"ln -s {granted}/file mine")
        for act in ("write", "append", "chmod", "replace", "upload"):
            with (
                pytest.raises(DeniedError, match="read-only")
                if act != "replace"
                else contextlib.nullcontext()
            ):
                acts(files, "mine")[act]()
        with pytest.raises(DeniedError, match="read-only"):
            files.replace("mine", "original", "x")
    assert (granted / "file").read_text() == "original\n"


def test_a_file_that_claims_to_be_huge_costs_nothing(workspace: Path) -> None:
    with sandbox(workspace, "overlay") as (box, files):
        sh(box, "truncate -s 7T huge")
        for act in ("read", "download", "replace"):
            with pytest.raises(LimitError):
                acts(files, "huge")[act]()
        assert os.stat(str(workspace).lstrip("/") + "/huge", dir_fd=files._roots.root).st_size == 7 << 40


def test_what_is_mounted_inside_cannot_be_replaced_from_outside(workspace: Path) -> None:
    """The kernel refuses it only to processes of the same mount namespace."""
    (workspace / ".envrc").write_text("original")
    with sandbox(workspace, "rw", protect=[".envrc"]) as (box, files):
        assert not box.run(["sh", "-c", "rm -f .envrc || mv .envrc x || echo x > .envrc"]).ok
        for act in ("write", "append", "move-from", "move-to", "remove", "remove-tree", "chmod", "upload"):
            files.write("mine", "x")
            with pytest.raises(DeniedError):
                acts(files, ".envrc")[act]()
        assert (workspace / ".envrc").read_text() == "original"
        os.unlink(str(workspace / ".envrc").lstrip("/"), dir_fd=files._roots.root)
    assert not (workspace / ".envrc").exists()


def test_root_reads_nothing_that_the_program_may_not(workspace: Path, granted: Path) -> None:
    applies(IS_ROOT, "only root has more rights than its program")
    secret = granted / "file"
    os.chown(secret, 12345, 12345)
    secret.chmod(0o600)
    with sandbox(workspace, "overlay", read=[str(granted)]) as (box, files):
        sh(box, f"ln -s {secret} mine")
        assert not box.run(["cat", "mine"]).ok
        for path in ("mine", str(secret)):
            with pytest.raises(DeniedError, match="ermission"):
                files.read(path)
        assert naively(files, secret) == b"original\n"
        # And it has its own rights back.
        assert secret.read_text() == "original\n"
    with sandbox(workspace, "rw", write=[str(granted)]) as (box, files):
        for act in ("append", "chmod"):
            with pytest.raises(DeniedError):
                acts(files, str(secret))[act]()
    assert secret.read_text() == "original\n"


def test_one_sandboxs_layer_is_not_anothers_to_read(
    workspace: Path, tmp_path: Path, stockade_home: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    with sandbox(workspace, "overlay") as (_, files), sandbox(other, "overlay") as (_, theirs):
        theirs.write("private", "x")
        layers = list(stockade_home.glob("workspaces/*/upper/private"))
        assert len(layers) == 1
        for path in (layers[0], stockade_home / "workspaces", other / "private"):
            with pytest.raises(NotFoundError):
                files.info(path)
            with pytest.raises((NotFoundError, DeniedError)):
                files.write(path, "y")
        assert layers[0].read_text() == "x"


def test_a_mount_that_the_host_puts_over_a_directory_is_not_seen(tmp_path: Path) -> None:
    """In namespaces that are thrown away: the API stays with what the sandbox has."""
    applies(IS_ROOT, "only root may mount on the host")
    script = f"""
import os, subprocess, sys
from pathlib import Path
from stockade import Policy, Sandbox
from support.boxfiles import files_of
workspace = Path({str(tmp_path)!r}) / "w"
(workspace / "dir").mkdir(parents=True)
(workspace / "dir/file").write_text("original")
policy = Policy(workspace={{"path": str(workspace), "mode": "rw"}}, protect=[])
with Sandbox(policy, on_exit="discard") as box, files_of(box) as files:
    subprocess.run(["mount", "-t", "tmpfs", "none", str(workspace / "dir")], check=True)
    (workspace / "dir/planted").write_text("x")
    assert files.read("dir/file") == b"original"
    files.write("dir/new", "x")
    assert [os.path.basename(info.path) for info in files.list("dir")] == ["file", "new"]
    assert os.listdir(workspace / "dir") == ["planted"]
"""
    done = subprocess.run(
        [need_program("unshare"), "--mount", "--propagation", "private", sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert sorted(os.listdir(tmp_path / "w/dir")) == ["file", "new"]
