"""Observed runs: each refusal once, with the wall, the clause and what would allow it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import stockade
from stockade import Policy, Sandbox
from stockade.errors import PolicyError, UnsupportedError
from stockade.host import host
from stockade.observe.access import Action
from stockade.observe.records import Observations
from stockade.sandbox.sandbox import RunExtras, run_once
from support.means import need

STOCKADE = [sys.executable, "-m", "stockade"]


@pytest.fixture(scope="module")
def secret(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("outside") / "secret"
    file.write_text("the secret\n")
    return file


def targets(result: stockade.Result) -> dict[str, str]:
    return {one.target: one.what for one in result.denials}


def test_each_refusal_once_with_its_wall_its_clause_and_the_smallest_change(secret: Path) -> None:
    script = f"cat {secret}; cat {secret}; mkdir /nope; mount -t tmpfs x /tmp; cat /none/at/all"
    result = stockade.run(["sh", "-c", script], explain=True)
    found = {one.target: one for one in result.denials}
    file = found[str(secret)]
    assert (file.what, file.count, file.wall, file.programs) == ("read", 2, "files", ("/usr/bin/cat",))
    assert (file.hint, file.change) == (f"--read {secret}", f'read = ["{secret}"]')
    assert str(secret) in file.reason and not file.danger
    assert (found["mount"].what, found["mount"].wall, found["mount"].hint) == ("mount", "syscalls", "")
    assert found["/nope"].what == "create"
    assert "/none/at/all" not in found, "it does not exist outside either"


def test_what_the_program_made_in_the_end_was_not_refused(tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    (tmp_path / "only-outside").mkdir()
    script = """
import os, sys
made, outside = sys.argv[1] + "/made", sys.argv[1] + "/only-outside"
for above in made, outside:
    try:
        os.mkdir(above + "/directory")
    except FileNotFoundError:
        print("missing")
try:
    open(made + "/file", "w")
except FileNotFoundError:
    os.makedirs(made + "/directory")
    open(made + "/file", "w")
"""
    # The directory is private inside, and has nothing of the host's.
    result = stockade.run(["python3", "-c", script, str(tmp_path)], explain=True)
    assert result.text == "missing\nmissing\n"
    assert targets(result) == {f"{tmp_path}/only-outside/directory": "create"}


def test_files_that_programs_do_without_are_not_listed() -> None:
    script = "import socket; socket.getaddrinfo('name.example', 80)"
    result = stockade.run(["python3", "-c", script], explain=True)
    assert not {"/etc/host.conf", "/etc/gai.conf", "/usr/share/locale/locale.alias"} & set(targets(result))


def test_what_is_observed_is_not_guessed() -> None:
    command = ["sh", "-c", "echo x > /usr/made"]
    assert "a guess" in stockade.run(command).hint
    assert "a guess" not in stockade.run(command, explain=True).hint


def test_an_ordinary_run_is_not_observed(secret: Path) -> None:
    result = stockade.run(["cat", str(secret)])
    assert (result.observed, result.denials, result.denials_cut) == (False, (), "")


def test_a_dangerous_change_comes_with_a_warning() -> None:
    (one,) = (
        one for one in stockade.run(["cat", "/etc/shadow"], explain=True).denials if "shadow" in one.target
    )
    assert one.danger


def test_every_family_of_calls_is_observed(secret: Path) -> None:
    script = f"""
import os, socket
def attempt(call, *args):
    try: call(*args)
    except OSError: pass
attempt(os.open, {str(secret)!r}, os.O_RDONLY)
attempt(os.open, "/usr/bin/env", os.O_WRONLY)
attempt(os.mkdir, "/usr/directory")
attempt(os.unlink, "/usr/bin/true")
attempt(os.rename, "/usr/bin/env", "/usr/bin/moved")
attempt(os.link, "/usr/bin/env", "/usr/bin/linked")
attempt(os.symlink, "env", "/usr/bin/a-link")
attempt(os.execv, {str(secret)!r}, ["x"])
attempt(socket.socket(socket.AF_INET).connect, ("192.0.2.1", 80))
attempt(socket.socket(socket.AF_UNIX).connect, "{secret}.socket")
attempt(os.setns, 0) if hasattr(os, "setns") else None
os.chdir("/usr/bin")
attempt(os.open, "relative", os.O_WRONLY | os.O_CREAT)
attempt(os.open, "below", os.O_WRONLY | os.O_CREAT, 0o600)
"""
    with HostSocket(Path(f"{secret}.socket")):
        found = targets(stockade.run(["/usr/bin/python3", "-I", "-c", script], explain=True))
    assert found.get(str(secret)) in ("read", "execute")
    assert found["/usr/bin/env"] in ("write", "rename")
    assert found["/usr/directory"] == found["/usr/bin/a-link"] == found["/usr/bin/relative"] == "create"
    assert found["/usr/bin/true"] == "remove"
    assert found["192.0.2.1:80"] == found[f"unix:{secret}.socket"] == "connect"


class HostSocket:
    """A socket of the host for the time of a `with` statement."""

    def __init__(self, path: Path) -> None:
        import socket

        self._path, self._socket = path, socket.socket(socket.AF_UNIX)

    def __enter__(self) -> None:
        self._socket.bind(str(self._path))
        self._socket.listen()

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self._path.unlink()


def test_executing_what_the_policy_does_not_list_is_explained() -> None:
    result = stockade.run(
        ["sh", "-c", "/usr/bin/env true"], Policy(exec=["/usr/bin/sh", "/usr/bin/dash"]), explain=True
    )
    assert targets(result).get("/usr/bin/env") == "execute"


def test_an_open_sandbox_explains_each_run_by_itself(secret: Path) -> None:
    with Sandbox(explain=True) as box:
        first = box.run(["cat", str(secret)], explain=True)
        quiet = box.run(["true"], explain=True)
        again = box.run(["sh", "-c", f"cat {secret}; cat {secret}"])
        started = box.start(["cat", str(secret)])
        assert [one.count for one in first.denials if one.target == str(secret)] == [1]
        assert quiet.observed and not quiet.denials
        assert [one.count for one in again.denials if one.target == str(secret)] == [2]
        assert str(secret) in targets(started.wait())


def test_a_sandbox_that_was_opened_without_an_observer_says_what_to_write() -> None:
    with Sandbox() as box, pytest.raises(PolicyError, match="no observer") as caught:
        box.run(["true"], explain=True)
    assert "Sandbox(policy, explain=True)" in caught.value.hint


def test_the_async_twins_explain_too(secret: Path) -> None:
    async def both() -> tuple[stockade.Result, stockade.Result]:
        one = await stockade.run_async(["cat", str(secret)], explain=True)
        async with stockade.AsyncSandbox(explain=True) as box:
            return one, await box.run(["cat", str(secret)], explain=True)

    for result in asyncio.run(both()):
        assert str(secret) in targets(result)


def test_what_succeeded_is_delivered_to_whoever_asks_for_it(workspace: Path) -> None:
    (workspace / "input").write_text("x")
    got: list[Observations] = []
    policy = Policy(workspace=str(workspace))
    extras = RunExtras(on_observed=lambda observed, prepared: got.append(observed))
    run_once(["sh", "-c", "cat input > output; mv output moved"], policy, {}, extras).check()
    found = {(one.action, one.target) for one in got[0].accesses if not one.error}
    assert {
        (Action.READ, f"{workspace}/input"),
        (Action.CREATE, f"{workspace}/output"),
        (Action.RENAME, f"{workspace}/output"),
        (Action.EXECUTE, "/usr/bin/cat"),
    } <= found


def test_the_receipt_says_that_the_run_was_observed() -> None:
    observed, ordinary = stockade.run(["true"], explain=True), stockade.run(["true"])
    assert observed.receipt is not None and ordinary.receipt is not None
    assert observed.receipt.predicate.observed and not ordinary.receipt.predicate.observed
    assert observed.receipt.predicate.filter != ordinary.receipt.predicate.filter


def test_a_terminal_inside_is_the_programs_own() -> None:
    script = 'test -t 0 && test "$(stty size < /dev/tty)" = "30 90" && echo > /dev/tty && exit 7'
    with Sandbox(explain=True) as box:
        assert box.start(["sh", "-c", script], pty=(30, 90)).wait().exit_code == 7


def test_an_observed_run_ends_in_time() -> None:
    result = stockade.run(["sh", "-c", "while :; do : < /usr/bin/env; done"], explain=True, timeout=0.5)
    assert result.outcome == "timed-out"


def test_a_backend_that_cannot_observe_says_so() -> None:
    need(host(helpers=True).has("bwrap"), "bubblewrap is not installed")
    with pytest.raises(UnsupportedError, match="cannot observe"):
        stockade.run(["true"], Policy(backend="bwrap"), explain=True)


def test_a_stopped_supervisor_does_not_stop_an_observed_program(tmp_path: Path, workspace: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    script = (
        "touch begun; while [ ! -e go ]; do sleep 0.01; done;"
        "for i in $(seq 300); do cat /none; : < go; done 2> /dev/null; touch done"
    )
    command = [*STOCKADE, "explain", "-q", "--write", str(out), "--", "sh", "-c", f"cd {out}; {script}"]
    supervisor = subprocess.Popen(command, cwd=workspace)
    try:
        appears(out / "begun")
        os.kill(supervisor.pid, signal.SIGSTOP)
        (out / "go").touch()
        appears(out / "done")
    finally:
        os.kill(supervisor.pid, signal.SIGCONT)
        assert supervisor.wait(60) == 0


def appears(file: Path) -> None:
    late = time.monotonic() + 30
    while not file.exists():
        assert time.monotonic() < late, file
        time.sleep(0.01)


class TestCommandLine:
    """`stockade explain -- COMMAND` and `stockade run --explain`."""

    def test_it_prints_each_refusal_and_returns_the_commands_exit_code(
        self, secret: Path, workspace: Path
    ) -> None:
        script = f"cat {secret}; mount -t tmpfs x /tmp; exit 3"
        done = subprocess.run(
            [*STOCKADE, "explain", "--", "sh", "-c", script],
            cwd=workspace,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 3
        for line in (
            f"read {secret} (cat)",
            f'to allow it: --read {secret} (read = ["{secret}"])',
            "call mount (mount)",
            "no change of the policy allows it",
        ):
            assert line in done.stderr, line
        assert "\x1b" not in done.stderr

    def test_a_clause_of_a_file_is_named_with_its_line(self, workspace: Path) -> None:
        (workspace / "hidden").write_text("x")
        (workspace / "policy.toml").write_text('workspace = "."\n\ndeny = ["hidden"]\n')
        command = [*STOCKADE, "run", "--explain", "-p", "policy.toml", "--", "cat", "hidden"]
        done = subprocess.run(command, cwd=workspace, capture_output=True, text=True, check=False)
        assert "policy.toml:3" in done.stderr

    def test_json_for_agents(self, secret: Path, workspace: Path) -> None:
        command = [*STOCKADE, "explain", "--json", "--", "cat", str(secret)]
        done = subprocess.run(command, cwd=workspace, capture_output=True, text=True, check=False)
        result = json.loads(done.stdout)
        (one,) = (one for one in result["denials"] if one["target"] == str(secret))
        assert (one["what"], one["wall"], one["hint"]) == ("read", "files", f"--read {secret}")
        assert result["observed"] is True and result["exit_code"] == 1

    def test_names_that_a_program_chose_do_not_reach_the_terminal_as_they_are(
        self, tmp_path: Path, workspace: Path
    ) -> None:
        evil = tmp_path / "a\x1b[31m\nstockade: b"
        evil.write_text("x")
        command = [*STOCKADE, "explain", "--", "cat", str(evil)]
        done = subprocess.run(command, cwd=workspace, capture_output=True, text=True, check=False)
        lines = [line for line in done.stderr.splitlines() if line.startswith("stockade:")]
        assert any("[31m" in line for line in lines) and not any("\x1b" in line for line in lines)
        assert not any(line.startswith("stockade: b") for line in lines)

    def test_nothing_refused_is_said(self, workspace: Path) -> None:
        command = [*STOCKADE, "explain", "--", "true"]
        done = subprocess.run(command, cwd=workspace, capture_output=True, text=True, check=False)
        assert "no wall refused anything" in done.stderr and done.returncode == 0
