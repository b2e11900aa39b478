"""What a private environment adds to a plan: the mounts of its own, and the system of an image."""

from __future__ import annotations

import os
import stat
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgspec

from stockade.backends.plan_parts import SystemPath, system_layout, within
from stockade.gate import operations as ops
from stockade.resolve.environment import KEPT

if TYPE_CHECKING:
    from stockade.backends.backend import PlanInputs
    from stockade.resolve.environment import Environment


class OwnMount(msgspec.Struct, frozen=True):
    """One mount of a private environment."""

    path: str
    #: The name of the same directory on the host.
    source: str
    access: str
    is_dir: bool
    clause: str
    #: Its descriptor + 1; those of an overlay's two directories follow it, unless its changes are private.
    descriptor: int
    #: Where an overlay keeps its changes.
    layer: str = ""


def environment_inputs(private: Environment, given: PlanInputs, before: int) -> dict[str, Any]:
    """Return what a private environment adds; `before` counts the descriptors that come before its own."""
    kept_aside = 0 if given.resolved.limits.disk else 2
    layers, mounts, number = iter(given.layers), list[OwnMount](), before
    for one in private.mounts:
        number += 1
        overlay = one.access == "overlay"
        mounts.append(
            OwnMount(
                path=one.path,
                source=one.source,
                access=one.access,
                is_dir=stat.S_ISDIR(os.fstat(one.fd).st_mode),
                clause=one.clause,
                descriptor=number,
                layer=next(layers, "/overlay") if overlay else "",
            )
        )
        number += kept_aside * overlay
    return {
        "mounts": tuple(mounts),
        "mounted": number - before,
        "uids": private.ids.uids,
        "gids": private.ids.gids,
        "keep": KEPT,
        "joins_network": private.network >= 0,
        # Files that a supervisor writes for a client count against no cgroup of the sandbox.
        "most_private": given.resolved.limits.memory or 0,
    }


def own_mounts(mounts: tuple[OwnMount, ...], *, noexec: bool, private: bool) -> dict[str, ops.Op]:
    """Return the operations for the mounts, by path; `private` says that changes go to private memory."""
    found: dict[str, ops.Op] = {}
    for one in mounts:
        if one.access == "overlay":
            found[one.path] = ops.Overlay(
                path=one.path,
                source=one.source,
                layer=one.layer,
                grant=one.descriptor,
                noexec=noexec,
                private=private,
                clause=one.clause,
            )
            continue
        # Not a view, as of the host's directories: programs of the same sandbox change it all the time.
        found[one.path] = ops.Bind(
            path=one.path,
            source=one.source,
            writable=one.access == "write",
            noexec=noexec,
            grant=one.descriptor,
            own=True,
            clause=one.clause,
        )
    return found | _pinned_directories(mounts, found, noexec)


def _pinned_directories(
    mounts: tuple[OwnMount, ...], found: dict[str, ops.Op], noexec: bool
) -> dict[str, ops.Op]:
    """Return mounts of the directories between a writable mount and one inside it: none can be renamed."""
    pinned: dict[str, ops.Op] = {}
    for tree in mounts:
        for path in (path for path in found if tree.access == "write" and within(path, tree.path)):
            above = os.path.dirname(path)
            while above != tree.path and within(above, tree.path) and above not in found:
                source = tree.source + above[len(tree.path) :]
                pinned[above] = ops.Bind(
                    path=above, source=source, writable=True, noexec=noexec, own=True, clause=tree.clause
                )
                above = os.path.dirname(above)
    return pinned


#: What every sandbox has of its own, whatever an image has there.
OWN_NAMES = ("dev", "proc", "sys", "tmp", "run", "etc")
OWN_ETC = ("hosts", "hostname", "resolv.conf", "mtab")


@lru_cache(maxsize=64)
def image_layout(root: str, taken: tuple[str, ...], names: tuple[str, ...]) -> tuple[SystemPath, ...]:
    """Return the top of an image's root as system paths: trees, links, and the entries of its /etc.

    `taken` are paths at which a mount takes the image's place; `names` are entries of the host's /etc that
    are shown as well. An image does not change once it is registered, so one look per process is enough.
    """
    shown = _entries(root, "", (*OWN_NAMES, *(path[1:] for path in taken)))
    etc = f"{root}/etc"
    # A link would lead to the host's /etc, or to wherever the image says.
    shown += _entries(etc, "/etc", OWN_ETC) if os.path.isdir(etc) and not os.path.islink(etc) else []
    return (*shown, *(one for one in system_layout((), names) if one.source))


def _entries(directory: str, inside: str, without: tuple[str, ...]) -> list[SystemPath]:
    shown = []
    with os.scandir(directory) as entries:
        for entry in sorted(entries, key=lambda one: one.name):
            path = f"{inside}/{entry.name}"
            if entry.name in without:
                continue
            if entry.is_symlink():
                shown.append(SystemPath(path, link=os.readlink(entry.path)))
            elif entry.is_dir(follow_symlinks=False) or entry.is_file(follow_symlinks=False):
                is_dir = entry.is_dir(follow_symlinks=False)
                shown.append(SystemPath(path, source=entry.path, is_dir=is_dir))
    return shown
