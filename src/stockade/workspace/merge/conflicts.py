"""Check whether the host's files are still those that the program saw.

The change time of the inode decides, which no program can set: a file whose
change time is not earlier than the opening of the workspace has changed.
Files that a commit itself wrote are known by their inode number and that time.
"""

from __future__ import annotations

import itertools
import os
import stat
import time
from collections.abc import Iterable, Iterator

import msgspec

from stockade.linux import dirwalk
from stockade.linux.dirwalk import add_above
from stockade.workspace.diff.layer_walk import FileStat, LayerWalk, PathDifference
from stockade.workspace.holdback.holdback import covers
from stockade.workspace.metadata import ABSENT, HostFileTable, WorkspaceRecord, threshold

#: How many conflicts to collect.
MOST = 10_000
#: How many seconds a commit examines directories that it would remove, and how many directories may be
#: waiting for that.
MOST_SECONDS = 60.0
MOST_PENDING = 100_000


class Conflict(msgspec.Struct, frozen=True):
    """One path of the host that is not as the program saw it."""

    path: str
    reason: str


class Judge:
    """Compares the host's tree with the facts recorded about it."""

    def __init__(self, lower: int, record: WorkspaceRecord, seen: HostFileTable) -> None:
        self._lower = lower
        self._record = record
        self._seen = seen
        self._from = threshold(record)
        self._until = time.monotonic() + MOST_SECONDS

    def conflicts(
        self, chosen: Iterable[PathDifference], walk: LayerWalk, force: tuple[str, ...]
    ) -> list[Conflict]:
        """Return the conflicts of the chosen changes that `force` does not cover: `MOST` at most."""
        found: dict[str, Conflict] = {}
        if self._record.inode and os.fstat(self._lower).st_ino != self._record.inode:
            found[""] = Conflict(".", "another directory replaced it after the workspace was opened")
        for path, reason in itertools.chain(self._directories(chosen, walk), self._changes(chosen, walk)):
            if not any(covers(tree, path) for tree in force):
                found[path] = Conflict(path or ".", reason)
            if len(found) == MOST:
                break
        return [one for path, one in found.items() if not any(covers(tree, path) for tree in force)]

    def _directories(self, chosen: Iterable[PathDifference], walk: LayerWalk) -> Iterator[tuple[str, str]]:
        """Yield the directories above the changes that are no longer the same, each with the reason."""
        above: set[str] = set()
        for one in chosen:
            add_above(above, one.directory)
        for path in sorted(above):
            info = walk.directory(path) if path else None
            if info is not None and (reason := self._directory(path, info)):
                yield path, reason

    def _changes(self, chosen: Iterable[PathDifference], walk: LayerWalk) -> Iterator[tuple[str, str]]:
        for one in chosen:
            if reason := self._why_conflicting(one, walk):
                yield one.path, reason

    def is_unchanged(self, path: str, info: os.stat_result | FileStat) -> bool:
        """Return whether a file is unchanged since the workspace was opened, or since a commit wrote it."""
        return not self._why_changed(path, info)

    def _why_conflicting(self, one: PathDifference, walk: LayerWalk) -> str:
        if one.before is None:
            gone = self._existed_before(one, walk)
            return "it existed when the program changed it, but not any more" if gone else ""
        if stat.S_ISDIR(one.before.st_mode) and (one.after is None or "type" in one.what):
            return self._tree(one.path)
        return self._why_changed(one.path, one.before)

    def _existed_before(self, one: PathDifference, walk: LayerWalk) -> bool:
        """Return whether the host had, or may have had, the path while the program ran."""
        if (known := self._seen.get(os.fsencode(one.path))) is not None:
            return known != ABSENT
        if not one.copied or one.after is None:
            return False
        if stat.S_ISDIR(one.after.st_mode):
            return True  # overlayfs does not rename a directory of the host's
        # A file may have been copied up under another name. Without a record of the host's files at the end
        # of the program, an unchanged directory shows that the host never had this name in it.
        info = walk.directory(one.directory)
        return b"" not in self._seen and info is not None and bool(self._why_changed(one.directory, info))

    def _tree(self, top: str) -> str:
        """Return the first conflict in a directory that the commit would remove, or ""."""
        pending = [top]
        while pending:
            path = pending.pop()
            with dirwalk.listed(self._lower, path) as directory, os.scandir(directory) as entries:
                if reason := self._why_changed(path, os.fstat(directory)):
                    return reason if path == top else f"{path}: {reason}"
                for entry in entries:
                    if time.monotonic() > self._until or len(pending) > MOST_PENDING:
                        return (
                            "it has so many files that checking them for your changes takes more than "
                            f"{MOST_SECONDS:.0f} seconds"
                        )
                    info = dirwalk.look(directory, entry.name)
                    if info is not None and stat.S_ISDIR(info.st_mode):
                        pending.append(f"{path}/{entry.name}")
                    elif info is not None and (reason := self._why_changed(f"{path}/{entry.name}", info)):
                        return f"{path}/{entry.name}: {reason}"
        return ""

    def _directory(self, path: str, info: os.stat_result | FileStat) -> str:
        """Return why a directory that contains changes is no longer the same one, or ""."""
        number, at = self._seen.get(os.fsencode(path)) or (info.st_ino, 0)
        if number != info.st_ino:
            return "another directory replaced it after the program ended"
        # New or removed files change both times; renaming the directory changes only its change time.
        moved = info.st_ctime_ns != info.st_mtime_ns and info.st_ctime_ns != at
        return self._why_changed(path, info) if moved else ""

    def _why_changed(self, path: str, info: os.stat_result | FileStat) -> str:
        if info.st_ctime_ns < self._from:
            return ""
        if self._seen.get(os.fsencode(path)) == (info.st_ino, info.st_ctime_ns):
            return ""
        if not self._from:
            return "the clock is behind the time at which the workspace was opened, so no time can be trusted"
        opened = clock(self._record.opened)
        return f"it changed at {clock(info.st_ctime_ns)}, the workspace was opened at {opened}"


def clock(nanoseconds: int) -> str:
    """Format a time for people, to the thousandth of a second."""
    seconds, rest = divmod(nanoseconds, 1_000_000_000)
    return f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(seconds))}.{rest // 1_000_000:03}"
