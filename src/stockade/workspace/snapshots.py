"""Snapshots of a workspace, and forks of it.

`snapshots/NAME/upper` in a layer is a copy of its changes at one moment.
Everything is built under a temporary name and then renamed, and a tree is put
back by exchanging two names: after a crash at any moment, a workspace is as
before or as after. The caller holds its lock.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator

import msgspec

from stockade.errors import NotFoundError, PolicyError
from stockade.linux import dirwalk
from stockade.workspace import metadata, tree_copy

PLACE = "snapshots"
#: The files that the program started from and changed (`bases`).
BASES = "base"
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")
MOST_FORKS = 1000


class Snapshot(msgspec.Struct, frozen=True):
    """One snapshot, and when it was taken, in seconds since 1970."""

    name: str
    taken: float


def known(layer: str) -> list[Snapshot]:
    """Return the snapshots of a layer, the oldest first."""
    try:
        names = [name for name in os.listdir(f"{layer}/{PLACE}") if not name.startswith(".")]
    except FileNotFoundError:
        return []
    found = []
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            found.append((os.stat(f"{layer}/{PLACE}/{name}").st_mtime_ns, name))
    return [Snapshot(name, taken / 1e9) for taken, name in sorted(found)]


def take(layer: str, name: str | None, prefix: str = "", *, sure: Callable[[], None]) -> Snapshot:
    """Keep a copy of the changes; without a name it gets the prefix and the next number."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(f"{layer}/{PLACE}", 0o700)
    with open_directory(f"{layer}/{PLACE}") as place, open_directory(f"{layer}/upper", dirwalk.NODE) as upper:
        there = os.listdir(place)
        if name is None:
            numbers = [one.removeprefix(prefix) for one in there if one.startswith(prefix)]
            name = f"{prefix}{1 + max((int(one) for one in numbers if one.isdecimal()), default=0)}"
        if not NAME.fullmatch(name):
            raise PolicyError(
                f"{name!r} is not a valid name for a snapshot",
                hint="use at most 64 letters, digits, dots, hyphens and underscores",
            )
        if name in there:
            raise PolicyError(f"snapshot {name!r} exists already", hint="choose another name")
        with temporary_directory(place) as doomed:
            with dirwalk.reached(place, doomed) as made:
                tree_copy.tree(upper, made, "upper")
            sure()
            os.rename(doomed, name, src_dir_fd=place, dst_dir_fd=place)
    return next(one for one in known(layer) if one.name == name)


def restore(layer: str, name: str) -> None:
    """Put the changes back as they were in a snapshot; later changes are lost."""
    with (
        open_directory(layer) as top,
        _open_snapshot(layer, name) as place,
        dirwalk.reached(place, "upper") as upper,
    ):
        replace(top, upper)


def replace(
    top: int,
    upper: int,
    left_out: tree_copy.OmittedPaths | None = None,
    sure: Callable[[], None] = lambda: None,
) -> None:
    """Replace a layer's changes by a copy of others, atomically; `sure` raises an error to prevent it."""
    with temporary_directory(top) as doomed, dirwalk.reached(top, doomed) as made:
        tree_copy.tree(upper, made, "upper", left_out)
        sure()
        tree_copy.exchange(top, "upper", made, "upper")


def drop(layer: str, name: str) -> None:
    """Remove a snapshot."""
    with _open_snapshot(layer, name), open_directory(f"{layer}/{PLACE}") as place:
        doomed = f"{dirwalk.REMOVED}{os.urandom(6).hex()}"
        os.rename(name, doomed, src_dir_fd=place, dst_dir_fd=place)
        dirwalk.remove_doomed(place)


def fork(layer: str, count: int, *, sure: Callable[[], None]) -> list[str]:
    """Make new workspaces with the same changes over the same tree, and return their ids."""
    if not 1 <= count <= MOST_FORKS:
        raise PolicyError(f"cannot make {count} workspaces at once", hint=f"choose from 1 to {MOST_FORKS}")
    parent = os.path.dirname(layer)
    with contextlib.ExitStack() as stack:
        place = stack.enter_context(open_directory(parent))
        upper = stack.enter_context(open_directory(f"{layer}/upper", dirwalk.NODE))
        ids = [os.urandom(6).hex() for _ in range(count)]
        for id in ids:
            doomed = f"{dirwalk.REMOVED}{id}"
            stack.callback(dirwalk.remove, place, doomed)  # a finished one no longer has this name
            os.mkdir(doomed, 0o700, dir_fd=place)
            # Locked, or a process that removes another layer would remove this one as well.
            stack.enter_context(metadata.held(f"{parent}/{doomed}", id))
            made = stack.enter_context(dirwalk.reached(place, doomed))
            tree_copy.tree(upper, made, "upper")
            os.mkdir("work", 0o700, dir_fd=made)
            for name in ("workspace.json", "seen"):
                _copy_file(f"{layer}/{name}", name, made)
            with contextlib.suppress(FileNotFoundError), open_directory(f"{layer}/{BASES}") as bases:
                tree_copy.tree(bases, made, BASES)
        sure()
        for number, id in enumerate(ids):
            try:
                os.rename(f"{dirwalk.REMOVED}{id}", id, src_dir_fd=place, dst_dir_fd=place)
            except BaseException:
                # All or none: the caller gets no ids, so no one would know of the finished ones.
                for made_before in ids[:number]:
                    doomed = f"{dirwalk.REMOVED}{made_before}"
                    os.rename(made_before, doomed, src_dir_fd=place, dst_dir_fd=place)
                raise
        return ids


def _copy_file(path: str, name: str, place: int) -> None:
    try:
        with open(path, "rb") as file:
            data = file.read()
    except FileNotFoundError:
        return
    with open(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=place), "wb") as file:
        file.write(data)


@contextlib.contextmanager
def open_directory(path: str, flags: int = dirwalk.DIRECTORY) -> Iterator[int]:
    """Open a directory of the state."""
    directory = os.open(path, flags | os.O_DIRECTORY)
    try:
        yield directory
    finally:
        os.close(directory)


@contextlib.contextmanager
def _open_snapshot(layer: str, name: str) -> Iterator[int]:
    if not NAME.fullmatch(name) or not os.path.isdir(f"{layer}/{PLACE}/{name}"):
        names = ", ".join(one.name for one in known(layer)) or "none"
        raise NotFoundError(f"there is no snapshot {name!r}", hint=f"existing snapshots: {names}")
    with open_directory(f"{layer}/{PLACE}/{name}") as place:
        yield place


@contextlib.contextmanager
def temporary_directory(place: int) -> Iterator[str]:
    """Create a directory with a temporary name; remove it afterwards if it still has that name."""
    dirwalk.remove_doomed(place)
    doomed = f"{dirwalk.REMOVED}{os.urandom(6).hex()}"
    os.mkdir(doomed, 0o700, dir_fd=place)
    try:
        yield doomed
    finally:
        dirwalk.remove(place, doomed)
