"""`stockade hook`: the process that answers a hook, and how commands share a workspace."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

import stockade
from support.screen import STOCKADE

CALL = {"hook_event_name": "PreToolUse", "tool_name": "Bash", "tool_input": {"command": "echo it's"}}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A project in a home."""
    tree = tmp_path / "home" / "tree"
    tree.mkdir(parents=True)
    (tree / "a.txt").write_text("one\n")
    return tree


def hook(tree: Path, *words: str, data: bytes = b"") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [STOCKADE, "hook", *words],
        cwd=tree,
        env={**os.environ, "HOME": str(tree.parent)},
        input=data.decode("latin-1"),
        capture_output=True,
        text=True,
        check=False,
    )


def _wait_until_taken(tree: Path) -> None:
    """Wait until a command has its turn in a directory."""
    descriptor = os.open(tree, os.O_RDONLY)
    try:
        for _ in range(3000):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            time.sleep(0.01)
        raise AssertionError("no command has begun")
    except BlockingIOError:
        return
    finally:
        os.close(descriptor)


def test_the_hook_answers_and_the_answer_runs_the_command_behind_the_policy(tree: Path) -> None:
    done = hook(tree, "claude", "--env", "FROM=the policy", "--allow", data=json.dumps(CALL).encode())
    specific = json.loads(done.stdout)["hookSpecificOutput"]
    command = specific["updatedInput"]["command"]
    assert specific["permissionDecision"] == "allow" and "--allow" not in command
    command = command.replace("echo it", "echo $FROM; cat /etc/shadow; echo it")
    # The shell that Claude Code starts, with an unfinished quotation in the command itself.
    ran = subprocess.run(["bash", "-c", command], cwd=tree, capture_output=True, text=True, check=False)
    assert "unexpected EOF" in ran.stderr and "root:" not in ran.stdout
    good: dict[str, Any] = {**CALL, "tool_input": {"command": 'echo "$FROM"; pwd; exit 7'}}
    done = hook(tree, "claude", "--env", "FROM=the policy", data=json.dumps(good).encode())
    command = json.loads(done.stdout)["hookSpecificOutput"]["updatedInput"]["command"]
    ran = subprocess.run(["sh", "-c", command], cwd=tree, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (7, f"the policy\n{tree}\n")


@pytest.mark.parametrize("words", [["--no-such-option"], ["--env"]])
def test_a_hook_with_wrong_options_stops_every_call(words: list[str], tree: Path) -> None:
    done = hook(tree, "claude", *words, data=json.dumps(CALL).encode())
    assert done.returncode == 2 and done.stdout == "" and "was not run" in done.stderr


def test_commands_go_on_in_one_workspace_and_take_turns(tree: Path) -> None:
    assert hook(tree, "run", "--", "echo two > a.txt").returncode == 0
    slow = subprocess.Popen(
        [STOCKADE, "hook", "run", "--", "cat a.txt; touch began; sleep 2; echo three > a.txt"],
        cwd=tree,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    _wait_until_taken(tree)
    done = hook(tree, "run", "--", "cat a.txt; ls")
    assert slow.communicate()[0] == "two\n" and slow.returncode == 0
    assert done.stdout == "three\na.txt\nbegan\n" and "stockade diff" not in done.stderr
    copied = hook(tree, "run", "--copy", "--", "cat a.txt; echo four > a.txt")
    assert copied.stdout == "three\n" and "deleted at its end" in copied.stderr
    assert hook(tree, "run", "--", "cat a.txt").stdout == "three\n"
    assert (tree / "a.txt").read_text() == "one\n" and sorted(os.listdir(tree)) == ["a.txt"]
    listed = subprocess.run([STOCKADE, "workspaces"], capture_output=True, text=True, check=True).stdout
    assert listed.count(str(tree)) == 1


def test_a_workspace_that_the_user_works_in_is_left_alone(tree: Path) -> None:
    with stockade.Sandbox(stockade.Policy(workspace=str(tree))) as box:
        box.files.write("mine.txt", "x")
        done = hook(tree, "run", "--", "ls; touch theirs.txt")
        assert done.stdout == "a.txt\n" and done.returncode == 0
        assert hook(tree, "run", "--", "ls").stdout == "a.txt\ntheirs.txt\n"


def test_a_command_is_one_word(tree: Path) -> None:
    done = hook(tree, "run", "--", "echo", "two words")
    assert done.returncode == 125 and "quote it" in done.stderr
    ran = subprocess.run(
        [f"{STOCKADE}-shell", "echo one word"], cwd=tree, capture_output=True, text=True, check=False
    )
    assert ran.stdout == "one word\n"


def test_the_hook_is_shown_and_installed_once(tree: Path) -> None:
    settings = tree.parent / ".claude" / "settings.json"
    shown = hook(tree, "claude", "--install")
    assert "PreToolUse" in shown.stdout and "--yes writes it" in shown.stderr and not settings.exists()
    relative = hook(tree, "claude", "--install", "--yes", "-p", "x.toml")
    assert relative.returncode == 125 and str(tree / "x.toml") in relative.stderr and not settings.exists()
    for _ in range(2):
        assert (
            hook(tree, "claude", "--install", "--yes", "--net", "api.example.com", "--allow").returncode == 0
        )
    (entry,) = json.loads(settings.read_text())["hooks"]["PreToolUse"]
    line = entry["hooks"][0]["command"]
    assert (
        line == f"{STOCKADE} hook claude --net api.example.com --allow || exit 2" and entry["matcher"] == "*"
    )
    wrong = hook(tree, "claude", "--install", "--yes", "--net", "not a host")
    assert wrong.returncode == 125 and len(json.loads(settings.read_text())["hooks"]["PreToolUse"]) == 1
    assert hook(tree, "claude", "--install", "--yes", "--project").returncode == 0
    assert (tree / ".claude" / "settings.json").exists()
