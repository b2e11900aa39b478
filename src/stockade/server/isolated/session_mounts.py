"""The mounts of an isolated session, each held open by a descriptor.

A session sees the trees of its sandbox read-only, and on top of them what its
request names. Every path is opened once, below the descriptor of the tree that
it lies in and through no link that leads out of that tree, and the descriptor
is what is mounted: nothing that a program does to names in the sandbox between
the check and the mount can change what the session gets.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

import msgspec

from stockade.linux import openat2
from stockade.resolve.environment import EnvironmentMount
from stockade.server.isolated.session_request import InvalidFieldError, SessionSpec

Access = Literal["read", "write", "overlay"]
ACCESS: Mapping[str, Access] = {"rw": "write", "overlay": "overlay", "ro": "read"}
#: The directory that strict sessions have of their own.
TMP = "/tmp"
#: Links are followed as long as they stay in their tree.
IN_TREE = openat2.BENEATH | openat2.NO_MAGICLINKS
#: What opening a path of a request can fail with, and what to tell the client.
PROBLEMS = {
    errno.ENOENT: "does not exist in the sandbox",
    errno.ENOTDIR: "leads through something that is not a directory",
    errno.EXDEV: "leads through a link to another place",
    errno.ELOOP: "leads through too many links",
    errno.EACCES: "cannot be opened: permission denied",
    errno.EROFS: "is on a read-only file system",
    errno.EEXIST: "is there already, and is not a directory",
}
#: The mode of a directory that is made because a session names it.
MADE = 0o755


class SessionMounts(msgspec.Struct, frozen=True):
    """The mounts of one session, and the descriptors that were opened for them."""

    mounts: tuple[EnvironmentMount, ...]
    opened: tuple[int, ...]

    def close(self) -> None:
        """Close the descriptors; the sandbox has its own once it is open."""
        for descriptor in self.opened:
            os.close(descriptor)


def session_mounts(spec: SessionSpec, trees: Mapping[str, int], allowed: Sequence[str]) -> SessionMounts:
    """Open what a session shows; the caller closes it.

    `trees` are the sandbox's directories by their paths inside. `allowed` are the paths below which sources
    of binds and writable paths must lie.
    """
    opened: list[int] = []
    found = {path: EnvironmentMount(path, fd, "read", "sandbox") for path, fd in trees.items()}
    if TMP in trees and spec.profile == "balanced":
        found[TMP] = EnvironmentMount(TMP, trees[TMP], "write", "profile = balanced")
    elif TMP in found:
        del found[TMP]  # a private one takes its place
    try:
        for field, path, place, access in _wanted(spec):
            if field.startswith(("extra_writable", "binds")):
                _check_allowed(field, path, allowed)
            making = not field.startswith("binds")
            descriptor = open_in_trees(field, path, trees, make=making, directory=access == "overlay")
            opened.append(descriptor)
            if place != path:
                _make_mount_point(field, place, trees, descriptor)
            found[place] = EnvironmentMount(place, descriptor, access, field)
    except BaseException:
        for descriptor in opened:
            os.close(descriptor)
        raise
    ordered = sorted(found.values(), key=lambda mount: mount.path)
    return SessionMounts(tuple(ordered), tuple(opened))


def _wanted(spec: SessionSpec) -> Iterator[tuple[str, str, str, Access]]:
    """Yield each mount of the request: its field, its path in the sandbox, its place inside, its access."""
    for index, one in enumerate(spec.overlays):
        yield f"overlays[{index}].path", one.path, one.path, ACCESS[one.mode or "overlay"]
    for index, path in enumerate(spec.extra_writable):
        yield f"extra_writable[{index}]", path, path, "write"
    for index, bind in enumerate(spec.binds):
        access: Access = "read" if bind.readonly else "write"
        yield f"binds[{index}].source", bind.source, bind.dest or bind.source, access


def _check_allowed(field: str, path: str, allowed: Iterable[str]) -> None:
    if not any(_within(path, tree) for tree in allowed):
        raise InvalidFieldError(field, f"{path} does not lie below {', '.join(allowed)}")


def _within(path: str, tree: str) -> bool:
    return path == tree or path.startswith(f"{tree}/")


def _tree_of(path: str, trees: Mapping[str, int]) -> str:
    """Return the innermost tree that a path lies in; empty if there is none."""
    return max((tree for tree in trees if _within(path, tree)), key=len, default="")


def open_in_trees(
    field: str, path: str, trees: Mapping[str, int], *, make: bool, directory: bool = False
) -> int:
    """Open a path of the sandbox as O_PATH, below the tree that it lies in; `make` makes a missing one."""
    tree = _tree_of(path, trees)
    if not tree:
        raise InvalidFieldError(field, f"{path} does not lie below {', '.join(sorted(trees))}")
    below = path[len(tree) :].strip("/")
    with _explained(field, path):
        if make:
            _make_directories(trees[tree], below)
        found = openat2.node(trees[tree], below, IN_TREE, directory=directory)
        if not make and not stat.S_ISREG(mode := os.fstat(found).st_mode) and not stat.S_ISDIR(mode):
            os.close(found)
            raise InvalidFieldError(field, f"{path} is neither a file nor a directory")
        return found


def _make_directories(root: int, path: str) -> None:
    """Make the directories on the way to a path, each below the one before."""
    here = os.dup(root)
    try:
        for name in filter(None, path.split("/")):
            try:
                below = openat2.node(here, name, IN_TREE, directory=True)
            except FileNotFoundError:
                os.mkdir(name, MADE, dir_fd=here)
                below = openat2.node(here, name, openat2.STRAIGHT, directory=True)
            except OSError as error:
                if error.errno != errno.EXDEV:
                    raise
                # A relative link may lead up and still stay in the tree: let the kernel judge the whole path.
                os.close(openat2.node(root, path, IN_TREE))
                return
            os.close(here)
            here = below
    finally:
        os.close(here)


def _make_mount_point(field: str, place: str, trees: Mapping[str, int], source: int) -> None:
    """Make the place of a bind in the tree that it lies in; outside of them the sandbox makes it itself."""
    if not (tree := _tree_of(place, trees)):
        return
    below = place[len(tree) :].strip("/")
    parent, _, name = below.rpartition("/")
    with _explained(field.replace(".source", ".dest"), place):
        if stat.S_ISDIR(os.fstat(source).st_mode):
            _make_directories(trees[tree], below)
            return
        _make_directories(trees[tree], parent)
        with (
            openat2.held(openat2.node(trees[tree], parent, IN_TREE, directory=True)) as directory,
            contextlib.suppress(FileExistsError),
        ):
            flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
            os.close(os.open(name, flags, 0o644, dir_fd=directory))


@contextlib.contextmanager
def _explained(field: str, path: str) -> Iterator[None]:
    """Turn an error of the kernel into a refusal of the field."""
    try:
        yield
    except OSError as error:
        if isinstance(error, InvalidFieldError):
            raise
        problem = PROBLEMS.get(error.errno or 0, f"cannot be opened: {error.strerror}")
        raise InvalidFieldError(field, f"{path} {problem}") from None
