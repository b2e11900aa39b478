"""Descriptors: 0, 1 and 2, all of them pipes or /dev/null, and no other comes in."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import subprocess
from pathlib import Path
from subprocess import PIPE

import pytest

import stockade
from attacks import arena
from attacks.arena import inside, outside
from stockade import AsyncSandbox, Policy, Sandbox
from stockade.gate import client

MAGIC = [
    *(f"/proc/self/fd/{number}" for number in range(12)),
    *("/proc/1/cwd", "/proc/1/root", "/proc/self/cwd", "/proc/self/root", "/proc/self/root/../.."),
    "/dev/fd/3",
]


@pytest.fixture
def leaked(hidden: Path) -> object:
    """A directory that the supervisor holds open and forgot to protect from being inherited."""
    descriptor = os.open(hidden, os.O_RDONLY | os.O_DIRECTORY)
    os.set_inheritable(descriptor, True)
    yield descriptor
    os.close(descriptor)


def test_exactly_three_descriptors_come_in(leaked: int, workspace: Path) -> None:
    verdict = inside("descriptors", workspace=str(workspace))
    assert set(verdict["kinds"]) == {"0", "1", "2"}
    control = outside("descriptors", pass_fds=(leaked,))
    assert str(leaked) in control["kinds"]


def test_no_descriptor_leads_up_and_out(leaked: int) -> None:
    assert set(inside("descriptors")["up"].values()) == {"EBADF"}
    assert outside("descriptors", pass_fds=(leaked,))["up"][str(leaked)] == "ok"


def test_none_of_them_can_pass_a_descriptor_on() -> None:
    """SCM_RIGHTS needs a socket, and there is none to a process outside."""
    verdict = inside("descriptors")
    assert set(verdict["sendmsg"].values()) == {"ENOTSOCK"}
    assert set(verdict["kinds"].values()) <= {"p", "c"}


def test_a_second_command_of_a_living_sandbox_gets_no_more_than_the_first(leaked: int) -> None:
    command, _ = arena.command_of("descriptors")
    with Sandbox(Policy()) as box:
        for _ in range(3):
            verdict = arena.verdict_of(box.run(command).stdout)
            assert set(verdict["kinds"]) == {"0", "1", "2"}
    assert str(leaked) in outside("descriptors", pass_fds=(leaked,))["kinds"]


def test_a_program_on_a_terminal_has_nothing_but_the_terminal(leaked: int) -> None:
    command, _ = arena.command_of("descriptors")
    with Sandbox(Policy()) as box, box.start(command, pty=True) as process:
        assert process.stdout is not None
        verdict = arena.verdict_of(process.stdout.read())
    assert verdict["kinds"] == {"0": "c", "1": "c", "2": "c"}
    assert str(leaked) in outside("descriptors", pass_fds=(leaked,))["kinds"]


def test_programs_that_run_at_once_have_nothing_of_each_other(leaked: int) -> None:
    """Their keepers are forked while others run; a child of a program has what the program has."""
    command, _ = arena.command_of("descriptors")
    with_child = ["sh", "-c", '"$@" & wait', "sh", *command]

    async def main() -> list[stockade.Result]:
        async with AsyncSandbox(Policy()) as box:
            held = [await box.start(["sleep", "60"], pty=True), await box.start(["cat"], stdin=PIPE)]
            found = await asyncio.gather(*(box.run(one) for one in (command, with_child) for _ in range(4)))
            for process in held:
                process.kill(0)
                await process.wait(10)
                await process.close()
            return list(found)

    for result in asyncio.run(main()):
        assert set(arena.verdict_of(result.stdout)["kinds"]) == {"0", "1", "2"}
    assert str(leaked) in outside("descriptors", pass_fds=(leaked,))["kinds"]


STDIO = {
    "closed": "import os\nfor n in range(3): os.close(n)",
    "swapped": "import os\nos.dup2(1, 0); os.dup2(2, 1); os.dup2(0, 2); os.write(1, b'x')",
    "filled": "import os\nos.set_blocking(1, False)\ntry:\n while True: os.write(1, bytes(65536))\n"
    "except BlockingIOError: pass",
    "reopened": "import os\nfor n in (0, 1, 2):\n"
    " for f in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR):\n"
    "  try: os.open(f'/proc/self/fd/{n}', f | os.O_NONBLOCK)\n  except OSError: pass",
    "grown": "import fcntl\nfor n in (0, 1, 2): fcntl.fcntl(n, 1031, 1 << 20)",
}


@pytest.mark.parametrize("living", [False, True])
@pytest.mark.parametrize("what", STDIO)
def test_whatever_a_program_does_to_its_streams_its_run_ends_by_itself(what: str, living: bool) -> None:
    command = [arena.PYTHON, "-c", STDIO[what]]
    if living:
        with Sandbox(Policy()) as box:
            result = box.run(command, input=b"x" * 100_000, timeout=20)
            assert box.run(["cat"], input=b"alive", timeout=10).stdout == b"alive"
    else:
        result = stockade.run(command, input=b"x" * 100_000, timeout=20)
    assert result.outcome == "exited" and result.usage.wall < 10
    done = subprocess.run(command, input=b"x" * 100_000, capture_output=True, check=False, timeout=20)
    assert done.returncode == result.exit_code


def test_descriptors_that_a_program_has_under_way_keep_no_other_from_starting() -> None:
    """The kernel counts them by user, and compares them with the limit of open files of whoever sends."""
    command, _ = arena.command_of("underway")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with Sandbox(Policy(limits={"files": 256})) as box:
        hoarder = box.start(command, stdout=PIPE)
        assert arena.verdict_of(hoarder.stdout.readline()) == {"stopped": "ETOOMANYREFS"}
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
        try:
            client.shutdown()
            ours, theirs = socket.socketpair()
            with ours, theirs, contextlib.nullcontext() if arena.IS_ROOT else pytest.raises(OSError):
                socket.send_fds(ours, [b"1"], [0])
            assert stockade.run(["echo", "hello"]).text == box.run(["echo", "hello"]).text == "hello\n"
            assert resource.getrlimit(resource.RLIMIT_NOFILE) == (200, hard)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        hoarder.kill(0)
        hoarder.close()


@pytest.mark.parametrize("cwd", MAGIC)
def test_a_command_cannot_begin_in_a_directory_behind_a_magic_link(cwd: str) -> None:
    """CVE-2024-21626: a leaked descriptor as the working directory led to the host's root."""
    result = stockade.run(["pwd"], cwd=cwd, timeout=10)
    assert (result.outcome, result.stdout) == ("setup-failed", b""), result


@pytest.mark.parametrize("target", ["/proc/self/fd/5", "/proc/1/cwd", "/proc/self/root", "hidden"])
def test_a_link_in_the_workspace_is_no_way_to_begin_elsewhere(
    workspace: Path, hidden: Path, target: str
) -> None:
    (workspace / "there").symlink_to(hidden if target == "hidden" else target)
    policy = Policy(workspace=str(workspace))
    result = stockade.run(["pwd"], policy, cwd=str(workspace / "there"), timeout=10)
    assert (result.outcome, result.stdout) == ("setup-failed", b""), result


def test_outside_a_leaked_descriptor_does_serve_as_the_working_directory(leaked: int, hidden: Path) -> None:
    done = subprocess.run(
        ["cat", "secret"], cwd=f"/proc/self/fd/{leaked}", capture_output=True, pass_fds=(leaked,), check=True
    )
    assert done.stdout == (hidden / "secret").read_bytes()
