"""Rebase a program's changes to text files on the host's own changes, before a commit.

All files are merged in memory first, so that one conflict leaves everything
as it was. Then the layer's files are replaced by the merged ones and committed
like any other change. After a crash in between, the layer has the changes of
both sides, and the next merge treats them as the same change.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable

import msgspec

from stockade.errors import SetupError, one_line, typed
from stockade.linux import dirwalk
from stockade.workspace import tree_copy
from stockade.workspace.diff.diff import read
from stockade.workspace.diff.layer_walk import PathDifference, pack
from stockade.workspace.diff.line_diff import MOST_LINES, Effort
from stockade.workspace.holdback.tracked_repositories import repository
from stockade.workspace.journal import identity
from stockade.workspace.merge import bases
from stockade.workspace.merge.conflicts import Conflict
from stockade.workspace.merge.three_way import merge3
from stockade.workspace.snapshots import open_directory, temporary_directory
from stockade.workspace.version_control import git_index

#: The size limits of one side and of all results together.
LARGEST = 4 * bases.LARGEST
IN_ALL = 16 << 20


class Merge(msgspec.Struct, frozen=True):
    """A change, merged with the host's changes to the file."""

    found: PathDifference
    text: bytes
    mode: int


def without_refreshed(
    layer: str, root: int, chosen: Iterable[PathDifference], conflicts: list[Conflict]
) -> list[Conflict]:
    """Return the conflicts without those of a git index in which the host's git only refreshed its notes.

    `git status` does that. Such an index still names what the program started from, so it can be replaced.
    """
    paths = {one.path for one in conflicts if _is_index(one.path)}
    changes = (one for one in chosen if one.path in paths) if paths else ()
    refreshed = {one.path for one in changes if _is_refreshed(layer, root, one)}
    return [one for one in conflicts if one.path not in refreshed]


def _is_index(path: str) -> bool:
    return repository(path).endswith(".git") and path.endswith("/index")


def _is_refreshed(layer: str, root: int, one: PathDifference) -> bool:
    if one.before is None or (then := bases.read(layer, one.path)) is None:
        return False
    now = read(root, one.path, one.before, git_index.LARGEST)
    return now is not None and git_index.same_files(now, then[0])


def index_hint(conflicts: Iterable[Conflict]) -> str:
    """Return a hint about a git index in conflict, which users cannot compare; "" if there is none."""
    path = next((one.path for one in conflicts if _is_index(one.path)), "")
    if not path:
        return ""
    words = f"--force {one_line(typed(path))} commits the program's; none of your files changes"
    return f"\n{one_line(path)} is git's list of staged files: {words}"


def merge_conflicts(
    layer: str, root: int, upper: int, chosen: Iterable[PathDifference], conflicts: list[Conflict]
) -> tuple[list[Merge], list[Conflict]]:
    """Merge the files in conflict; return the merges, and the conflicts that remain, with reasons."""
    asked = {conflict.path for conflict in conflicts}
    changes = {one.path: one for one in chosen if one.path in asked and bases.may_be_texts(one)}
    done: list[Merge] = []
    left: list[Conflict] = []
    room, effort = IN_ALL, Effort()
    for conflict in conflicts:
        if conflict.path not in changes:
            left.append(conflict)
            continue
        merged = _merge_file(layer, root, upper, changes[conflict.path], effort)
        if isinstance(merged, Merge) and len(merged.text) > room:
            merged = f"more than {IN_ALL >> 20} MiB cannot be merged at once"
        if isinstance(merged, Merge):
            done.append(merged)
            room -= len(merged.text)
        else:
            left.append(Conflict(conflict.path, f"{conflict.reason}; {merged}"))
    return done, left


def _merge_file(layer: str, root: int, upper: int, one: PathDifference, effort: Effort) -> Merge | str:
    """Return the merge of one file, or why it cannot be merged."""
    assert one.before is not None and one.after is not None
    base = bases.read(layer, one.path)
    if base is None:
        return "it cannot be merged, because Stockade has no copy of what the program started from"
    text, mode = base
    ours = read(upper, one.path, one.after, LARGEST, own=True)
    theirs = read(root, one.path, one.before, LARGEST)
    if ours is None or theirs is None:
        return f"it cannot be merged, because it is unreadable or larger than {LARGEST >> 20} MiB"
    if any(b"\0" in side for side in (text, ours, theirs)):
        return "it cannot be merged, because it is not a text file"
    if any(side.count(b"\n") >= MOST_LINES for side in (text, ours, theirs)):
        return f"it cannot be merged, because it has more than {MOST_LINES:,} lines"
    merged = merge3(text, ours, theirs, effort)
    if merged.conflicts:
        places = ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in merged.conflicts[:10])
        more = " and more" if len(merged.conflicts) > 10 else ""
        return f"both sides changed the same lines: {places}{more} of the host's version"
    new, now = (stat.S_IMODE(info.st_mode) & 0o777 for info in (one.after, one.before))
    if mode not in (new, now) and new != now:
        return f"both sides changed its mode, to {new:o} and {now:o}"
    return Merge(one, merged.text, now if new == mode else new)


def write_merge(layer: str, upper: int, merge: Merge) -> PathDifference:
    """Write the merged text to the layer and return the change as it is now."""
    one = merge.found
    parent, name = dirwalk.split(one.path)
    with (
        open_directory(layer) as top,
        temporary_directory(top) as doomed,
        dirwalk.reached(top, doomed) as aside,
        dirwalk.listed(upper, parent, own=True) as directory,
        dirwalk.content(directory, name, own=True) as old,
    ):
        info = os.fstat(old)
        if one.after is None or identity(info) != identity(one.after):
            raise SetupError(f"{one.path} changed while it was merged", stage="commit")
        with open(os.open("new", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=aside), "wb") as file:
            file.write(merge.text)
            file.flush()
            tree_copy.attributes(old, file.fileno())
            tree_copy.settle(file.fileno(), info)
            os.fchmod(file.fileno(), merge.mode)
            os.utime(file.fileno())
            after = os.fstat(file.fileno())
        os.rename("new", name, src_dir_fd=aside, dst_dir_fd=directory)
        return msgspec.structs.replace(one, now=pack(after))
