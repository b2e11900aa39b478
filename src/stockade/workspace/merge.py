"""Taking the changes of other workspaces of the same tree over into one.

Each change is a claim to a path. Claims that agree, or that have nothing to
do with one another, are all met; two that differ about a path, or where one
takes away the directory that the other is in, are a conflict. The new tree
is made aside and then changes places with the old one.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from stockade.errors import ConflictError, PolicyError, SetupError
from stockade.policy.model import PROTECT
from stockade.workspace import copying, descend, record
from stockade.workspace.commit import Job
from stockade.workspace.descend import parents
from stockade.workspace.layers import Change, change
from stockade.workspace.snapshots import begun, opened
from stockade.workspace.walk import OPAQUE, Found, same_attributes, same_content

if TYPE_CHECKING:
    from stockade.workspace.workspace import Workspace

#: By path: the change, and the upper directory that has it.
Claims = dict[str, tuple[Found, int]]


def check_other(one: Workspace, other: Workspace) -> None:
    """Refuse to merge what is not of the same tree."""
    if one.layer == other.layer:
        raise PolicyError(f"workspace {one.id} cannot be merged with itself", hint="name another")
    if one.path != other.path or one.record.inode != other.record.inode:
        raise PolicyError(
            f"workspace {other.id} is of {other.path}, workspace {one.id} of {one.path}",
            hint="only workspaces of the same directory can be merged",
        )


def merge(one: Job, others: Sequence[Job], sure: Sequence[Callable[[], None]]) -> list[Change]:
    """Merge others into one; the caller holds all of their locks. `sure` raise if one of them moved."""
    claims = {found.path: (found, one.upper) for found in one.walk.found}
    new: Claims = {}
    problems: dict[str, None] = {}
    for job in others:
        for found in job.walk.found:
            _refuse_deep(found)
            problems.update(dict.fromkeys(_against(found, job.upper, claims)))
        for found in job.walk.found:
            if found.path not in claims:
                claims[found.path] = new[found.path] = (found, job.upper)
    if problems:
        paths = tuple(path or "." for path in sorted(problems))
        raise ConflictError(
            f"the workspaces changed the same paths to different results: {', '.join(paths)}",
            paths=paths,
            hint="commit or restore one of them, or merge what is beside it by hand",
        )
    if new:
        _remember(one, others)
        with opened(one.layer) as top, begun(top) as doomed, descend.reached(top, doomed) as made:
            copying.tree(one.upper, made, "upper")
            with descend.reached(made, "upper") as target:
                for path in sorted(new, key=lambda path: path.split("/")):
                    _apply(*new[path], target)
            for ask in sure:
                ask()
            copying.exchange(top, "upper", made, "upper")
    return sorted((change(found) for found, _ in new.values()), key=lambda found: found.path)


def _refuse_deep(found: Found) -> None:
    if found.deep:
        raise SetupError(
            f"{found.path[:80]}... has directories too deep in one another to be merged",
            stage="workspace",
            hint="remove them in a run",
        )


def _against(found: Found, upper: int, claims: Claims) -> list[str]:
    """The paths at which a change and the claims cannot both be met."""
    if found.path in claims and not _agree(found, upper, *claims[found.path]):
        return [found.path]
    above = (claims[path][0] for path in parents(found.path) if path in claims)
    if any(not _is_directory(one) for one in above):
        return [found.path]
    if _is_directory(found) or found.path in claims:
        return []
    return [path for path in claims if path.startswith(f"{found.path}/")]


def _is_directory(found: Found) -> bool:
    return found.after is not None and stat.S_ISDIR(found.after.st_mode)


def _agree(one: Found, upper: int, other: Found, other_upper: int) -> bool:
    """Whether two changes of a path have the same result."""
    if one.after is None or other.after is None:
        return one.after is other.after
    if one.after.st_mode != other.after.st_mode:
        return False
    if not one.path:
        return True
    parent, name = descend.split(one.path)
    with (
        descend.listed(upper, parent, own=True) as here,
        descend.listed(other_upper, parent, own=True) as there,
    ):
        if not same_attributes(name, here, there):
            return False
        if stat.S_ISLNK(one.after.st_mode):
            return os.readlink(name, dir_fd=here) == os.readlink(name, dir_fd=there)
        if stat.S_ISREG(one.after.st_mode):
            return same_content(name, here, there, one.after, other.after, own=True)
    return True


def _remember(one: Job, others: Sequence[Job]) -> None:
    """Base what is merged on what the earliest of them saw, and hold back what any of them was to."""
    records = [job.record for job in (one, *others)]
    first = min(records, key=lambda known: known.opened)
    protect = dict.fromkeys(
        path
        for known in records
        for path in (tuple(map(os.fsencode, PROTECT)) if known.protect is None else known.protect)
    )
    record.rewrite(
        one.layer,
        msgspec.structs.replace(
            one.record,
            opened=first.opened,
            boot=first.boot,
            since_boot=first.since_boot,
            protect=tuple(protect),
        ),
    )
    seen: record.Seen = {}
    for job in reversed((one, *others)):
        seen |= job.seen
    record.remember(one.layer, seen)


def _apply(found: Found, upper: int, target: int) -> None:
    """Make one change in the new tree, as the kernel's overlay writes it."""
    if not found.path:
        assert found.after is not None
        os.chmod(f"/proc/self/fd/{target}", stat.S_IMODE(found.after.st_mode))
        return
    above = parents(found.path)
    for path in above[1:]:
        _directory(path, upper, target, merged=True)
    if _is_directory(found):
        merged = found.before is not None and stat.S_ISDIR(found.before.st_mode)
        _directory(found.path, upper, target, merged=merged)
        assert found.after is not None
        with descend.reached(target, found.path, own=True) as made:
            os.chmod(f"/proc/self/fd/{made}", stat.S_IMODE(found.after.st_mode))
        return
    name = descend.split(found.path)[1]
    with _writable(target, above[-1]) as to:
        descend.remove(to, name)
        if found.after is None:
            os.mknod(name, stat.S_IFCHR, 0, dir_fd=to)
        else:
            with descend.listed(upper, above[-1], own=True) as source:
                copying.entry(found.path, found.after, source, to)


def _directory(path: str, upper: int, target: int, *, merged: bool) -> None:
    """See to it that the new tree has a directory that another layer has; `merged` with one of the host's."""
    parent, name = descend.split(path)
    with _writable(target, parent) as to:
        there = descend.look(to, name)
        if there is not None and stat.S_ISDIR(there.st_mode):
            return
        descend.remove(to, name)
        os.mkdir(name, 0o700, dir_fd=to)
        with (
            descend.reached(upper, parent, own=True) as above,
            descend.listed(upper, path, own=True) as source,
            descend.reached(to, name) as made,
        ):
            here = f"/proc/self/fd/{made}"
            copying.attributes(source, here)
            if merged:
                # What the other one removed from it is removed name by name: this one may have more in it.
                with contextlib.suppress(OSError):
                    os.removexattr(here, OPAQUE)
            copying.settle(here, os.stat(name, dir_fd=above, follow_symlinks=False))


@contextlib.contextmanager
def _writable(target: int, path: str) -> Iterator[int]:
    """A directory of the new tree, which nobody uses yet, open to its owner meanwhile."""
    with descend.reached(target, path, own=True) as directory:
        here = f"/proc/self/fd/{directory}"
        mode = stat.S_IMODE(os.fstat(directory).st_mode)
        os.chmod(here, mode | 0o700)
        try:
            yield directory
        finally:
            os.chmod(here, mode)
