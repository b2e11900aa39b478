"""Descriptors: 0, 1 and 2, all of them pipes or /dev/null, and no other comes in."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

import stockade
from security import arena
from security.arena import inside, outside
from stockade import Policy, Sandbox

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
