"""Pydantic AI's own conformance tests of workspace backends."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from pydantic_ai.workspaces import WorkspaceOutputLimitError, WorkspaceRef, WorkspaceUnavailableError
from pydantic_ai.workspaces.conformance import WorkspaceBackendSuite

from stockade.errors import SetupError
from stockade.integrations.pydantic_ai import StockadeWorkspace
from support.paths import ROOT


@pytest.fixture(scope="module")
def shared(module_state: Path) -> Iterator[StockadeWorkspace]:
    """One sandbox for all tests that do not end it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STOCKADE_HOME", str(module_state))
        workspace = StockadeWorkspace()
        asyncio.run(workspace.working_dir())
        yield workspace
        asyncio.run(workspace.destroy())


@pytest.fixture(autouse=True)
def same_state(module_state: Path, stockade_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attach where the shared sandbox is known."""
    monkeypatch.setenv("STOCKADE_HOME", str(module_state))


class TestStockade(WorkspaceBackendSuite):
    """The conformance suite, with nothing left out."""

    @pytest.fixture
    def backend(self, shared: StockadeWorkspace) -> StockadeWorkspace:
        return shared

    @pytest.fixture
    def fresh_backend(self) -> Iterator[Callable[[], StockadeWorkspace]]:
        made: list[StockadeWorkspace] = []

        def make() -> StockadeWorkspace:
            made.append(StockadeWorkspace())
            return made[-1]

        yield make
        for one in made:
            asyncio.run(one.destroy())

    @pytest.fixture
    def attach_backend(self) -> Callable[[WorkspaceRef], StockadeWorkspace]:
        return lambda ref: StockadeWorkspace(ref=ref)

    @pytest.fixture
    def destroy_environment(self) -> Callable[[StockadeWorkspace], Awaitable[None]]:
        return lambda backend: backend.destroy()


async def test_root_inside_heeds_permissions_like_anyone_else(shared: StockadeWorkspace) -> None:
    """The suite skips this for root, who has no capability here."""
    await shared.write_bytes("/tmp/closed", b"data")
    await shared.run(["chmod", "000", "/tmp/closed"])
    with pytest.raises(PermissionError):
        await shared.read_bytes("/tmp/closed")
    with pytest.raises(PermissionError):
        await shared.write_bytes("/tmp/closed", b"changed")


async def test_output_past_the_limit_is_an_error_with_its_beginning() -> None:
    workspace = StockadeWorkspace(output_limit=1000)
    try:
        with pytest.raises(WorkspaceOutputLimitError) as caught:
            await workspace.run("head -c 5000 /dev/zero | tr '\\0' x", shell=True)
        assert (caught.value.limit, caught.value.stdout) == (1000, "x" * 1000)
    finally:
        await workspace.destroy()


async def test_a_sandbox_that_is_killed_is_unavailable(shared: StockadeWorkspace) -> None:
    workspace = StockadeWorkspace()
    await workspace.working_dir()
    assert workspace.ref is not None
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "stockade", "kill", "--now", workspace.ref.id],
        check=False,
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr
    with pytest.raises(WorkspaceUnavailableError):
        await workspace.run(["true"])
    with pytest.raises(WorkspaceUnavailableError):
        await StockadeWorkspace(ref=workspace.ref).working_dir()


async def test_a_policy_that_cannot_be_enforced_is_an_error_of_its_own() -> None:
    with pytest.raises(SetupError, match="nowhere"):
        await StockadeWorkspace({"read": ["/nowhere"]}).working_dir()


def test_a_ref_is_of_this_provider_and_has_its_policy_already(shared: StockadeWorkspace) -> None:
    assert shared.ref is not None
    with pytest.raises(ValueError, match="another provider"):
        StockadeWorkspace(ref=WorkspaceRef(provider="local", id="/tmp"))
    with pytest.raises(ValueError, match="not both"):
        StockadeWorkspace({}, ref=shared.ref)


def test_the_example_goes_on_in_the_sandbox_of_its_last_run() -> None:
    program = [sys.executable, ROOT / "examples" / "frameworks" / "pydantic_workspace.py"]
    first = subprocess.run(program, check=True, capture_output=True, text=True).stdout.split()
    second = subprocess.run([*program, first[0]], check=True, capture_output=True, text=True).stdout.split()
    ref = WorkspaceRef(provider="stockade", id=first[0])
    asyncio.run(StockadeWorkspace(ref=ref).destroy())
    assert (first[1], second) == ("1", [first[0], "2"])
