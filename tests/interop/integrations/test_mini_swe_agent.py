"""mini-swe-agent with commands in sandboxes: what its own environments promise, and a whole scripted run."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stockade import PolicyError, Workspace
from support.means import need

CLASS = "stockade.integrations.mini_swe_agent.StockadeEnvironment"


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its first import greets, and makes a directory for its settings."""
    need(importlib.util.find_spec("minisweagent") is not None, "mini-swe-agent is not installed")
    monkeypatch.setenv("MSWEA_SILENT_STARTUP", "1")
    monkeypatch.setenv("MSWEA_GLOBAL_CONFIG_DIR", str(tmp_path / "settings"))


@pytest.fixture
def environment(workspace: Path) -> Iterator[Any]:
    """An environment as mini-swe-agent makes it from its configuration, by the full path of the class."""
    from minisweagent.environments import get_environment

    made: Any = get_environment(
        {
            "environment_class": CLASS,
            "policy": {"workspace": str(workspace)},
            "env": {"COLOUR": "green"},
            "timeout": 5,
            "on_exit": "discard",
        }
    )
    yield made
    made.cleanup()


@pytest.mark.parametrize(
    ("command", "output", "code"),
    [
        ("echo hello", "hello\n", 0),
        ("echo -e 'one\\ntwo'", "one\ntwo\n", 0),
        ("echo hello world | grep -o world", "world\n", 0),
        ("echo $COLOUR", "green\n", 0),
        ("exit 42", "", 42),
        ("echo out; echo error >&2; echo out", "out\nerror\nout\n", 0),
        ("kill -9 $$", "", 137),
        ('echo "it\'s" "$0"', "it's bash\n", 0),
    ],
)
def test_a_command_has_its_output_and_its_exit_code(
    environment: Any, command: str, output: str, code: int
) -> None:
    found = environment.execute({"command": command})
    assert found == {"output": output, "returncode": code, "exception_info": ""}


def test_a_missing_program_is_an_ordinary_failure(environment: Any) -> None:
    found = environment.execute({"command": "no-such-program"})
    assert found["returncode"] == 127 and "no-such-program: command not found" in found["output"]


def test_a_command_that_takes_too_long_says_so_and_leaves_nothing_running(environment: Any) -> None:
    found = environment.execute({"command": "echo begun; sleep 600 & sleep 600"}, timeout=1)
    assert found["returncode"] == -1 and found["output"] == "begun\n"
    assert "timed out" in found["exception_info"]
    assert environment.execute({"command": "pgrep -c sleep"})["output"] == "0\n"


def test_files_stay_between_commands_and_aside_from_the_hosts(environment: Any, workspace: Path) -> None:
    environment.execute({"command": "mkdir d; echo content > d/file"})
    assert environment.execute({"command": "cat file"}, cwd="d")["output"] == "content\n"
    assert environment.execute({"command": "pwd"})["output"] == f"{workspace}\n"
    assert list(workspace.iterdir()) == []


def test_without_a_policy_the_directory_of_the_configuration_is_the_workspace(workspace: Path) -> None:
    from minisweagent.environments import get_environment

    made: Any = get_environment({"environment_class": CLASS, "cwd": str(workspace)})
    assert made.execute({"command": "pwd; echo 1 > file"})["output"] == f"{workspace}\n"
    made.cleanup()
    kept = Workspace.open(made.serialize()["info"]["stockade"]["workspace"])
    assert [change.path for change in kept.diff()] == ["file"]
    kept.discard()


def test_neither_commands_nor_prompts_see_the_environment_of_the_host(
    environment: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_OF_THE_HOST", "a-key")
    assert "a-key" not in environment.execute({"command": "env"})["output"]
    values = environment.get_template_vars(task="repair it")
    assert values["task"] == "repair it" and values["timeout"] == 5 and "machine" in values
    assert "SECRET_OF_THE_HOST" not in values


def test_a_policy_that_makes_no_sense_is_refused_before_a_model_is_asked() -> None:
    from minisweagent.environments import get_environment

    with pytest.raises(PolicyError, match="workspac"):
        get_environment({"environment_class": CLASS, "policy": {"workspac": "."}})


def test_a_whole_run_with_a_scripted_model_submits_its_work(
    environment: Any, workspace: Path, tmp_path: Path
) -> None:
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.models.test_models import DeterministicModel, make_output

    (workspace / "sum.py").write_text("print(1 - 1)\n")
    commands = [
        "cat sum.py; echo $HOME > /tmp/seen",
        "sed -i 's/-/+/' sum.py; python3 sum.py",
        "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; git diff --no-index /dev/null sum.py | tail -1",
    ]
    agent = DefaultAgent(
        DeterministicModel(outputs=[make_output("", [{"command": command}]) for command in commands]),
        environment,
        system_template="You work on {{system}}.",
        instance_template="{{task}}",
        cost_limit=0,
        output_path=tmp_path / "trajectory.json",
    )
    ended = agent.run("repair sum.py")
    assert ended == {"exit_status": "Submitted", "submission": "+print(1 + 1)\n"}
    assert any("<output>\n2\n" in str(message["content"]) for message in agent.messages)
    assert (workspace / "sum.py").read_text() == "print(1 - 1)\n"
    recorded = json.loads((tmp_path / "trajectory.json").read_text())["info"]
    assert recorded["config"]["environment_type"] == CLASS
    assert recorded["stockade"]["workspace"] == environment.workspace_id
