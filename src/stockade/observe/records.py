"""What the observer of a sandbox has written down, decoded.

The observer is a thread of init (`gate/src/observer.c`). It shares memory of a fixed size with the
supervisor: a header, then one record for each different access, with a count. What does not fit is counted.
The supervisor only reads; nothing in the sandbox waits for it. The program chose the paths in the records, so
the decoder trusts no number in them.
"""

from __future__ import annotations

import os
from functools import lru_cache

import msgspec

from stockade.gate import wire
from stockade.observe.access import Access, Action
from stockade.policy import socket_options

ACTIONS = {
    wire.OBSERVED_READ: Action.READ,
    wire.OBSERVED_WRITE: Action.WRITE,
    wire.OBSERVED_CREATE: Action.CREATE,
    wire.OBSERVED_REMOVE: Action.REMOVE,
    wire.OBSERVED_RENAME: Action.RENAME,
    wire.OBSERVED_EXECUTE: Action.EXECUTE,
    wire.OBSERVED_CONNECT: Action.CONNECT,
    wire.OBSERVED_BIND: Action.BIND,
    wire.OBSERVED_CALL: Action.CALL,
}
CHANGES = frozenset({Action.WRITE, Action.CREATE, Action.REMOVE, Action.RENAME})
MOUNTS = frozenset(
    {
        "mount", "umount2", "umount", "pivot_root", "move_mount", "open_tree", "open_tree_attr", "fsopen",
        "fsconfig", "fsmount", "fspick", "mount_setattr",
    }
)  # fmt: skip
#: What has a target that is no path.
_NAMED = frozenset({Action.CALL, Action.MOUNT, Action.CONNECT, Action.BIND})


class Observations(msgspec.Struct, frozen=True):
    """What the programs of an observed run tried."""

    #: Each access once, in the order in which they first happened.
    accesses: tuple[Access, ...] = ()
    #: Why `accesses` is incomplete, in words; empty if it is not.
    cut: str = ""

    def changed(self) -> frozenset[str]:
        """Return the paths that programs made, wrote, removed or gave a new name."""
        return frozenset(
            one.other or one.target for one in self.accesses if not one.error and one.action in CHANGES
        )


class Mark(msgspec.Struct, frozen=True):
    """A moment of an observation: how often each access had happened, by the place of its record."""

    counts: dict[int, int] = {}
    missed: int = 0
    unread: int = 0


#: Before everything.
START = Mark()


def is_compiled_python(access: Access) -> bool:
    """Whether a Python wanted to keep a module that it has compiled, and does without if it cannot."""
    return access.action in CHANGES and "__pycache__" in access.target.split("/")


def read(memory: int, since: Mark = START) -> Observations:
    """Return what was observed since then; `memory` is a descriptor of what the observer writes."""
    return decode(_content(memory), since)


def mark(memory: int) -> Mark:
    """Return this moment, for `read`."""
    content = _content(memory)
    used, missed, unread = _header(content)
    return Mark({place: fields[5] for place, fields in _records(content, used)}, missed, unread)


def decode(content: bytes, since: Mark = START) -> Observations:
    """Decode the memory that an observer wrote, from a moment on."""
    used, missed, unread = _header(content)
    programs: dict[int, str] = {}
    found: list[Access] = []
    for place, (_, number, _, error, program, count, call, first, second) in _records(content, used):
        start = place + wire.OBSERVATION.size
        target = os.fsdecode(content[start : start + first])
        if number == wire.OBSERVED_PROGRAM:
            programs[place] = target
            continue
        other = os.fsdecode(content[start + first : start + first + second])
        times = count - since.counts.get(place, 0)
        action = ACTIONS.get(number)
        if action is None or times <= 0:
            continue
        if action is Action.CALL:
            target, other = _option(other) or call_name(call), ""
            action = Action.MOUNT if target in MOUNTS else action
        found.append(
            Access(
                action=action,
                target=target if action in _NAMED else _normal(target),
                other=_normal(other),
                program=programs.get(program, ""),
                error=error,
                count=times,
            )
        )
    return Observations(tuple(found), _cut(missed - since.missed, unread - since.unread))


def _option(numbers: str) -> str:
    """Return the name of a socket option from its level and number; "" for a call without one."""
    level, _, option = numbers.partition(" ")
    if not level.isdecimal() or not option.isdecimal():
        return ""
    return socket_options.name_of(int(level), int(option))


def _cut(missed: int, unread: int) -> str:
    reasons = []
    if missed > 0:
        reasons.append(f"{missed} accesses did not fit in the memory of the observer")
    if unread > 0:
        reasons.append(f"{unread} calls came from programs whose memory the observer cannot read")
    return "; ".join(reasons)


def _content(memory: int) -> bytes:
    """Return the part of the memory that has been written."""
    used, _, _ = _header(os.pread(memory, wire.OBSERVATIONS.size, 0))
    return os.pread(memory, min(wire.OBSERVATIONS.size + used, wire.OBSERVATIONS_SIZE), 0)


def _header(content: bytes) -> tuple[int, int, int]:
    """Return the bytes of all records, and the numbers of accesses without room and of calls unread."""
    if len(content) < wire.OBSERVATIONS.size:
        return 0, 0, 0
    magic, used, missed, unread = wire.OBSERVATIONS.unpack_from(content)
    return (used, missed, unread) if magic == wire.OBSERVATIONS_MAGIC.encode() else (0, 0, 0)


def _records(content: bytes, used: int) -> list[tuple[int, tuple[int, ...]]]:
    """Return each whole record and its place; what follows one that is impossible is left out."""
    found = []
    place, end = wire.OBSERVATIONS.size, min(len(content), wire.OBSERVATIONS.size + used)
    while place + wire.OBSERVATION.size <= end:
        fields = wire.OBSERVATION.unpack_from(content, place)
        size, first, second = fields[0], fields[7], fields[8]
        if size < wire.OBSERVATION.size + first + second or size % 8 or place + size > end:
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
