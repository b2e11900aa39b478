"""The differences between a layer and the host's tree, found by walking the layer only.

The layer has the format of overlayfs: a character device 0:0 is a whiteout, a
directory marked opaque hides everything that the host has in it. A file that
was copied up but is the same is not a change.

The program chose how many names there are, how long they are and how deep
they lie. So changes come as a stream, in the order of their paths, and a
`WalkBudget` ends it: the caller learns that the list is cut, and why. A change
is stored as a name in a directory, whose path all changes in it share, with
its stat in packed form.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import struct
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal

import msgspec

from stockade.linux import dirwalk
from stockade.state.spool import spool

if TYPE_CHECKING:
    from stockade.workspace.fingerprint import Fingerprint

OPAQUE = "user.overlay.opaque"
#: On everything that the kernel copied up: it existed when the program first changed it.
ORIGIN = "user.overlay.origin"
#: Access lists.
LISTS = ("system.posix_acl_access", "system.posix_acl_default")
#: Attributes that our overlays never set, and that would change the meaning of a file.
FOREIGN = ("user.overlay.redirect", "user.overlay.metacopy")

Kind = Literal["added", "modified", "deleted"]
Aspect = Literal["type", "content", "target", "mode", "access", "attributes"]
PIECE = 1 << 20

#: Limits of a walk: entries of a layer, directories, the total length of paths, and directories entered on
#: the way. Listing, diff, commit and merge share these limits, so that nothing is committed that could not
#: be shown; within them each takes tens of MiB. An installation of 2,150 npm packages has 107,000 entries in
#: 12,600 directories, with 6 MiB of paths.
MOST_ENTRIES = 150_000
MOST_DIRECTORIES = 25_000
MOST_PATHS = 10 << 20
MOST_STEPS = 1_000_000
#: How many seconds a walk compares contents that may be the same. Files after that count as changed.
MOST_SECONDS = 30.0
#: How many entries of a directory to examine before descending into them.
BATCH = 1000
#: How many characters JSON and a terminal need for an unprintable one.
SPELLED = 6

_PACKED = struct.Struct("=IIIIQQQqqq")


class WalkBudget:
    """The budget of one walk. `cut` says why it ended early, and is empty if it did not."""

    def __init__(
        self, entries: int | None = None, paths: int | None = None, directories: int | None = None
    ) -> None:
        self._entries = self._all_entries = MOST_ENTRIES if entries is None else entries
        self._paths = self._all_paths = MOST_PATHS if paths is None else paths
        self._steps = MOST_STEPS
        self._directories = self._all_directories = MOST_DIRECTORIES if directories is None else directories
        #: The seconds left for comparing contents.
        self.patience = MOST_SECONDS
        self.cut = ""

    def take(self, path: int) -> bool:
        """Count one more entry with a path of that length; return False if the budget is exceeded."""
        self._entries -= 1
        self._paths -= path
        if self._entries < 0:
            self.cut = f"there are more than {self._all_entries:,} entries"
        elif self._paths < 0:
            self.cut = f"their paths take more than {self._all_paths >> 20} MiB"
        return not self.cut

    def enter(self, depth: int) -> bool:
        """Count one more directory and the way to it; return False if the budget is exceeded."""
        self._steps -= depth
        self._directories -= 1
        if self._steps < 0:
            self.cut = "they lie in too many deeply nested directories"
        elif self._directories < 0:
            self.cut = f"they lie in more than {self._all_directories:,} directories"
        return not self.cut


def length(name: str) -> int:
    """Return what a name or a path costs of a budget."""
    return (1 if name.isascii() and name.isprintable() else SPELLED) * len(name)


class FileStat(msgspec.Struct, frozen=True, gc=False):
    """The stat fields that a walk keeps, under the names of `os.stat_result`."""

    st_mode: int
    st_uid: int
    st_gid: int
    st_nlink: int
    st_rdev: int
    st_ino: int
    st_size: int
    st_atime_ns: int
    st_mtime_ns: int
    st_ctime_ns: int


def pack(info: os.stat_result | None) -> bytes:
    """Pack the stat fields that a change keeps; empty for None."""
    if info is None:
        return b""
    return _PACKED.pack(
        info.st_mode, info.st_uid, info.st_gid, min(info.st_nlink, 0xFFFFFFFF), info.st_rdev, info.st_ino,
        info.st_size, info.st_atime_ns, info.st_mtime_ns, info.st_ctime_ns,
    )  # fmt: skip


def unpack(packed: bytes) -> FileStat | None:
    """Return the stat from its packed form."""
    return FileStat(*_PACKED.unpack(packed)) if packed else None


class PathDifference(msgspec.Struct, frozen=True, gc=False):
    """One path that differs: the host's version and the layer's."""

    directory: str
    """The path of its directory, which all changes there share."""
    name: str
    kind: Kind
    was: bytes
    now: bytes
    what: tuple[Aspect, ...] = ()
    copied: bool = False
    """Whether the layer shows that the host once had it."""
    deep: bool = False
    """Whether it stands for its contents, which lie too deep to examine."""
    unsure: bool = False
    """Whether its content counts as changed only because there was no time to compare it."""

    @property
    def path(self) -> str:
        return f"{self.directory}/{self.name}" if self.directory else self.name

    @property
    def before(self) -> FileStat | None:
        return unpack(self.was)

    @property
    def after(self) -> FileStat | None:
        return unpack(self.now)


class LayerWalk(msgspec.Struct):
    """The differences found, directories before their contents."""

    found: Sequence[PathDifference]
    merged: dict[str, bytes]
    """The host's directories that may contain differences, with their packed stats."""
    cut: str = ""
    """Why some differences are missing; empty if none are."""
    partial: bool = False
    """Whether the walk covered only some paths and what is below them."""

    def directory(self, path: str) -> FileStat | None:
        """Return the stat of a directory of the host's that may contain differences, or None."""
        return unpack(self.merged.get(path, b""))


def walk(
    upper: int,
    lower: int,
    *,
    deepest: int,
    paths: Sequence[str] | None = None,
    fingerprint: Fingerprint | None = None,
) -> LayerWalk:
    """Compare the layer with the tree, all of it or at and below some paths.

    A `fingerprint` is fed with everything that the walk sees of the layer.
    """
    budget = WalkBudget()
    merged: dict[str, bytes] = {}
    found = spool(PathDifference)
    found.extend(
        changed(upper, lower, budget, deepest=deepest, merged=merged, paths=paths, fingerprint=fingerprint)
    )
    return LayerWalk(found, merged, budget.cut, paths is not None)


def changed(
    upper: int,
    lower: int,
    budget: WalkBudget,
    *,
    deepest: int,
    merged: dict[str, bytes] | None = None,
    paths: Sequence[str] | None = None,
    fingerprint: Fingerprint | None = None,
) -> Iterator[PathDifference]:
    """Yield each change in the order of the paths, within the budget.

    Adds to `merged` the host's directories that may contain differences.
    """
    before, after = os.fstat(lower), os.fstat(upper)
    if fingerprint is not None:
        fingerprint.entry("", after)
    if what := _aspects(before, after):
        yield PathDifference("", "", "modified", pack(before), pack(after), what, copied=True)
    # The usual end of a run: nothing has changed. In other cases the directory may not be open for reading.
    with contextlib.suppress(OSError), os.scandir(upper) as entries:
        if next(entries, None) is None:
            return
    reader = _LayerReader(upper, lower, budget, deepest, {} if merged is None else merged, paths, fingerprint)
    pending = [reader.entries_of("", 0, 0, True)]
    while pending:
        entry = next(pending[-1], None)
        if entry is None:
            pending.pop()
            continue
        if entry.found is not None:
            yield entry.found
        if entry.deeper is not None:
            pending.append(reader.entries_of(*entry.deeper))


#: A directory to enter: its path, the cost of that, its depth, whether the host has it as well.
_Deeper = tuple[str, int, int, bool]


class _Entry(msgspec.Struct, frozen=True, gc=False):
    """One name of a layer's directory: the change, if it is one, and the directory to enter next."""

    found: PathDifference | None
    deeper: _Deeper | None = None


class _LayerReader(msgspec.Struct):
    """Reads the directories of one walk. None stays open: each is opened from the top."""

    upper: int
    lower: int
    budget: WalkBudget
    deepest: int
    merged: dict[str, bytes]
    paths: Sequence[str] | None
    fingerprint: Fingerprint | None

    def entries_of(self, path: str, cost: int, depth: int, merged: bool) -> Iterator[_Entry]:
        """Yield every entry of one directory, by name."""
        if not self.budget.enter(depth):
            return
        names: list[str] | None = None
        # In batches: there may be too many to keep, and the directories among them come in between.
        while names is None or names:
            with self._open(path, merged) as (above, below):
                if above is None:
                    return
                if names is None:
                    names = self._order(path, cost, above, below)
                some = [names.pop() for _ in range(min(BATCH, len(names)))]
                found = self._compare_names(path, cost, depth, above, below, some)
            yield from found

    @contextlib.contextmanager
    def _open(self, path: str, merged: bool) -> Iterator[tuple[int | None, int | None]]:
        """Open one directory of the layer, and the host's by that path if it exists."""
        with contextlib.ExitStack() as stack:
            above = below = None
            # Removed meanwhile: a live sandbox keeps working.
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                above = stack.enter_context(dirwalk.listed(self.upper, path, own=True))
            if merged:
                # A directory that the caller may not read is hidden from us and from the program alike.
                with contextlib.suppress(PermissionError, FileNotFoundError, NotADirectoryError):
                    below = stack.enter_context(dirwalk.listed(self.lower, path))
            yield above, below

    def _order(self, path: str, cost: int, above: int, below: int | None) -> list[str]:
        """Return the names in a directory to examine, in reverse."""
        if below is not None:
            self.merged[path] = pack(os.fstat(below))
        names = self._names(above, path, cost)
        if below is not None and path and _has_mark(above, OPAQUE):
            # The directory was removed and made again: entries that are not in the layer are deleted.
            names |= self._names(below, path, cost)
        return sorted(names, reverse=True)

    def _compare_names(
        self, path: str, cost: int, depth: int, above: int, below: int | None, names: list[str]
    ) -> list[_Entry]:
        opaque = _has_mark(above, OPAQUE)
        if self.fingerprint is not None:
            self.fingerprint.directory(path, opaque=opaque)
        found = []
        for name in names:
            after = dirwalk.look(above, name)
            before = dirwalk.look(below, name)
            if self.fingerprint is not None and after is not None:
                self.fingerprint.entry(name, after)
            if after is None or is_whiteout(after):
                if before is not None and (after is not None or (opaque and path)):
                    found.append(_Entry(PathDifference(path, name, "deleted", pack(before), b"")))
                continue
            is_dir = stat.S_ISDIR(after.st_mode)
            deep = is_dir and depth > self.deepest
            one = self._compare(path, name, above, below, before, after, deep)
            if is_dir and not deep:
                was_dir = before is not None and stat.S_ISDIR(before.st_mode)
                inner = f"{path}/{name}" if path else name
                found.append(_Entry(one, (inner, cost + length(name) + 1, depth + 1, was_dir)))
            elif one is not None:
                found.append(_Entry(one))
        return found

    def _compare(
        self,
        directory: str,
        name: str,
        above: int,
        below: int | None,
        before: os.stat_result | None,
        after: os.stat_result,
        deep: bool,
    ) -> PathDifference | None:
        # In a directory that the host does not have, only directories can be the host's own.
        copied = (below is not None or stat.S_ISDIR(after.st_mode)) and has_attribute(above, name, ORIGIN)
        if before is None:
            return PathDifference(directory, name, "added", b"", pack(after), copied=copied, deep=deep)
        same: bool | None = True
        what = _aspects(before, after)
        if "type" not in what and below is not None:
            if stat.S_ISREG(after.st_mode):
                same = same_content(name, above, below, before, after, self.budget)
                what = what if same else ("content", *what)
            elif stat.S_ISLNK(after.st_mode) and _target(name, above) != _target(name, below):
                what = ("target", *what)
            if not stat.S_ISLNK(after.st_mode):
                what = (*what, *_different_attributes(name, above, below))
        if not what and not deep:
            return None
        unsure = same is None
        return PathDifference(
            directory, name, "modified", pack(before), pack(after), what, copied, deep, unsure
        )

    def _names(self, directory: int, path: str, cost: int) -> set[str]:
        """Return the names in a directory to examine, within the budget."""
        wanted = self._wanted(path)
        names: set[str] = set()
        if wanted is not None:
            names = {name for name in wanted if dirwalk.look(directory, name) is not None}
            return {name for name in sorted(names) if self.budget.take(cost + length(name) + 1)}
        with os.scandir(directory) as entries:
            for entry in entries:
                if not self.budget.take(cost + length(entry.name) + 1):
                    break
                names.add(entry.name)
        return names

    def _wanted(self, path: str) -> set[str] | None:
        """Return the names on the way to the requested paths; None if everything here is requested."""
        if self.paths is None:
            return None
        prefix = f"{path}/" if path else ""
        if any(one == path or prefix.startswith(f"{one}/") for one in self.paths):
            return None
        return {one.removeprefix(prefix).split("/")[0] for one in self.paths if one.startswith(prefix)}


def _aspects(before: os.stat_result, after: os.stat_result) -> tuple[Aspect, ...]:
    if stat.S_IFMT(before.st_mode) != stat.S_IFMT(after.st_mode):
        return ("type",)
    if stat.S_IMODE(before.st_mode) != stat.S_IMODE(after.st_mode):
        return ("mode",)
    return ()


def is_whiteout(info: os.stat_result | FileStat) -> bool:
    """Return whether an entry of a layer stands for a deleted path."""
    return stat.S_ISCHR(info.st_mode) and info.st_rdev == 0


def _has_mark(directory: int, attribute: str) -> bool:
    try:
        return os.getxattr(directory, attribute) == b"y"
    except OSError:
        return False


def has_attribute(above: int, name: str, *attributes: str) -> bool:
    """Return whether an entry of a directory has one of the attributes."""
    for attribute in attributes:
        with contextlib.suppress(OSError):
            os.getxattr(f"/proc/self/fd/{above}/{name}", attribute, follow_symlinks=False)
            return True
    return False


def is_program_attribute(attribute: str) -> bool:
    """Return whether an attribute belongs to the program, rather than to the overlay."""
    return attribute in LISTS or (attribute.startswith("user.") and not attribute.startswith("user.overlay."))


def same_attributes(name: str, above: int, below: int) -> bool:
    """Return whether an entry has the same attributes and access lists in two directories."""
    return not _different_attributes(name, above, below)


def _different_attributes(name: str, above: int, below: int) -> tuple[Aspect, ...]:
    one, other = _attributes(name, above), _attributes(name, below)
    different = set(one.keys() ^ other.keys())
    for known in one.keys() & other.keys():
        if None not in (one[known], other[known]) and one[known] != other[known]:
            different.add(known)
    lists: tuple[Aspect, ...] = ("access",) if not different.isdisjoint(LISTS) else ()
    return (*lists, "attributes") if not different.issubset(LISTS) else lists


def _attributes(name: str, directory: int) -> dict[str, bytes | None]:
    """Return the attributes of a file that count; None for a value that its owner may not read."""
    path = f"/proc/self/fd/{directory}/{name}"
    found: dict[str, bytes | None] = {}
    with contextlib.suppress(OSError):  # this file system has none, or the file has disappeared
        for known in filter(is_program_attribute, os.listxattr(path, follow_symlinks=False)):
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
    before: os.stat_result | FileStat,
    after: os.stat_result | FileStat,
    budget: WalkBudget,
    *,
    own: bool = False,
) -> bool | None:
    """Return whether a layer's file has the content of another by the same name.

    `own` says that the other is a layer's too. None means that the budget's time did not suffice.
    """
    if before.st_size != after.st_size:
        return False
    began = time.monotonic()
    try:
        with dirwalk.content(above, name, own=True) as new, dirwalk.content(below, name, own=own) as old:
            at = 0
            # Where both have a hole they are equal, however large it is.
            while (at := min(_data(new, at, after.st_size), _data(old, at, after.st_size))) < after.st_size:
                if time.monotonic() - began > budget.patience:
                    return None
                # Never read a hole after data, or small pieces of data would cost as much as large ones.
                end = max(os.lseek(file, at, os.SEEK_HOLE) for file in (new, old))
                one, other = (os.pread(file, min(PIECE, end - at), at) for file in (new, old))
                if one != other or not one:
                    return False
                at += len(one)
            return True
    except OSError:
        return False  # an unreadable file may differ
    finally:
        budget.patience -= time.monotonic() - began


def _data(file: int, at: int, size: int) -> int:
    """Return the offset of the next data of a file; its size if there is none."""
    try:
        return os.lseek(file, at, os.SEEK_DATA)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        return size
