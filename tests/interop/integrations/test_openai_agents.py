"""The OpenAI Agents SDK runs whole agents in sandboxes, with its own scripted models and no network."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stockade import AsyncSandbox, Policy, PolicyError, Workspace
from support.means import need

try:
    import agents
except ModuleNotFoundError:
    need(False, "openai-agents is not installed")
from agents import Agent, RunConfig, Runner, ShellTool
from agents.run_config import SandboxRunConfig
from agents.sandbox import Manifest, SandboxAgent
from agents.sandbox.entries import File
from agents.sandbox.errors import ExecTimeoutError, WorkspaceReadNotFoundError
from agents.sandbox.manifest import Environment
from agents.sandbox.snapshot import LocalSnapshotSpec
from agents.testing import ScriptedModel, assistant_message, function_call

from stockade.integrations.openai_agents import StockadeSandboxClient, shell_executor


@pytest.fixture(autouse=True)
def without_traces() -> Iterator[None]:
    """The SDK would send traces of each run to its maker."""
    agents.set_tracing_disabled(True)
    yield


def shell_call(*commands: str, **action: Any) -> Any:
    """What a model answers to have commands run by the shell tool."""
    from openai.types.responses import ResponseFunctionShellToolCall

    return ResponseFunctionShellToolCall.model_validate(
        {
            "type": "shell_call",
            "id": "sh_1",
            "call_id": "call_1",
            "status": "completed",
            "action": {"commands": list(commands), **action},
        }
    )


async def shell_outputs(workspace: Path, *commands: str, **action: Any) -> list[dict[str, Any]]:
    """Run an agent whose model asks for the commands, and return what the model learns of them."""
    model = ScriptedModel([[shell_call(*commands, **action)], [assistant_message("done")]])
    async with AsyncSandbox(Policy(workspace=str(workspace)), on_exit="discard") as box:
        agent = Agent(name="agent", model=model, tools=[ShellTool(executor=shell_executor(box))])
        result = await Runner.run(agent, "do it")
    assert result.final_output == "done"
    model.assert_complete()
    assert model.last_call is not None
    last = model.last_call.input[-1]
    assert isinstance(last, dict)
    found: list[dict[str, Any]] = last["output"]
    return found


async def test_the_shell_tool_runs_the_models_commands_behind_the_walls(workspace: Path) -> None:
    (workspace / "file").write_text("from outside\n")
    first, second = await shell_outputs(
        workspace, "cat file; echo changed > file; exit 3", "cat file; ls -A ~ | wc -l"
    )
    assert first["stdout"] == "from outside\n"
    assert first["outcome"] == {"type": "exit", "exit_code": 3}
    assert second["stdout"].split() == ["changed", "0"]
    assert (workspace / "file").read_text() == "from outside\n"


async def test_a_command_that_takes_too_long_ends_and_the_rest_does_not_run(workspace: Path) -> None:
    outputs = await shell_outputs(workspace, "echo begun; sleep 60", "echo never", timeout_ms=300)
    assert [(one["stdout"], one["outcome"]["type"]) for one in outputs] == [("begun\n", "timeout")]
    assert "time limit" in outputs[0]["stderr"]


async def test_a_sandbox_agent_works_on_a_copy_of_the_project(workspace: Path) -> None:
    (workspace / "sum.py").write_text("print(1 - 1)\n")
    command = "sed -i 's/-/+/' sum.py && python3 sum.py; pwd"
    model = ScriptedModel(
        [
            [function_call("exec_command", {"cmd": command}, call_id="call_1")],
            [assistant_message("repaired")],
        ]
    )
    client = StockadeSandboxClient(Policy(workspace=str(workspace)))
    result = await Runner.run(
        SandboxAgent(name="fixer", model=model),
        "repair sum.py",
        run_config=RunConfig(sandbox=SandboxRunConfig(client=client)),
    )
    assert result.final_output == "repaired"
    assert model.last_call is not None
    seen = json.dumps(model.last_call.input, default=str)
    assert f"2\\n{workspace}" in seen
    assert (workspace / "sum.py").read_text() == "print(1 - 1)\n"
    (kept,) = Workspace.list()
    assert [change.path for change in kept.diff()] == ["sum.py"]
    kept.discard()


async def test_a_session_reads_writes_lists_and_applies_its_manifest(workspace: Path) -> None:
    client = StockadeSandboxClient()
    manifest = Manifest(
        entries={"notes/plan.txt": File(content=b"first\n")}, environment=Environment(value={"WHO": "ada"})
    )
    session = await client.create(manifest=manifest)
    async with session:
        assert await session.running()
        assert (await session.read(Path("notes/plan.txt"))).read() == b"first\n"
        await session.write(Path("deep/er/file"), io.BytesIO(b"\x00\xff"))
        done = await session.exec("echo $WHO; od -An -tx1 deep/er/file; echo no >&2; exit 5")
        assert (done.stdout, done.stderr, done.exit_code) == (b"ada\n 00 ff\n", b"no\n", 5)
        assert sorted(Path(entry.path).name for entry in await session.ls(".")) == ["deep", "notes"]
        with pytest.raises(WorkspaceReadNotFoundError):
            await session.read(Path("missing"))
        with pytest.raises(ExecTimeoutError):
            await session.exec("sleep 60", timeout=0.3)
        assert await session._inner.read_bounded(Path("notes/plan.txt"), max_bytes=3) == b"fir"
        with pytest.raises(PolicyError, match="only your own user"):
            await session.exec("id", user="root")
    assert not await session.running()
    await client.delete(session)


async def test_a_link_of_the_program_leads_to_files_inside_and_never_to_the_hosts(
    workspace: Path, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("of the host")
    session = await StockadeSandboxClient(Policy(workspace=str(workspace)), on_exit="discard").create()
    async with session:
        await session.exec(f"ln -s {secret} link; ln -s {tmp_path} directory")
        for path in ("link", "directory/secret"):
            with pytest.raises(WorkspaceReadNotFoundError):
                await session.read(Path(path))
    assert (tmp_path / "secret").read_text() == "of the host"


async def test_a_snapshot_fills_the_files_of_a_resumed_session(tmp_path: Path) -> None:
    client = StockadeSandboxClient()
    snapshot = LocalSnapshotSpec(base_path=tmp_path / "snapshots")
    session = await client.create(snapshot=snapshot)
    async with session:
        await session.exec("mkdir d; echo kept > d/file; ln -s d/file link")
        state = client.serialize_session_state(session.state)
    resumed = await client.resume(client.deserialize_session_state(state))
    async with resumed:
        assert (await resumed.exec("cat link; ls")).stdout == b"kept\nd\nlink\n"


async def test_a_resumed_session_goes_on_in_its_kept_workspace(workspace: Path) -> None:
    client = StockadeSandboxClient(Policy(workspace=str(workspace)))
    session = await client.create()
    async with session:
        await session.exec("echo one > file")
        state = client.serialize_session_state(session.state)
    resumed = await client.resume(client.deserialize_session_state(state))
    async with resumed:
        assert (await resumed.exec("cat file")).stdout == b"one\n"
    Workspace.open(str(state["workspace_id"])).discard()


async def test_neither_a_manifest_nor_a_saved_state_chooses_another_directory(
    workspace: Path, tmp_path: Path
) -> None:
    client = StockadeSandboxClient(Policy(workspace=str(workspace)))
    with pytest.raises(PolicyError, match="the files of this client's sessions"):
        await client.create(manifest=Manifest(root=str(tmp_path)))
    session = await client.create()
    state = client.serialize_session_state(session.state)
    state["manifest"]["root"] = str(tmp_path)  # type: ignore[index]
    with pytest.raises(PolicyError, match="the files of this client's sessions"):
        await client.resume(client.deserialize_session_state(state))
