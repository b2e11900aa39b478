"""What the observer of a sandbox has written down, decoded.

The observer is a thread of init (`gate/src/observer.c`). It shares a piece of memory with the supervisor, whose
size never changes: a header, then one record for each different access, with a count. What does not fit is
counted. The supervisor only reads; nothing in the sandbox waits for it. The program chose the paths in the
records, so the decoder trusts no number in them.
"""

from __future__ import annotations

import os
import struct
from functools import lru_cache

import msgspec

from stockade.observe.access import Access, Action

#: struct observations of `gate/src/wire.h`: magic, bytes of records, accesses without room, calls unread.
HEADER = struct.Struct("=8sQQQ")
#: struct observation: size, action, unused, error, program, count, call, lengths of the target and of the other.
RECORD = struct.Struct("=IHHiIQIHH")
MAGIC = b"STKOBSV1"
#: The size of the memory.
SIZE = 16 << 20
#: The most bytes of a target: the kernel's longest path behind the longest name of a directory.
LONGEST = 2 * 4096

PROGRAM = 0
ACTIONS = {
    1: Action.READ,
    2: Action.WRITE,
    3: Action.CREATE,
    4: Action.REMOVE,
    5: Action.RENAME,
    6: Action.EXECUTE,
    7: Action.CONNECT,
    8: Action.BIND,
    9: Action.CALL,
}
MOUNTS = frozenset(
    "mount umount2 umount pivot_root move_mount open_tree open_tree_attr fsopen fsconfig fsmount fspick "
    "mount_setattr".split()
)


class Observed(msgspec.Struct, frozen=True):
    """What the programs of an observed run tried."""

    #: Each access once, in the order in which they first happened.
    accesses: tuple[Access, ...] = ()
    #: Why `accesses` is incomplete, in words; empty if it is not.
    cut: str = ""


class Mark(msgspec.Struct, frozen=True):
    """A moment of an observation: how often each access had happened, by the place of its record."""

    counts: dict[int, int] = {}
    missed: int = 0
    unread: int = 0


def read(memory: int, since: Mark = Mark()) -> Observed:
    """Return what was observed since then; `memory` is a descriptor of what the observer writes."""
    return decode(os.pread(memory, SIZE, 0), since)


def mark(memory: int) -> Mark:
    """Return this moment, for `read`."""
    content = os.pread(memory, SIZE, 0)
    used, missed, unread = _header(content)
    counts = {place: fields[5] for place, fields in _records(content, used)}
    return Mark(counts, missed, unread)


def decode(content: bytes, since: Mark = Mark()) -> Observed:
    """Decode the memory that an observer wrote, from a moment on."""
    used, missed, unread = _header(content)
    programs: dict[int, str] = {}
    found: list[Access] = []
    for place, (_, action, _, error, program, count, call, first, second) in _records(content, used):
        start = place + RECORD.size
        target = os.fsdecode(content[start : start + first])
        if action == PROGRAM:
            programs[place] = target
            continue
        other = os.fsdecode(content[start + first : start + first + second])
        count -= since.counts.get(place, 0)
        kind = ACTIONS.get(action)
        if kind is None or count <= 0:
            continue
        if kind is Action.CALL:
            target = call_name(call)
            kind = Action.MOUNT if target in MOUNTS else kind
        found.append(
            Access(
                action=kind,
                target=target if kind in _UNPATHED else _normal(target),
                other=_normal(other) if other else "",
                program=programs.get(program, ""),
                error=error,
                count=count,
            )
        )
    return Observed(tuple(found), _cut(missed - since.missed, unread - since.unread))


_UNPATHED = frozenset({Action.CALL, Action.MOUNT, Action.CONNECT, Action.BIND})


def _cut(missed: int, unread: int) -> str:
    reasons = []
    if missed > 0:
        reasons.append(f"{missed} accesses did not fit in the memory of the observer")
    if unread > 0:
        reasons.append(f"{unread} calls came from programs whose memory the observer cannot read")
    return "; ".join(reasons)


def _header(content: bytes) -> tuple[int, int, int]:
    """Return the size of the records in bytes, and the numbers of accesses without room and of calls unread."""
    if len(content) < HEADER.size:
        return 0, 0, 0
    magic, used, missed, unread = HEADER.unpack_from(content)
    return (used, missed, unread) if magic == MAGIC else (0, 0, 0)


def _records(content: bytes, used: int) -> list[tuple[int, tuple[int, ...]]]:
    """Return each whole record and its place; what follows one that is impossible is left out."""
    found = []
    place, end = HEADER.size, min(len(content), HEADER.size + used)
    while place + RECORD.size <= end:
        fields = RECORD.unpack_from(content, place)
        size, first, second = fields[0], fields[7], fields[8]
        if size < RECORD.size + first + second or size % 8 or place + size > end:
            break
        found.append((place, fields))
        place += size
    return found


def _normal(path: str) -> str:
    """Return an absolute path without `.`, `..` and doubled slashes, by its text alone."""
    return "/" + os.path.normpath(path).lstrip("/") if path.startswith("/") else path


@lru_cache(maxsize=512)
def call_name(number: int) -> str:
    """Return the name of a system call of this machine."""
    import pyseccomp

    try:
        return os.fsdecode(pyseccomp.resolve_syscall(pyseccomp.Arch.NATIVE, number))
    except (ValueError, OSError):
        return f"call {number}"
