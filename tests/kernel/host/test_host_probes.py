"""What the probes find: here, as root and as an ordinary user, and where something is in the way."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import msgspec
import pytest

from stockade import host
from stockade.gate import executable
from stockade.host import GATE_PROBES, PROBES, Host, Probe
from support.means import applies, need, need_program

TELL = "import msgspec, sys, stockade.host as h; sys.stdout.buffer.write(msgspec.json.encode(h.probe()))"


def answers(user: int | None = None, names: tuple[str, ...] = GATE_PROBES) -> dict[str, list[str]]:
    """The gate's own lines, as the given user."""
    # By descriptor: the user may not be able to enter the directories above the gate.
    gate = os.open(executable(), os.O_RDONLY)
    try:
        done = subprocess.run(
            [f"/proc/self/fd/{gate}", "probe", *names],
            pass_fds=[gate],
            user=user,
            group=user,
            extra_groups=None if user is None else [],
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        os.close(gate)
    assert done.stderr == ""
    return {line.split("\t")[0]: line.split("\t")[1:] for line in done.stdout.splitlines()}


def behind(*command: str, before: str = "") -> dict[str, Probe]:
    """All probes from a Python that something was done to before."""
    done = subprocess.run(
        [*command, sys.executable, "-c", before + TELL], capture_output=True, check=False, cwd="/"
    )
    assert done.returncode == 0, done.stderr.decode()
    return msgspec.json.decode(done.stdout, type=dict[str, Probe])


def test_every_probe_answers_and_names_a_reason_and_a_fix_if_it_fails() -> None:
    found = host.probe()
    assert tuple(found) == PROBES
    for name, probe in found.items():
        assert probe.ok or (probe.reason and probe.fix), name


def test_everything_works_here_for_root_but_the_task_limit() -> None:
    applies(os.geteuid() == 0, "for root only")
    found = answers()
    need(found["userns"][0] == "ok", "user namespaces do not work on this machine")
    assert [name for name in GATE_PROBES if found[name][0] == "no"] == ["nproc"]
    assert found["nproc"] == ["no", "0", "root's tasks are not counted"]


def test_everything_works_here_for_an_ordinary_user() -> None:
    found = answers(user=65534 if os.geteuid() == 0 else None)
    need(found["userns"][0] == "ok", "user namespaces do not work on this machine")
    assert [name for name in GATE_PROBES if found[name][0] == "no"] == []


def test_the_landlock_probe_tells_the_abi() -> None:
    need(answers()["landlock"][0] == "ok", "Landlock does not work on this machine")
    assert int(answers()["landlock"][2]) >= 1


def test_an_unknown_probe_is_told_apart_from_a_failed_one() -> None:
    assert answers(names=("usrens",)) == {"usrens": ["no", str(errno.EINVAL), "no such probe"]}


def test_probing_often_leaves_no_process_behind() -> None:
    for _ in range(10):
        assert len(answers()) == len(GATE_PROBES)


def test_user_namespaces_switched_off_by_sysctl() -> None:
    unshare = need_program("unshare")
    need(host.probe(["userns"])["userns"].ok, "user namespaces do not work on this machine")
    # The setting belongs to each user namespace: this changes only the child's own.
    off = 'echo 0 > /proc/sys/user/max_user_namespaces; exec "$@"'
    found = behind(unshare, "--user", "--map-root-user", "sh", "-c", off, "sh")
    for name in ("userns", "mountapi", "pidns", "netns", "ipcns", "overlay"):
        assert not found[name].ok
        assert found[name].errno == errno.ENOSPC
        assert "switched off by user.max_user_namespaces=0" in found[name].reason
        assert found[name].fix == "sudo sysctl -w user.max_user_namespaces=65536"
    assert found["landlock"].ok and found["seccomp"].ok and found["pidfd"].ok


def test_user_namespaces_blocked_by_a_seccomp_filter() -> None:
    block = (
        "import errno, pyseccomp as s; f = s.SyscallFilter(s.ALLOW);"
        "f.add_rule(s.ERRNO(errno.EPERM), 'unshare'); f.load();"
    )
    found = behind(before=block)
    assert found["userns"].errno == errno.EPERM
    assert found["userns"].detail == "unshare(CLONE_NEWUSER)"
    assert "the environment of Stockade" in found["userns"].reason
    assert "seccomp" in found["userns"].fix
    assert found["seccomp"].ok


def test_a_filter_that_kills_is_an_answer_too() -> None:
    block = (
        "import pyseccomp as s; f = s.SyscallFilter(s.ALLOW);f.add_rule(s.KILL_PROCESS, 'unshare'); f.load();"
    )
    found = behind(before=block)
    assert found["userns"].detail == "ended by signal 31"
    assert "a seccomp filter around Stockade kills every process that tries" in found["userns"].reason
    assert found["pidfd"].ok


def test_a_masked_proc_as_in_a_container() -> None:
    unshare = need_program("unshare")
    need(host.probe(["pidns"])["pidns"].ok, "pid namespaces do not work on this machine")
    mask = 'mount --bind /dev/null /proc/cmdline && exec "$@"'
    found = behind(unshare, "--user", "--map-root-user", "--mount", "sh", "-c", mask, "sh")
    assert found["userns"].ok
    assert not found["pidns"].ok
    assert "parts of /proc are masked" in found["pidns"].reason
    assert "systempaths=unconfined" in found["pidns"].fix or "unmask=ALL" in found["pidns"].fix


def test_a_gate_that_hangs_costs_only_the_probes_it_did_not_answer(
    tmp_path: os.PathLike[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = os.path.join(tmp_path, "gate")
    with open(gate, "w", opener=lambda path, flags: os.open(path, flags, 0o755)) as file:
        file.write("#!/bin/sh\nprintf 'userns\\tok\\t0\\t\\n'\nexec sleep 60\n")
    monkeypatch.setattr("stockade.gate.executable", lambda: gate)
    monkeypatch.setattr(host, "_SECONDS_PER_PROBE", 0.2)
    found = host.probe(["userns", "pidns"])
    assert found["userns"].ok
    assert (found["pidns"].ok, found["pidns"].errno) == (False, errno.ETIMEDOUT)
    assert "did not end in time" in found["pidns"].reason


def test_a_missing_gate_is_said_to_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stockade.gate.executable", lambda: "/nonexistent/gate")
    found = host.probe(["userns"])["userns"]
    assert "the gate could not be started" in found.reason
    assert "install Stockade again" in found.fix


def test_a_pretended_host_lacks_exactly_what_it_is_told_to() -> None:
    weak = Host.pretend(without=("userns", "overlay"), landlock=3)
    assert [name for name in PROBES if not weak.has(name)] == ["userns", "overlay"]
    assert weak.landlock == 3
    assert Host.pretend(without=("landlock",)).landlock == 0
    with pytest.raises(ValueError, match="no such probe: usrens"):
        Host.pretend(without=("usrens",))


def test_the_current_host_is_the_one_that_was_found() -> None:
    assert Host.current() is host.host()
