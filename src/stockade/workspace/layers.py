"""The layer that receives a run's changes to its workspace.

A layer is a directory `workspaces/ID` of the state, private to the caller and
invisible inside: `upper` holds what changed in the kernel's own overlay
format, `work` is the kernel's. Nothing here touches the host's tree.
"""

from __future__ import annotations

import os
import stat
from typing import Literal

import msgspec

from stockade import state
from stockade.errors import SetupError

OPAQUE = "user.overlay.opaque"


class Change(msgspec.Struct, frozen=True):
    """One path that a run changed, relative to the workspace."""

    path: str
    kind: Literal["added", "modified", "deleted"]


class Layer:
    """One layer, held open by descriptors while a sandbox uses it."""

    def __init__(self, home: str, lower: int, lower_path: str) -> None:
        self.id = os.urandom(6).hex()
        self.path = f"{state.ensure(home)}/workspaces/{self.id}"
        self.lower = lower
        self._open: list[int] = []
        try:
            for name in ("", "/upper", "/work"):
                os.makedirs(self.path + name, mode=0o700)
            with open(f"{self.path}/workspace.json", "wb") as file:
                file.write(msgspec.json.encode({"lower": os.fsencode(lower_path).decode("utf-8", "replace")}))
            like = os.fstat(lower)
            # The merged root shows the upper directory's owner and mode.
            os.chmod(f"{self.path}/upper", stat.S_IMODE(like.st_mode))
            if os.geteuid() == 0:
                os.chown(f"{self.path}/upper", like.st_uid, like.st_gid)
            for name in ("upper", "work"):
                self._open.append(os.open(f"{self.path}/{name}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        except OSError as error:
            self.discard()
            raise SetupError(
                f"cannot keep the workspace's changes in {self.path}: {error.strerror}",
                stage="workspace",
                errno=error.errno or 0,
                hint="free some space, or set STOCKADE_HOME to a directory elsewhere",
            ) from None

    @property
    def descriptors(self) -> tuple[int, int]:
        """The upper and the work directory."""
        upper, work = self._open
        return upper, work

    def changes(self) -> list[Change]:
        """What differs from the host's tree, found by walking the changes only."""
        found: list[Change] = []
        _walk(self._open[0], self.lower, "", found)
        return sorted(found, key=lambda change: change.path)

    def close(self) -> None:
        while self._open:
            os.close(self._open.pop())

    def discard(self) -> None:
        """Forget every change and remove the layer."""
        self.close()
        remove_tree(self.path)


def _walk(upper: int, lower: int | None, prefix: str, found: list[Change]) -> None:
    with os.scandir(upper) as entries:
        names = sorted(entry.name for entry in entries)
    for name in names:
        path = f"{prefix}{name}"
        info = os.stat(name, dir_fd=upper, follow_symlinks=False)
        before = _stat(name, lower)
        if stat.S_ISCHR(info.st_mode) and info.st_rdev == 0:
            found.append(Change(path, "deleted"))
            continue
        is_dir = stat.S_ISDIR(info.st_mode)
        was_dir = before is not None and stat.S_ISDIR(before.st_mode)
        if before is None:
            found.append(Change(path, "added"))
        elif not (is_dir and was_dir) or stat.S_IMODE(info.st_mode) != stat.S_IMODE(before.st_mode):
            found.append(Change(path, "modified"))
        if is_dir:
            _descend(name, path, upper, lower if was_dir else None, found)


def _descend(name: str, path: str, upper: int, lower: int | None, found: list[Change]) -> None:
    inner = _open_directory(name, upper)
    below = (
        None if lower is None else os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=lower)
    )
    try:
        if below is not None and _is_opaque(inner):
            # The directory was removed and made again: what was in it is gone unless it is in the layer.
            kept = set(os.listdir(inner))
            found += [Change(f"{path}/{gone}", "deleted") for gone in os.listdir(below) if gone not in kept]
        _walk(inner, below, f"{path}/", found)
    finally:
        os.close(inner)
        if below is not None:
            os.close(below)


def _open_directory(name: str, parent: int) -> int:
    """Open a directory of the layer, also one that the program made unreadable."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(name, flags, dir_fd=parent)
    except PermissionError:
        # Through O_PATH: between a chmod by name and the open, nothing else can be put there.
        node = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
        try:
            here = f"/proc/self/fd/{node}"
            mode = stat.S_IMODE(os.fstat(node).st_mode)
            os.chmod(here, mode | 0o700)
            try:
                return os.open(here, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            finally:
                os.chmod(here, mode)
        finally:
            os.close(node)


def _is_opaque(directory: int) -> bool:
    try:
        return os.getxattr(directory, OPAQUE) == b"y"
    except OSError:
        return False


def _stat(name: str, directory: int | None) -> os.stat_result | None:
    if directory is None:
        return None
    try:
        return os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return None


def remove_tree(path: str) -> None:
    """Remove a tree of the state, whatever modes a program gave its parts."""
    parent, name = os.path.split(path)
    try:
        directory = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        _remove(name, directory)
    finally:
        os.close(directory)


def _remove(name: str, parent: int) -> None:
    try:
        os.unlink(name, dir_fd=parent)
        return
    except FileNotFoundError:
        return
    except IsADirectoryError:
        pass
    os.chmod(name, 0o700, dir_fd=parent)
    directory = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    try:
        for entry in os.listdir(directory):
            _remove(entry, directory)
    finally:
        os.close(directory)
    os.rmdir(name, dir_fd=parent)
