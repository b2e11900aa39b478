"""The attacks that every backend must withstand which claims the control, on all of them but the first.

The first, with every wall, has files of its own here, with a control outside for each attack. These are the
same attacks on the others, whichever there are: what one does not claim is not asked of it, and a policy
that needs it is refused there (`tests/kernel/backends/test_conformance.py`).
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

import stockade
from attacks import arena
from attacks.arena import inside, outside, run
from attacks.backends.test_network import ALLOWED
from attacks.backends.test_processes import NOT_THERE, alive, victim
from attacks.backends.test_syscalls import KERNEL, KEYS, MOUNTS, NAMESPACES, REFUSED, Call, told
from stockade import Policy, Sandbox, backends
from stockade.controls import Control
from support.means import applies, clauses_for

OTHERS = list(backends.BACKENDS)[1:]
#: Refused, whoever refuses: by the mount, by Landlock, or because there is no such thing.
DENIED = {"EPERM", "EACCES", "ENOENT", "EROFS", "EXDEV", "ENOSYS", "ENOTSUP", "EAFNOSUPPORT"}


@pytest.fixture(params=OTHERS)
def walls(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The clauses of a policy for one backend, with what it has only in part accepted."""
    return clauses_for(request.param)


#: What is kept by the gate, and by a filter of the same bytes, whoever made the namespaces.
not_behind_bubblewrap = pytest.mark.parametrize(
    "walls", [name for name in OTHERS if name != "bwrap"], indirect=True
)


def claims(walls: dict[str, Any], *controls: str) -> bool:
    table = backends.load(walls["backend"]).offers(stockade.Host.current())
    return all(table[Control(control)].available for control in controls)


def refused(calls: list[Call], answers: list[str]) -> dict[str, str]:
    """What was not."""
    return {told(call): answer for call, answer in zip(calls, answers, strict=True) if answer not in REFUSED}


def known(calls: list[Call]) -> list[Call]:
    """Those that this architecture has."""
    import pyseccomp

    return [
        call
        for call in calls
        if call.name in ("statmount", "listmount", "open_tree_attr")
        or pyseccomp.resolve_syscall(pyseccomp.Arch.NATIVE, call.name) >= 0
    ]


def test_calls_that_lead_out_or_deep_into_the_kernel_are_refused(walls: dict[str, Any]) -> None:
    """Threats 16, 29, 31, 33, 34. What needs nobody special outside is shown to work there."""
    calls = known([*MOUNTS, *KERNEL, *KEYS, *NAMESPACES])
    words = json.dumps([(call.number, call.arguments) for call in calls])
    assert refused(calls, inside("calls", words, **walls)) == {}
    free = [call for call in calls if call.control == "user"]
    control = outside("calls", json.dumps([(call.number, call.arguments) for call in free]))
    open_there = refused(free, control)
    assert {"clone3", "io_uring_setup", "keyctl", "personality", "unshare"} <= {
        name.partition("-")[0] for name in open_there
    }


@not_behind_bubblewrap
def test_calls_of_another_architecture_end_the_program(walls: dict[str, Any]) -> None:
    applies(os.uname().machine == "x86_64", "int 0x80 and x32 are of x86")
    for attack in ("int80.c", "x32.c"):
        result = run(attack, **walls)
        assert (result.outcome, result.signal) == ("denied", signal.SIGSYS)


def test_no_namespace_can_be_entered(walls: dict[str, Any]) -> None:
    verdict = inside("setns", **walls)
    assert {answer for _, answer in verdict.values()} <= DENIED | {"ESRCH"}, verdict


def test_a_process_outside_can_be_neither_read_nor_seized_nor_ended(walls: dict[str, Any]) -> None:
    """Threats 21, 22, 39."""
    with victim() as (pid, address):
        verdict = inside("processes", pid, address, **walls)
        if not claims(walls, "processes"):
            verdict.pop("pidfd_open")  # that it is there may be learned
        assert set(verdict.values()) <= NOT_THERE, verdict
        assert set(inside("signals", pid, 0, 9, **walls).values()) <= {"ESRCH", "EPERM"}
        result = run("kill_all", **walls)
        assert result.outcome in ("exited", "signalled")
        assert alive(pid)


def test_no_privilege_is_had_or_gained(walls: dict[str, Any]) -> None:
    verdict = inside("privileges.c", **walls)
    assert verdict == {
        "uid": os.getuid(), "euid": os.getuid(), "egid": os.getgid(), "permitted": 0, "effective": 0,
    }  # fmt: skip
    assert set(inside("become", **walls).values()) <= {"EPERM", "EINVAL", "EACCES"}
    path = "/usr/bin/mount"
    # It is looked at through /proc, which not every backend shows.
    if claims(walls, "processes") and os.path.exists(path) and os.stat(path).st_mode & 0o4000:
        verdict = inside("setuid", path, **walls)
        assert (verdict["euid"], verdict["effective"]) == (os.getuid(), 0), verdict


def test_descriptors_lead_nowhere(walls: dict[str, Any], hidden: Path) -> None:
    """Threats 10, 40, 43: none that the supervisor forgot comes in, and none goes out."""
    leaked = os.open(hidden, os.O_RDONLY | os.O_DIRECTORY)
    os.set_inheritable(leaked, True)
    command, _ = arena.command_of("descriptors")
    try:
        with Sandbox(Policy(**walls)) as box:
            verdicts = [arena.verdict_of(box.run(command, timeout=20).stdout) for _ in range(2)]
    finally:
        os.close(leaked)
    for verdict in verdicts:
        assert set(verdict["kinds"]) == {"0", "1", "2"}
        assert set(verdict["up"].values()) == {"EBADF"}
        assert set(verdict["sendmsg"].values()) == {"ENOTSOCK"}


def test_no_command_begins_behind_a_magic_link(walls: dict[str, Any]) -> None:
    """Threat 11, CVE-2024-21626."""
    with Sandbox(Policy(**walls)) as box:
        for cwd in ("/proc/self/fd/3", "/proc/1/cwd", "/proc/self/root", "/dev/fd/3"):
            result = box.run(["pwd"], cwd=cwd, timeout=10)
            assert (result.outcome, result.stdout) == ("setup-failed", b""), result


def test_what_is_hidden_comes_in_by_no_link_or_rename(
    walls: dict[str, Any], granted: Path, hidden: Path
) -> None:
    """Threats 1, 2, 3."""
    for way in ("link", "link-by-descriptor", "move", "symlink-and-read"):
        words = (way, hidden / "secret", granted / way)
        assert inside("files", *words, write=[str(granted)], **walls)[way] in DENIED, way
    assert {path.name for path in granted.iterdir()} <= {"file", "symlink-and-read"}
    assert (hidden / "secret").read_text() == "the secret\n"


def test_nothing_of_the_machine_can_be_written_through_proc(walls: dict[str, Any]) -> None:
    """Threats 9, 12."""
    paths = ("/proc/sysrq-trigger", "/proc/sys/kernel/core_pattern", "/proc/self/exe", "/proc/1/exe")
    assert set(inside("proc", "write", *paths, **walls).values()) <= DENIED | {"ETXTBSY"}
    assert set(inside("proc", "read", "/proc/kcore", "/proc/kmsg", **walls).values()) <= DENIED


def test_no_device_can_be_made(walls: dict[str, Any], granted: Path) -> None:
    assert set(inside("devices", granted, write=[str(granted)], **walls).values()) <= DENIED


@pytest.mark.parametrize("net", [[], "open"], ids=["none", "open"])
def test_no_other_family_of_sockets_is_there(walls: dict[str, Any], net: Any) -> None:
    """Threat 44."""
    every = [f"{family},{kind},0" for family in range(64) if family not in ALLOWED for kind in (1, 2, 3, 5)]
    every += [f"{family},3,{protocol}" for family in (2, 10) for protocol in (1, 6, 17, 58, 255)]
    every += [f"{1 << 32 | 17},3,0", f"16,3,{1 << 32 | 15}"]
    verdict = inside("sockets", *every, net=net, **walls)
    refused = DENIED | {"EOPNOTSUPP", "EPROTONOSUPPORT"}
    open_ones = {words: both for words, both in verdict.items() if not set(both) <= refused}
    assert open_ones == {}


def test_nothing_is_typed_into_a_terminal(walls: dict[str, Any]) -> None:
    """Threat 20. Where programs can open no terminal there is none to type into."""
    result = run("terminal", **walls)
    if result.exit_code:
        assert not claims(walls, "devices") and b"Permission denied" in result.stderr, result.stderr
        return
    verdict = arena.verdict_of(result.stdout)
    assert verdict["typed"] == 0 and set(verdict["TIOCSTI"] + verdict["TIOCLINUX"]) == {"EPERM"}


def test_limits_hold_and_cannot_be_raised(walls: dict[str, Any]) -> None:
    """Threats 23, 25, 28."""
    count, answer = inside("limits", "files", 300, limits={"files": 64}, **walls)
    assert answer == "EMFILE" and count <= 64
    assert inside("limits", "lift", 200, limits={"files": 64}, **walls) == [64, "refused"]
    if claims(walls, "limits.tasks"):
        made, answer = inside("limits", "tasks", 60, limits={"tasks": 20}, **walls)
        assert answer == "EAGAIN" and made <= 20


@not_behind_bubblewrap
def test_neither_output_nor_time_is_had_beyond_the_limit(walls: dict[str, Any]) -> None:
    """Threats 23, 25."""
    result = run("limits", "output", limits={"output": 100_000, "wall": 0.5}, **walls)
    assert result.truncated and result.outcome == "timed-out"
    assert run("limits", "hide", limits={"wall": 0.3}, **walls).outcome == "timed-out"
