"""Files that the overlay of an ordinary user cannot copy up.

The user namespace of an ordinary caller knows one user and one group, the
caller's own. The kernel copies nothing up into an overlay whose owner or group
is another: a program that writes there fails with EOVERFLOW in the middle of
its work, also where the group is one that the caller is in. A directory is
copied up as soon as something in it changes. So what matters is whatever the
caller could write in the plain directory, and who owns it and what it is in;
the workspace itself is no copy. Root's namespace knows every id.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections import deque
from collections.abc import Generator

import msgspec

from stockade.workspace import descend

#: How many entries are looked at before a start, the nearest ones: it costs the same in every tree.
NEAREST = 200
#: Each directory is reached from the top, so it costs as much as it is deep.
DEEPEST = 1000


class Foreign(msgspec.Struct, frozen=True):
    """One path below a workspace that is somebody else's."""

    path: str
    uid: int
    gid: int

    @property
    def owner(self) -> str:
        """Its owner and group by name, as far as they have one."""
        import grp
        import pwd

        user, group = str(self.uid), str(self.gid)
        with contextlib.suppress(KeyError):
            user = pwd.getpwuid(self.uid).pw_name
        with contextlib.suppress(KeyError):
            group = grp.getgrgid(self.gid).gr_name
        return f"{user}:{group}"


def foreign(root: int, uid: int, gid: int, most: int | None = None) -> Generator[Foreign, None, None]:
    """Everything that keeps this caller from writing in an overlay what it may write in the directory.

    The nearest entries come first; `most` says how many are looked at. No link is followed.
    """
    told: set[str] = set()
    pending: deque[tuple[str, tuple[Foreign, ...]]] = deque([("", ())])
    left = most
    while pending:
        path, above = pending.popleft()
        prefix = f"{path}/" if path else ""
        with contextlib.ExitStack() as stack:
            try:
                directory = stack.enter_context(descend.listed(root, path))
            except OSError:
                continue  # gone or replaced again, or the caller may not look into it, and so no program
            for entry in stack.enter_context(os.scandir(directory)):
                if left is not None:
                    if not left:
                        return
                    left -= 1
                try:
                    info = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue  # gone again
                chain = above
                if (info.st_uid, info.st_gid) != (uid, gid):
                    chain = (*above, Foreign(prefix + entry.name, info.st_uid, info.st_gid))
                if chain and _writable(directory, entry.name, info.st_mode):
                    yield from (one for one in chain if one.path not in told)
                    told.update(one.path for one in chain)
                if stat.S_ISDIR(info.st_mode) and path.count("/") < DEEPEST:
                    pending.append((prefix + entry.name, chain))


def _writable(directory: int, name: str, mode: int) -> bool:
    if stat.S_ISDIR(mode):
        return os.access(name, os.W_OK | os.X_OK, dir_fd=directory)
    return stat.S_ISREG(mode) and os.access(name, os.W_OK, dir_fd=directory)


def first(root: int, uid: int, gid: int) -> Foreign | None:
    """One of them, if there is one among the nearest entries."""
    with contextlib.closing(foreign(root, uid, gid, NEAREST)) as found:
        return next(found, None)
