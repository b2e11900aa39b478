"""`stockade doctor`: readable anywhere, honest, and its exit code can be relied on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from stockade import backends, cli, host
from stockade.controls import Control
from stockade.host import Host, Probe
from support.means import need, need_program

Pretend = Callable[[Host], None]
DOCTOR = "import sys; from stockade.cli import main; sys.exit(main(['doctor', *sys.argv[1:]]))"


def doctor(*arguments: str, before: tuple[str, ...] = (), **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*before, sys.executable, "-c", DOCTOR, *arguments],
        capture_output=True,
        text=True,
        env=os.environ | env,
        check=False,
    )


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Pretend:
    """Makes doctor believe that it runs on another host, without other means."""

    def pretend(machine: Host) -> None:
        monkeypatch.setattr(host, "host", lambda fresh, helpers: machine)
        monkeypatch.setattr(
            "stockade.host.engines.find",
            lambda: {"kvm": Probe(ok=False, reason="no /dev/kvm", fix="switch it on")},
        )

    return pretend


def test_this_machine_enforces_the_default_policy() -> None:
    need(host.host().has("userns"), "user namespaces do not work on this machine")
    done = doctor()
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert "This machine can enforce the default policy, by native" in done.stdout
    assert all(f"\n{control}" in done.stdout for control in Control)


def test_a_pipe_gets_neither_colour_nor_wide_lines() -> None:
    done = doctor(COLUMNS="80")
    assert "\x1b" not in done.stdout
    for line in done.stdout.splitlines():
        assert len(line) <= 80 or " " not in line.strip(), line


def test_json_says_everything() -> None:
    told = json.loads(doctor("--json").stdout)
    assert set(told) == {"host", "backends", "means", "default_policy"}
    assert set(told["backends"]["native"]) == {control.value for control in Control}
    for offer in told["backends"]["native"].values():
        assert offer["mechanism"] if offer["available"] else offer["reason"] and offer["fix"]
    assert told["host"]["landlock"] == host.host().landlock
    assert set(told["means"]) == {"bwrap.links", "runsc", "container", "kvm"}


def test_every_control_is_shown_by_every_backend(on: Pretend, capsys: pytest.CaptureFixture[str]) -> None:
    on(Host.pretend())
    assert cli.main(["doctor"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    at = lines.index(["CONTROL", *(name.upper() for name in backends.BACKENDS)])
    marks = {line[0]: line[1:] for line in lines[at + 1 : at + 1 + len(Control)]}
    for number, name in enumerate(backends.BACKENDS):
        for control, offer in backends.load(name).offers(Host.pretend()).items():
            assert marks[control][number] == ("yes" if offer.available else "part" if offer.weaker else "no")
    assert marks["files"] == ["yes", "yes", "part"] and marks["deny"] == ["yes", "no", "no"]


def test_json_has_a_mechanism_or_a_reason_for_every_control_and_backend() -> None:
    told = json.loads(doctor("--json").stdout)["backends"]
    assert set(told) == set(backends.names())
    for table in told.values():
        assert set(table) == {control.value for control in Control}
        assert all(offer["mechanism"] if offer["available"] else offer["reason"] for offer in table.values())


def test_a_really_blocked_machine_is_a_failure_with_its_fix() -> None:
    unshare = need_program("unshare")
    need(host.host().has("userns"), "user namespaces do not work on this machine")
    off = 'echo 0 > /proc/sys/user/max_user_namespaces; exec "$@"'
    before = (unshare, "--user", "--map-root-user", "sh", "-c", off, "sh")
    done = doctor(before=before, COLUMNS="200")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "This machine can NOT enforce the default policy" in done.stdout
    assert "native misses every control: user namespaces are switched off" in done.stdout
    assert "fix: sudo sysctl -w user.max_user_namespaces=65536" in done.stdout
    told = json.loads(doctor("--json", before=before).stdout)
    assert told["default_policy"]["enforced"] is False
    assert "files" in told["default_policy"]["missing"]["native"]


def test_one_missing_control_is_shown_with_reason_and_fix(
    on: Pretend, capsys: pytest.CaptureFixture[str]
) -> None:
    on(Host.pretend(without=("netns", "bwrap")))
    assert cli.main(["doctor"]) == 1
    told = capsys.readouterr().out
    assert "native misses network.none: no netns\n  fix: get netns\n" in told
    assert "kvm" not in told
    assert cli.main(["doctor", "-v"]) == 1
    assert "kvm: no, no /dev/kvm\n    fix: switch it on\n" in capsys.readouterr().out


def test_it_begins_with_the_verdict_and_one_table(on: Pretend, capsys: pytest.CaptureFixture[str]) -> None:
    on(Host.pretend(without=("cgroup.memory",)))
    assert cli.main(["doctor"]) == 0
    first, blank, head, *rows = capsys.readouterr().out.splitlines()
    assert first == "This machine can enforce the default policy, by native."
    assert not blank and head.split() == ["CONTROL", "NATIVE", "BWRAP", "LANDLOCK"]
    assert [row.split()[0] for row in rows[: len(Control)]] == list(Control)
    assert [row for row in rows[len(Control) :] if row] == [
        "`stockade doctor -v` shows the mechanisms, and how to fix what is missing."
    ]
    assert cli.main(["doctor", "-v"]) == 0
    told = capsys.readouterr().out
    assert told.splitlines()[: 3 + len(Control)] == [first, blank, head, *rows[: len(Control)]]
    assert "native misses limits.memory: no cgroup.memory" in told and "CONTROL            NATIVE  BY" in told


def test_a_control_the_default_policy_does_not_need_is_no_failure(
    on: Pretend, capsys: pytest.CaptureFixture[str]
) -> None:
    on(Host.pretend(without=("overlay",)))
    assert cli.main(["doctor", "-v"]) == 0
    assert "native misses deny, workspace.overlay: no overlay" in capsys.readouterr().out


def test_root_is_told_what_is_weaker(on: Pretend, capsys: pytest.CaptureFixture[str]) -> None:
    on(Host.pretend(without=("nproc",), uid=0))
    assert cli.main(["doctor", "-v"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "weaker" not in told and "limits.tasks yes pids cgroup" in told
    on(Host.pretend(without=("nproc", "cgroup.pids", "bwrap.nproc"), uid=0))
    assert cli.main(["doctor"]) == 0
    assert "weaker than elsewhere: limits.tasks." in " ".join(capsys.readouterr().out.split())


def test_a_limit_without_a_cgroup_is_shown_with_what_would_stand_in_for_it(
    on: Pretend, capsys: pytest.CaptureFixture[str]
) -> None:
    on(Host.pretend(without=("cgroup.memory", "cgroup.cpu")))
    assert cli.main(["doctor", "-v"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "limits.memory no if accepted: RLIMIT_AS for each process only" in told
    assert "native misses limits.cpu: no cgroup.cpu fix: get cgroup.cpu" in told
    assert "weaker" not in told


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["doctor", "--help"])
    assert caught.value.code == 0
    assert "example: stockade doctor --json" in capsys.readouterr().out


def test_doctor_looks_afresh_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def find(fresh: bool, helpers: bool) -> Host:
        asked.append(fresh and helpers)
        return Host.pretend()

    monkeypatch.setattr(host, "host", find)
    monkeypatch.setattr("stockade.host.engines.find", dict)
    assert cli.main(["doctor"]) == 0
    assert asked == [True]
