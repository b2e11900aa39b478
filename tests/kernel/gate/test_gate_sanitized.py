"""Launches through a gate with the address and undefined-behaviour sanitizers in it: they find nothing."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import stockade
from stockade import Policy, Sandbox, SetupError
from stockade.gate import build, client, wire
from stockade.gate.network import open_listener
from stockade.host import CGROUP_PROBES, host
from stockade.runs import launch, prepare
from stockade.runs.io.eventloop import Events, drive
from support import gatebuild
from support.mapped import mapped, programs_as
from support.means import applies, need_program
from support.paths import ROOT


@pytest.fixture(autouse=True)
def gate(sanitized_gate: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    need_program("gcc")
    client.shutdown()
    monkeypatch.setattr("stockade.gate.executable", lambda: str(sanitized_gate))
    # A report from inside a sandbox could not be written out; the death of the process is what tells.
    yield
    client.shutdown()
    assert gatebuild.reports(sanitized_gate) == []


def test_a_run() -> None:
    result = stockade.run(["sh", "-c", "cat; echo err >&2; exit 3"], input=b"in", env={"A": "b"}, timeout=60)
    assert (result.exit_code, result.stdout, result.stderr) == (3, b"in", b"err\n")


def test_a_workspace_of_each_mode_with_grants(workspace: Path, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "file").touch()
    for name in (".vscode", "b"):
        (workspace / name).mkdir()
    for mode in ("overlay", "ro", "rw"):
        policy = Policy(
            workspace={"path": str(workspace), "mode": mode},
            read=[str(tmp_path / "data")],
            write=[str(tmp_path / "file")],
            protect=[".vscode"],
            deny=() if mode == "rw" else [f"{workspace}/{name}" for name in ("a", "b/c", "none/d", "none/e")],
            exec=["/usr/bin/*"],
        )
        assert stockade.run(["sh", "-c", "touch x; ls -A"], policy, timeout=60).exit_code == 0


def test_the_hosts_network() -> None:
    assert stockade.run(["true"], Policy(net="open"), timeout=60).ok


def test_a_living_sandbox() -> None:
    with Sandbox() as box, box.shell(first=True) as shell:
        assert shell.run("echo $$").text == "2\n"
        for number in range(20):
            assert box.run(["echo", str(number)], timeout=60).text == f"{number}\n"
        assert box.run(["no-such-command"]).exit_code == 127
        assert box.run(["true"], cwd="/none").exit_code == 125
        assert box.run(["sleep", "60"], timeout=0.2).outcome == "timed-out"
        assert box.run(["echo", *["y" * 1000] * 1000]).ok
        assert shell.run("sleep 60", timeout=0.2).outcome == "timed-out"
        assert box.run([""]).exit_code == 127
        assert box.run(["a" * 5000], env={"PATH": ":".join(["/" + "p" * 200] * 50) + "::"}).exit_code != 0


def test_started_processes() -> None:
    with Sandbox(Policy(limits={"tasks": 32})) as box:
        with box.start(["cat"], stdin=subprocess.PIPE) as process:
            assert process.stdin is not None and process.stdout is not None
            process.pause()
            process.resume()
            process.stdin.write(b"x\n")
            assert process.stdout.readline() == b"x\n"
            process.signal(signal.SIGUSR1)
            assert process.wait(60).signal == signal.SIGUSR1
        with box.start(["sh", "-c", "stty size; read x"], pty=(7, 9)) as process:
            assert process.stdout is not None and process.stdout.readline() == b"7 9\r\n"
            process.resize(3, 4)
            process.kill()
            assert process.wait(60).outcome == "cancelled"
        fork = "setsid sh -c 'trap \"\" TERM; sleep 60' & sleep 60"
        assert box.run(["sh", "-c", fork], timeout=0.3, grace=0.1).outcome == "timed-out"
        assert box.run(["sh", "-c", "kill -9 -1"]).outcome == "exited"
        with box.start(["sh", "-c", "kill -9 -1"]) as process:  # its keeper too
            assert process.wait(60).outcome == "signalled"
        assert box.run(["true"], timeout=60).ok


def test_without_namespaces(workspace: Path) -> None:
    policy = Policy(
        backend="landlock",
        accept=["files", "processes", "devices"],
        write=[str(workspace)],
        limits={"cpu_time": "30s", "memory": "256M"} if os.geteuid() == 0 else {},
    )
    result = stockade.run(["sh", "-c", "(setsid sleep 60 &); cat; exit 3"], policy, input=b"in", timeout=60)
    assert (result.exit_code, result.stdout) == (3, b"in")
    assert stockade.run(["sh", "-c", "kill -9 -1; sleep 60"], policy, timeout=0.3).outcome == "timed-out"
    with Sandbox(policy) as box:
        started = [box.start(["sh", "-c", "(setsid sleep 60 &); sleep 60"]) for _ in range(4)]
        box.pause()
        box.resume()
        for process in started:
            process.kill(0)
        assert [process.wait(30).outcome for process in started] == ["cancelled"] * 4
        with box.start(["sh", "-c", "read x; echo $x"], pty=(30, 90)) as process:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(b"hello\n")
            assert b"hello" in process.stdout.read()
        for process in started:
            process.close()


def test_ids_of_a_plan_and_a_joined_network() -> None:
    with mapped(), Sandbox() as box:
        assert box._box is not None
        assert box.run(["sh", "-c", "touch /tmp/a; chown 5:6 /tmp/a; id -u"], timeout=60).text == "0\n"
        os.close(open_listener(box._box.connection.resident, box._box.network_fd, 44771))
        with programs_as(1000):
            assert box.run(["id", "-u"], timeout=60).text == "1000\n"
            assert box.run(["sleep", "60"], timeout=0.2, grace=0.1).outcome == "timed-out"
        with programs_as(70000):
            assert box.run(["id"]).exit_code == 125
        with mapped(network=box._box.network_fd):
            assert stockade.run(["true"], timeout=60).ok
    with mapped():
        for _ in range(3):
            assert stockade.run(["true"], timeout=60).ok


def test_limits_that_a_cgroup_keeps() -> None:
    applies(all(host().has(name) for name in CGROUP_PROBES), "no cgroups for this user")
    limits = {"memory": "256M", "tasks": 32, "cpu": 2, "cpu_time": "1s"}
    busy = ["sh", "-c", "while :; do :; done"]
    assert stockade.run(busy, Policy(limits=limits), timeout=60).outcome == "limit-exceeded"
    with Sandbox(Policy(limits=limits)) as box:
        assert box.run(["true"], timeout=60).ok
        assert box.run(busy, timeout=60).outcome == "limit-exceeded"


def test_a_protected_file_that_is_replaced(workspace: Path) -> None:
    (workspace / ".envrc").touch()
    rw = Policy(workspace={"path": str(workspace), "mode": "rw"}, protect=[".envrc"])
    result = stockade.run(
        ["sh", "-c", "echo up; sleep 60"], rw, on_stdout=lambda _: (workspace / ".envrc").unlink(), timeout=60
    )
    assert result.outcome == "denied"


def test_bad_plans() -> None:
    prepared = prepare.prepare(Policy())
    good = prepared.plan.encoded
    prepared.close(discard=True)
    damaged = [good[:length] for length in range(0, len(good), 997)]
    damaged += [good[:8] + bytes([n]) + good[9:] for n in range(4)]
    damaged += [bytes(100), os.urandom(4096)]
    for data in damaged:
        connection = client.launch(data, ())
        reply = connection.receive()
        connection.close()
        assert reply is not None and reply.kind == wire.REPLY_FAILED
    assert stockade.run(["true"], timeout=60).ok


def test_processes_terminals_and_limits(workspace: Path) -> None:
    limits = {"memory": "256M", "cpu_time": "30s", "cpu": 1} if os.geteuid() == 0 else {}
    with Sandbox(Policy(workspace=str(workspace), limits=limits), on_exit="discard") as box:
        started = [box.start(["sh", "-c", "(setsid sleep 60 &); sleep 60"]) for _ in range(8)]
        for process in started:
            process.pause()
            process.resume()
            process.kill(0)
        assert [process.wait(30).outcome for process in started] == ["cancelled"] * 8
        with box.start(["sh", "-c", "read x; echo $x"], pty=(30, 90)) as process:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(b"hello\n")
            assert b"hello" in process.stdout.read()
        box.pause()
        box.resume()
        for process in started:
            process.close()
        assert box.run(["echo", "after"], timeout=60).text == "after\n"


def test_a_launch_that_fails_on_the_way(tmp_path: Path, workspace: Path) -> None:
    prepared = prepare.prepare(Policy(read=[str(workspace)]))
    try:
        workspace.rename(tmp_path / "elsewhere")
        with pytest.raises(SetupError, match="nothing was run"), Events() as events:
            drive(launch.launch(prepared, events), events)
    finally:
        prepared.close(discard=True)
    assert stockade.run(["true"], timeout=60).ok


@pytest.mark.parametrize(
    ("fault", "is_reported"),
    [("volatile char *p = malloc(n); p[n] = 1", True), ("volatile int m = 0x7fffffff; m += n", False)],
    ids=["memory", "undefined"],
)
def test_a_fault_would_be_seen(tmp_path: Path, fault: str, is_reported: bool) -> None:
    """With the same options: a fault ends the process, and one of memory is written down too."""
    sources = tmp_path / "faulty"
    sources.mkdir()
    (sources / "options.c").write_text(gatebuild.OPTIONS.format(log=sources / "report"))
    (sources / "main.c").write_text(f"#include <stdlib.h>\nint main(int n) {{ {fault}; return 0; }}")
    program = build.sanitized(sources / "program", sources=sources)
    assert subprocess.run([program], env={}, stderr=subprocess.DEVNULL, check=False).returncode != 0
    assert bool(gatebuild.reports(program)) is is_reported


def test_an_observed_run(tmp_path: Path) -> None:
    program = tmp_path / "observed"
    source = ROOT / "tests/attacks/programs/observed.c"
    subprocess.run(["gcc", "-static", "-pthread", "-O1", "-o", program, source], check=True)
    policy = Policy(read=[str(program)])
    ordinary, observed = (
        stockade.run([str(program)], policy, explain=explain, timeout=60).check() for explain in (False, True)
    )
    assert observed.text == ordinary.text
    assert stockade.run([str(program), "rewrite"], policy, explain=True, timeout=60).text == "wrong: 0\n"
