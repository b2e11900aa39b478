"""Behind bubblewrap: what it leaves out, or is led to do, starts nothing; and what it makes holds.

A wrapper stands in for a bubblewrap that leaves something out. It reads what
the real one is told and hands that on without one argument, or with another.
"""

from __future__ import annotations

import asyncio
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import stockade
from attacks.arena import IS_ROOT, PYTHON, inside
from stockade import Policy, SetupError
from stockade.gate import client
from stockade.gate import operations as ops
from stockade.gate.bwrap_operations import Devices, Helper, Placement
from stockade.runs import prepare
from support import bubblewraps, leaks
from support.bubblewraps import NEW, OLD
from support.means import applies, need

WRAPPER = """#!{python} -IS
import json, os, sys
if sys.argv[1:2] != ["--args"]:
    os.execv({real!r}, ["bwrap", *sys.argv[1:]])
with os.fdopen(int(sys.argv[2]), "rb", closefd=False) as file:
    told = file.read().split(b"\\0")[:-1]
with open({orders!r}) as file:
    first, count, instead = json.load(file)
told[first : first + count] = [word.encode() for word in instead]
changed = os.memfd_create("arguments")
os.write(changed, b"".join(word + b"\\0" for word in told))
os.lseek(changed, 0, 0)
os.dup2(changed, int(sys.argv[2]))
os.execv({real!r}, ["bwrap", *sys.argv[1:]])
"""
Order = Callable[[int, int, list[str]], None]
#: Without these every wall stands: where it begins, and what is the same without being said.
NO_WALLS = {"--chdir", "--uid", "--gid", "--cap-drop", "--perms 0755"}
#: Of these each is another.
BY_OPERAND = ("--remount-ro", "--perms", "--tmpfs")


@pytest.fixture(params=[OLD, NEW])
def version(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture
def order(version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Order]:
    """Says what bubblewrap is told instead of some of its arguments."""
    need(os.path.exists(PYTHON), f"{PYTHON} is not installed")
    wrapper, orders = tmp_path / "bwrap", tmp_path / "orders"
    real = bubblewraps.program(version)
    wrapper.write_text(WRAPPER.format(python=PYTHON, real=real, orders=str(orders)))
    wrapper.chmod(0o755)

    def give(first: int, count: int, instead: list[str]) -> None:
        import json

        orders.write_text(json.dumps([first, count, instead]))

    give(0, 0, [])
    bubblewraps.use(wrapper, monkeypatch)
    yield give


@pytest.fixture
def out(tmp_path: Path) -> Path:
    directory = tmp_path / "out"
    directory.mkdir()
    return directory


@pytest.fixture
def policy(version: str, tmp_path: Path, workspace: Path, out: Path) -> Policy:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/file").write_text("")
    (workspace / ".vscode").mkdir()
    (workspace / "file").write_text("")
    return Policy(
        backend="bwrap",
        workspace={"path": str(workspace), "mode": "rw" if version == OLD else "overlay"},
        write=[str(out)],
        read=[str(tmp_path / "data/file" if version == OLD else tmp_path / "data")],
        protect=[".vscode"],
        toolchain=False,
    )


def told(policy: Policy) -> list[list[str]]:
    """What bubblewrap is told, flag by flag."""
    prepared = prepare.prepare(policy)
    prepared.close(discard=True)
    helper = next(op for op in prepared.plan.ops if isinstance(op, Helper))
    found: list[list[str]] = []
    for word in helper.arguments:
        if word.startswith("--"):
            found.append([])
        found[-1].append(word)
    return found


def starts(policy: Policy, out: Path) -> bool:
    """Whether the command came to run, by what it would have left and by what the caller was told."""
    marker = out / "marker"
    refused = False
    try:
        stockade.run(["touch", str(marker)], policy)
    except SetupError:
        refused = True
    touched = marker.exists()
    marker.unlink(missing_ok=True)
    return touched or not refused


@pytest.mark.parametrize("version", [OLD if IS_ROOT else NEW])
def test_nothing_that_bubblewrap_is_told_can_be_left_out(
    policy: Policy, out: Path, order: Order, version: str
) -> None:
    """The eyes are the same for every version and user: each of these has one of those."""
    flags = told(policy)
    assert starts(policy, out), "the wrapper alone changes nothing"
    seen, unnoticed, first = set(), [], 0
    for flag in flags:
        kind = " ".join(flag) if flag[0] in BY_OPERAND else flag[0]
        if kind not in seen:
            seen.add(kind)
            order(first, len(flag), [])
            if starts(policy, out):
                unnoticed.append(kind)
        first += len(flag)
    assert set(unnoticed) == NO_WALLS
    assert {"--unshare-net", "--seccomp", "--disable-userns", "--ro-bind-fd", "--die-with-parent"} <= seen


@pytest.mark.parametrize("version", [NEW])  # 0.8 has no overlays, which are mounted by their path
def test_what_was_led_elsewhere_meanwhile_is_noticed(
    policy: Policy, out: Path, order: Order, version: str, tmp_path: Path
) -> None:
    """As if somebody had put another directory there after bubblewrap had looked up where it is.

    What is bound it compares itself; here it has not.
    """
    secrets = tmp_path / "secrets"
    secrets.mkdir()
    (secrets / "file").write_text("")  # by the names of what is there it looks the same
    first, tried = 0, 0
    for flag in told(policy):
        if flag[0] == "--overlay-src" and flag[1].startswith("/proc/self/fd/"):
            order(first, 2, ["--overlay-src", str(secrets)])
            assert not starts(policy, out)
            tried += 1
        if flag[0] in ("--bind-fd", "--ro-bind-fd") and flag[2] in (str(out), "/usr"):
            order(first, 3, [flag[0].removesuffix("-fd"), str(secrets), flag[2]])
            assert not starts(policy, out)
            tried += 1
        if flag[0] == "--overlay":
            elsewhere = [tmp_path / "upper", tmp_path / "work"]
            for directory in elsewhere:
                directory.mkdir()
            order(first + 1, 2, [str(directory) for directory in elsewhere])
            assert not starts(policy, out)
            tried += 1
        first += len(flag)
    assert tried == 5


#: What another sandbox in the same workspace does while bubblewrap starts, here at the best moment for it.
SWAP = """#!/bin/sh
[ "$1" = --args ] && {{ mv {place} {place}.aside; ln -s {target} {place}; }}
exec {real} "$@"
"""


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A directory of the host that no policy names."""
    directory = tmp_path / "victim"
    directory.mkdir()
    return directory


def test_a_link_that_is_swapped_in_makes_bubblewrap_change_the_host(
    version: str, workspace: Path, victim: Path
) -> None:
    """The control of the tests below: bubblewrap follows the link to where it keeps the host's root."""
    (workspace / "x").symlink_to(f"/oldroot{victim}")
    nested = ["--bind", str(workspace), "/w", "--bind", str(workspace), "/w/x/.git", "--dir", "/w/x/made"]
    command = [bubblewraps.program(version), "--unshare-user", "--ro-bind", "/usr", "/usr", *nested, "true"]
    subprocess.run(command, capture_output=True, check=False)
    made = set(os.listdir(victim))
    applies(bool(made) or version == NEW, "this bubblewrap of the distribution is repaired")
    assert made == {".git", "made"}


@pytest.mark.parametrize(("version", "mode"), [(OLD, "rw"), (NEW, "rw"), (NEW, "overlay")])
def test_a_link_that_is_swapped_in_leads_no_mount_to_the_host(
    version: str, mode: str, workspace: Path, victim: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, real = workspace / "x", bubblewraps.program(version)
    (place / "out").mkdir(parents=True)
    rule = {"path": str(workspace), "mode": mode}
    wanted = Policy(backend="bwrap", workspace=rule, write=[str(place / "out")], protect=[], toolchain=False)
    bubblewraps.use(real, monkeypatch)
    stockade.run(["touch", "x/out/new"], wanted, on_exit="discard").check()
    assert (place / "out/new").exists()
    swapping = tmp_path / "bwrap"
    for target in (f"/oldroot{victim}", victim, f"/newroot{victim}"):
        swapping.write_text(SWAP.format(place=place, target=target, real=real))
        swapping.chmod(0o755)
        bubblewraps.use(swapping, monkeypatch)
        with pytest.raises(SetupError) as refused:
            stockade.run(["true"], wanted, on_exit="discard")
        assert os.listdir(victim) == [] and "symbolic link" in str(refused.value)
        place.unlink()
        (workspace / "x.aside").rename(place)


def test_the_gate_leaves_out_nothing_of_what_is_its_own(
    out: Path, sabotaged_gate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (out / ".git/hooks").mkdir(parents=True)
    policy = Policy(backend="bwrap", write=[str(out)], toolchain=False)
    client.shutdown()
    monkeypatch.setattr("stockade.gate.executable", lambda: str(sabotaged_gate))
    prepared = prepare.prepare(policy)
    prepared.close(discard=True)
    kinds = (Devices, Placement, ops.JoinCgroup, ops.Limit, ops.Privileges, ops.LandlockRules, ops.BindGrant)
    try:
        for index, op in [(9999, None), *enumerate(prepared.plan.ops)]:
            if op is None or isinstance(op, kinds):
                client.shutdown()
                monkeypatch.setattr(client, "EXTRA_ARGUMENTS", (f"op:{index}",))
                assert starts(policy, out) == (op is None), op
    finally:
        client.shutdown()


SUPERVISOR = """
import sys, stockade
policy = stockade.Policy(backend="bwrap", workspace={"path": sys.argv[1], "mode": "rw"}, protect=[])
print("go", flush=True)
while True:
    stockade.run(["sh", "-c", "sleep 0.02"], policy)
"""


@pytest.mark.usefixtures("swept")
def test_whenever_its_supervisor_is_killed_nothing_is_left(workspace: Path) -> None:
    before = set(map(str, leaks.family()))
    for number in range(5):
        command = [sys.executable, "-c", SUPERVISOR, str(workspace)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as supervisor:
            assert supervisor.stdout is not None and supervisor.stdout.readline() == b"go\n"
            time.sleep(0.15 + 0.011 * number)  # from before the first one is made on
            supervisor.kill()
    assert leaks.settled(lambda: sorted(set(map(str, leaks.family())) - before), 8) == []


def test_a_bubblewrap_that_hangs_goes_with_whoever_gives_up_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left of it would be found after the test."""
    hangs = tmp_path / "bwrap"
    real = bubblewraps.program(NEW)
    hangs.write_text(f'#!/bin/sh\n[ "$1" = --args ] && exec sleep 60\nexec {real} "$@"\n')
    hangs.chmod(0o755)
    bubblewraps.use(hangs, monkeypatch)

    async def give_up() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(stockade.AsyncSandbox(Policy(backend="bwrap")).open(), 0.5)

    asyncio.run(give_up())


def test_a_bubblewrap_that_hangs_goes_with_its_usher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has not yet asked to die with its parent. The next one, which does not hang, serves."""
    hangs, started = tmp_path / "bwrap", tmp_path / "started"
    real = bubblewraps.program(NEW)
    once = f'[ "$1" = --args ] && [ ! -e {started} ] && echo $$ >{started} && exec sleep 60'
    hangs.write_text(f'#!/bin/sh\n{once}\nexec {real} "$@"\n')
    hangs.chmod(0o755)
    bubblewraps.use(hangs, monkeypatch)
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(stockade.run, ["true"], Policy(backend="bwrap"))
        assert leaks.settled(lambda: [] if started.exists() and started.read_text() else ["waits"]) == []
        watched = os.pidfd_open(int(started.read_text()))
        try:
            [usher] = [one.pid for one in leaks.family() if one.name == "stockade-usher"]
            os.kill(usher, signal.SIGKILL)
            ended = bool(select.select([watched], [], [], 5)[0])
            if not ended:
                signal.pidfd_send_signal(watched, signal.SIGKILL)
        finally:
            os.close(watched)
        assert ended and result.result(20).ok


LATER = """
import os, subprocess, sys, stockade
directory, seen = sys.argv[1], []
for backend in ("bwrap", "native"):
    inner = f"{directory}/{backend}"
    os.mkdir(inner)
    with stockade.Sandbox(stockade.Policy(backend=backend, write=[directory])) as box:
        subprocess.run(["mount", "-t", "tmpfs", "later", inner], check=True)
        open(f"{inner}/file", "w").close()
        seen.append(box.run(["ls", inner]).check().text)
        box.run(["touch", f"{inner}/below"]).check()
    assert os.listdir(inner) == ["file"]
    subprocess.run(["umount", inner], check=True)
    assert os.listdir(inner) == ["below"]
print(seen)
"""


def test_what_the_host_mounts_later_does_not_come_in(workspace: Path) -> None:
    """It would come in without any of the rules of what it lies in."""
    applies(IS_ROOT, "nobody else can keep it out with bubblewrap")
    need(bool(shutil.which("unshare")), "unshare is not installed")
    command = ["unshare", "-m", "--propagation", "shared", sys.executable, "-c", LATER, str(workspace)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    assert done.stdout == "['', '']\n", done.stderr


@pytest.mark.parametrize("victim", ["stockade-usher", "bwrap", "stockade-gate"])
def test_everything_goes_with_each_process_that_keeps_it(victim: str) -> None:
    with stockade.Sandbox(Policy(backend="bwrap")) as box, box.start(["sleep", "60"]) as process:
        family = {one.name: one.pid for one in leaks.family() if not one.resident}
        os.kill(family[victim], signal.SIGKILL)
        assert process.wait(10).outcome in ("cancelled", "signalled", "setup-failed")
        assert leaks.settled(lambda: [one.name for one in leaks.family() if one.pid == process.pid]) == []


def test_a_device_of_the_host_stays_as_it_is() -> None:
    """Root owns it, without any capability."""
    applies(IS_ROOT, "nobody else owns it")
    code = "import os; os.chmod('/dev/null', 0o600)"
    before = os.stat("/dev/null").st_mode
    try:
        result = stockade.run([PYTHON, "-c", code], Policy(backend="bwrap"))
        assert b"Read-only file system" in result.stderr
        assert os.stat("/dev/null").st_mode == before
    finally:
        os.chmod("/dev/null", before & 0o7777)


@pytest.mark.parametrize("mode", ["overlay", "rw"])
def test_a_device_in_the_workspace_cannot_be_opened(workspace: Path, mode: str) -> None:
    """An overlay of bubblewrap's has no nodev; that it is of a user namespace is what counts."""
    applies(IS_ROOT, "nobody else makes one")
    os.mknod(workspace / "node", 0o020666, os.makedev(1, 3))
    rule = {"path": str(workspace), "mode": mode}
    wanted = Policy(backend="bwrap", workspace=rule, protect=[])
    assert b"ermission denied" in stockade.run(["cat", "node"], wanted, on_exit="discard").stderr


@pytest.mark.parametrize("how", ["read", "overlay"])
def test_a_socket_in_what_is_shown_cannot_be_reached(workspace: Path, how: str) -> None:
    clauses: dict[str, Any] = {"read": [str(workspace)]} if how == "read" else {"workspace": str(workspace)}
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(workspace / "s"))
        server.listen()
        server.setblocking(False)
        code = "import socket, sys; socket.socket(1).connect(sys.argv[1])"
        wanted = Policy(backend="bwrap", protect=[], **clauses)
        result = stockade.run([PYTHON, "-c", code, str(workspace / "s")], wanted, on_exit="discard")
        assert b"ConnectionRefusedError" in result.stderr
        with pytest.raises(BlockingIOError):
            server.accept()


def test_nobody_inside_can_look_at_or_hold_on_to_the_gate(workspace: Path) -> None:
    code = """
import os
found = []
links = ("exe", "cwd", "root", "ns/user", "fd/3")
for what in (*links, "environ", "mem"):
    try:
        os.readlink(f"/proc/1/{what}") if what in links else open(f"/proc/1/{what}").read(1)
        found.append(what)
    except (PermissionError, FileNotFoundError):
        pass
print(found)
"""
    result = stockade.run([PYTHON, "-I", "-c", code], Policy(backend="bwrap"))
    assert result.text == "[]\n", result.stderr


def test_no_setting_of_the_kernel_can_be_written() -> None:
    """Which of two refusals it is depends on who owns the namespaces."""
    assert set(inside("proc", "write", "sysctls", backend="bwrap").values()) <= {"EROFS", "EACCES", "EPERM"}


def test_nobody_else_can_be_become() -> None:
    assert set(inside("become", backend="bwrap").values()) <= {"EPERM", "EINVAL", "EACCES"}
