"""Take some of a program's changes back: the layer is built anew from the others.

What is not in the new layer is as the host has it, so nothing has to be copied
from there, whatever the program did at such a path: it may have removed the
path, put a link there, or replaced the directory above it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable

from stockade.errors import SetupError
from stockade.linux import dirwalk
from stockade.result import Change
from stockade.workspace import tree_copy
from stockade.workspace.commit import CommitJob
from stockade.workspace.diff.layer_walk import PathDifference
from stockade.workspace.merge.merge import apply_difference, refuse_deep
from stockade.workspace.overlay import change
from stockade.workspace.snapshots import open_directory, temporary_directory

#: How many entries of a directory that a program removed are looked at; with more it is taken back whole.
MOST_LOOKED_AT = 20_000
#: Whether a path, relative to the workspace, is one whose changes are taken back.
Matches = Callable[[str], bool]


def revert(job: CommitJob, matches: Matches, sure: Callable[[], None]) -> list[Change]:
    """Take back the changes at the paths that match; return them. The caller holds the lock.

    A change that hides such a path of the host's is taken back too: one that removed the directory above it,
    or put something else in its place.
    """
    kept: list[PathDifference] = []
    taken: list[Change] = []
    gone: set[str] = set()
    for found in job.walk.found:
        refuse_deep(found)
        above = dirwalk.beginnings(found.directory, len(found.directory))
        if matches(found.path) or _hides_match(job.root, found, matches):
            taken.append(change(found))
            if found.before is None or not stat.S_ISDIR(found.before.st_mode):
                gone.add(found.path)
        elif any(path in gone for path in above):
            taken.append(change(found))
        else:
            kept.append(found)
    if taken:
        rebuild(job, kept, sure)
    return taken


def rebuild(job: CommitJob, kept: list[PathDifference], sure: Callable[[], None]) -> None:
    """Replace the layer by one that has these changes and nothing else, atomically."""
    with (
        open_directory(job.layer) as top,
        temporary_directory(top) as doomed,
        dirwalk.reached(top, doomed) as made,
    ):
        os.mkdir("upper", 0o700, dir_fd=made)
        with dirwalk.reached(made, "upper") as target:
            tree_copy.settle(f"/proc/self/fd/{target}", os.fstat(job.root))
            there = ""
            for found in sorted(kept, key=lambda one: one.path.split("/")):
                there = apply_difference(found, job.upper, target, there)
        sure()
        tree_copy.exchange(top, "upper", made, "upper")


def _hides_match(root: int, found: PathDifference, matches: Matches) -> bool:
    """Whether a change removes or replaces a directory of the host's in which a path matches."""
    before, after = found.before, found.after
    if before is None or not stat.S_ISDIR(before.st_mode):
        return False
    if after is not None and stat.S_ISDIR(after.st_mode):
        return False
    left = MOST_LOOKED_AT
    pending = [found.path]
    while pending:
        path = pending.pop()
        try:
            with dirwalk.listed(root, path) as directory, os.scandir(directory) as entries:
                for entry in entries:
                    left -= 1
                    inner = f"{path}/{entry.name}"
                    if left < 0 or matches(inner):
                        return True
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(inner)
        except (FileNotFoundError, NotADirectoryError):
            continue  # the user removed it meanwhile
        except OSError as error:
            raise SetupError(
                f"{path} cannot be looked at: {error.strerror}", stage="workspace", errno=error.errno or 0
            ) from None
    return False
