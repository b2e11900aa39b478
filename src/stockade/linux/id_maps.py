"""Which users and groups a user namespace of the caller's can have, and work as root of one.

Root gives its namespaces a range that no user of the machine has. Other users have subordinate ids, in
/etc/subuid and /etc/subgid, which newuidmap and newgidmap map for them; without those, a namespace has the
caller alone.
"""

from __future__ import annotations

import ctypes
import os
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from stockade.linux import subordinate_ids

if TYPE_CHECKING:
    from stockade.linux.user import Caller

#: A row of an id map: the first id inside, the first id outside, and how many.
IdRow = tuple[int, int, int]

#: Where root's range begins outside: above the ids that adduser, systemd and containers use.
BASE = 0x70000000
#: How many ids a namespace has at most, 0 included.
COUNT = 65536
_NEWUSER = 0x10000000


class IdMaps(msgspec.Struct, frozen=True):
    """The users and groups inside, and those that they are outside."""

    uids: tuple[IdRow, ...]
    gids: tuple[IdRow, ...]
    #: Why only the caller is mapped; empty if more are.
    reason: str = ""

    @classmethod
    def of_caller(cls, caller: Caller | None = None) -> IdMaps:
        """Return the maps that the caller may have: 0 is the caller, the others are a range or none."""
        uid, gid = (os.geteuid(), os.getegid()) if caller is None else (caller.uid, caller.gid)
        if uid == 0:
            reason = _unmapped_range()
            uids = gids = (BASE + 1, COUNT - 1)
        else:
            reason, uids, gids = _subordinate(uid)
        if reason:
            return cls(((0, uid, 1),), ((0, gid, 1),), reason)
        return cls(((0, uid, 1), (1, *uids)), ((0, gid, 1), (1, *gids)))

    def has_uid(self, uid: int) -> bool:
        """Whether a user inside exists outside."""
        return self.uid_outside(uid) is not None

    def has_gid(self, gid: int) -> bool:
        """Whether a group inside exists outside."""
        return self.gid_outside(gid) is not None

    def uid_outside(self, uid: int) -> int | None:
        """Return what a user inside is outside; None if there is no such user."""
        return _outside(self.uids, uid)

    def gid_outside(self, gid: int) -> int | None:
        """Return what a group inside is outside; None if there is no such group."""
        return _outside(self.gids, gid)

    def has_outside(self, uid: int, gid: int) -> bool:
        """Whether a user and a group outside both have a number inside."""
        pairs = ((self.uids, uid), (self.gids, gid))
        return all(any(out <= id < out + count for _, out, count in rows) for rows, id in pairs)

    @property
    def several(self) -> bool:
        """Whether programs inside can be users other than root."""
        return len(self.uids) > 1

    def describe(self) -> str:
        """Say which ids are mapped."""
        last = max(inside + count - 1 for inside, _, count in self.uids)
        return "0 is the caller" + (f", 1 to {last} are a range of their own" if last else ", no other id")


def _outside(rows: tuple[IdRow, ...], id: int) -> int | None:
    return next((out + id - first for first, out, count in rows if first <= id < first + count), None)


def _unmapped_range() -> str:
    """Say why root's range cannot be used: in a container, root may lack those ids."""
    for kind in ("uid", "gid"):
        with open(f"/proc/self/{kind}_map", encoding="ascii") as file:
            rows = [tuple(map(int, line.split())) for line in file]
        if not any(first <= BASE + 1 and first + count >= BASE + COUNT for first, _, count in rows):
            return f"this user namespace has no {kind}s from {BASE + 1} to {BASE + COUNT - 1}"
    return ""


def _subordinate(uid: int) -> tuple[str, tuple[int, int], tuple[int, int]]:
    """Return the caller's first ranges of subordinate users and groups, and why there are none."""
    if reason := subordinate_ids.why_none(uid):
        return reason, (0, 0), (0, 0)
    users, groups = (
        subordinate_ids.ranges(path, uid)[0] for path in (subordinate_ids.USERS, subordinate_ids.GROUPS)
    )
    return "", (users[0], min(users[1], COUNT - 1)), (groups[0], min(groups[1], COUNT - 1))


def as_root_inside(maps: IdMaps, work: Callable[[], object]) -> bool:
    """Do some work in a child process, as root of a user namespace with these ids; return whether it worked.

    The child has no other thread and no event loop: the work must only make system calls.
    """
    ready, begun = os.pipe()
    waiting, go = os.pipe()
    child = -1
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside other threads
            child = os.fork()
        if child == 0:
            _work_in_child(begun, (ready, go), waiting, work)
        os.close(begun)
        begun = -1
        if os.read(ready, 1):
            _map("newuidmap", child, maps.uids)
            _map("newgidmap", child, maps.gids)
            os.write(go, b"1")
    finally:
        # Without the word the child ends without having done anything.
        for descriptor in (ready, begun, waiting, go):
            if descriptor >= 0:
                os.close(descriptor)
        status = os.waitpid(child, 0)[1] if child > 0 else 1
    return os.waitstatus_to_exitcode(status) == 0


def _work_in_child(begun: int, theirs: tuple[int, int], waiting: int, work: Callable[[], object]) -> None:
    status = 1
    try:
        for descriptor in theirs:
            os.close(descriptor)
        if ctypes.CDLL(None, use_errno=True).unshare(_NEWUSER) == 0:
            os.write(begun, b"1")
            os.close(begun)
            if os.read(waiting, 1):
                work()
                status = 0
    finally:
        os._exit(status)


def _map(program: str, child: int, rows: tuple[IdRow, ...]) -> None:
    import subprocess

    numbers = [str(number) for row in rows for number in row]
    subprocess.run(
        [program, str(child), *numbers], check=False, stdin=subprocess.DEVNULL, capture_output=True
    )
