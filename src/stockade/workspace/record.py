"""What is remembered about a workspace beside its changes, and who has it now.

`workspace.json` says which tree the layer lies over and when it was opened.
`seen` says which files the host had at the changed paths when the program
ended, and which a commit put there. The lock is on the layer's directory.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import time
from collections.abc import Callable, Iterator, Sequence

import msgspec

from stockade.errors import NotFoundError, SetupError
from stockade.policy.model import PROTECT

#: By path: a number that an inode has, and its change time; the time 0 stands for any.
Seen = dict[bytes, tuple[int, int]]
#: The clock that files get their times from; Python has no name for it.
REALTIME_COARSE = 5
#: For a path that a commit removed.
ABSENT = (0, 0)


class InUseError(SetupError):
    """A sandbox or a commit has the workspace now."""


class Hold(msgspec.Struct, frozen=True):
    """Nobody else has a workspace meanwhile."""

    living: bool = False
    """Whether a sandbox lives in it, which is held still."""
    sure: Callable[[], None] = lambda: None
    """Raises if somebody inside was awake all the same: asked before what was copied counts."""


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One workspace. Records of the first version have only `lower`."""

    lower: str
    path: bytes = b""
    opened: int = 0
    boot: str = ""
    since_boot: int = 0
    inode: int = 0
    protect: tuple[bytes, ...] | None = None

    @property
    def tree(self) -> str:
        """The path of the host's tree."""
        return os.fsdecode(self.path) if self.path else self.lower


def write(layer: str, lower: str, inode: int, protect: Sequence[str]) -> Record:
    """Record a workspace that is opened now."""
    # The time is the kernel's own, from a file: it gives a file that was looked at since its last change
    # a time later than all given before (Linux 6.13), and no change from now on gets an earlier one.
    file = os.open(f"{layer}/workspace.json", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.fstat(file)
        os.fchmod(file, 0o600)
        opened = os.fstat(file).st_ctime_ns
        if opened > time.time_ns():  # the state is on a file system with a clock of its own
            opened = time.clock_gettime_ns(REALTIME_COARSE)
        record = Record(
            lower=os.fsencode(lower).decode("utf-8", "replace"),
            path=os.fsencode(lower),
            opened=opened,
            boot=_boot(),
            since_boot=time.clock_gettime_ns(time.CLOCK_BOOTTIME),
            inode=inode,
            protect=tuple(os.fsencode(path) for path in protect),
        )
        # So short that it is written whole or, on a full disk, not at all, which is an error.
        os.write(file, msgspec.json.encode(record))
    finally:
        os.close(file)
    return record


def read(layer: str) -> Record:
    """The record of a layer; one without a time is as old as its file."""
    path = f"{layer}/workspace.json"
    try:
        with open(path, "rb") as file:
            record = msgspec.json.decode(file.read(), type=Record)
            written = os.fstat(file.fileno()).st_mtime_ns
    except (OSError, msgspec.MsgspecError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is damaged"
        raise SetupError(
            f"the workspace's record {path} cannot be read: {why}",
            stage="workspace",
            hint=f"what was changed is in {layer}/upper",
        ) from None
    return record if record.opened else msgspec.structs.replace(record, opened=written)


def rewrite(layer: str, record: Record) -> None:
    """Replace the record of a layer: it is there as a whole whatever happens."""
    part = f"{layer}/workspace.json.new"
    with open(part, "wb", opener=_private) as file:
        file.write(msgspec.json.encode(record))
    os.replace(part, f"{layer}/workspace.json")


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def protect_too(layer: str, paths: Sequence[str]) -> None:
    """Let a commit hold more back than it did: what one of several runs was not to change is held back."""
    record = read(layer)
    had = record.protect if record.protect is not None else tuple(map(os.fsencode, PROTECT))
    if more := [path for path in map(os.fsencode, paths) if path not in had]:
        rewrite(layer, msgspec.structs.replace(record, protect=(*had, *more)))


def threshold(record: Record) -> int:
    """From this change time on a file of the host may have changed since the workspace was opened.

    A clock that was set back has since given times that look earlier, so as much earlier counts.
    """
    now = time.time_ns()
    if now < record.opened:
        return 0
    if record.boot != _boot():
        return record.opened
    passed = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - record.since_boot
    stepped = now - record.opened - passed
    # Both clocks are read one after the other, so less than this is no step.
    return record.opened + stepped if stepped < -1_000_000_000 else record.opened


@functools.cache
def _boot() -> str:
    with open("/proc/sys/kernel/random/boot_id", encoding="utf-8") as file:
        return file.read().strip()


def seen(layer: str) -> Seen:
    """What is known of the host's files; nothing if the record is not there."""
    try:
        with open(f"{layer}/seen", "rb") as file:
            return msgspec.msgpack.decode(file.read(), type=Seen)
    except (FileNotFoundError, msgspec.MsgspecError):
        return {}  # then the times alone decide


def remember(layer: str, more: Seen) -> None:
    """Add to what is known of the host's files."""
    part = f"{layer}/seen.new"
    with open(part, "wb") as file:
        file.write(msgspec.msgpack.encode(seen(layer) | more))
    os.replace(part, f"{layer}/seen")


def lose(layer: str, paths: list[tuple[str, str]]) -> None:
    """Write down which changes could not be kept in a layer, and why."""
    with open(f"{layer}/lost", "wb", opener=_private) as file:
        file.write(msgspec.msgpack.encode([(os.fsencode(path), why) for path, why in paths]))


def lost(layer: str) -> list[tuple[str, str]]:
    """The changes that could not be kept in a layer, and why."""
    try:
        with open(f"{layer}/lost", "rb") as file:
            known = msgspec.msgpack.decode(file.read(), type=list[tuple[bytes, str]])
    except (FileNotFoundError, msgspec.MsgspecError):
        return []
    return [(os.fsdecode(path), why) for path, why in known]


def lock(layer: str, id: str) -> int:
    """Take the workspace for this process alone; closing the descriptor gives it back."""
    try:
        directory = os.open(layer, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise NotFoundError(f"there is no workspace {id}") from None
    try:
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.fstat(directory).st_nlink:
            raise NotFoundError(f"there is no workspace {id} any more")
    except BaseException as error:
        holder = _holder(directory)
        os.close(directory)
        if isinstance(error, BlockingIOError):
            raise InUseError(
                f"workspace {id} is in use by {holder}",
                stage="workspace",
                hint="wait until it has ended",
            ) from None
        raise
    return directory


@contextlib.contextmanager
def held(layer: str, id: str) -> Iterator[Hold]:
    """The workspace is this process's alone meanwhile; no sandbox lives in it."""
    descriptor = lock(layer, id)
    try:
        yield Hold()
    finally:
        os.close(descriptor)


def _holder(directory: int) -> str:
    """Who has the lock on an open directory, in words."""
    number = os.fstat(directory).st_ino
    with contextlib.suppress(OSError, ValueError), open("/proc/locks", encoding="utf-8") as table:
        for line in table:
            words = line.split()
            if words[1] == "FLOCK" and words[5].rpartition(":")[2] == str(number):
                pid = int(words[4])
                with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
                    return f"process {pid} ({file.read().strip()})"
    return "another process"
