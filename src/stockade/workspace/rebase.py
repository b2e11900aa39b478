"""Putting a program's changes to a text on top of the host's own, before a commit.

Everything is merged in memory first, so that one contradiction leaves all as
it was. Then the layer's files become the merged ones, and are committed like
any other change. Killed in between, the layer has the changes of both sides,
which the next merge finds to be the same.
"""

from __future__ import annotations

import os
import stat

import msgspec

from stockade.errors import SetupError
from stockade.workspace import bases, copying, descend
from stockade.workspace.conflicts import Conflict
from stockade.workspace.diff import Side
from stockade.workspace.journal import identity
from stockade.workspace.merge3 import merge3
from stockade.workspace.snapshots import begun, opened
from stockade.workspace.walk import Found

#: How large one side may have grown, and all results together.
LARGEST = 4 * bases.LARGEST
IN_ALL = bases.IN_ALL


class Merge(msgspec.Struct, frozen=True):
    """A change, and what becomes of it together with the host's."""

    found: Found
    text: bytes
    mode: int


def merges(
    layer: str, root: int, upper: int, chosen: list[Found], conflicts: list[Conflict]
) -> tuple[list[Merge], list[Conflict]]:
    """What can be merged of what is in conflict, and what cannot, with the reason."""
    changes = {one.path: one for one in chosen if bases.may_be_texts(one)}
    done: list[Merge] = []
    left: list[Conflict] = []
    room = IN_ALL
    for conflict in conflicts:
        if conflict.path not in changes:
            left.append(conflict)
            continue
        merged = _merged(layer, root, upper, changes[conflict.path])
        if isinstance(merged, Merge) and len(merged.text) > room:
            merged = f"more than {IN_ALL >> 20} MiB cannot be merged at once"
        if isinstance(merged, Merge):
            done.append(merged)
            room -= len(merged.text)
        else:
            left.append(Conflict(conflict.path, f"{conflict.reason}; {merged}"))
    return done, left


def _merged(layer: str, root: int, upper: int, one: Found) -> Merge | str:
    """The merge of one file, or why there is none."""
    assert one.before is not None and one.after is not None
    base = bases.read(layer, one.path)
    if base is None:
        return "it cannot be merged, because no copy was kept of what the program started from"
    text, mode = base
    ours = Side(one.path, one.after, upper, True).read(LARGEST)
    theirs = Side(one.path, one.before, root, False).read(LARGEST)
    if ours is None or theirs is None:
        return f"it cannot be merged, because it is larger than {LARGEST >> 20} MiB, or cannot be read"
    if any(b"\0" in side for side in (text, ours, theirs)):
        return "it cannot be merged, because it is no text"
    merged = merge3(text, ours, theirs)
    if merged.conflicts:
        places = ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in merged.conflicts[:10])
        more = " and more" if len(merged.conflicts) > 10 else ""
        return f"both sides changed the same lines: {places}{more} of the host's"
    new, now = (stat.S_IMODE(info.st_mode) & 0o777 for info in (one.after, one.before))
    if mode not in (new, now) and new != now:
        return f"both sides changed its mode, to {new:o} and {now:o}"
    return Merge(one, merged.text, now if new == mode else new)


def lay(layer: str, upper: int, merge: Merge) -> Found:
    """Let the layer have the merged text; the result is the change as it is now."""
    one = merge.found
    parent, name = descend.split(one.path)
    with (
        opened(layer) as top,
        begun(top) as doomed,
        descend.reached(top, doomed) as aside,
        descend.listed(upper, parent, own=True) as directory,
        descend.content(directory, name, own=True) as old,
    ):
        info = os.fstat(old)
        if one.after is None or identity(info) != identity(one.after):
            raise SetupError(f"{one.path} changed while it was merged", stage="commit")
        with open(os.open("new", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=aside), "wb") as file:
            file.write(merge.text)
            file.flush()
            copying.attributes(old, file.fileno())
            copying.settle(file.fileno(), info)
            os.fchmod(file.fileno(), merge.mode)
            os.utime(file.fileno())
            after = os.fstat(file.fileno())
        os.rename("new", name, src_dir_fd=aside, dst_dir_fd=directory)
        return msgspec.structs.replace(one, after=after)
