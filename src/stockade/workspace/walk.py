"""What differs between a layer and the host's tree, found by walking the layer only.

The layer is in the kernel's overlay format: a character device 0:0 is a
deleted path, a directory marked opaque hides everything that the host has in
it. What was copied up and is as it was is no change.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from typing import Literal

import msgspec

from stockade.workspace import descend

OPAQUE = "user.overlay.opaque"
#: On everything that the kernel copied up: it was there when the program first changed it.
ORIGIN = "user.overlay.origin"
#: Access lists.
LISTS = ("system.posix_acl_access", "system.posix_acl_default")
#: Marks that an overlay of ours never makes, and that would change what a file means.
FOREIGN = ("user.overlay.redirect", "user.overlay.metacopy")

Kind = Literal["added", "modified", "deleted"]
Aspect = Literal["type", "content", "target", "mode", "attributes"]
PIECE = 1 << 20


class Found(msgspec.Struct, frozen=True):
    """One path that differs: as the host has it, and as the layer has it."""

    path: str
    kind: Kind
    before: os.stat_result | None
    after: os.stat_result | None
    what: tuple[Aspect, ...] = ()
    copied: bool = False
    """Whether the layer says that the host had it once."""
    deep: bool = False
    """Whether it stands for everything in it, which was too deep to look at."""


class Walk(msgspec.Struct):
    """Everything that was found, parents before what is in them."""

    found: list[Found]
    merged: dict[str, os.stat_result]
    """The host's directories in which something may differ."""


def walk(upper: int, lower: int, *, deepest: int) -> Walk:
    """Compare the layer with the tree, both given as directories."""
    seen = Walk([], {})
    before, after = os.fstat(lower), os.fstat(upper)
    if what := _aspects(before, after):
        seen.found.append(Found("", "modified", before, after, what, copied=True))
    # The usual end of a run: nothing was changed. Elsewhere the directory is not open for reading.
    with contextlib.suppress(OSError):
        if not os.listdir(upper):
            return seen
    pending = [("", True)]
    while pending:
        path, merged = pending.pop()
        with contextlib.ExitStack() as stack:
            try:
                above = stack.enter_context(descend.listed(upper, path, own=True))
            except (FileNotFoundError, NotADirectoryError):
                continue  # gone again: a living sandbox goes on working
            below = None
            if merged:
                # One that the caller may not read hides what is in it from us and from the program alike.
                with contextlib.suppress(PermissionError, FileNotFoundError, NotADirectoryError):
                    below = stack.enter_context(descend.listed(lower, path))
            if below is not None:
                seen.merged[path] = os.fstat(below)
            pending += _directory(path, above, below, seen.found, deepest)
    seen.found.sort(key=lambda one: one.path.split("/"))
    return seen


def _directory(
    path: str, above: int, below: int | None, found: list[Found], deepest: int
) -> list[tuple[str, bool]]:
    """Compare one directory; the result are those in it that are still to be looked at."""
    deeper = []
    prefix = f"{path}/" if path else ""
    names = sorted(os.listdir(above))
    if below is not None and path and _marked(above, OPAQUE):
        # Removed and made again: what was in it is gone unless it is in the layer.
        for name in sorted(set(os.listdir(below)).difference(names)):
            if (before := descend.look(below, name)) is not None:
                found.append(Found(prefix + name, "deleted", before, None))
    for name in names:
        after = descend.look(above, name)
        before = descend.look(below, name)
        if after is None:
            continue
        if is_whiteout(after):
            if before is not None:
                found.append(Found(prefix + name, "deleted", before, None))
            continue
        is_dir = stat.S_ISDIR(after.st_mode)
        was_dir = before is not None and stat.S_ISDIR(before.st_mode)
        deep = is_dir and path.count("/") >= deepest
        one = _compared(prefix + name, name, above, below, before, after, deep)
        if one is not None:
            found.append(one)
        if is_dir and not deep:
            deeper.append((prefix + name, was_dir))
    return deeper


def _compared(
    path: str,
    name: str,
    above: int,
    below: int | None,
    before: os.stat_result | None,
    after: os.stat_result,
    deep: bool,
) -> Found | None:
    copied = _copied(above, name)
    if before is None:
        return Found(path, "added", None, after, copied=copied, deep=deep)
    what = _aspects(before, after)
    if "type" not in what and below is not None:
        if stat.S_ISREG(after.st_mode) and not same_content(name, above, below, before, after):
            what = ("content", *what)
        elif stat.S_ISLNK(after.st_mode) and _target(name, above) != _target(name, below):
            what = ("target", *what)
        if not stat.S_ISLNK(after.st_mode) and not same_attributes(name, above, below):
            what = (*what, "attributes")
    if not what and not deep:
        return None
    return Found(path, "modified", before, after, what, copied=copied, deep=deep)


def _aspects(before: os.stat_result, after: os.stat_result) -> tuple[Aspect, ...]:
    if stat.S_IFMT(before.st_mode) != stat.S_IFMT(after.st_mode):
        return ("type",)
    if stat.S_IMODE(before.st_mode) != stat.S_IMODE(after.st_mode):
        return ("mode",)
    return ()


def is_whiteout(info: os.stat_result) -> bool:
    """Whether an entry of a layer stands for a deleted path."""
    return stat.S_ISCHR(info.st_mode) and info.st_rdev == 0


def _marked(directory: int, attribute: str) -> bool:
    try:
        return os.getxattr(directory, attribute) == b"y"
    except OSError:
        return False


def _copied(above: int, name: str) -> bool:
    try:
        os.getxattr(f"/proc/self/fd/{above}/{name}", ORIGIN, follow_symlinks=False)
    except OSError:
        return False
    return True


def counts(attribute: str) -> bool:
    """Whether an attribute is the program's, and no mark of the overlay's."""
    return attribute in LISTS or (attribute.startswith("user.") and not attribute.startswith("user.overlay."))


def same_attributes(name: str, above: int, below: int) -> bool:
    """Whether two directories have something with the same attributes by a name."""
    one, other = _attributes(name, above), _attributes(name, below)
    if one.keys() != other.keys():
        return False
    return all(None in (one[known], other[known]) or one[known] == other[known] for known in one)


def _attributes(name: str, directory: int) -> dict[str, bytes | None]:
    """What is kept beside a file; None for what is closed to its owner."""
    path = f"/proc/self/fd/{directory}/{name}"
    found: dict[str, bytes | None] = {}
    with contextlib.suppress(OSError):  # there are none on this file system, or the file is gone
        for known in filter(counts, os.listxattr(path, follow_symlinks=False)):
            try:
                found[known] = os.getxattr(path, known, follow_symlinks=False)
            except PermissionError:
                found[known] = None
    return found


def _target(name: str, directory: int) -> str | None:
    try:
        return os.readlink(name, dir_fd=directory)
    except OSError:
        return None


def same_content(
    name: str,
    above: int,
    below: int,
    before: os.stat_result,
    after: os.stat_result,
    *,
    own: bool = False,
) -> bool:
    """Whether a layer's file has the content of another by the same name; `own` if that is a layer's too."""
    if before.st_size != after.st_size:
        return False
    try:
        with descend.content(above, name, own=True) as new, descend.content(below, name, own=own) as old:
            at = 0
            # Where both have a hole they are the same, however large it is.
            while (at := min(_data(new, at, after.st_size), _data(old, at, after.st_size))) < after.st_size:
                # And no hole is read after data, or small pieces of that would cost as much as large ones.
                end = max(os.lseek(file, at, os.SEEK_HOLE) for file in (new, old))
                one, other = (os.pread(file, min(PIECE, end - at), at) for file in (new, old))
                if one != other or not one:
                    return False
                at += len(one)
            return True
    except OSError:
        return False  # one that cannot be read may differ


def _data(file: int, at: int, size: int) -> int:
    """Where the next data of a file is; its size if there is none."""
    try:
        return os.lseek(file, at, os.SEEK_DATA)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        return size
