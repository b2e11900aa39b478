"""Calls as a newcomer writes them: each works, or says what was meant."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import stockade
from stockade import AsyncSandbox, Policy, PolicyError, Pool, Sandbox, Spawner
from stockade.functions import WarmPython

ECHO = ["sh", "-c", "echo $A"]
FILE = 'env = { A = "from a file" }\n'


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "policy.toml"
    path.write_text(FILE)
    return path


def in_sandbox(policy: Any) -> str:
    with Sandbox(policy) as box:
        return box.run(ECHO).text


def in_async_sandbox(policy: Any) -> str:
    async def main() -> str:
        async with AsyncSandbox(policy) as box:
            return (await box.run(ECHO)).text

    return asyncio.run(main())


def in_pool(policy: Any) -> str:
    with Pool(policy, size=1) as pool:
        return pool.run(ECHO).text


def by_spawner(policy: Any) -> str:
    with Spawner(policy) as spawner:
        return spawner.collect(spawner.spawn(ECHO)).text


CALLS: list[Callable[[Any], str]] = [
    lambda policy: stockade.run(ECHO, policy).text,
    lambda policy: asyncio.run(stockade.run_async(ECHO, policy)).text,
    in_sandbox,
    in_async_sandbox,
    in_pool,
    by_spawner,
]
IDS = ["run", "run_async", "Sandbox", "AsyncSandbox", "Pool", "Spawner"]


@pytest.mark.parametrize("call", CALLS, ids=IDS)
class TestPolicies:
    def test_the_clauses_in_a_dict_are_a_policy(self, call: Callable[[Any], str]) -> None:
        assert call({"env": {"A": "from a dict"}}) == "from a dict\n"

    def test_the_path_of_a_file_is_a_policy(self, call: Callable[[Any], str], file: Path) -> None:
        assert call(str(file)) == call(file) == "from a file\n"


@pytest.mark.parametrize(
    ("policy", "hint"),
    [
        ("no-such.toml", "check the path"),
        ("dev", "Policy(profile='dev')"),
        ('workspace = "."', "Policy.from_toml(text)"),
        (".", "Policy(workspace='.')"),
        (["-l"], 'run(["ls", "-l"])'),
        (5, "its clauses as a dict"),
        ({"netw": []}, "did you mean net?"),
    ],
)
@pytest.mark.parametrize("call", [stockade.run, Sandbox, Pool, Spawner, WarmPython])
def test_what_is_no_policy_says_what_was_meant(call: Any, policy: Any, hint: str) -> None:
    with pytest.raises(PolicyError) as caught:
        call(["true"], policy) if call is stockade.run else call(policy)
    assert hint in caught.value.hint


def test_a_loaded_policy_protects_its_file_from_the_program(workspace: Path) -> None:
    file = workspace / "own.toml"
    file.write_text('workspace = { path = ".", mode = "rw" }\nprotect = []\n')
    result = stockade.run(["sh", "-c", "echo 'net = \"open\"' > own.toml"], file)
    assert not result.ok and "net" not in file.read_text()
    assert Policy.load(file).workspace == Policy.from_toml(file.read_text(), base=str(workspace)).workspace


def test_a_pyproject_holds_a_policy_in_its_table(tmp_path: Path) -> None:
    file = tmp_path / "pyproject.toml"
    file.write_text('[project]\nname = "x"\n[tool.stockade]\nprofile = "dev"\n')
    assert Policy.load(file).profile == "dev"


def test_numbers_and_paths_are_variables(tmp_path: Path) -> None:
    assert stockade.run(["sh", "-c", "echo $A $B"], env={"A": 1, "B": tmp_path}).text == f"1 {tmp_path}\n"


def test_text_is_input() -> None:
    assert stockade.run(["cat"], input="schön").stdout == "schön".encode()


def test_a_timeout_may_be_text() -> None:
    assert stockade.run(["sleep", "60"], timeout="200ms").outcome == "timed-out"


@pytest.mark.parametrize(
    ("command", "options", "words"),
    [
        ("ls -l", {}, "write ['ls', '-l']"),
        ("ls | wc", {}, "write ['sh', '-c', 'ls | wc']"),
        ("it's", {}, "write ['sh', '-c', \"it's\"]"),
        (["sleep", 1], {}, "write it as text: '1'"),
        (5, {}, "write a list"),
        (["true"], {"env": {"A": True}}, "write env={'A': 'True'}"),
        (["true"], {"env": {"A": None}}, "leave A out"),
        (["true"], {"env": ["A=1"]}, 'write env={"NAME": "value"}'),
        (["true"], {"input": 5}, "write bytes or text"),
        (["true"], {"cwd": 5}, "write a path"),
        (["true"], {"grace": "1s"}, "write seconds"),
        (["true"], {"name": "two\nlines"}, "printable"),
        (["true"], {"name": "x" * 65}, "1 to 64"),
        (["true"], {"name": 5}, "printable"),
    ],
)
def test_a_wrong_value_says_what_to_write(command: Any, options: Any, words: str) -> None:
    with pytest.raises(PolicyError) as caught:
        stockade.run(command, **options)
    assert words in caught.value.hint


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"workspace": "."}, r"a clause of the policy: write Policy\(workspace='.'\)"),
        ({"net": "open"}, "a clause of the policy"),
        ({"timout": 3}, "did you mean 'timeout'"),
        ({"check": True}, r"call check\(\) on the result"),
        ({"capture_output": True}, "the result has stdout and stderr"),
        ({"shell": True}, "run a shell"),
        ({"nonsense": 1}, "known: advise, cwd, env"),
    ],
)
def test_an_option_that_a_call_does_not_have_says_what_was_meant(options: Any, words: str) -> None:
    for call in (lambda: stockade.run(["true"], **options), lambda: asyncio.run(waited(options))):
        with pytest.raises(TypeError, match=words):
            call()


async def waited(options: Any) -> None:
    await stockade.run_async(["true"], **options)


def test_every_call_refuses_an_option_that_it_does_not_have() -> None:
    with Sandbox() as box, box.shell() as shell, box.python() as python, Pool(size=1) as pool:
        words = ["true"]
        for call in (box.run, box.start, box.background, pool.run):
            with pytest.raises(TypeError, match="did you mean 'timeout'"):
                call(words, timout=1)  # type: ignore[operator]
        for code in (shell.run, python.run):
            with pytest.raises(TypeError, match="did you mean 'timeout'"):
                code("1", timout=1)  # type: ignore[operator]


def test_a_workspace_as_an_option_is_resumed_by_another_name(workspace: Path) -> None:
    result = stockade.run(["touch", "new"], {"workspace": str(workspace)})
    kept = stockade.Workspace.open(result.workspace_id)
    with pytest.raises(TypeError, match="resume="):
        stockade.run(["true"], workspace=kept)  # type: ignore[call-arg]
    assert asyncio.run(stockade.run_async(["ls"], resume=kept, snapshot=True)).text == "new\n"
    assert [one.name for one in kept.snapshots()] == ["run-1"]
    kept.discard()
