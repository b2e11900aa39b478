"""The landlock backend: among the host's processes and in its file tree, nothing of them can be had.

Landlock looks at neither attributes nor named sockets nor other objects of the
same user; the filter has to. And with no pid namespace, nothing must be able
to end or outlive whoever sees to the end of everything.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import stockade
from attacks import arena
from attacks.arena import inside, outside
from stockade import Policy, PolicyError, Sandbox
from stockade.gate import client
from stockade.host import host
from support import leaks
from support.marks import MARK, gone, marked
from support.means import need

PLAIN: dict[str, Any] = {"backend": "landlock", "accept": ["files", "processes", "devices"]}
DENIED = {"EPERM", "EACCES", "ENOSYS", "ENOTSUP", "ENOTTY", "EAFNOSUPPORT"}
IPC_CREAT, IPC_RMID = 0o1000, 0

need(host().has("scopes"), "this kernel's Landlock cannot keep signals inside")


@pytest.fixture
def segment() -> Iterator[int]:
    """A piece of System V shared memory of ours, by its key."""
    libc = ctypes.CDLL(None, use_errno=True)
    key = 0x53000000 | os.getpid()
    number = libc.shmget(key, 4096, IPC_CREAT | 0o600)
    need(number >= 0, "no System V shared memory here")
    yield key
    libc.shmctl(number, IPC_RMID, None)


@pytest.fixture
def queue(segment: int) -> Iterator[int]:
    """And a message queue."""
    libc = ctypes.CDLL(None, use_errno=True)
    name = f"/stockade-{segment}".encode()
    made = libc.mq_open(name, os.O_CREAT | os.O_RDWR, 0o600, None)
    need(made >= 0, "no message queues here")
    yield segment
    os.close(made)
    libc.mq_unlink(name)


def test_nothing_beside_the_rights_to_files_leads_out(granted: Path, hidden: Path, queue: int) -> None:
    secret = hidden / "secret"
    try:
        os.setxattr(secret, "user.secret", b"x")
    except OSError as error:
        need(False, f"the temporary directory has no attributes: {error.strerror}")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end, socket.socket(socket.AF_UNIX) as listener:
        end.bind(str(granted / "d"))
        end.setblocking(False)
        listener.bind(str(granted / "s"))
        listener.listen(1)
        words = (granted / "file", secret, granted / "d", granted / "s", queue)
        for net in ((), "open"):
            verdict = inside("beside", *words, read=[str(granted)], net=net, **PLAIN)
            # A pair that is connected stays so.
            assert verdict.pop("stream") == ("EISCONN" if net else "EPERM")
            assert set(verdict.values()) <= DENIED, verdict
        with pytest.raises(BlockingIOError):
            end.recv(1)
        before = (granted / "file").stat()
        assert before.st_mode & 0o777 == 0o644 and secret.stat().st_mtime > 1
        control = outside("beside", *words)
        assert end.recv(1) == b"x"
    control.pop("stream")
    control.pop("set-flags")  # not every file system has any
    assert set(control.values()) == {"ok"}, control


@pytest.mark.parametrize("way", ["link", "link-by-descriptor", "move", "symlink-and-read"])
def test_what_is_hidden_does_not_come_into_a_writable_directory(
    granted: Path, hidden: Path, way: str
) -> None:
    words = (way, hidden / "secret", granted / "new")
    assert inside("files", *words, write=[str(granted)], **PLAIN)[way] in DENIED | {"EXDEV"}
    if way == "symlink-and-read":
        (granted / "new").unlink()
    assert not (granted / "new").exists()
    assert outside("files", *words) == {way: "ok"}


def test_a_program_that_is_not_granted_is_not_executed(hidden: Path) -> None:
    program = hidden / "program"
    shutil.copy("/bin/true", program)
    assert inside("files", "execute", program, **PLAIN) == {"execute": "EACCES"}
    assert subprocess.run([program], check=False).returncode == 0


def test_a_named_socket_cannot_even_be_made(granted: Path) -> None:
    with socket.socket(1) as end:
        end.bind(str(granted / "s"))
        end.listen(1)
        for clause in ("read", "write"):
            result = arena.run("unix_sockets", "stream", granted / "s", **{clause: [str(granted)]}, **PLAIN)
            assert b"Address family not supported" in result.stderr
        assert outside("unix_sockets", "stream", granted / "s")["connect"] == "ok"


INTERFACES = """
import array, fcntl, socket, struct
room = array.array("B", bytes(4096))
one, other = socket.socketpair()
try:
    told = fcntl.ioctl(one, 0x8912, struct.pack("iP", 4096, room.buffer_info()[0]))
    print("told", struct.unpack("iP", told)[0])
except OSError as error:
    print(error.strerror)
other.send(b"123")
print(struct.unpack("i", fcntl.ioctl(one, 0x541B, bytes(4)))[0])
"""


def test_a_closed_network_does_not_tell_the_addresses_of_the_host() -> None:
    command = ["/usr/bin/python3", "-c", INTERFACES]
    assert stockade.run(command, Policy(**PLAIN)).text == "Inappropriate ioctl for device\n3\n"
    assert stockade.run(command, Policy(net="open", **PLAIN)).text.startswith("told ")


def test_nothing_of_another_process_is_told(hidden: Path) -> None:
    """Its numbers can be guessed; command lines, environments and what it has open cannot be read."""
    with subprocess.Popen(["sleep", "60"], env={"SECRET": "x"}) as victim:
        try:
            for name in ("cmdline", "environ", "stat", "fd"):
                path = f"/proc/{victim.pid}/{name}"
                assert inside("files", "open", path, **PLAIN)["open"] in DENIED, name
                assert outside("files", "open", path) == {"open": "ok"}
            for name in ("exe", "cwd"):
                path = f"/proc/{victim.pid}/{name}"
                assert inside("files", "readlink", path, **PLAIN)["readlink"] in DENIED, name
                assert outside("files", "readlink", path) == {"readlink": "ok"}
        finally:
            victim.kill()


def test_one_sandbox_cannot_enter_the_home_of_another(hidden: Path) -> None:
    with Sandbox(Policy(**PLAIN)) as one, Sandbox(Policy(**PLAIN)) as other:
        home = one.run(["sh", "-c", "echo secret > ~/file; pwd"]).text.strip()
        for script in (f"cat {home}/file", f"ls {home}", f"echo x > {home}/new", f"rm {home}/file"):
            assert other.run(["sh", "-c", script]).exit_code != 0, script
        assert one.run(["cat", "file"]).text == "secret\n"
        pid = one.start(["sleep", "60"])
        verdict = arena.verdict_of(other.run(arena.command_of("signals", pid.pid, 0)[0]).stdout)
        assert verdict == {"0": "EPERM"}
        pid.kill(0)
        pid.wait(10)
        pid.close()


def gates_of(box: Sandbox) -> tuple[int, int]:
    """The warden and the gate of an open sandbox."""
    assert box._box is not None
    with open(f"/proc/self/fdinfo/{box._box.pidfd}", encoding="ascii") as file:
        warden = next(int(line.split()[1]) for line in file if line.startswith("Pid:"))
    children = Path(f"/proc/{warden}/task/{warden}/children").read_text().split()
    return warden, int(children[0])


@pytest.mark.parametrize("number", [0, signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM, signal.SIGSEGV])
def test_no_program_signals_whoever_keeps_it(number: int) -> None:
    with Sandbox(Policy(**PLAIN)) as box:
        warden, gate = gates_of(box)
        keeper = int(box.run(["sh", "-c", "echo $PPID"]).text)
        for pid in (warden, gate, keeper, *client.resident_pids(), os.getpid()):
            command, _ = arena.command_of("signals", pid, number)
            verdict = arena.verdict_of(box.run(command).stdout)
            assert set(verdict.values()) <= {"EPERM", "ESRCH"}, (pid, verdict)
        assert (
            box.run(["sh", "-c", f"kill -{number or 9} -1; kill -{number or 9} $PPID; echo alive"]).text
            == "alive\n"
        )
        assert box.run(["echo", "alive"]).text == "alive\n"


def test_killing_everything_kills_only_what_is_inside() -> None:
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as victim:
        try:
            verdict = inside("kill_all", **PLAIN)
            assert (verdict["kill"], verdict["bystander"]) == ("ok", signal.SIGKILL)
            assert victim.poll() is None
        finally:
            victim.kill()


DAEMON = f"cd; (setsid sh -c 'trap \"\" TERM; echo >up; sleep 60; :' {MARK} >/dev/null 2>&1 &)"
STARTS_ONE = f"{DAEMON}; until [ -e up ]; do sleep 0.01; done"


@pytest.mark.parametrize(
    ("which", "number"),
    [(0, signal.SIGKILL), (0, signal.SIGTERM), (1, signal.SIGKILL), (1, signal.SIGSTOP)],
    ids=["warden killed", "warden told", "gate killed", "gate stopped"],
)
def test_whichever_of_the_two_keepers_dies_everything_does(which: int, number: int) -> None:
    """By a hand from outside; a program can do neither."""
    with Sandbox(Policy(**PLAIN)) as box:
        process = box.start(["sh", "-c", f"{STARTS_ONE}; sleep 60"])
        while not marked():
            time.sleep(0.01)
        os.kill(gates_of(box)[which], number)
        assert gone()
        assert process.wait(10).exit_code != 0
        process.close()


@pytest.mark.parametrize("living", [False, True])
@pytest.mark.parametrize(("heads", "life"), [(1, 0), (20, 300)])
def test_nobody_forks_faster_than_a_run_is_ended(heads: int, life: int, living: bool) -> None:
    command, program = arena.command_of("comet.c", heads, life, "deaf")
    policy = Policy(read=program, **PLAIN)

    def strays() -> list[str]:
        return [str(one) for one in leaks.family() if "comet" in one.name and not one.zombie]

    if living:
        with Sandbox(policy) as box:
            # One signal reaches all of the run at one instant, so its end is its own.
            assert box.run(command, timeout=0.3, grace=0.1).outcome == "timed-out"
            assert strays() == []
            assert box.run(["echo", "alive"]).text == "alive\n"
    else:
        assert stockade.run(command, policy, timeout=0.3, grace=0.1).outcome == "timed-out"
        assert strays() == []


def test_a_readable_directory_in_a_writable_one_is_refused(granted: Path) -> None:
    (granted / "inner").mkdir()
    with pytest.raises(PolicyError, match="cannot make a part of a writable directory read-only"):
        stockade.run(["true"], Policy(write=[str(granted)], read=[str(granted / "inner")], **PLAIN))


def test_no_policy_lets_a_program_past_the_filter() -> None:
    for name in ("chmod", "inotify_init1", "shmget", "setxattr", "prlimit64"):
        with pytest.raises(PolicyError, match=name):
            stockade.run(["true"], Policy(syscalls={"allow": [name]}, **PLAIN))
    with pytest.raises(PolicyError, match="landlock_restrict_self"):
        stockade.run(["true"], Policy(syscalls={"deny": ["landlock_restrict_self"]}, **PLAIN))


def test_a_set_uid_program_gains_nothing() -> None:
    path = "/usr/bin/mount"
    need(os.path.exists(path) and bool(os.stat(path).st_mode & 0o4000), "no set-uid mount is installed")
    result = stockade.run(["sh", "-c", "mount -t tmpfs x /tmp; grep -c . /etc/shadow"], Policy(**PLAIN))
    assert result.exit_code != 0


@pytest.mark.usefixtures("swept")
def test_the_home_of_a_killed_supervisors_sandbox_is_swept(stockade_home: Path) -> None:
    import sys

    code = (
        "import os, stockade\n"
        f"box = stockade.Sandbox(stockade.Policy(**{PLAIN!r}))\n"
        "box.open()\n"
        "box.run(['sh', '-c', 'mkdir -p ~/a/b; echo x > ~/a/b/c'])\n"
        "print('up', flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    with contextlib.suppress(subprocess.CalledProcessError):
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    [left] = (stockade_home / "scratch").iterdir()
    end = time.monotonic() + 10
    while left.exists() and time.monotonic() < end:
        from stockade.runs.register import register

        register.sweep(str(stockade_home))
        time.sleep(0.05)
    assert not left.exists()
