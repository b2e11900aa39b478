"""Whether the host's files are still those that the program inside saw.

What decides is the time of the
last change to the inode, which no program can set: a file whose change time
is not earlier than the opening of the workspace has changed, and what a
commit itself left is known by its number and that time.
"""

from __future__ import annotations

import os
import stat
import time

import msgspec

from stockade.workspace import descend
from stockade.workspace.caution import covers
from stockade.workspace.descend import parents
from stockade.workspace.record import ABSENT, Record, Seen, threshold
from stockade.workspace.walk import Found, Walk


class Conflict(msgspec.Struct, frozen=True):
    """One path of the host that is not as the program inside saw it."""

    path: str
    reason: str


class Judge:
    """Compares the host's tree with what is known of it."""

    def __init__(self, lower: int, record: Record, seen: Seen) -> None:
        self._lower = lower
        self._record = record
        self._seen = seen
        self._from = threshold(record)

    def conflicts(self, chosen: list[Found], walk: Walk, force: tuple[str, ...]) -> list[Conflict]:
        """Everything that stands against a commit of the chosen changes, unless it is forced by name."""
        found: dict[str, Conflict] = {}
        if self._record.inode and os.fstat(self._lower).st_ino != self._record.inode:
            found[""] = Conflict(".", "another directory has taken its place since the workspace was opened")
        for path in sorted({above for one in chosen for above in parents(one.path)}):
            if path and path in walk.merged and (reason := self._directory(path, walk.merged[path])):
                found[path] = Conflict(path, reason)
        for one in chosen:
            if reason := self._changed(one, walk):
                found[one.path] = Conflict(one.path or ".", reason)
        return [one for path, one in found.items() if not any(covers(tree, path) for tree in force)]

    def is_as_it_was(self, path: str, info: os.stat_result) -> bool:
        """Whether a file of the host is what it was when the workspace was opened, or what a commit left."""
        return not self._later(path, info)

    def _changed(self, one: Found, walk: Walk) -> str:
        if one.before is None:
            return "it was there when the program changed it, and is gone" if self._gone(one, walk) else ""
        if stat.S_ISDIR(one.before.st_mode) and (one.after is None or "type" in one.what):
            return self._tree(one.path)
        return self._later(one.path, one.before)

    def _gone(self, one: Found, walk: Walk) -> bool:
        """Whether the host had the path when the program worked, or may have had it."""
        if os.fsencode(one.path) in self._seen:
            return self._seen[os.fsencode(one.path)] != ABSENT
        if not one.copied or one.after is None:
            return False
        if stat.S_ISDIR(one.after.st_mode):
            return True  # the kernel's overlay does not rename a directory of the host's
        # A file may have been copied up under another name. Where nobody wrote down what was there when the
        # program ended, a directory that is as it was tells that this name was never in it.
        parent = descend.split(one.path)[0]
        return (
            b"" not in self._seen and parent in walk.merged and bool(self._later(parent, walk.merged[parent]))
        )

    def _tree(self, top: str) -> str:
        """The first reason found in a directory that the commit would remove with everything in it."""
        pending = [top]
        while pending:
            path = pending.pop()
            with descend.listed(self._lower, path) as directory:
                if reason := self._later(path, os.fstat(directory)):
                    return reason if path == top else f"{path}: {reason}"
                for name in os.listdir(directory):
                    info = descend.look(directory, name)
                    if info is not None and stat.S_ISDIR(info.st_mode):
                        pending.append(f"{path}/{name}")
                    elif info is not None and (reason := self._later(f"{path}/{name}", info)):
                        return f"{path}/{name}: {reason}"
        return ""

    def _directory(self, path: str, info: os.stat_result) -> str:
        """Whether a directory in which something changes is still the same one."""
        number, at = self._seen.get(os.fsencode(path), (info.st_ino, 0))
        if number != info.st_ino:
            return "another directory has taken its place since the program ended"
        # New or removed files change both times; a directory that was renamed has a change time of its own.
        moved = info.st_ctime_ns != info.st_mtime_ns and info.st_ctime_ns != at
        return self._later(path, info) if moved else ""

    def _later(self, path: str, info: os.stat_result) -> str:
        if info.st_ctime_ns < self._from:
            return ""
        if self._seen.get(os.fsencode(path)) == (info.st_ino, info.st_ctime_ns):
            return ""
        if not self._from:
            return "the clock is behind the time at which the workspace was opened, so no time can be trusted"
        opened = clock(self._record.opened)
        return f"it changed at {clock(info.st_ctime_ns)}, the workspace was opened at {opened}"


def clock(nanoseconds: int) -> str:
    """A time as people read it, to the thousandth of a second."""
    seconds, rest = divmod(nanoseconds, 1_000_000_000)
    return f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(seconds))}.{rest // 1_000_000:03}"
