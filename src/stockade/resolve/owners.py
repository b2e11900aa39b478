"""Files that the overlay of an ordinary user cannot copy up.

The user namespace of an ordinary user maps one user and one group, the user's
own. The kernel does not copy up a file with any other owner or group: a
program that writes there fails with EOVERFLOW in the middle of its work, even
if the user is in that group. A directory is copied up as soon as something in
it changes. So the search is for files that the user could write in the plain
directory, and that lie in, or are, something with another owner; the workspace
itself is not copied up. Root's namespace maps every id.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections import deque
from collections.abc import Generator

import msgspec

from stockade.linux import dirwalk

#: How many entries are checked before a start, the nearest first: so the cost is bounded in any tree.
NEAREST = 200
#: Each directory is reached from the top, which costs as much as it is deep.
DEEPEST = 1000


class ForeignPath(msgspec.Struct, frozen=True):
    """One path below a workspace that another user or group owns."""

    path: str
    uid: int
    gid: int

    @property
    def owner(self) -> str:
        """Its owner and group, by name or else by number."""
        import grp
        import pwd

        user, group = str(self.uid), str(self.gid)
        with contextlib.suppress(KeyError):
            user = pwd.getpwuid(self.uid).pw_name
        with contextlib.suppress(KeyError):
            group = grp.getgrgid(self.gid).gr_name
        return f"{user}:{group}"


def foreign(root: int, uid: int, gid: int, most: int | None = None) -> Generator[ForeignPath, None, None]:
    """Every path whose owner keeps this user from writing in an overlay what they may write in the directory.

    The nearest entries come first; `most` bounds how many are checked. No link is followed.
    """
    reported: set[str] = set()
    pending: deque[tuple[str, tuple[ForeignPath, ...]]] = deque([("", ())])
    left = most
    while pending:
        path, above = pending.popleft()
        prefix = f"{path}/" if path else ""
        with contextlib.ExitStack() as stack:
            try:
                directory = stack.enter_context(dirwalk.listed(root, path))
            except OSError:
                continue  # removed or replaced meanwhile, or closed to the user, and so to every program
            for entry in stack.enter_context(os.scandir(directory)):
                if left is not None:
                    if not left:
                        return
                    left -= 1
                try:
                    info = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue  # removed meanwhile
                chain = above
                if (info.st_uid, info.st_gid) != (uid, gid):
                    chain = (*above, ForeignPath(prefix + entry.name, info.st_uid, info.st_gid))
                if chain and _writable(directory, entry.name, info.st_mode):
                    yield from (one for one in chain if one.path not in reported)
                    reported.update(one.path for one in chain)
                if stat.S_ISDIR(info.st_mode) and path.count("/") < DEEPEST:
                    pending.append((prefix + entry.name, chain))


def _writable(directory: int, name: str, mode: int) -> bool:
    if stat.S_ISDIR(mode):
        return os.access(name, os.W_OK | os.X_OK, dir_fd=directory)
    return stat.S_ISREG(mode) and os.access(name, os.W_OK, dir_fd=directory)


def first(root: int, uid: int, gid: int) -> ForeignPath | None:
    """The first such path among the nearest entries; None if there is none."""
    with contextlib.closing(foreign(root, uid, gid, NEAREST)) as found:
        return next(found, None)
