"""The changes file by file, as a value to print, to count, or to make a patch from.

The walk covers only the layer, and the host's files at the same paths. A
deleted directory is listed file by file, because those files are the loss.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import msgspec

from stockade.errors import SetupError
from stockade.linux import dirwalk
from stockade.state.spool import Spool, spool
from stockade.workspace.diff.layer_walk import (
    BATCH,
    LISTS,
    MOST_ENTRIES,
    MOST_PATHS,
    PIECE,
    Aspect,
    FileStat,
    LayerWalk,
    PathDifference,
    WalkBudget,
    has_attribute,
    length,
    pack,
    unpack,
)
from stockade.workspace.diff.line_diff import Effort, has_many_lines, unified
from stockade.workspace.holdback.holdback import covers, special

#: How many bytes to show of one file, and of all together; the diff says if more was cut.
SHOWN = 1 << 20
SHOWN_IN_ALL = 8 << 20
#: How many bytes of one file a patch can hold, and its total size: a patch is exact or refused.
PATCHED = 4 << 20
PATCHED_IN_ALL = 16 << 20
#: As in git, a NUL within this beginning makes a file binary.
BEGINNING = 8000
#: How many bytes to read of all files together.
READ_IN_ALL = 512 << 20
#: Limits of rename detection: files, different sizes of deleted files, bytes.
RENAMES = 1000
RENAMED_SIZES = 50_000
RENAMED_BYTES = 256 << 20

Kind = Literal["added", "modified", "deleted", "renamed"]


class FileDiff(msgspec.Struct, frozen=True, gc=False):
    """One path before and after. A path whose type changed is listed as deleted and as added."""

    path: str
    kind: Kind
    held: str = ""
    """Why a commit holds it back."""
    runs: str = ""
    """How it runs at the user's next command."""
    was: str = ""
    """Its old path, if it was renamed."""
    what: tuple[Aspect, ...] = ()
    type: str = "file"
    old_mode: int | None = None
    new_mode: int | None = None
    old_size: int = 0
    new_size: int = 0
    target: str = ""
    """The target of a link; the old one if the link was deleted."""
    binary: bool = False
    cut: bool = False
    """Whether its text was too large to be compared, or unreadable."""
    added: int = 0
    removed: int = 0
    text: bytes = b""
    """Unified hunks."""


class Diff(msgspec.Struct, frozen=True):
    """The differences between a workspace and the host's tree."""

    files: Sequence[FileDiff]
    patch: bytes = b""
    """A patch for `git apply`, if requested."""
    left_out: Sequence[str] = ()
    """Paths that a patch cannot hold: directories without files, pipes, sockets, attributes."""
    cut: str = ""
    """Why some differences are missing; empty if none are."""
    digest: str = ""
    """Identifies the compared state, for `Workspace.commit(expect=...)`. Empty while a sandbox uses the
    workspace: the sandbox may change it before you have read the diff."""
    unsure: int = 0
    """How many files count as changed because there was no time to compare their contents."""

    def __iter__(self) -> Iterator[FileDiff]:
        return iter(self.files)

    def __len__(self) -> int:
        return len(self.files)

    def __repr__(self) -> str:
        cut = f", cut: {self.cut}" if self.cut else ""
        return f"<Diff: {len(self)} file{'s' if len(self) != 1 else ''}, +{self.added} -{self.removed}{cut}>"

    @property
    def added(self) -> int:
        return sum(one.added for one in self.files)

    @property
    def removed(self) -> int:
        return sum(one.removed for one in self.files)


class Side(msgspec.Struct, frozen=True, gc=False):
    """One version of one path, and the tree to read it from."""

    path: str
    info: os.stat_result | FileStat
    tree: dirwalk.Directories

    @property
    def type(self) -> str:
        mode = self.info.st_mode
        known = {stat.S_IFREG: "file", stat.S_IFLNK: "link", stat.S_IFDIR: "directory"}
        return known.get(stat.S_IFMT(mode)) or special(mode).removeprefix("a ")

    def pieces(self) -> Iterator[bytes]:
        """Yield the content; for a link, its target."""
        parent, name = dirwalk.split(self.path)
        directory = self.tree.listed(parent)
        if stat.S_ISLNK(self.info.st_mode):
            yield os.fsencode(os.readlink(name, dir_fd=directory))
            return
        with dirwalk.content(directory, name, own=self.tree.own) as file:
            while piece := os.read(file, PIECE):
                yield piece

    def has_access_list(self) -> bool:
        """Return whether it has an access list."""
        parent, name = dirwalk.split(self.path)
        lists = LISTS if stat.S_ISDIR(self.info.st_mode) else LISTS[:1]
        with contextlib.suppress(OSError):
            return not stat.S_ISLNK(self.info.st_mode) and has_attribute(
                self.tree.listed(parent), name, *lists
            )
        return False

    def read(self, limit: int) -> bytes | None:
        """Return the whole content, or None if it is larger or unreadable."""
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


def read(tree: int, path: str, info: FileStat, limit: int, *, own: bool = False) -> bytes | None:
    """Return the whole content of a file below `tree`, or None if it is larger or unreadable."""
    with dirwalk.Directories(tree, own=own) as directories:
        return Side(path, info, directories).read(limit)


class Pair(msgspec.Struct, frozen=True, gc=False):
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
    lower: int,
    upper: int,
    walk: LayerWalk,
    paths: Sequence[str] | None = None,
    *,
    held: Sequence[Sequence[str]],
    runs: Callable[[PathDifference], str],
    patch: bool = False,
) -> Diff:
    """Return the differences, all or at and below some paths, and if requested the patch that makes them.

    Hold-backs come first, then files that run at the user's next command; `held` has the verdict on each
    change, and `runs` says how it runs. The total of shown text is limited, and these files use it first.
    """
    from stockade.workspace.diff.git_patch import section

    left, reading, effort = SHOWN_IN_ALL, READ_IN_ALL, Effort()
    files, sections, out, unsure = spool(FileDiff), bytearray(), spool(str), 0
    # For the contents of deleted directories.
    budget = WalkBudget(entries=MOST_ENTRIES - len(walk.found), paths=MOST_PATHS // 2)
    lines = _lines(walk, paths, held, runs, lower, budget)
    # Directories that git creates by itself; only a patch needs this.
    full = {dirwalk.split(line.path)[0] for line in lines if line.now} if patch else set()
    with dirwalk.Directories(lower) as old_tree, dirwalk.Directories(upper, own=True) as new_tree:
        for line in _ordered(lines, old_tree, new_tree):
            pair = line.pair(old_tree, new_tree)
            within = PATCHED if patch else 0
            one, contents = _compare_file(pair, min(SHOWN, left, reading), min(within, reading), effort)
            how = line.runs if pair.new is not None else ""
            files.append(msgspec.structs.replace(one, held=line.held, runs=how) if line.held or how else one)
            left -= len(one.text)
            reading -= sum(len(content or b"") for content in contents)
            reading, unsure = max(0, reading), unsure + line.unsure
            if patch:
                made = section(pair, contents, effort)
                sections += made
                if len(sections) > PATCHED_IN_ALL:
                    raise SetupError(
                        f"the patch is larger than {PATCHED_IN_ALL >> 20} MiB",
                        stage="diff",
                        hint="name some paths, and make several patches",
                    )
                # git creates and removes directories with the files in them.
                implied = one.type == "directory" and (
                    pair.new is None or (pair.old is None and pair.path in full)
                )
                if not made and not implied:
                    out.append(one.path)
    if patch and (cut := walk.cut or budget.cut):
        raise SetupError(
            f"there are too many changes for a patch: {cut}", stage="diff", hint="name some paths"
        )
    return Diff(files.settled(), bytes(sections), out.settled(), walk.cut or budget.cut, unsure=unsure)


class _Line(msgspec.Struct, frozen=True, gc=False):
    """A pair in compact form, with both stats packed: there may be very many."""

    path: str
    was: bytes
    now: bytes
    what: tuple[Aspect, ...] = ()
    unsure: bool = False
    held: str = ""
    runs: str = ""
    before: str = ""
    """Its old path, if it was renamed."""

    def pair(self, lower: dirwalk.Directories, upper: dirwalk.Directories) -> Pair:
        old, new = unpack(self.was), unpack(self.now)
        return Pair(
            None if old is None else Side(self.before or self.path, old, lower),
            None if new is None else Side(self.path, new, upper),
            self.what,
        )


def _lines(
    walk: LayerWalk,
    paths: Sequence[str] | None,
    held: Sequence[Sequence[str]],
    runs: Callable[[PathDifference], str],
    lower: int,
    budget: WalkBudget,
) -> Spool[_Line]:
    """Return every pair in the order of the walk."""
    lines = spool(_Line)
    for one, verdict in zip(walk.found, held, strict=True):
        if paths is not None and not any(covers(path, one.path) for path in paths):
            continue
        # The commit reports omitted caches, once for all.
        why, path = "" if "cache" in verdict[:1] else "".join(verdict[1:]), one.path
        both = _Line(path, one.was, one.now, one.what, one.unsure, why, runs(one))
        if not (one.was and (not one.now or "type" in one.what)):
            lines.append(both)
            continue
        lines.append(msgspec.structs.replace(both, now=b""))
        if one.now:
            lines.append(msgspec.structs.replace(both, was=b""))
        if one.before is not None and stat.S_ISDIR(one.before.st_mode):
            lines.extend(_deleted_entries(path, lower, budget))
    return lines


def _deleted_entries(top: str, lower: int, budget: WalkBudget) -> Iterator[_Line]:
    """Yield everything in a deleted directory of the host, within the budget."""
    pending = [_entries(top, lower, budget)]
    while pending:
        line = next(pending[-1], None)
        if line is None:
            pending.pop()
            continue
        yield line
        info = unpack(line.was)
        if info is not None and stat.S_ISDIR(info.st_mode):
            pending.append(_entries(line.path, lower, budget))


def _entries(path: str, lower: int, budget: WalkBudget) -> Iterator[_Line]:
    """Yield the entries of one directory of the host by name, in batches, so that no directory stays open."""
    names: list[str] = []
    with dirwalk.listed(lower, path) as directory, os.scandir(directory) as entries:
        for entry in entries:
            if not budget.take(length(f"{path}/{entry.name}")):
                break
            names.append(entry.name)
    names.sort(reverse=True)
    while names:
        with dirwalk.listed(lower, path) as directory:
            some = [names.pop() for _ in range(min(BATCH, len(names)))]
            found = [(name, pack(dirwalk.look(directory, name))) for name in some]
        yield from (_Line(f"{path}/{name}", was, b"") for name, was in found if was)


def _ordered(lines: Spool[_Line], lower: dirwalk.Directories, upper: dirwalk.Directories) -> Iterator[_Line]:
    """Yield hold-backs first, then files that run at the next command; a renamed file is one pair."""
    old, new = _find_renames(lines, lower, upper)
    for wanted in (0, 1, 2):
        for at, line in enumerate(lines):
            if at in old or (0 if line.held else 1 if line.runs and line.now else 2) != wanted:
                continue
            gone = lines[new[at]] if at in new else None
            yield line if gone is None else msgspec.structs.replace(line, was=gone.was, before=gone.path)


def _find_renames(
    lines: Spool[_Line], lower: dirwalk.Directories, upper: dirwalk.Directories
) -> tuple[set[int], dict[int, int]]:
    """Find unchanged files that were deleted here and added there: return the old ones, and old by new."""
    sizes: set[int] = set()
    for line in lines:
        if not line.now and (size := _regular_size(line.was)):
            sizes.add(size)
            if len(sizes) > RENAMED_SIZES:
                return set(), {}
    both = {size for line in lines if not line.was and (size := _regular_size(line.now)) in sizes}
    old, new, total = list[int](), list[int](), 0
    for at, line in enumerate(lines):
        if bool(line.was) == bool(line.now) or (size := _regular_size(line.was or line.now)) not in both:
            continue
        (old if line.was else new).append(at)
        total += size
        if max(len(old), len(new)) > RENAMES or total > RENAMED_BYTES:
            return set(), {}
    known: dict[bytes, list[int]] = {}
    for at in old:
        if digest := _digest(lines[at].pair(lower, upper).old):
            known.setdefault(digest, []).append(at)
    replaced: dict[int, int] = {}
    for at in new:
        digest = _digest(lines[at].pair(lower, upper).new)
        if digest and known.get(digest):
            replaced[at] = known[digest].pop(0)
    return set(replaced.values()), replaced


def _regular_size(packed: bytes) -> int:
    """Return the size of a regular file, else 0: an empty file cannot count as renamed."""
    info = unpack(packed)
    return info.st_size if info is not None and stat.S_ISREG(info.st_mode) else 0


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


def _compare_file(pair: Pair, limit: int, most: int, effort: Effort) -> tuple[FileDiff, Contents]:
    """Return one file's difference, and both contents up to `most` or as far as the text needs them."""
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
        elif max(len(before), len(after)) > limit or has_many_lines(before, after):
            cut = True
        else:
            text, added, removed = unified(before, after, effort)
    return (
        FileDiff(
            path=pair.path or ".",
            kind=kind,
            was=old.path if kind == "renamed" and old else "",
            what=(*pair.what, "access") if old is None and side.has_access_list() else pair.what,
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
    """Return whether git would treat the content as binary."""
    return b"\0" in data[:BEGINNING]
