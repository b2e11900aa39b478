"""Repositories that are held back as a whole.

If a commit applied git's index without a file that it names, the user's next git commit would record that
file as deleted, or a checkout would bring it back. So a commit holds back both: the file and all data of the
repository. The same goes for an index that no longer names a file which the policy hides: `git commit -a`
inside takes a hidden file for a deleted one, and the branch would lose it. It also goes for a repository that
the program made: the user's settings that count from its top, such as a relative `core.hooksPath`, would run
files beside it.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable, Sequence

from stockade.linux import dirwalk
from stockade.workspace.diff.layer_walk import PathDifference
from stockade.workspace.holdback.holdback import covers, may_split
from stockade.workspace.holdback.protected_names import ProtectedNames
from stockade.workspace.metadata import Rules
from stockade.workspace.version_control import git_index

#: By version control system: the beginning of the name of its list of tracked files.
LISTS = {".git": "index", ".hg": "dirstate", ".sl": "treestate", ".jj": "tree_state"}
#: Beyond these totals, every list counts as naming every file.
LARGEST_IN_ALL = 64 << 20
MOST_LISTS = 1000
#: Beyond this number, held-back files are not looked up one by one.
MOST = 1000


def repository(path: str) -> str:
    """Return the version control directory that a path is or lies in; "" if there is none."""
    names = path.split("/")
    place = next((place for place, name in enumerate(names) if name in LISTS), None)
    return "" if place is None else "/".join(names[: place + 1])


def repositories_to_hold(
    root: int, upper: int, found: Sequence[PathDifference], held: Sequence[Sequence[str]], rules: Rules
) -> dict[str, str]:
    """Return the repositories to hold back as a whole, each with the reason in words.

    `held` has the verdict on each change, in the same order.
    """
    records, crowded = _records(found)
    if not records:
        return {}
    protect = ProtectedNames(rules.protect)
    paths = (one.path for one, why in zip(found, held, strict=True) if why)
    inside = _inside(paths, {dirwalk.split(record)[0] for record in records})
    kept: dict[str, str] = {}
    room = _ReadBudget()
    made = set() if rules.allow_exec_config else {one.path for one in found if _is_new_repository(one)}
    for record, lists in records.items():
        tree = dirwalk.split(record)[0]
        missing = [path for path in inside.get(tree, ()) if not covers(record, path)]
        why = _why_held(record, missing[0]) if missing and record in crowded else ""
        if record in made:
            why = f"{record} is a new repository, and your settings may run files in {tree or 'it'}"
        for one in lists:
            why = why or _differs(root, upper, one, tree, missing, protect, room)
        if why and not may_split(record, rules):
            kept[record] = why
    return kept


def _records(found: Iterable[PathDifference]) -> tuple[dict[str, list[PathDifference]], set[str]]:
    """Return the changed lists of each changed repository, and the repositories with too many lists."""
    records: dict[str, list[PathDifference]] = {}
    crowded: set[str] = set()
    left = MOST_LISTS
    for one in found:
        if not (record := repository(one.path)):
            continue
        lists = records.setdefault(record, [])
        if record not in crowded and _is_list(one, dirwalk.split(record)[1]):
            left -= 1
            if left >= 0:
                lists.append(one)
            else:
                crowded.add(record)
    return records, crowded


def _is_new_repository(one: PathDifference) -> bool:
    """Return whether a change is a repository's directory that the host does not have."""
    if one.name not in LISTS or one.after is None or not stat.S_ISDIR(one.after.st_mode):
        return False
    return one.before is None or not stat.S_ISDIR(one.before.st_mode)


class _ReadBudget:
    """How many bytes may still be read of all lists together."""

    def __init__(self) -> None:
        self.left = LARGEST_IN_ALL


def _inside(paths: Iterable[str], trees: set[str]) -> dict[str, list[str]]:
    """Return for each tree the paths in it at any depth, up to one more than are looked up."""
    found: dict[str, list[str]] = {}
    last, inside = None, list[str]()
    for path in paths:
        if (directory := dirwalk.split(path)[0]) != last:
            last, inside = directory, sorted(trees.intersection((*dirwalk.parents(directory), directory)))
        for tree in inside:
            if len(here := found.setdefault(tree, [])) <= MOST:
                here.append(path)
    return found


def _is_list(one: PathDifference, kind: str) -> bool:
    # Sapling has a directory of them.
    names = one.path.split("/")[-2:]
    named = any(name.startswith(LISTS[kind]) for name in names)
    return named and one.after is not None and stat.S_ISREG(one.after.st_mode)


def _differs(
    root: int,
    upper: int,
    one: PathDifference,
    tree: str,
    missing: Sequence[str],
    protect: ProtectedNames,
    room: _ReadBudget,
) -> str:
    """Return why a changed list must stay with the held-back files, or "".

    Either it names a `missing` file with other content than the host's list does, or it no longer names one.
    """
    record = repository(one.path)
    after = _content(upper, one.path, room, own=True)
    if not missing and (after is None or not after.startswith(b"DIRC")):
        return ""
    if after is None or len(missing) > MOST:
        return _why_held(record, missing[0])
    relative = {path: os.fsencode(path[len(tree) :].lstrip("/")) for path in missing}
    if not after.startswith(b"DIRC"):
        return next((_why_held(record, path) for path, name in relative.items() if name in after), "")
    # The list of a submodule or of another worktree counts from the top of that.
    nested = one.path.count("/") > tree.count("/") + (2 if tree else 1)
    wanted: dict[bytes, str] = {}
    for path, name in relative.items():
        parts = name.split(b"/")
        wanted |= {b"/".join(parts[start:]): path for start in range(len(parts) if nested else 1)}
    now = _digests(after)
    if now is None:
        return _why_held(record, missing[0]) if missing else ""
    then = _digests(_content(root, one.path, room, own=False) or b"") or {}
    for name, path in wanted.items():
        if name in now and then.get(name) != now[name]:
            return _why_held(record, path)
    if nested:
        return ""
    for name in then.keys() - now.keys():
        path = "/".join(filter(None, (tree, os.fsdecode(name))))
        if name in wanted or protect.touched(path, goes=False):
            return f"{record} no longer names {path}, which the policy hides or protects"
    return ""


def _why_held(record: str, path: str) -> str:
    return f"{record} names {path}, which is held back: the repository is held back with it"


def _digests(index: bytes) -> dict[bytes, bytes] | None:
    """Return the digest for each name in git's index; None if the index cannot be parsed."""
    found: dict[bytes, bytes] = {}
    try:
        for one in git_index.entries(index):  # during a merge a name occurs more than once
            found[one.name] = found.get(one.name, b"") + one.digest
    except git_index.NotReadError:
        return None
    return found


def _content(tree: int, path: str, room: _ReadBudget, *, own: bool) -> bytes | None:
    """Return a list of the layer's or of the host's; None if it is too large or unreadable."""
    parent, name = dirwalk.split(path)
    data = bytearray()
    with (
        contextlib.suppress(OSError),
        dirwalk.listed(tree, parent, own=own) as directory,
        dirwalk.content(directory, name, own=own) as file,
    ):
        while piece := os.read(file, 1 << 20):
            data += piece
            room.left -= len(piece)
            if len(data) > git_index.LARGEST or room.left < 0:
                return None  # it counts as naming every file
        return bytes(data)
    return None
