"""LangChain's own tests of sandboxes, against a living sandbox and, for what fails, without any walls."""

from __future__ import annotations

import functools
import importlib.util
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from deepagents.backends.protocol import ExecuteResponse, FileDownloadResponse, FileUploadResponse
from deepagents.backends.sandbox import BaseSandbox
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage
from langchain_tests.integration_tests import SandboxIntegrationTests

import stockade
from stockade.integrations.deepagents import StockadeBackend
from support.paths import ROOT

PATHS = "the suite expects names where deepagents has had absolute paths since 0.7"
OVERWRITES = "the suite expects an error where deepagents has overwritten files since 0.7"
#: What every backend fails with these versions, because the suite and deepagents disagree.
DISAGREED = {
    "test_glob": PATHS,
    "test_glob_basic_pattern": PATHS,
    "test_glob_with_directories": PATHS,
    "test_glob_hidden_files_explicitly": PATHS,
    "test_glob_with_character_class": PATHS,
    "test_glob_with_question_mark": PATHS,
    "test_write_existing_file_fails": OVERWRITES,
}


class TestStockade(SandboxIntegrationTests):
    """The standard suite."""

    @pytest.fixture(scope="class")
    def sandbox(self, module_state: Path) -> Iterator[StockadeBackend]:
        with stockade.Sandbox(stockade.Policy()) as box:
            yield StockadeBackend(box)
            box.files.close()


def _xfailed(test: Callable[..., None], why: str) -> Callable[..., None]:
    @functools.wraps(test)
    def same(self: Any, sandbox_backend: BaseSandbox, sandbox_test_root: str) -> None:
        test(self, sandbox_backend, sandbox_test_root)

    return pytest.mark.xfail(reason=why, strict=True)(same)


for _name, _why in DISAGREED.items():
    setattr(TestStockade, _name, _xfailed(getattr(SandboxIntegrationTests, _name), _why))


class PlainBackend(BaseSandbox):
    """Runs commands without any walls, as the control of what is expected to fail."""

    @property
    def id(self) -> str:
        return "plain"

    def execute(self, command: str, *, timeout: int | None = None) -> ExecuteResponse:
        done = subprocess.run(["bash", "-c", command], check=False, capture_output=True, timeout=timeout)
        return ExecuteResponse(output=(done.stdout + done.stderr).decode(), exit_code=done.returncode)

    def upload_files(self, files: list[tuple[str, bytes]]) -> list[FileUploadResponse]:
        for path, content in files:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_bytes(content)
        return [FileUploadResponse(path=path) for path, _ in files]

    def download_files(self, paths: list[str]) -> list[FileDownloadResponse]:
        return [FileDownloadResponse(path=path, content=Path(path).read_bytes()) for path in paths]


@pytest.mark.parametrize("name", DISAGREED)
def test_what_is_expected_to_fail_fails_without_walls_too(name: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        getattr(SandboxIntegrationTests, name)(TestStockade(), PlainBackend(), str(tmp_path))


@pytest.fixture(scope="module")
def backend(module_state: Path) -> Iterator[StockadeBackend]:
    with stockade.Sandbox(stockade.Policy()) as box:
        yield StockadeBackend(box, output_limit=1000)
        box.files.close()


def test_output_past_the_limit_is_cut_and_says_so(backend: StockadeBackend) -> None:
    answer = backend.execute("head -c 5000 /dev/zero | tr '\\0' x")
    assert (answer.output, answer.truncated, answer.exit_code) == ("x" * 1000, True, 0)


def test_a_command_that_takes_too_long_ends_with_the_reason(backend: StockadeBackend) -> None:
    answer = backend.execute("echo begun; sleep 60", timeout=1)
    assert answer.exit_code == 124
    assert answer.output.startswith("begun\nstockade: ")


def test_each_file_has_an_answer_of_its_own(backend: StockadeBackend) -> None:
    sent = backend.upload_files([("/tmp/a/b", b"1"), ("relative", b"2"), ("/usr/x", b"3"), ("/tmp/a", b"4")])
    assert [one.error for one in sent] == [None, "invalid_path", "permission_denied", "is_directory"]
    backend.execute("mkdir /tmp/closed; echo x > /tmp/closed/file; chmod 0 /tmp/closed")
    got = backend.download_files(["/tmp/a/b", "/tmp/none", "/tmp/a", "/tmp/a/b/c", "/tmp/closed/file"])
    assert [one.content for one in got] == [b"1", None, None, None, None]
    errors = [None, "file_not_found", "is_directory", "invalid_path", "permission_denied"]
    assert [one.error for one in got] == errors


def test_files_of_the_host_are_out_of_reach(backend: StockadeBackend, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("of the host")
    [answer] = backend.download_files([f"{tmp_path}/secret"])
    assert answer.error == "file_not_found"
    assert "of the host" not in backend.execute(f"cat {tmp_path}/secret").output


class ScriptedModel(GenericFakeChatModel):
    """Says what it is told to, whatever tools it has."""

    def bind_tools(self, *_: Any, **__: Any) -> ScriptedModel:
        return self


def test_the_example_leaves_the_agents_changes_for_review(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("example", ROOT / "examples/frameworks/deep_agent.py")
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "words").write_text("pear\napple\n")
    sort = {"command": f"sort {tmp_path}/project/words > {tmp_path}/project/sorted"}
    calls = [{"name": "execute", "args": sort, "id": "1"}]
    said = [AIMessage("", tool_calls=calls), AIMessage("done")]
    id = example.work(ScriptedModel(messages=iter(said)), "sort the words", str(tmp_path / "project"))
    assert not (tmp_path / "project" / "sorted").exists()
    workspace = stockade.Workspace.open(id)
    assert workspace.files.read("sorted") == b"apple\npear\n"
    workspace.discard()
