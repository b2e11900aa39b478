"""Held sandboxes: a process of their own supervises them, and others call into them by id."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from stockade.errors import SetupError
from stockade.linux.user import Caller
from stockade.runs.register import register
from stockade.runs.register.sandbox_record import SandboxRecord
from stockade.sandbox.held_sandbox import HeldSandbox, SandboxGoneError
from support import leaks


@asynccontextmanager
async def held(policy: dict[str, Any] | None = None, **options: Any) -> AsyncIterator[HeldSandbox]:
    box = await HeldSandbox.start(policy, **options)
    try:
        yield box
    finally:
        await box.end()


def record(home: Path, box: HeldSandbox) -> SandboxRecord:
    return register.find(str(home), box.id)


async def test_its_files_and_processes_stay_between_calls() -> None:
    async with held() as box:
        await box.write("/tmp/a/b", b"1")
        await box.run(["sh", "-c", "sleep 60 & echo $! > /tmp/pid"])
        again = await HeldSandbox.attach(box.id)
        assert await again.read("/tmp/a/b") == b"1"
        assert (await again.run(["sh", "-c", "kill -0 $(cat /tmp/pid)"])).exit_code == 0
        assert again.directory == box.directory == Caller.current().home


async def test_its_holder_has_a_session_of_its_own_and_nothing_of_the_caller(stockade_home: Path) -> None:
    reader, writer = os.pipe()
    os.set_inheritable(writer, True)
    async with held() as box:
        os.close(writer)
        supervisor = record(stockade_home, box).supervisor
        assert os.getsid(supervisor) not in (os.getsid(0), supervisor)
        assert os.read(reader, 1) == b"", "the holder has a descriptor of the caller's"
    os.close(reader)


async def test_it_ends_when_it_is_told_to_and_a_call_that_runs_says_so() -> None:
    async with held() as box:
        running = asyncio.ensure_future(box.run(["sh", "-c", "touch /tmp/begun; sleep 60"]))
        while not [one for one in await box.list("/tmp") if one.path == "/tmp/begun"]:
            await asyncio.sleep(0.02)
        await box.end()
        with pytest.raises(SandboxGoneError):
            await running
        with pytest.raises(SandboxGoneError):
            await box.read("/tmp/begun")
        await box.end()  # harmless


async def test_it_ends_after_the_time_without_calls(stockade_home: Path) -> None:
    await HeldSandbox.start(idle=0.2)
    assert leaks.settled(lambda: [one.id for one in register.living(str(stockade_home))]) == []


def _is_gone(box: HeldSandbox) -> bool:
    try:
        box._connect().close()
    except SandboxGoneError:
        return True
    return False


async def test_everything_inside_ends_with_a_killed_holder(stockade_home: Path) -> None:
    box = await HeldSandbox.start()
    await box.run(["sh", "-c", "sleep 987654 >/dev/null 2>&1 &"])
    os.kill(record(stockade_home, box).supervisor, signal.SIGKILL)
    await asyncio.to_thread(leaks.settled, lambda: [] if _is_gone(box) else ["alive"])
    with pytest.raises(SandboxGoneError):
        await box.run(["true"])
    assert leaks.settled(lambda: register.sweep(str(stockade_home))) == []


async def test_a_cancelled_call_ends_its_command() -> None:
    async with held() as box:
        running = asyncio.ensure_future(box.run(["sh", "-c", "echo $$ > /tmp/pid; exec sleep 60"]))
        while not [one for one in await box.list("/tmp") if one.path == "/tmp/pid" and one.size]:
            await asyncio.sleep(0.02)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        while (await box.run(["sh", "-c", "kill -0 $(cat /tmp/pid)"])).exit_code == 0:
            await asyncio.sleep(0.02)


async def test_a_sandbox_that_nobody_takes_ends_at_once() -> None:
    """The process that asked is gone before it knew the id."""
    starting = asyncio.ensure_future(HeldSandbox.start())
    await asyncio.sleep(0.05)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    # The check after each test finds what stays.


async def test_a_refused_policy_says_why_and_leaves_nothing() -> None:
    with pytest.raises(SetupError, match="/nowhere does not exist"):
        await HeldSandbox.start({"read": ["/nowhere"]})


async def test_an_unknown_id_is_gone() -> None:
    with pytest.raises(SandboxGoneError, match="0123456789ab"):
        await HeldSandbox.attach("0123456789ab")


async def test_errors_of_files_are_those_of_the_kernel() -> None:
    async with held() as box:
        await box.write("/tmp/file", b"")
        for error, call in (
            (FileNotFoundError, box.read("/tmp/none")),
            (IsADirectoryError, box.read("/tmp")),
            (NotADirectoryError, box.list("/tmp/file")),
            (PermissionError, box.write("/usr/x", b"")),
            (FileExistsError, box.mkdir("/tmp/file")),
            (ValueError, box.read("/tmp/a\0b")),
            (ValueError, box.run([])),
            (ValueError, box.run(["a\0b"])),
        ):
            with pytest.raises(error):
                await call


async def test_what_is_too_long_for_one_call_is_an_error_of_the_call() -> None:
    async with held() as box:
        with pytest.raises(OSError, match="more than one call can carry"):
            await box.write("/tmp/long", bytes(66 << 20))
        await box.run(["truncate", "-s", "65M", "/tmp/long"])
        with pytest.raises(OSError, match="long") as caught:
            await box.read("/tmp/long")
        assert caught.value.errno == errno.EFBIG


async def test_what_is_not_a_call_harms_no_one() -> None:
    async with held() as box:
        for noise in (b"", b"\xff" * 8, (5).to_bytes(8, "big") + b"noise", (1 << 40).to_bytes(8, "big")):
            line = box._connect()
            line.sendall(noise)
            line.shutdown(socket.SHUT_WR)
            assert await asyncio.to_thread(line.recv, 1) == b""
            line.close()
        assert (await box.run(["echo", "fine"])).stdout == b"fine\n"


async def test_no_module_of_the_directory_is_loaded_outside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller stands in an untrusted workspace; its modules would run in the holder, before any wall."""
    project = tmp_path / "project"
    for name in ("asyncio", "stockade", "msgspec", "sitecustomize"):
        (project / name).mkdir(parents=True)
        (project / name / "__init__.py").write_text(f"open({str(tmp_path / 'trap')!r}, 'w')\n")
    monkeypatch.chdir(project)
    async with held({"workspace": "."}) as box:
        assert box.directory == str(project)
        assert (await box.run(["ls"])).stdout == b"asyncio\nmsgspec\nsitecustomize\nstockade\n"
    assert not (tmp_path / "trap").exists()
