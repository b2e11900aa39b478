"""The real Claude Code outside, its commands and tools inside; a scripted model tells it what to do."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from support.local_model import KEY, LocalModel, local_model
from support.means import need_program
from support.model_apis import DONE
from support.screen import STOCKADE

SHELL = f"{STOCKADE}-shell"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project in a home that has a secret."""
    project = tmp_path / "home" / "project"
    project.mkdir(parents=True)
    (tmp_path / "home" / "secret").write_text("private\n")
    (project / "a.txt").write_text("one\n")
    return project


def claude(model: LocalModel, project: Path, *options: str, **environ: str) -> None:
    """Let Claude Code do one task; it asks for no permission, as the walls are ours."""
    program = need_program("claude")
    done = subprocess.run(
        [program, "-p", "--dangerously-skip-permissions", *options, "do it"],
        cwd=project,
        env={
            **os.environ,
            "HOME": str(project.parent),
            "ANTHROPIC_BASE_URL": model.address,
            "ANTHROPIC_API_KEY": KEY,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "TMPDIR": str(project.parent),
            "CLAUDE_CODE_TMPDIR": str(project.parent),
            "IS_SANDBOX": "1",  # or it does not start like this as root
            **environ,
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0 and DONE in done.stdout, (done.stdout, done.stderr)


def stockade(project: Path, *words: str) -> str:
    done = subprocess.run(
        [STOCKADE, *words],
        cwd=project,
        env={**os.environ, "HOME": str(project.parent)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def attack(project: Path) -> str:
    """A command that reads a secret, writes, ends quotations, and calls Stockade itself with wider rights."""
    secret = project.parent / "secret"
    return (
        f"cat {secret}; echo two > a.txt; echo \"it's $((6*7))\" 'and \"this\"' \\' ; # '; cat {secret}; '\n"
        f"{STOCKADE} run --write {project} -- sh -c 'echo evil > {project}/a.txt' 2>/dev/null; cat <<'E'\n"
        f"done $PWD\nE\n"
    )


def test_the_hook_puts_every_command_behind_the_walls(project: Path) -> None:
    stockade(project, "hook", "claude", "--install", "--yes")
    assert "has this already" not in stockade(project, "hook", "claude", "--install", "--yes")
    (entry,) = json.loads((project.parent / ".claude" / "settings.json").read_text())["hooks"]["PreToolUse"]
    assert entry["hooks"][0]["command"].endswith("hook claude || exit 2")
    with local_model(command=attack(project)) as model:
        claude(model, project)
    (result,) = model.results
    assert "it's 42" in result and "done $PWD" in result and "private" not in result
    assert (project / "a.txt").read_text() == "one\n"
    assert "+two" in stockade(project, "diff"), "the change is aside"
    assert stockade(project, "hook", "run", "--", "cat a.txt") == "two\n", "the next command goes on there"


def test_a_hook_that_cannot_start_lets_no_command_through(project: Path) -> None:
    """Claude Code goes on after most errors of a hook; the entry turns them into the one that stops it."""
    (settings := project.parent / ".claude" / "settings.json").parent.mkdir()
    stockade(project, "hook", "claude", "--install", "--yes")
    settings.write_text(settings.read_text().replace(STOCKADE, "/nowhere/stockade"))
    with local_model(command="echo evil > a.txt") as model:
        claude(model, project)
    assert "hook error" in model.results[0] and (project / "a.txt").read_text() == "one\n"


def test_the_shell_prefix_puts_every_command_behind_the_walls(project: Path) -> None:
    with local_model(command=attack(project)) as model:
        claude(model, project, CLAUDE_CODE_SHELL_PREFIX=SHELL)
    assert "it's 42" in model.results[0] and "private" not in model.results[0]
    assert (project / "a.txt").read_text() == "one\n" and "+two" in stockade(project, "diff")


def test_claude_code_calls_a_tool_of_the_server_that_install_registered(project: Path) -> None:
    stockade(project, "mcp", "install", "claude", "--write")
    arguments: dict[str, Any] = {"code": f"cat {project.parent}/secret; echo $((6*7)); echo two > a.txt"}
    with local_model(tool="mcp__stockade__shell", arguments=arguments) as model:
        claude(model, project, "--mcp-config", ".mcp.json", "--strict-mcp-config")
    assert "42" in model.results[-1] and "private" not in model.results[-1]
    assert (project / "a.txt").read_text() == "one\n" and "+two" in stockade(project, "diff")
