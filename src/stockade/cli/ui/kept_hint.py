"""A hint for a command that failed on a file which only a kept workspace has.

Each run starts from the user's files. A command that reads what an earlier run wrote fails, although the
file is kept: the hint names the workspace that has it. It rests on the words of the command and on what
exists, not on what the program printed, and costs nothing unless the command failed and names a path that is
missing.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Sequence

from stockade.cli.ui import output
from stockade.errors import StockadeError
from stockade.linux import dirwalk
from stockade.linux.path_lookup import covers
from stockade.workspace import metadata
from stockade.workspace.diff.layer_walk import is_whiteout

#: How many words of a command, and how many workspaces, the last used ones, are looked at.
MOST_WORDS, MOST_WORKSPACES = 64, 50
#: What may be a name in a script that a shell was given.
_NAME = re.compile(r"[^\s'\"`;&|<>(){}=$*?]+")


def kept_hint(command: Sequence[str], cwd: str, tree: str, state: str, *, without: str = "") -> str:
    """Return a hint if a kept workspace of the tree has a path that the command names; otherwise "".

    `cwd` is where the command started, and `without` is the workspace of the run itself.
    """
    if not (missing := list(_missing(command, cwd, tree))):
        return ""
    for layer in _layers(tree, state, without):
        for path in missing:
            if _has(layer, path):
                id = os.path.basename(layer)
                return (
                    f"{output.brief(path)} is not among your files, but workspace {id} has it: "
                    f"`{continuing(id, state)}` goes on from there"
                )
    return ""


def continuing(id: str, state: str) -> str:
    """Return the option that continues a workspace: a bare @ if no other one is kept."""
    with contextlib.suppress(OSError):
        if [name for name in os.listdir(f"{state}/workspaces") if not name.startswith(".")] == [id]:
            return "-w @"
    return f"-w @{id}"


def _missing(command: Sequence[str], cwd: str, tree: str) -> Iterator[str]:
    """Yield the paths, relative to the tree, that the command names and the host does not have."""
    names = (name for word in command[:MOST_WORDS] for name in _NAME.findall(word)[:MOST_WORDS])
    for name in list(dict.fromkeys(names))[:MOST_WORDS]:
        path = os.path.normpath(os.path.join(cwd, name))
        with contextlib.suppress(OSError, ValueError):
            if path != tree and covers(tree, path) and not os.path.lexists(path):
                yield path[len(tree) :].lstrip("/")


def _layers(tree: str, state: str, without: str) -> list[str]:
    """Return the layers of the tree, the last used one first."""
    place = f"{state}/workspaces"
    found = []
    with contextlib.suppress(OSError), os.scandir(place) as entries:
        known = sorted(
            (entry for entry in entries if not entry.name.startswith(".") and entry.name != without),
            key=lambda entry: entry.stat().st_mtime,
            reverse=True,
        )
        for entry in known[:MOST_WORKSPACES]:
            with contextlib.suppress(StockadeError, OSError):
                if metadata.read(entry.path).tree == tree:
                    found.append(entry.path)
    return found


def _has(layer: str, path: str) -> bool:
    parent, name = dirwalk.split(path)
    with contextlib.suppress(OSError):
        upper = os.open(f"{layer}/upper", dirwalk.NODE | os.O_DIRECTORY)
        try:
            with dirwalk.reached(upper, parent, own=True) as directory:
                found = dirwalk.look(directory, name)
                return found is not None and not is_whiteout(found)
        finally:
            os.close(upper)
    return False
