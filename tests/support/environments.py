"""Private environments for tests: a tree in the state directory, and sandboxes over it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import stockade
from stockade.resolve.environment import Environment, EnvironmentMount, IdMaps
from stockade.sandbox.private_tree import DIRECTORIES, PrivateTree
from support.means import need

POLICY = stockade.Policy(toolchain=False)


@contextmanager
def private_tree(state: Path, name: str = "one") -> Iterator[PrivateTree]:
    """A tree where the server has those of its sandboxes; it is removed afterwards."""
    place = state / "sandboxes" / name
    for directory in (state, state / "sandboxes", place):
        directory.mkdir(mode=0o700, exist_ok=True)
    tree = PrivateTree.make(str(place / "tree"))
    try:
        yield tree
    finally:
        tree.remove()
        place.rmdir()


def environment(
    tree: PrivateTree,
    overlays: tuple[str, ...] = (),
    *,
    access: Literal["read", "write"] = "write",
    more: tuple[EnvironmentMount, ...] = (),
    **fields: Any,
) -> Environment:
    """Everything of the tree, some of it copy-on-write."""
    mounts = [mount for mount in tree.mounts(access) if mount.path not in overlays]
    mounts += [EnvironmentMount(path, tree.descriptors[path], "overlay", "test") for path in overlays]
    return Environment((*mounts, *more), IdMaps.of_caller(), **fields)


def need_several_ids() -> IdMaps:
    """The maps of the caller, if programs inside can be other users than root."""
    maps = IdMaps.of_caller()
    need(maps.several, f"no ids besides the caller's: {maps.reason}")
    return maps


def sh(box: stockade.Sandbox, script: str) -> str:
    """What a script prints, which must succeed."""
    return box.run(["sh", "-c", script], timeout=30).check().text


def names_below(directory: str) -> set[str]:
    """The names in a directory of the host."""
    return set(os.listdir(directory)) if os.path.isdir(directory) else set()


def open_beneath(tree: PrivateTree, path: str, *, create: bool = False) -> int:
    """Open a directory of a tree by its path inside, such as /workspace/a; the caller closes it."""
    (name,) = (name for name, (inside, _) in DIRECTORIES.items() if path.startswith(f"{inside}/"))
    place = f"{tree.path}/{name}/{path.split('/', 2)[2]}"
    if create:
        os.makedirs(place, exist_ok=True)
    return os.open(place, os.O_PATH | os.O_DIRECTORY)
