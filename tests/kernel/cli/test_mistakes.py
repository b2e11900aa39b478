"""Mistakes of a first day: each message says what happened, why, and what to type next."""

from __future__ import annotations

import errno
import os
import signal
import struct
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from msgspec.structs import replace

from stockade import Policy, UnsupportedError
from stockade.backends.selection import select
from stockade.cli import main
from stockade.host import Host
from stockade.host.advice import explain
from stockade.host.capabilities import Probe
from support import installs as made
from support.cli import STOCKADE
from support.installs import SYSTEM_PATH, program
from support.means import applies, need, need_program
from support.screens import stockade as at_terminal

Prepare = Callable[[Path], Sequence[str]]


def typed(*arguments: str) -> Prepare:
    """A command line that needs nothing prepared."""
    return lambda _: arguments


def with_file(name: str, text: str | bytes, *arguments: str, mode: int = 0o755) -> Prepare:
    def prepare(place: Path) -> Sequence[str]:
        data = text if isinstance(text, bytes) else text.format(place=place).encode()
        (place / name).write_bytes(data)
        (place / name).chmod(mode)
        return [argument.format(place=place) for argument in arguments]

    return prepare


def elf(machine: int, interpreter: bytes = b"/lib/ld-nowhere.so.1\0") -> bytes:
    """The head of a program for some machine, with the loader that it asks for."""
    head = b"\x7fELF\x02\x01\x01" + bytes(9)
    head += struct.pack("<HHIQQQIHHHHHH", 3, machine, 1, 0x1000, 64, 0, 0, 64, 56, 1, 0, 0, 0)
    entry = struct.pack("<IIQQQQQQ", 3, 4, 120, 0x78, 0x78, len(interpreter), len(interpreter), 1)
    return head + entry + interpreter


def hidden_interpreter(place: Path) -> Sequence[str]:
    tool = program(place.parent / "elsewhere/python")
    program(place / "job", f"#!{tool}\n")
    return ["run", "--no-toolchain", "--", "./job"]


def hidden_install(place: Path) -> Sequence[str]:
    prefix = made.python(place.parent / "pythons/3.77", "3.77")
    os.environ["PATH"] = f"{prefix}/bin:{SYSTEM_PATH}"
    return ["run", "--no-toolchain", "--", "python3.77"]


def outside(place: Path) -> Sequence[str]:
    (place.parent / "data.csv").write_text("1,2\n")
    return ["run", "--", "cat", "../data.csv"]


def new_outside(place: Path) -> Sequence[str]:
    (place.parent / "other").mkdir()
    return ["run", "--", "touch", "../other/x"]


PYTHON_REACHES = "import socket; socket.create_connection(('192.0.2.1', 443))"
PYTHON_ASKS = "import socket; socket.getaddrinfo('example.org', 443)"

#: What is typed; then, in the words of the message: what happened, why, and what to type next.
MISTAKES: dict[str, tuple[Prepare, str, str, str]] = {
    "a path that is not there": (
        typed("run", "--read", "/srv/no/such", "--", "true"),
        'read = "/srv/no/such"', "/srv/no/such does not exist", 'write "/srv/no/such?" if it may be missing',
    ),
    "a workspace that is not there": (
        typed("run", "-w", "/no/such", "--", "true"),
        'workspace = "/no/such"', "/no/such does not exist", "/ exists, the rest of the path does not",
    ),
    "a file as the workspace": (
        with_file("file", "", "run", "-w", "file", "--", "true"),
        'workspace = "file"', "is not a directory", "name the directory that it is in",
    ),
    "the system as a place to write": (
        typed("run", "--write", "/usr/local", "--", "true"),
        'write = "/usr/local"', "/usr belongs to the system", "write elsewhere, then copy",
    ),
    "a hidden interpreter": (
        hidden_interpreter,
        "./job", "elsewhere/python is hidden by the policy", "--read",
    ),
    "a hidden install": (
        hidden_install,
        "python3.77: ", "is hidden by the policy", "leave --no-toolchain",
    ),
    "an interpreter that is not installed": (
        with_file("job", "#!/usr/bin/python4\n", "run", "--", "./job"),
        "./job", "names /usr/bin/python4, which this machine does not have", "install it, or change the line",
    ),
    "line ends of Windows": (
        with_file("job", "#!/bin/sh\r\necho\r\n", "run", "--", "./job"),
        "./job", "ends in a carriage return", "sed -i 's/\\r$//'",
    ),
    "a script without a first line": (
        with_file("job", "echo hello\n", "run", "--", "./job"),
        "cannot be executed inside", "it is not a program and has no #! line", "#!/bin/sh",
    ),
    "an empty file": (
        with_file("job", "", "run", "--", "./job"),
        "cannot be executed inside", "the file is empty", "write a program into it",
    ),
    "not executable": (
        with_file("job.py", "#!/usr/bin/env python3\n", "run", "--", "./job.py", mode=0o644),
        "Permission denied", "the file is not executable", "stockade run -- python3 ./job.py",
    ),
    "a directory as the command": (
        typed("run", "--", "/usr/bin"), "cannot be executed", "it is a directory", "name a program in it",
    ),
    "a program for another machine": (
        with_file("job", elf(20), "run", "--", "./job"),
        "cannot be executed inside", "it is built for another machine", "use a build for this machine",
    ),
    "a program for another system": (
        with_file("job", elf(62), "run", "--", "./job"),
        "./job", "needs the loader /lib/ld-nowhere.so.1", "use a build for this one",
    ),
    "a command that is not there": (
        typed("run", "--", "pyhton3"),
        "error: pyhton3:", "there is no such command inside", "check its name, or install it",
    ),
    "a command in one word": (
        typed("run", "--", "ls -l"), "ls -l", "one word with spaces", "stockade run -- ls -l;",
    ),
    "a word of the shell's": (
        typed("run", "--", "cd", "/tmp"), "cd", "built into the shell", "stockade run -- sh -c 'cd ...'",
    ),
    "a program of the current directory": (
        with_file("job", "#!/bin/sh\n", "run", "--", "job"),
        "job: there is no such command", "there is a file of that name in", "write ./job",
    ),
    "a path with a mistake": (
        typed("run", "--", "./bin/job"), "no such file inside", "/bin/job", "exists, what follows does not",
    ),
    "no network": (
        typed("run", "--", "/usr/bin/python3", "-c", PYTHON_REACHES),
        "the program tried to use the network", "the policy gives it none", "--net open",
    ),
    "no network to look up names": (
        typed("run", "--", "/usr/bin/python3", "-c", PYTHON_ASKS),
        "the program tried to use the network", "the lookup of a name", "--net open",
    ),
    "a file outside the workspace": (
        outside, "No such file", "data.csv exists on the host, but the policy does not show it", "--read",
    ),
    "a read-only place": (
        typed("run", "--", "touch", "/usr/share/x"),
        "Read-only file system", "belongs to the system and is read-only", "write to the workspace",
    ),
    "a new file outside the workspace": (
        new_outside, "No such file", "exists on the host, but the policy does not show it", "--write",
    ),
    "a read-only workspace": (
        typed("run", "--mode", "ro", "--", "mkdir", "./x"),
        "Read-only file system", "is read-only inside", "--mode overlay",
    ),
    "a command missing in a shell": (
        typed("run", "--", "sh", "-c", "pyhton3"),
        "not found", "a shell exits with 127", "--toolchain NAME",
    ),
    "an unknown option": (
        typed("run", "--raed", "/x", "--", "true"),
        "unknown option --raed", "did you mean --read?", "--help",
    ),
    "a terminal as docker gives one": (
        typed("run", "-it", "--", "bash"),
        "unknown option -it", "gets a terminal of its own automatically", "leave it out",
    ),
    "a volume": (
        typed("run", "-v", "/data:/data", "--", "ls"),
        "-v /data:/data", "mounts nothing", "--read /path",
    ),
    "a volume and an image": (
        typed("run", "-v", "/data:/data", "alpine", "ls"),
        "-v /data:/data", "mounts nothing", "--read /path",
    ),
    "a network by docker's name": (
        typed("run", "--net", "host", "--", "true"),
        "--net host", "is not a rule", "write --net open",
    ),
    "a place to write that is not there": (
        typed("run", "--write", "/srv/no such", "--", "true"),
        'write = "/srv/no such"', "does not exist", "`mkdir -p '/srv/no such'` makes it",
    ),
    "a Python script without a first line": (
        with_file("job.py", "print(1)\n", "run", "--", "./job.py", mode=0o644),
        "Permission denied", "the file is not executable", "stockade run -- python3 ./job.py",
    ),
    "a profile that is none": (
        typed("run", "--profile", "stict", "--", "true"),
        'profile = "stict"', "is not a known value", "did you mean strict?",
    ),
    "a PATH that has not the command": (
        typed("run", "--env", "PATH=/opt/bin", "--", "true"),
        "true: ", "PATH inside is /opt/bin", "--env PATH=/opt/bin:",
    ),
    "an option without its value": (
        typed("run", "--timeout"), "--timeout", "expected one argument", "write the value after the option",
    ),
    "no run": (
        typed("ls", "-l"), "unknown command 'ls'", "to run that program", "stockade run -- ls -l",
    ),
    "an unknown command": (
        typed("runn", "--", "ls"), "unknown command 'runn'", "did you mean", "`stockade run`",
    ),
    "nothing to run": (
        typed("run", "--discard"),
        "there is no command to run", "write it after --", "stockade run -- COMMAND",
    ),
    "a policy with a typing error": (
        with_file("p.toml", 'raed = ["/x"]\n', "run", "-p", "p.toml", "--", "true"),
        "p.toml:1: raed", "there is no such key", "did you mean read?",
    ),
    "a policy that is not TOML": (
        with_file("p.toml", "read = [/x]\n", "run", "-p", "p.toml", "--", "true"),
        "p.toml is not TOML", "line 1", 'read = ["/opt/data"]',
    ),
    "a policy that is not there": (
        typed("run", "-p", "no.toml", "--", "true"),
        "cannot read no.toml", "No such file", "check the path",
    ),
    "a limit that is none": (
        typed("run", "--limit", "memory=lots", "--", "true"),
        'limits.memory = "lots"', "is not a size", '"10M"',
    ),
    "an unknown limit": (
        typed("run", "--limit", "mem=1G", "--", "true"),
        "limits.mem", "there is no such key", "did you mean limits.memory?",
    ),
    "a limit without a value": (
        typed("run", "--limit", "memory", "--", "true"),
        "--limit 'memory'", "is not K=V", "--limit NAME=VALUE",
    ),
    "an unknown backend": (
        typed("run", "--backend", "natvie", "--", "true"),
        'backend = "natvie"', "is not a known value", "did you mean native?",
    ),
    "a time that is none": (
        typed("run", "--timeout", "5x", "--", "true"), "--timeout '5x'", "is not a time", '"30s"',
    ),
    "too little time": (
        typed("run", "--timeout", "100ms", "--", "sleep", "60"),
        "timed-out", "its time limit", "allow more time: --timeout",
    ),
    "too little room": (
        typed("run", "--limit", "disk=1M", "--", "sh", "-c", "head -c 2000000 /dev/zero > big"),
        "No space left on device", "limits.disk = 1M", "--limit disk=2M",
    ),
    "tasks that are no number": (
        typed("run", "--limit", "tasks=nine", "--", "true"),
        'limits.tasks = "nine"', "is not a whole number", "such as 64",
    ),
    "a variable without a value": (
        typed("run", "--env", "CI", "--", "true"), "--env 'CI'", "is not K=V", "--env NAME=VALUE",
    ),
    "a workspace that is not kept": (
        typed("run", "-w", "@zzz", "--", "true"), "'zzz'", "there is no workspace", "`stockade workspaces`",
    ),
    "an install that is not there": (
        typed("run", "--toolchain", "pythn", "--", "true"),
        'toolchain = "pythn"', "no such command in your PATH", "check its name",
    ),
}  # fmt: skip


class Told(NamedTuple):
    """How a command line ended, and what was said on standard error."""

    code: int
    said: str


Tell = Callable[..., Told]


@pytest.fixture
def tell(
    workspace: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Tell]:
    """`stockade` with these arguments in the workspace, in this process: a start of Python costs more."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    monkeypatch.chdir(workspace)

    def told(*arguments: str) -> Told:
        try:
            code = main(list(arguments))
        except SystemExit as end:
            code = int(end.code or 0)
        return Told(code, capfd.readouterr().err)

    yield told
    for number, handler in kept.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_message_says_what_happened_why_and_what_to_type_next(
    name: str, workspace: Path, tell: Tell
) -> None:
    prepare, what, why, then = MISTAKES[name]
    code, said = tell(*prepare(workspace))
    assert code != 0
    assert [part for part in (what, why, then) if part not in said] == [], said


def test_a_closed_workspace_is_refused_with_the_way_to_open_it(workspace: Path, tell: Tell) -> None:
    applies(os.getuid() != 0, "root may enter every directory")
    (workspace / "closed").mkdir(mode=0)
    code, said = tell("run", "-w", "closed", "--", "true")
    assert code == 125 and "you may not read and enter" in said and "chmod u+rwx" in said


@pytest.mark.parametrize("tool", ["strace", "su", "mount"])
def test_a_program_that_no_policy_lets_work_is_told_so(tool: str, tell: Tell) -> None:
    need_program(tool)
    command = {"su": ["su", "-c", "true", "daemon"], "mount": ["mount", "-t", "tmpfs", "none", "/mnt"]}
    code, said = tell("run", "--", *command.get(tool, [tool, "true"]))
    assert code != 0 and "stockade: hint: no process inside " in said


@pytest.mark.parametrize(
    "command", [["false"], ["ls", "no-such-file"], ["grep", "^x", "/etc/passwd"], ["ls", "/", "/tmp", "/x/y"]]
)
def test_what_fails_for_a_reason_of_its_own_gets_no_hint(command: list[str], tell: Tell) -> None:
    code, said = tell("run", "--", *command)
    assert code != 0 and "stockade:" not in said, said


def test_a_quiet_run_gives_no_hints(tell: Tell) -> None:
    code, said = tell("run", "-q", "--", "cat", "/etc/shadow")
    assert code == 1 and "stockade:" not in said


def test_a_place_of_secrets_is_never_advised(
    tmp_path: Path, tell: Tell, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = program(tmp_path / "home/.ssh/tool")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for command in ([str(tool)], ["cat", str(tool)]):
        code, said = tell("run", "--", *command)
        assert code != 0 and str(tool) in said and "--read" not in said and "exists" not in said


def test_memory_that_ran_out_is_told_with_the_limit(tell: Tell) -> None:
    """Or, where no cgroup limits it, how to get one, and how to do without."""
    script = "x = bytearray(1 << 30)"
    code, said = tell("run", "--limit", "memory=16M", "--", "/usr/bin/python3", "-c", script)
    if code == 137:
        parts = ["out-of-memory", 'limits.memory = "16M"', "--limit memory=32M"]
    else:
        parts = ["limits.memory", "cgroup", 'accept = ["limits.memory"]']
    assert [part for part in parts if part not in said] == [], said


FORKS = "for i in 1 2 3 4 5 6 7 8 9; do sleep 1 & done"


def test_too_few_tasks_are_told_with_the_limit(tell: Tell) -> None:
    """Or, for root without a cgroup that counts them, how to get one."""
    code, said = tell("run", "--limit", "tasks=8", "--", "sh", "-c", FORKS)
    parts = ["limits.tasks", "cgroup"] if code == 125 else ["Cannot fork", "8", "--limit tasks=16"]
    assert [part for part in parts if part not in said] == [], said


def test_too_few_tasks_are_told_at_a_terminal_too(workspace: Path) -> None:
    with at_terminal(workspace, "run", "--limit", "tasks=8", "--", "sh", "-c", FORKS) as terminal:
        terminal.until("hint: ")
        if terminal.code() != 125:
            assert "Cannot fork" in terminal.text and "--limit tasks=16" in terminal.text.replace("\n", "")


def test_a_missing_library_is_told_with_the_way_to_show_one(workspace: Path, tell: Tell) -> None:
    need_program("gcc")
    (workspace / "lib.c").write_text("int seven(void) { return 7; }\n")
    (workspace / "main.c").write_text("int seven(void);\nint main(void) { return seven() - 7; }\n")
    elsewhere = workspace.parent / "elsewhere"
    elsewhere.mkdir()
    for command in (
        ["gcc", "-shared", "-o", f"{elsewhere}/libseven.so", "lib.c"],
        ["gcc", "-o", "job", "main.c", f"-L{elsewhere}", "-lseven", f"-Wl,-rpath,{elsewhere}"],
    ):
        subprocess.run(command, cwd=workspace, check=True)
    code, said = tell("run", "--", "./job")
    assert code == 127 and "libseven.so" in said and "a library is missing or hidden" in said
    assert "`--read DIRECTORY` shows a directory" in said
    assert tell("run", "--read", str(elsewhere), "--", "./job").code == 0


def test_a_full_disk_is_told_before_anything_runs(workspace: Path) -> None:
    """In a mount namespace of its own, with a state directory that has no room."""
    need_program("unshare")
    able = subprocess.run(["unshare", "-Urm", "true"], check=False, capture_output=True).returncode == 0
    need(able, "no user namespaces for unshare")
    script = (
        'mount -t tmpfs -o size=32k none "$1" && mkdir -m 700 "$1/state" && '
        'dd if=/dev/zero "of=$1/fill" 2>/dev/null; STOCKADE_HOME="$1/state" exec "$2" run -- true'
    )
    (workspace / "full").mkdir()
    command = ["unshare", "-Urm", "sh", "-c", script, "sh", str(workspace / "full"), STOCKADE]
    done = subprocess.run(
        command, cwd=workspace.parent, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert done.returncode == 125
    told = ["full/state", "No space left on device", "free some space"]
    assert [part for part in told if part not in done.stderr] == [], done.stderr


def test_output_that_cannot_be_written_says_so() -> None:
    with open("/dev/full", "w") as full:
        from support.cli import STOCKADE

        done = subprocess.run(
            [STOCKADE, "profiles"], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 125 and "No space left" in done.stderr and "free some space" in done.stderr


HOST = Host.pretend(without=("bwrap",))
UNSHARE = "unshare(CLONE_NEWUSER)"
APPARMOR = {"kernel.apparmor_restrict_unprivileged_userns": "1"}
#: A pretend host, the probe that fails there and how; then why, and what to type next.
HOSTS: dict[str, tuple[Host, str, int, str, str, str]] = {
    "no user namespaces": (
        replace(HOST, sysctls={"user.max_user_namespaces": "0"}), "userns", errno.ENOSPC, UNSHARE,
        "switched off by user.max_user_namespaces=0", "sudo sysctl -w user.max_user_namespaces=65536",
    ),
    "Debian's switch": (
        replace(HOST, sysctls={"kernel.unprivileged_userns_clone": "0"}), "userns", errno.EPERM, UNSHARE,
        "forbids user namespaces to ordinary users", "sudo sysctl -w kernel.unprivileged_userns_clone=1",
    ),
    "AppArmor": (
        replace(HOST, sysctls=APPARMOR), "userns", errno.EACCES, "write /proc/self/uid_map",
        "AppArmor forbids user namespaces", "sudo apparmor_parser -r /etc/apparmor.d/stockade-gate",
    ),
    "Docker": (
        replace(HOST, container="docker"), "userns", errno.EPERM, UNSHARE,
        "the environment of Stockade (a container", "docker run --security-opt seccomp=unconfined",
    ),
    "Podman": (
        replace(HOST, container="podman"), "pidns", errno.EPERM, "mount proc",
        "parts of /proc are masked", "podman run --security-opt",
    ),
    "WSL 1": (
        replace(HOST, kernel="4.4.0-19041-Microsoft"), "userns", errno.EINVAL, UNSHARE,
        "WSL 1 has no Linux kernel", "wsl --set-version",
    ),
    "WSL 2": (
        replace(HOST, kernel="5.10.16.3-microsoft-standard-WSL2"), "landlock", errno.ENOSYS, "landlock",
        "needs Linux 5.13", "wsl --update",
    ),
    "an old kernel": (
        replace(HOST, kernel="5.4.0-150-generic"), "mountapi", errno.ENOSYS, "mount_setattr",
        "needs Linux 5.12, this is 5.4.0", "use Linux 5.12 or newer",
    ),
    "Landlock left out": (
        HOST, "landlock", errno.EOPNOTSUPP, "landlock_create_ruleset",
        "Landlock is switched off at boot", "lsm=...",
    ),
    "no overlayfs": (
        HOST, "overlay", errno.ENODEV, "mount overlay", "no overlayfs loaded", "sudo modprobe overlay",
    ),
    "macOS": (
        Host.pretend(system="darwin"), "userns", errno.ENOSYS, "userns",
        "the seatbelt backend has never been run on macOS", "use a Linux machine",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTS)
def test_a_host_that_cannot_says_why_and_what_would_help(name: str) -> None:
    host, probe, number, detail, why, then = HOSTS[name]
    reason, fix = explain(probe, number, detail, host, "/opt/stockade-gate")
    failed = Probe(ok=False, errno=number, detail=detail, reason=reason, fix=fix)
    weak = replace(host, probes={**host.probes, probe: failed})
    with pytest.raises(UnsupportedError) as refused:
        select(Policy(workspace="."), weak)
    assert "no backend on this host enforces the whole policy" in refused.value.message
    assert why in refused.value.message and then in refused.value.hint
