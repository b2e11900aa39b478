"""Files that programs of a user namespace have made for ids that the caller is not.

Root can do with them what it likes. For an ordinary user, a process that is root over its subordinate ids
does it. That is rare, so what it takes is loaded only then.
"""

from __future__ import annotations

import os

from stockade.linux import dirwalk

TYPE_CHECKING = False
if TYPE_CHECKING:
    from stockade.linux.id_maps import IdMaps


def maps() -> IdMaps | None:
    """Return the caller's maps if it needs such a process; None for root, or without subordinate ids."""
    if os.geteuid() == 0:
        return None
    from stockade.linux.id_maps import IdMaps

    found = IdMaps.of_caller()
    return found if found.several else None


def remove(directory: int, name: str) -> None:
    """Remove what the directory has under the name, with everything in it, also what belongs to other ids."""
    try:
        dirwalk.remove(directory, name)
    except PermissionError:
        from stockade.linux.id_maps import as_root_inside

        known = maps()
        if known is None or not as_root_inside(known, lambda: dirwalk.remove(directory, name)):
            raise


def copy_owner(known: IdMaps, like: int, path: str) -> None:
    """Give a file the owner that another one has, if the maps have it."""
    from stockade.linux.id_maps import as_root_inside

    def give() -> None:
        found = os.fstat(like)
        os.chown(path, found.st_uid, found.st_gid)

    there = os.fstat(like)
    if known.has_outside(there.st_uid, there.st_gid):
        as_root_inside(known, give)
