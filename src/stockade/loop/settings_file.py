"""Where the settings of a loop come from: a file that the user names, or the user's own and the project's.

The verify command and the agent run in sandboxes, but a notify command and a command that prints the items do
not. So the project's `[loop]` counts only if the user has trusted the exact bytes of its file.
"""

from __future__ import annotations

import os
from typing import Any

import msgspec

from stockade.errors import PolicyError, typed
from stockade.linux.user import Caller
from stockade.loop.settings import parse_settings
from stockade.policy.toml import PYPROJECT, SECTION, read_file, text_of
from stockade.resolve.config_files import config_file
from stockade.resolve.discovery import find_project, loop_table
from stockade.resolve.trust import trusted
from stockade.state import state_dir


class SettingsSource(msgspec.Struct, frozen=True):
    """What files say about a loop, under the names of `LoopSettings`, and which files those are."""

    found: dict[str, Any]
    files: tuple[str, ...]


def find_settings(caller: Caller, file: str | None) -> SettingsSource:
    """Return what applies here: `[loop]` of the named file alone, or the project's over the user's own."""
    if file is not None:
        return _combine([(file, _table_of(file))])
    own = config_file(caller.environ, caller.home)
    tables = [(own, _table_of(own))] if os.path.lexists(own) else []
    project = find_project(caller.cwd, caller.home)
    if project is not None:
        section = SECTION if os.path.basename(project.path) == PYPROJECT else ()
        table = loop_table(text_of(project.data, project.path), project.path, section)
        found = project.lookups(caller.home, caller.cwd, caller.environ)
        if table and not trusted(project, found, state_dir(caller.environ, caller.home)):
            raise PolicyError(
                f"{project.path} has a [loop], which names commands, and you have not trusted it",
                hint=f"read it; if you agree, run: stockade trust {typed(project.path)}",
            )
        tables.append((project.path, table))
    return _combine(tables)


def _table_of(path: str) -> dict[str, Any]:
    section = SECTION if os.path.basename(path) == PYPROJECT else ()
    return loop_table(text_of(read_file(path), path), path, section)


def _combine(tables: list[tuple[str, dict[str, Any]]]) -> SettingsSource:
    found: dict[str, Any] = {}
    for path, table in tables:
        said = parse_settings(table, path)
        if "items" in said and not said["items"].startswith(("!", "/")):
            said["items"] = os.path.join(os.path.dirname(os.path.realpath(path)), said["items"])
        for scope, part in said.pop("budget", {}).items():
            known = found.setdefault("budget", {})
            known[scope] = {**known.get(scope, {}), **part}
        found |= said
    return SettingsSource(found, tuple(path for path, table in tables if table))
