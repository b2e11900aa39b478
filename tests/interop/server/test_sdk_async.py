"""The published Python SDK, unmodified, with `await`: every service once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from datetime import timedelta
from typing import Any

from code_interpreter import CodeInterpreter
from opensandbox import Sandbox, SandboxManager
from opensandbox.config import ConnectionConfig
from opensandbox.models.execd import ExecutionHandlers, RunCommandOpts
from opensandbox.models.filesystem import SearchEntry, WriteEntry
from opensandbox.models.isolated import CreateIsolatedSessionRequest, IsolatedWorkspaceSpec
from opensandbox.models.sandboxes import SandboxFilter

Body = Callable[[Sandbox], Coroutine[Any, Any, None]]


def with_sandbox(address: tuple[str, str], body: Body) -> None:
    """Run the body with a sandbox of its own."""

    async def main() -> None:
        domain, key = address
        config = ConnectionConfig(domain=domain, api_key=key, disable_metrics=True)
        box = await Sandbox.create("host", connection_config=config, timeout=timedelta(minutes=5))
        try:
            await body(box)
        finally:
            await box.kill()
            await box.close()

    asyncio.run(main())


def test_lifecycle(address: tuple[str, str]) -> None:
    async def body(box: Sandbox) -> None:
        assert (await box.get_info()).status.state == "Running" and await box.is_healthy()
        await box.patch_metadata({"team": "b"})
        await box.renew(timedelta(minutes=20))
        config = box.connection_config
        async with await SandboxManager.create(connection_config=config) as manager:
            found = await manager.list_sandbox_infos(SandboxFilter(metadata={"team": "b"}))
            assert [one.id for one in found.sandbox_infos] == [box.id]
        await box.pause()
        assert not await box.is_healthy()
        again = await Sandbox.resume(box.id, connection_config=config)
        assert (await again.commands.run("echo back")).text == "back"
        await again.close()
        assert (await box.get_metrics()).cpu_count > 0

    with_sandbox(address, body)


def test_commands_run_at_the_same_time_and_stream(address: tuple[str, str]) -> None:
    async def body(box: Sandbox) -> None:
        start = time.monotonic()
        done = await asyncio.gather(*(box.commands.run(f"sleep 0.5; echo {n}") for n in range(6)))
        assert [one.text for one in done] == list("012345") and time.monotonic() - start < 2.5
        texts: list[str] = []

        async def note(message) -> None:
            texts.append(message.text)

        await box.commands.run(
            "echo a; echo b >&2", handlers=ExecutionHandlers(on_stdout=note, on_stderr=note)
        )
        assert sorted(texts) == ["a\n", "b\n"]
        begun = await box.commands.run("echo log", opts=RunCommandOpts(background=True))
        while (await box.commands.get_command_status(begun.id)).running:
            await asyncio.sleep(0.02)
        assert (await box.commands.get_background_command_logs(begun.id)).content == "log\n"
        await box.commands.set_env("KEPT", "a\nb")
        assert "".join(m.text for m in (await box.commands.run('printf %s "$KEPT"')).logs.stdout) == "a\nb"
        session = await box.commands.create_session(working_directory="/tmp")
        assert (await box.commands.run_in_session(session, "pwd")).text == "/tmp"
        await box.commands.delete_session(session)

    with_sandbox(address, body)


def test_files(address: tuple[str, str]) -> None:
    async def body(box: Sandbox) -> None:
        await box.files.write_files(
            [WriteEntry(path="/tmp/d/a", data="1"), WriteEntry(path="/tmp/d/b", data=b"2")]
        )
        assert await box.files.read_file("/tmp/d/a") == "1"
        parts = [part async for part in await _stream(box.files.read_bytes_stream("/tmp/d/b"))]
        assert b"".join(parts) == b"2"
        assert len(await box.files.search(SearchEntry(path="/tmp/d", pattern="*"))) == 2
        assert (await box.files.get_file_info(["/tmp/d/a"]))["/tmp/d/a"].size == 1
        await box.files.delete_directories(["/tmp/d"])

    with_sandbox(address, body)


async def _stream(stream: Any) -> Any:
    return await stream if isinstance(stream, Awaitable) else stream


def test_isolated_sessions(address: tuple[str, str]) -> None:
    async def body(box: Sandbox) -> None:
        request = CreateIsolatedSessionRequest(workspace=IsolatedWorkspaceSpec(path="/workspace"))
        async with box.isolation.session(request) as session:
            await session.files.write_file("/workspace/a", "x")
            assert (await session.run("cat a")).text == "x"
            run = await session.run_background("echo later")
            while (await session.run_status(run.run_id)).running:
                await asyncio.sleep(0.02)
            assert (await session.run_logs(run.run_id)).text == "later\n"
        assert (await box.commands.run("ls /workspace")).text == ""
        assert (await box.isolation.run_once("echo once", workspace="/workspace")).text == "once"

    with_sandbox(address, body)


def test_code(address: tuple[str, str]) -> None:
    async def body(box: Sandbox) -> None:
        interpreter = await CodeInterpreter.create(sandbox=box)
        context = await interpreter.codes.create_context("python")
        await interpreter.codes.run("x = 6 * 7", context=context)
        assert (await interpreter.codes.run("x", context=context)).result[0].text == "42"
        await interpreter.aclose()

    with_sandbox(address, body)
