"""The layer that receives a run's changes to its workspace.

A layer is a directory `workspaces/ID` of the state, private to the caller and
invisible inside: `upper` holds what changed in the kernel's own overlay
format, `work` is the kernel's. Nothing here touches the host's tree.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from typing import Literal

import msgspec

from stockade import state
from stockade.errors import SetupError

OPAQUE = "user.overlay.opaque"
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
DEEPEST = 100
DESCRIPTION = "workspace.json"


class Change(msgspec.Struct, frozen=True):
    """One path that a run changed, relative to the workspace."""

    path: str
    kind: Literal["added", "modified", "deleted"]


class Layer:
    """One layer, held open by descriptors while a sandbox uses it."""

    def __init__(self, home: str, lower: int, lower_path: str, id: str) -> None:
        self.id = id
        self.path = f"{state.ensure(home)}/workspaces/{self.id}"
        self.lower = lower
        self._owner = os.getpid()
        self._open: list[int] = []
        try:
            for name in ("", "/upper", "/work"):
                os.makedirs(self.path + name, mode=0o700)
            like = os.fstat(lower)
            # The merged root shows the upper directory's owner and mode.
            os.chmod(f"{self.path}/upper", stat.S_IMODE(like.st_mode))
            if os.geteuid() == 0:
                os.chown(f"{self.path}/upper", like.st_uid, like.st_gid)
            # Last: a layer without it was only begun, and nothing was ever done in it.
            with open(f"{self.path}/{DESCRIPTION}", "wb") as file:
                file.write(msgspec.json.encode({"lower": os.fsencode(lower_path).decode("utf-8", "replace")}))
            for name in ("upper", "work"):
                self._open.append(os.open(f"{self.path}/{name}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        except OSError as error:
            with contextlib.suppress(OSError):
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
        try:
            return changed(self._open[0], self.lower)
        except OSError as error:
            raise SetupError(
                f"the changes in {self.path} cannot be listed: {error.strerror}",
                stage="workspace",
                errno=error.errno or 0,
                hint="they are kept there",
            ) from error

    def close(self) -> None:
        while self._open:
            os.close(self._open.pop())

    def discard(self) -> None:
        """Forget every change and remove the layer; it is not a forked child's to remove."""
        self.close()
        if self._owner == os.getpid():
            remove_tree(self.path)


def changed(upper: int, lower: int) -> list[Change]:
    """What differs between an upper directory and the tree it lies over."""
    found: list[Change] = []
    before, after = os.fstat(lower), os.fstat(upper)
    if stat.S_IMODE(before.st_mode) != stat.S_IMODE(after.st_mode):
        found.append(Change(".", "modified"))
    with _readable(upper) as readable:
        _walk(readable, lower, "", found)
    return sorted(found, key=lambda change: change.path)


def _walk(upper: int, lower: int | None, prefix: str, found: list[Change]) -> None:
    for name in sorted(os.listdir(upper)):
        path = f"{prefix}{name}"
        info = _stat(name, upper)
        if info is None:
            continue  # gone again: a living sandbox goes on working
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
        if is_dir and prefix.count("/") < DEEPEST:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                _descend(name, path, upper, lower if was_dir else None, found)
        elif is_dir and was_dir:
            # So deep, a directory stands for what is in it: descriptors and stack are finite.
            found.append(Change(path, "modified"))


def _descend(name: str, path: str, upper: int, lower: int | None, found: list[Change]) -> None:
    below = _open_lower(name, lower)
    try:
        with _opened(name, upper) as inner:
            if below is not None and _is_opaque(inner):
                # The directory was removed and made again: what was in it is gone unless it is in the layer.
                gone = set(os.listdir(below)).difference(os.listdir(inner))
                found += [Change(f"{path}/{lost}", "deleted") for lost in gone]
            _walk(inner, below, f"{path}/", found)
    finally:
        if below is not None:
            os.close(below)


def _open_lower(name: str, lower: int | None) -> int | None:
    """The host's directory, or None where there is none that the caller may read."""
    if lower is None:
        return None
    try:
        return os.open(name, DIRECTORY, dir_fd=lower)
    except PermissionError:
        return None


@contextlib.contextmanager
def _opened(name: str, parent: int) -> Iterator[int]:
    """A directory of the layer by descriptor."""
    # Through O_PATH: what is changed and opened is what was found, whatever takes its name.
    node = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    try:
        with _readable(node) as directory:
            yield directory
    finally:
        os.close(node)


@contextlib.contextmanager
def _readable(node: int) -> Iterator[int]:
    """The same directory, open for reading, also if the program made it unreadable."""
    here = f"/proc/self/fd/{node}"
    mode = stat.S_IMODE(os.fstat(node).st_mode)
    if mode & 0o700 != 0o700:
        os.chmod(here, mode | 0o700)
    try:
        directory = os.open(here, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            yield directory
        finally:
            os.close(directory)
    finally:
        if mode & 0o700 != 0o700:
            os.chmod(here, mode)


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
    except (FileNotFoundError, PermissionError):
        return None


def remove_tree(path: str) -> None:
    """Remove a tree of the state, however deep and whatever modes a program gave its parts."""
    parent, name = os.path.split(path)
    try:
        directory = os.open(parent, DIRECTORY)
    except FileNotFoundError:
        return
    try:
        pending = [name]
        while pending:
            _remove(pending.pop(), directory, directory, 0, pending)
    finally:
        os.close(directory)


def _remove(name: str, parent: int, top: int, depth: int, pending: list[str]) -> None:
    try:
        os.unlink(name, dir_fd=parent)
        return
    except FileNotFoundError:
        return
    except IsADirectoryError:
        pass
    os.chmod(name, 0o700, dir_fd=parent)
    if depth > DEEPEST:
        # Moved up and removed later, so that neither descriptors nor stack run out.
        pending.append(f".removed-{os.urandom(6).hex()}")
        os.rename(name, pending[-1], src_dir_fd=parent, dst_dir_fd=top)
        return
    directory = os.open(name, DIRECTORY, dir_fd=parent)
    try:
        for entry in os.listdir(directory):
            _remove(entry, directory, top, depth + 1, pending)
    finally:
        os.close(directory)
    os.rmdir(name, dir_fd=parent)
