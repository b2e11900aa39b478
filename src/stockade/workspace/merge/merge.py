"""Merge the changes of other workspaces of the same tree into one.

Each change claims a path. Claims that agree, or that do not affect one
another, are all applied. Two claims conflict if they differ about a path, or
if one removes the directory that the other is in. The new tree is built aside
and then exchanged with the old one.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from stockade.errors import ConflictError, PolicyError, SetupError
from stockade.linux import dirwalk
from stockade.linux.dirwalk import parents
from stockade.result import Change
from stockade.workspace import metadata, tree_copy
from stockade.workspace.commit import CommitJob
from stockade.workspace.diff.layer_walk import (
    OPAQUE,
    PathDifference,
    WalkBudget,
    same_attributes,
    same_content,
)
from stockade.workspace.overlay import change
from stockade.workspace.snapshots import open_directory, temporary_directory

if TYPE_CHECKING:
    from stockade.sandbox.workspace import Workspace

#: How many changes to merge at most: all of them are in memory.
MOST = 50_000
#: How many paths a message names.
SHOWN = 1000
#: By path: the change, and the upper directory that has it.
Claims = dict[str, tuple[PathDifference, int]]


def check_other(one: Workspace, other: Workspace) -> None:
    """Refuse to merge workspaces of different trees."""
    if one.layer == other.layer:
        raise PolicyError(f"workspace {one.id} cannot be merged with itself", hint="name another workspace")
    if one.path != other.path or one.record.inode != other.record.inode:
        raise PolicyError(
            f"workspace {other.id} belongs to {other.path}, workspace {one.id} to {one.path}",
            hint="only workspaces of the same directory can be merged",
        )


def merge(one: CommitJob, others: Sequence[CommitJob], sure: Sequence[Callable[[], None]]) -> list[Change]:
    """Merge others into one; the caller holds all their locks. `sure` raise if one changed meanwhile."""
    if sum(len(job.walk.found) for job in (one, *others)) > MOST:
        raise SetupError(
            f"the workspaces have more than {MOST:,} changes together, too many for one merge",
            stage="workspace",
            hint="commit one of them first",
        )
    budget = WalkBudget()
    claims = {found.path: (found, one.upper) for found in one.walk.found}
    new: Claims = {}
    problems: dict[str, None] = {}
    for job in others:
        # With NUL for the slash, everything below a path sorts directly after it.
        order = sorted(path.replace("/", "\0") for path in claims)
        for found in job.walk.found:
            refuse_deep(found)
            problems.update(dict.fromkeys(_conflicts_with(found, job.upper, claims, order, budget)))
        for found in job.walk.found:
            if found.path not in claims:
                claims[found.path] = new[found.path] = (found, job.upper)
    if problems:
        paths = tuple(path or "." for path in sorted(problems))
        raise ConflictError(
            f"the workspaces changed the same paths differently: {_join_paths(paths)}",
            paths=paths,
            hint="commit or restore one of them, or merge these paths by hand",
        )
    if new:
        _merge_records(one, others)
        with (
            open_directory(one.layer) as top,
            temporary_directory(top) as doomed,
            dirwalk.reached(top, doomed) as made,
        ):
            tree_copy.tree(one.upper, made, "upper")
            with dirwalk.reached(made, "upper") as target:
                made_for = ""
                for path in sorted(new, key=lambda path: path.split("/")):
                    made_for = apply_difference(*new[path], target, made_for)
            for ask in sure:
                ask()
            tree_copy.exchange(top, "upper", made, "upper")
    return sorted((change(found) for found, _ in new.values()), key=lambda found: found.path)


def _join_paths(paths: Sequence[str]) -> str:
    more = f" and {len(paths) - SHOWN} more" if len(paths) > SHOWN else ""
    return ", ".join(paths[:SHOWN]) + more


def refuse_deep(found: PathDifference) -> None:
    """Refuse a change whose contents were not examined."""
    if found.deep:
        raise SetupError(
            f"{found.path[:80]}... is nested too deeply to be merged",
            stage="workspace",
            hint="remove it in a run",
        )


def _conflicts_with(
    found: PathDifference, upper: int, claims: Claims, order: list[str], budget: WalkBudget
) -> list[str]:
    """Return the paths at which a change conflicts with the claims."""
    if found.path in claims and not _agree(found, upper, *claims[found.path], budget):
        return [found.path]
    above = itertools.chain(dirwalk.beginnings(found.directory, len(found.directory)), ("",))
    if any(path in claims and not _is_directory(claims[path][0]) for path in above if path != found.path):
        return [found.path]
    if _is_directory(found) or found.path in claims:
        return []
    prefix = found.path.replace("/", "\0") + "\0"
    below = itertools.islice(order, bisect.bisect_left(order, prefix), None)
    return [
        path.replace("\0", "/") for path in itertools.takewhile(lambda one: one.startswith(prefix), below)
    ]


def _is_directory(found: PathDifference) -> bool:
    return found.after is not None and stat.S_ISDIR(found.after.st_mode)


def _agree(
    one: PathDifference, upper: int, other: PathDifference, other_upper: int, budget: WalkBudget
) -> bool:
    """Return whether two changes of a path have the same result."""
    if one.after is None or other.after is None:
        return one.after is other.after
    if one.after.st_mode != other.after.st_mode:
        return False
    if not one.path:
        return True
    parent, name = dirwalk.split(one.path)
    with (
        dirwalk.listed(upper, parent, own=True) as here,
        dirwalk.listed(other_upper, parent, own=True) as there,
    ):
        if not same_attributes(name, here, there):
            return False
        if stat.S_ISLNK(one.after.st_mode):
            return os.readlink(name, dir_fd=here) == os.readlink(name, dir_fd=there)
        if stat.S_ISREG(one.after.st_mode):
            return same_content(name, here, there, one.after, other.after, budget, own=True) is True
    return True


def _merge_records(one: CommitJob, others: Sequence[CommitJob]) -> None:
    """Date the result to the earliest workspace, and hold back whatever any of the policies holds back."""
    records = [job.record for job in (one, *others)]
    first = min(records, key=lambda known: known.opened)
    metadata.rewrite(
        one.layer,
        msgspec.structs.replace(
            metadata.strictest(one.record, [job.record for job in others]),
            opened=first.opened,
            boot=first.boot,
            since_boot=first.since_boot,
        ),
    )
    # The first record of a path counts.
    known = (metadata.sights(job.layer) for job in (one, *others))
    metadata.remember(one.layer, itertools.chain.from_iterable(known))
    metadata.add_places(one.layer, (place for job in others for place in job.record.places))


def apply_difference(found: PathDifference, upper: int, target: int, there: str) -> str:
    """Make one change in the new tree in overlayfs's format, and return its directory.

    `there` is a directory that the new tree is known to have: the last change's, most often the same.
    """
    if not found.path:
        assert found.after is not None
        os.chmod(f"/proc/self/fd/{target}", stat.S_IMODE(found.after.st_mode))
        return there
    above = parents(found.path) if found.directory != there else [found.directory]
    for path in above[1:]:
        _directory(path, upper, target, merged=True)
    if _is_directory(found):
        merged = found.before is not None and stat.S_ISDIR(found.before.st_mode)
        _directory(found.path, upper, target, merged=merged)
        assert found.after is not None
        with dirwalk.reached(target, found.path, own=True) as made:
            os.chmod(f"/proc/self/fd/{made}", stat.S_IMODE(found.after.st_mode))
        return above[-1]
    name = dirwalk.split(found.path)[1]
    with _writable(target, above[-1]) as to:
        dirwalk.remove(to, name)
        if found.after is None:
            os.mknod(name, stat.S_IFCHR, 0, dir_fd=to)
        else:
            with dirwalk.listed(upper, above[-1], own=True) as source:
                tree_copy.copy_entry(found.path, found.after, source, to)
    return above[-1]


def _directory(path: str, upper: int, target: int, *, merged: bool) -> None:
    """Make sure that the new tree has another layer's directory; `merged` if the host has it as well."""
    parent, name = dirwalk.split(path)
    with _writable(target, parent) as to:
        there = dirwalk.look(to, name)
        if there is not None and stat.S_ISDIR(there.st_mode):
            return
        dirwalk.remove(to, name)
        os.mkdir(name, 0o700, dir_fd=to)
        with (
            dirwalk.reached(upper, parent, own=True) as above,
            dirwalk.listed(upper, path, own=True) as source,
            dirwalk.reached(to, name) as made,
        ):
            here = f"/proc/self/fd/{made}"
            tree_copy.attributes(source, here)
            if merged:
                # The other layer's removals in it follow name by name: this layer may have more in it.
                with contextlib.suppress(OSError):
                    os.removexattr(here, OPAQUE)
            tree_copy.settle(here, os.stat(name, dir_fd=above, follow_symlinks=False))


@contextlib.contextmanager
def _writable(target: int, path: str) -> Iterator[int]:
    """Make a directory of the new tree, which is not in use yet, writable to its owner meanwhile."""
    with dirwalk.reached(target, path, own=True) as directory:
        here = f"/proc/self/fd/{directory}"
        mode = stat.S_IMODE(os.fstat(directory).st_mode)
        os.chmod(here, mode | 0o700)
        try:
            yield directory
        finally:
            os.chmod(here, mode)
