"""Agents that are found and started inside, by their recipes, and never outside."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any, cast

import pytest

from stockade import Policy, Sandbox
from stockade.errors import SetupError
from stockade.loop.items.item import ItemsError
from stockade.loop.items.load import load_items
from stockade.loop.items.source_file import printed_by
from stockade.loop.recipes.recipe import AgentError, recipe_for
from unit.loop.test_items import make_task

#: Notes what it was started with, in a file beside itself: the host's if it runs outside, the copy's inside.
AGENT = """#!/bin/sh
case "$1" in --version) echo "9.9 (pretend)"; exit ;; esac
printf '%s\\n' "$@" > "$(dirname "$0")/started"
cat > "$(dirname "$0")/prompt"
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project that has an agent named claude."""
    project = tmp_path / "project"
    project.mkdir()
    (project / "claude").write_text(AGENT)
    (project / "claude").chmod(0o755)
    return project


def policy(project: Path) -> Policy:
    return Policy(workspace=str(project))


def test_an_agent_is_found_inside_and_says_its_version(project: Path) -> None:
    found = recipe_for([str(project / "claude")]).detect(policy(project))
    assert (found.program, found.version) == (str(project / "claude"), "9.9 (pretend)")
    assert not (project / "started").exists()


def test_an_agent_that_is_nowhere_gets_a_hint_how_to_install_it(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    if shutil.which("claude"):
        (project.parent / "bin").mkdir()
        monkeypatch.setenv("PATH", str(project.parent / "bin"))
    with pytest.raises(AgentError, match="there is no program no-such-agent"):
        recipe_for(["no-such-agent"]).detect(policy(project))
    with pytest.raises(AgentError, match="there is no program") as raised:
        recipe_for([str(project / "bin" / "claude")]).detect(policy(project))
    assert "npm install -g @anthropic-ai/claude-code" in raised.value.hint


def test_an_agent_that_the_policy_does_not_show_gets_the_line_that_shows_it(
    project: Path, tmp_path: Path
) -> None:
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (project / "claude").rename(hidden / "claude")
    with pytest.raises(AgentError, match="the policy does not show it inside") as raised:
        recipe_for([str(hidden / "claude")]).detect(policy(project))
    assert f'read = ["{hidden}"]' in raised.value.hint


def test_an_agent_that_fails_at_once_is_told_from_one_that_is_missing(project: Path) -> None:
    (project / "claude").write_text("#!/bin/sh\necho broken >&2; exit 3\n")
    with pytest.raises(AgentError, match=r"--version` failed inside: .*broken"):
        recipe_for([str(project / "claude")]).detect(policy(project))


def test_the_switch_and_the_prompt_reach_the_agent_inside(project: Path) -> None:
    recipe = recipe_for([str(project / "claude"), "--model", "opus"])
    prompt = "fix it\n" * 40_000  # more than a pipe holds, and than an argument may have
    with Sandbox(policy(project), on_exit="discard") as box:
        process = recipe.start(box, prompt)
        assert process.wait(60).ok
        assert box.files.read(project / "prompt").decode() == prompt
        assert b"--dangerously-skip-permissions" in box.files.read(project / "started")
        assert recipe.run(box, "again", timeout=60).ok
        assert box.files.read(project / "prompt") == b"again"
    assert sorted(os.listdir(project)) == ["claude"], "on the host nothing was started"


def test_a_prompt_is_an_argument_or_a_file_where_the_command_says_so(project: Path) -> None:
    script = 'printf "%s" "$1" > as-argument; cat "$2" > as-file'
    with Sandbox(policy(project), on_exit="discard") as box:
        recipe_for(["sh", "-c", script, "x", "{prompt}", "/dev/null"]).run(box, "-rf {prompt_file}").check()
        assert box.files.read("as-argument") == b"\n-rf {prompt_file}", "a dash is no option of the agent's"
        recipe_for(["sh", "-c", script, "x", "", "{prompt_file}"]).run(box, "from {prompt}").check()
        assert box.files.read("as-file") == b"from {prompt}"
        with pytest.raises(AgentError, match="cannot be an argument"):
            recipe_for(["echo", "{prompt}"]).run(box, "x" * 200_000)


class Outside:
    """Has the calls of a sandbox, and would start the command on the host."""

    gate = 1

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def start(self, *args: Any, **more: Any) -> None:
        self.calls.append(args)

    run = start


def test_no_recipe_starts_an_agent_outside_of_an_open_sandbox(project: Path) -> None:
    recipe = recipe_for([str(project / "claude")])
    closed, outside = Sandbox(policy(project)), Outside()
    for box in (closed, cast(Sandbox, outside)):
        for start in (recipe.start, recipe.run):
            with pytest.raises(SetupError, match="in an open sandbox only"):
                start(box, "fix it")
    with Sandbox(policy(project), on_exit="discard") as ended:
        pass
    with pytest.raises(SetupError, match="in an open sandbox only"):
        recipe.start(ended, "fix it")
    assert outside.calls == [] and not (project / "started").exists()


def test_control_the_pretended_agent_would_leave_its_mark_outside(project: Path) -> None:
    import subprocess

    subprocess.run([str(project / "claude"), "-p"], stdin=subprocess.DEVNULL, check=True)
    assert (project / "started").read_text() == "-p\n"


def test_items_come_from_a_command_that_the_user_asks_for(tmp_path: Path) -> None:
    (tmp_path / "ready.json").write_text('[{"id": "bd-1", "title": "First", "priority": 1}]')
    (item,) = load_items(f"!cat {tmp_path}/ready.json", commands=True)
    assert (item.id, item.title, item.priority) == ("bd-1", "First", 1)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("echo no such database >&2; exit 3", "exit code 3: no such database"),
        ("echo not json", "the output of echo not json is not JSON"),
        ("echo '{}'", "has no items"),
        ("head -c 17000000 /dev/zero", "more than 16 MiB"),
    ],
)
def test_a_command_that_prints_no_items_is_an_error(command: str, message: str) -> None:
    with pytest.raises(ItemsError, match=message):
        load_items(f"!{command}", commands=True)


def test_a_command_that_does_not_end_is_ended_with_all_that_it_started() -> None:
    with pytest.raises(ItemsError, match="did not end in"):
        printed_by("sleep 1234 & sleep 1234", patience=0.2)


@pytest.mark.parametrize(
    ("test", "passes"),
    [
        (
            "test -f done.txt && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt",
            True,
        ),
        ("echo 0 > /logs/verifier/reward.txt", False),
        ("echo 0.5 > /logs/verifier/reward.txt; exit 1", True),
        ("echo '{\"reward\": 0.0}' > /logs/verifier/reward.json", False),
        ("echo '{\"reward\": 1.0}' > /logs/verifier/reward.json", True),
        (": > /logs/verifier/reward.txt", False),
        ("grep -q wanted /tests/data.txt", True),
        ("exit 3", False),
    ],
)
def test_the_verifier_of_a_harbor_task_judges_by_its_reward_or_its_exit_code(
    test: str, passes: bool, tmp_path: Path, project: Path
) -> None:
    make_task(tmp_path / "task", **{"tests/test.sh": test + "\n", "tests/data.txt": "wanted\n"})
    (item,) = load_items(str(tmp_path / "task"))
    (project / "done.txt").write_text("yes")
    with Sandbox(Policy(workspace=str(project), read=list(item.judge_reads)), on_exit="discard") as box:
        assert box.run(["sh", "-c", item.verify], timeout=60).ok is passes
