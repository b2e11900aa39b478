"""What changed, file by file: a value to print, to count, or to make a patch of.

Only the layer is walked, and of the host's tree what it names; a deleted
directory is listed file by file, because those are what is lost.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import msgspec

from stockade.workspace import descend
from stockade.workspace.caution import covers, special
from stockade.workspace.lines import unified
from stockade.workspace.walk import PIECE, Aspect, Found, Walk

#: What is shown of one file, and of all together; more is said to be cut.
SHOWN = 1 << 20
SHOWN_IN_ALL = 32 << 20
#: What a patch holds of one file: it is exact or refused.
PATCHED = 64 << 20
#: As git does: a NUL in the beginning makes a file binary.
BEGINNING = 8000
#: Renames are sought among so many files, and so many bytes.
RENAMES = 1000
RENAMED_BYTES = 256 << 20

Kind = Literal["added", "modified", "deleted", "renamed"]


class FileDiff(msgspec.Struct, frozen=True, kw_only=True):
    """One thing before and after. A path whose type changed is deleted as the one and added as the other."""

    path: str
    kind: Kind
    was: str = ""
    """Where it was before, if it was renamed."""
    what: tuple[Aspect, ...] = ()
    type: str = "file"
    old_mode: int | None = None
    new_mode: int | None = None
    old_size: int = 0
    new_size: int = 0
    target: str = ""
    """Where a link leads now, or led."""
    binary: bool = False
    cut: bool = False
    """Whether its text was too large to be compared, or cannot be read."""
    added: int = 0
    removed: int = 0
    text: bytes = b""
    """Unified hunks."""


class Diff(msgspec.Struct, frozen=True):
    """Every difference between a workspace and the host's tree."""

    files: tuple[FileDiff, ...]
    patch: bytes = b""
    """What `git apply` takes, if it was asked for."""
    left_out: tuple[str, ...] = ()
    """Paths that a patch cannot hold: directories without files, pipes, sockets, attributes."""

    @property
    def added(self) -> int:
        return sum(one.added for one in self.files)

    @property
    def removed(self) -> int:
        return sum(one.removed for one in self.files)


class Side(msgspec.Struct, frozen=True):
    """One version of one path, and the tree to read it from."""

    path: str
    info: os.stat_result
    tree: int
    own: bool

    @property
    def type(self) -> str:
        mode = self.info.st_mode
        known = {stat.S_IFREG: "file", stat.S_IFLNK: "link", stat.S_IFDIR: "directory"}
        return known.get(stat.S_IFMT(mode)) or special(mode).removeprefix("a ")

    def pieces(self) -> Iterator[bytes]:
        """The content; a link's is where it leads."""
        parent, name = descend.split(self.path)
        with descend.listed(self.tree, parent, own=self.own) as directory:
            if stat.S_ISLNK(self.info.st_mode):
                yield os.fsencode(os.readlink(name, dir_fd=directory))
                return
            with descend.content(directory, name, own=self.own) as file:
                while piece := os.read(file, PIECE):
                    yield piece

    def read(self, limit: int) -> bytes | None:
        """The whole content, or None if it is larger or cannot be read."""
        data = bytearray()
        if self.info.st_size > limit:
            return None
        try:
            for piece in self.pieces():
                data += piece
                if len(data) > limit:
                    return None
        except OSError:
            return None
        return bytes(data)


class Pair(msgspec.Struct, frozen=True):
    """Both versions of one path."""

    old: Side | None
    new: Side | None
    what: tuple[Aspect, ...] = ()

    @property
    def path(self) -> str:
        side = self.new or self.old
        assert side is not None
        return side.path

    @property
    def kind(self) -> Kind:
        if self.old is None:
            return "added"
        if self.new is None:
            return "deleted"
        return "renamed" if self.old.path != self.new.path else "modified"


def compare(
    lower: int, upper: int, walk: Walk, paths: Sequence[str] | None = None, *, patch: bool = False
) -> Diff:
    """The differences, as a whole or at and below some paths, and if asked the patch that makes them."""
    from stockade.workspace.patch import section

    left, files, sections, out = SHOWN_IN_ALL, [], [], []
    pairs = _pairs(lower, upper, walk, paths)
    full = {descend.split(pair.path)[0] for pair in pairs if pair.new is not None}
    for pair in pairs:
        one, contents = _file(pair, min(SHOWN, left), PATCHED if patch else 0)
        files.append(one)
        left -= len(one.text)
        if patch:
            made = section(pair, contents)
            sections.append(made)
            # git makes and removes directories with the files in them.
            implied = one.type == "directory" and (
                pair.new is None or (pair.old is None and pair.path in full)
            )
            if not made and not implied:
                out.append(one.path)
    return Diff(tuple(files), b"".join(sections), tuple(out))


def _pairs(lower: int, upper: int, walk: Walk, paths: Sequence[str] | None) -> list[Pair]:
    pairs: list[Pair] = []
    for one in walk.found:
        if paths is None or any(covers(path, one.path) for path in paths):
            pairs += _sides(one, lower, upper)
    return sorted(_renamed(pairs), key=lambda pair: (pair.path.split("/"), pair.new is not None))


def _sides(one: Found, lower: int, upper: int) -> Iterable[Pair]:
    old = Side(one.path, one.before, lower, False) if one.before is not None else None
    new = Side(one.path, one.after, upper, True) if one.after is not None else None
    if old is not None and (new is None or "type" in one.what):
        yield Pair(old, None, one.what)
        yield from _inside(old)
        old = None
    if new is not None:
        yield Pair(old, new, one.what)


def _inside(top: Side) -> Iterator[Pair]:
    """Everything in a directory of the host that is deleted."""
    pending = [top]
    while pending:
        side = pending.pop()
        if not stat.S_ISDIR(side.info.st_mode):
            continue
        with descend.listed(side.tree, side.path) as directory:
            for name in os.listdir(directory):
                info = descend.look(directory, name)
                if info is not None:
                    pending.append(Side(f"{side.path}/{name}", info, side.tree, False))
                    yield Pair(pending[-1], None)


def _renamed(pairs: list[Pair]) -> list[Pair]:
    """The same with each file that was deleted here and added there, unchanged, as one."""
    old = [pair for pair in pairs if pair.new is None and _nameable(pair.old)]
    new = [pair for pair in pairs if pair.old is None and _nameable(pair.new)]
    sizes = {_size(pair.old) for pair in old} & {_size(pair.new) for pair in new}
    old = [pair for pair in old if _size(pair.old) in sizes]
    new = [pair for pair in new if _size(pair.new) in sizes]
    if (
        max(len(old), len(new)) > RENAMES
        or sum(_size(pair.old or pair.new) for pair in old + new) > RENAMED_BYTES
    ):
        return pairs
    known: dict[bytes, list[Pair]] = {}
    for pair in old:
        if digest := _digest(pair.old):
            known.setdefault(digest, []).append(pair)
    replaced: dict[int, Pair | None] = {}
    for pair in new:
        digest = _digest(pair.new)
        if digest and known.get(digest):
            gone = known[digest].pop(0)
            replaced[id(gone)], replaced[id(pair)] = None, Pair(gone.old, pair.new)
    found = [replaced.get(id(pair), pair) for pair in pairs]
    return [pair for pair in found if pair is not None]


def _nameable(side: Side | None) -> bool:
    return side is not None and stat.S_ISREG(side.info.st_mode) and side.info.st_size > 0


def _size(side: Side | None) -> int:
    return side.info.st_size if side is not None else 0


def _digest(side: Side | None) -> bytes:
    import hashlib

    digest = hashlib.sha256()
    try:
        for piece in side.pieces() if side is not None else ():
            digest.update(piece)
    except OSError:
        return b""
    return digest.digest()


Contents = tuple[bytes | None, bytes | None]


def _file(pair: Pair, limit: int, most: int) -> tuple[FileDiff, Contents]:
    """One file's difference, and both contents as far as `most` or the text needs them."""
    old, new = pair.old, pair.new
    side = new or old
    assert side is not None
    kind = pair.kind
    contents: Contents = (b"", b"")
    text, added, removed, binary, cut = b"", 0, 0, False, False
    if side.type in ("file", "link") and (kind != "renamed" or most):
        within = max(limit, most)
        contents = (old.read(within) if old else b"", new.read(within) if new else b"")
    if side.type == "file" and kind != "renamed":
        before, after = contents
        if before is None or after is None:
            cut = True
        elif binary_content(before) or binary_content(after):
            binary = True
        elif max(len(before), len(after)) > limit:
            cut = True
        else:
            text, added, removed = unified(before, after)
    return (
        FileDiff(
            path=pair.path or ".",
            kind=kind,
            was=old.path if kind == "renamed" and old else "",
            what=pair.what,
            type=side.type,
            old_mode=stat.S_IMODE(old.info.st_mode) if old else None,
            new_mode=stat.S_IMODE(new.info.st_mode) if new else None,
            old_size=_size(old),
            new_size=_size(new),
            target=os.fsdecode(contents[1 if new else 0] or b"") if side.type == "link" else "",
            binary=binary,
            cut=cut,
            added=added,
            removed=removed,
            text=text,
        ),
        contents,
    )


def binary_content(data: bytes) -> bool:
    """Whether git would call it binary."""
    return b"\0" in data[:BEGINNING]
