"""How clients of MCP learn of the server: an entry in a file of theirs."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from stockade.integrations import settings_files


class Registration(NamedTuple):
    """The file of a client, what goes into it, and its text afterwards, or None if it is there already."""

    path: str
    entry: str
    text: str | None


def registration(
    client: str, name: str, command: Sequence[str], cwd: str, home: str, environ: Mapping[str, str]
) -> Registration:
    """Return what registers the server `command` under a name; nothing is written."""
    return CLIENTS[client](name, list(command), cwd, home, environ)


def _json(path: str, key: str, name: str, entry: Mapping[str, object]) -> Registration:
    shown = settings_files.json_text({key: {name: entry}})
    return Registration(path, shown, settings_files.with_json_entry(path, (key, name), entry))


def _claude(name: str, command: list[str], cwd: str, home: str, environ: Mapping[str, str]) -> Registration:
    entry = {"type": "stdio", "command": command[0], "args": command[1:]}
    return _json(os.path.join(cwd, ".mcp.json"), "mcpServers", name, entry)


def _gemini(name: str, command: list[str], cwd: str, home: str, environ: Mapping[str, str]) -> Registration:
    entry = {"command": command[0], "args": command[1:]}
    return _json(os.path.join(cwd, ".gemini", "settings.json"), "mcpServers", name, entry)


def _vscode(name: str, command: list[str], cwd: str, home: str, environ: Mapping[str, str]) -> Registration:
    entry = {"type": "stdio", "command": command[0], "args": command[1:]}
    return _json(os.path.join(cwd, ".vscode", "mcp.json"), "servers", name, entry)


def _codex(name: str, command: list[str], cwd: str, home: str, environ: Mapping[str, str]) -> Registration:
    path = os.path.join(environ.get("CODEX_HOME") or os.path.join(home, ".codex"), "config.toml")
    entry = {"command": command[0], "args": command[1:]}
    keys = ("mcp_servers", name)
    shown = settings_files.toml_table(keys, entry)
    return Registration(path, shown, settings_files.with_toml_table(path, keys, entry))


#: By the name of a client: what finds its file and makes its entry.
CLIENTS: dict[str, Callable[[str, list[str], str, str, Mapping[str, str]], Registration]] = {
    "claude": _claude,
    "codex": _codex,
    "gemini": _gemini,
    "vscode": _vscode,
}
