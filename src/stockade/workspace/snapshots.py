"""Points of a workspace to come back to, and workspaces that begin where another is.

`snapshots/NAME/upper` in a layer is a copy of its changes as they were.
Whatever is made here is made under a name that stands for nothing and then
renamed, and a tree is put back by letting two names change places: killed at
any moment, a workspace is as before or as after. The caller holds its lock.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator

import msgspec

from stockade.errors import NotFoundError, PolicyError
from stockade.workspace import copying, descend, record

PLACE = "snapshots"
#: What the program started from where it changed files (`bases`).
BASES = "base"
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")
MOST_FORKS = 1000


class Snapshot(msgspec.Struct, frozen=True):
    """One point to come back to, and when it was taken, in seconds."""

    name: str
    taken: float


def known(layer: str) -> list[Snapshot]:
    """The snapshots of a layer, the oldest first."""
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
    """Keep a copy of the changes; without a name it gets the next number, after the prefix."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(f"{layer}/{PLACE}", 0o700)
    with opened(f"{layer}/{PLACE}") as place, opened(f"{layer}/upper", descend.NODE) as upper:
        there = os.listdir(place)
        if name is None:
            numbers = [one.removeprefix(prefix) for one in there if one.startswith(prefix)]
            name = f"{prefix}{1 + max((int(one) for one in numbers if one.isdecimal()), default=0)}"
        if not NAME.fullmatch(name):
            raise PolicyError(
                f"{name!r} cannot be the name of a snapshot",
                hint="use at most 64 letters, digits, dots, lines and underscores",
            )
        if name in there:
            raise PolicyError(f"there is a snapshot {name!r} already", hint="choose another name")
        with begun(place) as doomed:
            with descend.reached(place, doomed) as made:
                copying.tree(upper, made, "upper")
            sure()
            os.rename(doomed, name, src_dir_fd=place, dst_dir_fd=place)
    return next(one for one in known(layer) if one.name == name)


def restore(layer: str, name: str) -> None:
    """Put the changes back as they were; those since then are gone."""
    with (
        opened(layer) as top,
        _named(layer, name) as place,
        descend.reached(place, "upper") as upper,
    ):
        replace(top, upper)


def replace(
    top: int, upper: int, left_out: copying.LeftOut | None = None, sure: Callable[[], None] = lambda: None
) -> None:
    """Let a layer have a copy of some changes instead of its own, at one moment; `sure` may refuse it."""
    with begun(top) as doomed, descend.reached(top, doomed) as made:
        copying.tree(upper, made, "upper", left_out)
        sure()
        copying.exchange(top, "upper", made, "upper")


def drop(layer: str, name: str) -> None:
    """Forget a snapshot."""
    with _named(layer, name), opened(f"{layer}/{PLACE}") as place:
        doomed = f"{descend.REMOVED}{os.urandom(6).hex()}"
        os.rename(name, doomed, src_dir_fd=place, dst_dir_fd=place)
        descend.remove_doomed(place)


def fork(layer: str, count: int, *, sure: Callable[[], None]) -> list[str]:
    """Make workspaces of their own with the same changes over the same tree; the result are their ids."""
    if not 1 <= count <= MOST_FORKS:
        raise PolicyError(f"{count} workspaces cannot be made at once", hint=f"from 1 to {MOST_FORKS}")
    parent = os.path.dirname(layer)
    with contextlib.ExitStack() as stack:
        place = stack.enter_context(opened(parent))
        upper = stack.enter_context(opened(f"{layer}/upper", descend.NODE))
        ids = [os.urandom(6).hex() for _ in range(count)]
        for id in ids:
            doomed = f"{descend.REMOVED}{id}"
            stack.callback(descend.remove, place, doomed)  # of those that were finished nothing is there
            os.mkdir(doomed, 0o700, dir_fd=place)
            # Else somebody who removes another would remove it as well.
            stack.enter_context(record.held(f"{parent}/{doomed}", id))
            made = stack.enter_context(descend.reached(place, doomed))
            copying.tree(upper, made, "upper")
            os.mkdir("work", 0o700, dir_fd=made)
            for name in ("workspace.json", "seen"):
                _copied(f"{layer}/{name}", name, made)
            with contextlib.suppress(FileNotFoundError), opened(f"{layer}/{BASES}") as bases:
                copying.tree(bases, made, BASES)
        sure()
        for number, id in enumerate(ids):
            try:
                os.rename(f"{descend.REMOVED}{id}", id, src_dir_fd=place, dst_dir_fd=place)
            except BaseException:
                # All or none: nobody would hear of those that are there already.
                for made_before in ids[:number]:
                    doomed = f"{descend.REMOVED}{made_before}"
                    os.rename(made_before, doomed, src_dir_fd=place, dst_dir_fd=place)
                raise
        return ids


def _copied(path: str, name: str, place: int) -> None:
    try:
        with open(path, "rb") as file:
            data = file.read()
    except FileNotFoundError:
        return
    with open(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=place), "wb") as file:
        file.write(data)


@contextlib.contextmanager
def opened(path: str, flags: int = descend.DIRECTORY) -> Iterator[int]:
    """A directory of the state."""
    directory = os.open(path, flags | os.O_DIRECTORY)
    try:
        yield directory
    finally:
        os.close(directory)


@contextlib.contextmanager
def _named(layer: str, name: str) -> Iterator[int]:
    if not NAME.fullmatch(name) or not os.path.isdir(f"{layer}/{PLACE}/{name}"):
        names = ", ".join(one.name for one in known(layer)) or "none"
        raise NotFoundError(f"there is no snapshot {name!r}", hint=f"there are: {names}")
    with opened(f"{layer}/{PLACE}/{name}") as place:
        yield place


@contextlib.contextmanager
def begun(place: int) -> Iterator[str]:
    """The name of a new directory that stands for nothing; what is still under it afterwards is removed."""
    descend.remove_doomed(place)
    doomed = f"{descend.REMOVED}{os.urandom(6).hex()}"
    os.mkdir(doomed, 0o700, dir_fd=place)
    try:
        yield doomed
    finally:
        descend.remove(place, doomed)
