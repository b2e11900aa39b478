"""The disk usage of a tree that a program made, measured in bounded memory and time."""

from __future__ import annotations

import contextlib
import os

import msgspec

from stockade.linux import dirwalk
from stockade.workspace.diff.layer_walk import MOST_PATHS, WalkBudget, length

#: How many entries to count at most; each costs a stat.
MOST_ENTRIES = 500_000


class DiskUsage(msgspec.Struct, frozen=True):
    """Bytes on the disk; `cut` says that the count stopped before the end."""

    bytes: int = 0
    cut: bool = False

    def __add__(self, other: DiskUsage) -> DiskUsage:
        return DiskUsage(self.bytes + other.bytes, self.cut or other.cut)


def disk_usage(top: str) -> DiskUsage:
    """Return the usage of all entries of a directory; the contents of unreadable directories do not count."""
    try:
        root = os.open(top, dirwalk.NODE | os.O_DIRECTORY)
    except OSError:
        return DiskUsage()
    # Only the paths of directories are kept in memory, so only they count.
    budget = WalkBudget(entries=MOST_ENTRIES, paths=MOST_PATHS, directories=MOST_ENTRIES)
    blocks, left = 0, MOST_ENTRIES
    try:
        pending = [("", 0)]
        while pending and left > 0 and not budget.cut:
            path, depth = pending.pop()
            prefix = f"{path}/" if path else ""
            with contextlib.ExitStack() as stack:
                if not budget.enter(depth):
                    break
                try:
                    directory = stack.enter_context(dirwalk.listed(root, path))
                except OSError:
                    continue  # it has disappeared, or is unreadable
                for entry in stack.enter_context(os.scandir(directory)):
                    left -= 1
                    try:
                        blocks += entry.stat(follow_symlinks=False).st_blocks
                    except OSError:  # it has disappeared
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        if not budget.take(len(prefix) + length(entry.name)):
                            break
                        pending.append((prefix + entry.name, depth + 1))
                    if left <= 0:
                        break
    finally:
        os.close(root)
    return DiskUsage(blocks * 512, bool(left <= 0 or budget.cut))
