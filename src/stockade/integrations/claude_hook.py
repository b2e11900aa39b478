"""A PreToolUse hook of Claude Code: the agent stays outside, its commands go behind the walls.

Claude Code hands the hook each tool call as JSON before it happens. For a tool that runs a shell command, the
answer replaces the command by one that runs it through Stockade. The command is quoted as one word, so
nothing that the agent writes into it can end the quotation. A call that the hook does not understand is
denied.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from typing import Any

from stockade.errors import PolicyError

#: The tools whose `command` is a line for a shell.
WRAPPED = ("Bash", "Monitor")
#: Tools of MCP servers: they are processes of their own, which `stockade mcp wrap` confines.
FOREIGN = "mcp__"
#: How many bytes of a call are read.
LARGEST = 16 << 20
#: The longest command: the kernel takes at most 128 KiB for one word.
LONGEST = 100_000
#: Seconds that Claude Code waits for the hook. A hook that it stops waiting for would not hold the call back.
TIMEOUT = 3600


class UnknownCallError(ValueError):
    """A call that the hook cannot judge."""


def answer(data: bytes, runner: Sequence[str], *, allow: bool = False) -> dict[str, Any] | None:
    """Return the answer to a call, or None to let it pass as it is.

    `runner` are the words that run a command behind the walls; the command comes after them as one word. With
    `allow` the user is not asked about a command any more.
    """
    try:
        tool, given = _call(data)
        if tool not in WRAPPED:
            if isinstance(given.get("command"), str) and not tool.startswith(FOREIGN):
                raise UnknownCallError(f"Stockade does not know how to run the commands of the tool {tool!r}")
            return None
        command = _command(given)
    except UnknownCallError as error:
        return denial(str(error))
    background = ["--copy"] if given.get("run_in_background") is True or tool == "Monitor" else []
    wrapped = shlex.join([*runner, *background, "--", _unwrapped(command, runner)])
    found: dict[str, Any] = {"updatedInput": {**given, "command": wrapped}}
    if allow:
        found |= {
            "permissionDecision": "allow",
            "permissionDecisionReason": "it runs behind Stockade's walls",
        }
    return _output(found)


def denial(reason: str) -> dict[str, Any]:
    """Return the answer that stops a call."""
    return _output({"permissionDecision": "deny", "permissionDecisionReason": f"stockade: {reason}"})


def _output(found: dict[str, Any]) -> dict[str, Any]:
    return {"hookSpecificOutput": {"hookEventName": "PreToolUse", **found}}


def _call(data: bytes) -> tuple[str, dict[str, Any]]:
    """Return the tool and its input."""
    if len(data) > LARGEST:
        raise UnknownCallError(f"the call takes more than {LARGEST >> 20} MiB")
    try:
        call = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise UnknownCallError(f"the call is not JSON: {error}") from None
    if not isinstance(call, dict) or call.get("hook_event_name") != "PreToolUse":
        raise UnknownCallError("this is not a call before a tool's use (PreToolUse)")
    tool, given = call.get("tool_name"), call.get("tool_input")
    if not isinstance(tool, str) or not isinstance(given, dict):
        raise UnknownCallError("the call names no tool, or has no input")
    return tool, given


def _command(given: dict[str, Any]) -> str:
    command = given.get("command")
    if not isinstance(command, str) or not command.strip():
        raise UnknownCallError("the call has no command")
    if "\0" in command:
        raise UnknownCallError("the command contains a NUL character, which no program can be given")
    try:
        size = len(command.encode())
    except UnicodeEncodeError:
        raise UnknownCallError("the command is not valid text") from None
    if size > LONGEST:
        raise UnknownCallError(
            f"the command takes {size} bytes, more than {LONGEST}; write it to a file first"
        )
    return command


def _unwrapped(command: str, runner: Sequence[str]) -> str:
    """Return what is in a command that is wrapped already: a model may repeat what it has seen.

    That is safe: the result is wrapped again, with the same words.
    """
    try:
        words = shlex.split(command)
    except ValueError:
        return command
    for head in ([*runner, "--"], [*runner, "--copy", "--"]):
        if words[:-1] == head and shlex.join(words) == command:
            return words[-1]
    return command


def settings_entry(command: Sequence[str]) -> dict[str, Any]:
    """Return the entry for `hooks.PreToolUse` of Claude Code's settings.

    Exit code 2 stops the call; with any other error, such as a missing program, Claude Code would go on.
    """
    if any("\n" in word for word in command):
        raise PolicyError("an option contains a newline, which settings cannot hold")
    line = f"{shlex.join(command)} || exit 2"
    return {"matcher": "*", "hooks": [{"type": "command", "command": line, "timeout": TIMEOUT}]}
