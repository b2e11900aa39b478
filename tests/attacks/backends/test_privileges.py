"""Privileges: none, and none to be gained from set-uid programs, file capabilities or root's uid."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
from pathlib import Path
from typing import Any

import pytest

import stockade
from attacks import arena
from attacks.arena import inside, outside
from stockade import Policy
from support.means import applies, need

NOBODY = 65534
CAP_NET_RAW = 13


def test_whoever_calls_the_program_has_no_capability() -> None:
    verdict = inside("privileges.c")
    assert verdict == {
        "uid": os.getuid(), "euid": os.getuid(), "egid": os.getgid(), "permitted": 0, "effective": 0,
    }  # fmt: skip
    control = outside("privileges.c", namespaces="user")
    assert control["euid"] == 0 and control["effective"]


def test_nobody_else_can_be_become() -> None:
    verdict = inside("become")
    assert set(verdict.values()) <= {"EPERM", "EINVAL", "EACCES"}, verdict
    applies(arena.IS_ROOT, "refused inside; outside only root can become somebody else")
    assert outside("become") | {"capset": ""} == dict.fromkeys(verdict, "ok") | {
        "capset": "", "setresgid": "EPERM", "setgroups": "EPERM", "nice": "EACCES",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["mount", "su"])
def test_a_set_uid_program_of_the_system_gains_nothing(name: str) -> None:
    applies(name != "su" or not arena.IS_ROOT, "su asks root for nothing and ends at once")
    path = shutil.which(name, path="/usr/bin:/bin")
    need(path is not None and bool(os.stat(path).st_mode & 0o4000), f"no set-uid {name} is installed")
    verdict = inside("setuid", path)
    assert (verdict["euid"], verdict["effective"]) == (os.getuid(), 0), verdict
    control = outside("setuid", path)
    need(control["state"] == "S", f"{name} did not stay to be looked at")
    assert control["euid"] == 0 and control["effective"]


def run_program(path: Path, **policy: Any) -> Any:
    result = stockade.run([str(path)], Policy(**policy), timeout=10)
    assert result.ok, result
    return arena.verdict_of(result.stdout)


def as_nobody(path: Path) -> Any:
    """Started by its descriptor, because the directories above it are closed to others."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        done = subprocess.run(
            [str(path)],
            executable=f"/proc/self/fd/{descriptor}",
            pass_fds=(descriptor,),
            user=NOBODY,
            group=NOBODY,
            extra_groups=[],
            stdout=subprocess.PIPE,
            check=True,
        )
    finally:
        os.close(descriptor)
    return arena.verdict_of(done.stdout)


@pytest.fixture
def program(granted: Path) -> Path:
    copy = granted / "privileges"
    shutil.copy(arena.compiled("privileges.c"), copy)
    copy.chmod(0o755)
    return copy


@pytest.mark.parametrize("how", ["read", "write", "overlay", "rw"])
def test_a_set_uid_file_in_a_grant_gains_nothing(program: Path, how: str) -> None:
    applies(arena.IS_ROOT, "only root can make one that belongs to root")
    program.chmod(0o6755)
    rule = {"workspace": {"path": str(program.parent), "mode": how}, "protect": []}
    verdict = run_program(program, **({how: [str(program.parent)]} if how in ("read", "write") else rule))
    assert (verdict["permitted"], verdict["effective"]) == (0, 0)
    need(as_nobody(program)["euid"] == 0, "the temporary directory ignores set-uid bits")


def test_a_set_uid_file_of_another_user_does_not_change_who_one_is(program: Path) -> None:
    applies(arena.IS_ROOT, "only root can make one that belongs to somebody else")
    os.chown(program, NOBODY, NOBODY)
    program.chmod(0o6755)
    verdict = run_program(program, write=[str(program.parent)])
    assert (verdict["euid"], verdict["egid"]) == (0, 0)
    done = subprocess.run([program], stdout=subprocess.PIPE, check=True)
    need(arena.verdict_of(done.stdout)["euid"] == NOBODY, "the temporary directory ignores set-uid bits")


def test_file_capabilities_gain_nothing(program: Path) -> None:
    applies(arena.IS_ROOT, "only root can give a file capabilities")
    value = struct.pack("<5I", 0x02000001, 1 << CAP_NET_RAW, 0, 0, 0)
    try:
        os.setxattr(program, "security.capability", value)
    except OSError as error:
        need(False, f"the temporary directory has no file capabilities: {error.strerror}")
    verdict = run_program(program, write=[str(program.parent)])
    assert (verdict["permitted"], verdict["effective"]) == (0, 0)
    assert as_nobody(program)["effective"] == 1 << CAP_NET_RAW
