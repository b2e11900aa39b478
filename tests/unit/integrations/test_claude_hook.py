"""What the hook answers to calls of Claude Code, and that no command can end its own quotation."""

from __future__ import annotations

import json
import shlex
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest

from stockade.errors import PolicyError
from stockade.integrations.claude_hook import LARGEST, LONGEST, answer, settings_entry

RUNNER = ["/usr/bin/stockade", "hook", "run", "-p", "/home/ada/my policy.toml"]


def call(command: Any, tool: str = "Bash", **more: Any) -> bytes:
    given = {"command": command, "description": "x", **more}
    return json.dumps({"hook_event_name": "PreToolUse", "tool_name": tool, "tool_input": given}).encode()


def output(data: bytes, **options: Any) -> dict[str, Any]:
    found = answer(data, RUNNER, **options)
    assert found is not None
    specific = found["hookSpecificOutput"]
    assert specific["hookEventName"] == "PreToolUse"
    return dict(specific)


def reason(data: bytes) -> str:
    found = output(data)
    assert found["permissionDecision"] == "deny" and "updatedInput" not in found
    return str(found["permissionDecisionReason"])


HOSTILE = st.text(st.sampled_from("'\"\\$`!;&|<>()\n\t #-x{}*~=\x1b\u202e\ud7ff"), max_size=40) | st.text()


@hypothesis.given(HOSTILE)
def test_the_command_is_one_word_whatever_is_in_it(command: str) -> None:
    hypothesis.assume(command.strip() and "\0" not in command)
    try:
        command.encode()
    except UnicodeEncodeError:
        assert "not valid text" in reason(call(command))
        return
    wrapped = output(call(command))["updatedInput"]["command"]
    assert shlex.split(wrapped) == [*RUNNER, "--", command]
    assert output(call(wrapped))["updatedInput"]["command"] == wrapped, "it is not wrapped twice"


@pytest.mark.parametrize(
    "command",
    [
        "/usr/bin/stockade hook run --net open -- 'curl evil.example'",
        "/usr/bin/stockade hook run -p '/home/ada/my policy.toml' -- 'ls'; cat ~/.ssh/id_ed25519",
        "/usr/bin/stockade hook run -p '/home/ada/my policy.toml' -- 'ls' 'cat'",
        "/usr/bin/stockade hook run -p '/home/ada/my policy.toml' -- \"$(cat ~/.ssh/id_ed25519)\"",
        "/usr/bin/stockade hook run -p '/home/ada/my policy.toml' -- ls # '",
        "'/usr/bin/stockade' run -- ls",
        "'",
    ],
)
def test_a_command_that_only_looks_wrapped_is_wrapped(command: str) -> None:
    wrapped = output(call(command))["updatedInput"]["command"]
    assert shlex.split(wrapped) == [*RUNNER, "--", command]


def test_everything_else_of_the_call_stays_and_background_commands_run_on_a_copy() -> None:
    found = output(call("make", run_in_background=True, timeout=5000))["updatedInput"]
    assert shlex.split(found.pop("command")) == [*RUNNER, "--copy", "--", "make"]
    assert found == {"description": "x", "run_in_background": True, "timeout": 5000}
    assert "--copy" in output(call("tail -f log", "Monitor"))["updatedInput"]["command"]
    again = output(call(shlex.join([*RUNNER, "--copy", "--", "make"])))["updatedInput"]["command"]
    assert shlex.split(again) == [*RUNNER, "--", "make"]


def test_claude_codes_own_question_stays_unless_the_user_gave_it_up() -> None:
    assert "permissionDecision" not in output(call("ls"))
    assert output(call("ls"), allow=True)["permissionDecision"] == "allow"
    assert output(call(""), allow=True)["permissionDecision"] == "deny"


def test_other_tools_pass_but_not_unknown_ones_that_run_commands() -> None:
    other = {"hook_event_name": "PreToolUse", "tool_name": "Read", "tool_input": {"file_path": "/x"}}
    assert answer(json.dumps(other).encode(), RUNNER) is None
    assert answer(call("ls", "mcp__other__shell"), RUNNER) is None
    assert "'PowerShell'" in reason(call("ls", "PowerShell"))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"\xff",
        b"[]",
        b"null",
        b"[" * 100_000,
        b"{}",
        b'{"hook_event_name": "PostToolUse", "tool_name": "Bash", "tool_input": {"command": "ls"}}',
        b'{"hook_event_name": "PreToolUse", "tool_name": 1, "tool_input": {}}',
        b'{"hook_event_name": "PreToolUse", "tool_name": "Bash", "tool_input": "ls"}',
        call(None),
        call(["ls"]),
        call(" \n"),
        call("a\0b"),
        call("x" * (LONGEST + 1)),
        b" " * (LARGEST + 1),
    ],
    ids=lambda data: repr(data[:40]),
)
def test_a_call_that_the_hook_does_not_understand_is_denied(data: bytes) -> None:
    assert reason(data).startswith("stockade: ")


def test_the_entry_stops_the_call_if_the_hook_fails() -> None:
    entry = settings_entry(["/usr/bin/stockade", "hook", "claude", "-p", "/a b"])
    assert entry["hooks"][0]["command"] == "/usr/bin/stockade hook claude -p '/a b' || exit 2"
    with pytest.raises(PolicyError):
        settings_entry(["a\nb"])
