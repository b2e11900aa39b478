"""Trees of files: what one looks like, and workspaces that a real run has changed."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import stockade
from stockade import Policy, Workspace

PYTHON = "/usr/bin/python3"
Tree = dict[str, tuple[str, int, bytes]]


def snapshot(top: Path) -> Tree:
    """Everything in a tree: what it is, its mode, its content or where it leads. What is closed is opened."""
    found: Tree = {}
    _look(str(top), "", found)
    return found


def _look(full: str, path: str, found: Tree) -> None:
    info = os.lstat(full)
    mode = stat.S_IMODE(info.st_mode)
    if stat.S_ISDIR(info.st_mode):
        found[path] = ("directory", mode, b"")
        with _opened(full, mode, 0o500):
            for name in os.listdir(full):
                _look(f"{full}/{name}", f"{path}/{name}" if path else name, found)
    elif stat.S_ISLNK(info.st_mode):
        found[path] = ("link", 0, os.fsencode(os.readlink(full)))
    elif stat.S_ISREG(info.st_mode):
        with _opened(full, mode, 0o400):
            found[path] = ("file", mode, Path(full).read_bytes())
    else:
        found[path] = ("special", mode, b"")


@contextlib.contextmanager
def _opened(path: str, mode: int, needed: int) -> Iterator[None]:
    closed = mode & needed != needed
    if closed:
        os.chmod(path, mode | needed)
    try:
        yield
    finally:
        if closed:
            os.chmod(path, mode)


def changed(workspace: Path, script: str, *words: str, python: bool = False) -> Workspace:
    """A workspace in which a program has run in a real sandbox."""
    command = [PYTHON, "-c", script] if python else ["sh", "-c", script, "sh"]
    result = stockade.run([*command, *words], Policy(workspace=str(workspace)), timeout=60)
    assert result.ok, result.stderr
    assert result.workspace_id, "nothing was changed"
    return Workspace.open(result.workspace_id)
