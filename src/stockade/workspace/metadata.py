"""The record of a workspace beside its changes, and the lock on it.

`workspace.json` holds the tree below the layer and the time of opening.
`seen` holds the host's files at the changed paths when the program ended, and
those that a commit wrote. The lock is on the layer's directory.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from stockade.errors import NotFoundError, SetupError
from stockade.linux.boot import boot_id
from stockade.policy.model import PROTECT

#: The number of an inode and its change time; the time 0 stands for any.
Sight = tuple[int, int]
#: The clock of file times; Python has no name for it.
REALTIME_COARSE = 5
#: The file that identifies an epoch.
EPOCH = "epoch"
#: For a path that a commit removed.
ABSENT = (0, 0)


class InUseError(SetupError):
    """A sandbox or a commit is using the workspace."""


class WorkspaceLock(msgspec.Struct, frozen=True):
    """The exclusive use of a workspace."""

    living: bool = False
    """Whether a sandbox lives in it, which is frozen meanwhile."""
    sure: Callable[[], None] = lambda: None
    """Raises an error if a process inside ran all the same: call it before the copies count."""


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """What one commit may include: the policy's patterns, and what the user agreed to."""

    protect: Sequence[str] = ()
    hold_back: Sequence[str] = ()
    #: Patterns of the policy's `allow_commit` and of the user's command.
    allow: Sequence[str] = ()
    allow_exec_config: bool = False


class WorkspaceRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One workspace. Records of the first version have only `lower`."""

    lower: str
    path: bytes = b""
    opened: int = 0
    boot: str = ""
    since_boot: int = 0
    inode: int = 0
    #: The paths in the tree that grants of its runs' policies name, and the clause of each.
    places: tuple[tuple[bytes, bytes], ...] = ()
    protect: tuple[bytes, ...] | None = None
    hold_back: tuple[bytes, ...] = ()
    allow_commit: tuple[bytes, ...] = ()
    #: Whether the tree is a sandbox's own, where no tool of the host runs or obeys anything.
    own: bool = False

    @property
    def tree(self) -> str:
        """The path of the host's tree."""
        return os.fsdecode(self.path) if self.path else self.lower

    @property
    def protected(self) -> tuple[bytes, ...]:
        """The names that the policy protects; records of the first version lack them."""
        return tuple(map(os.fsencode, PROTECT)) if self.protect is None else self.protect

    @property
    def rules(self) -> Rules:
        """What a commit may include by the policy."""
        return Rules(
            protect=tuple(map(os.fsdecode, self.protected)),
            hold_back=tuple(map(os.fsdecode, self.hold_back)),
            allow=tuple(map(os.fsdecode, self.allow_commit)),
            allow_exec_config=self.own,
        )


def write(layer: str, lower: str, inode: int, rules: Rules) -> WorkspaceRecord:
    """Record a workspace that is opened now, and what a commit of it may include."""
    # The kernel's own time, from a file: a stat between two changes makes it give the second one a time later
    # than all before (Linux 6.13), and no change from now on gets an earlier one.
    file = os.open(f"{layer}/workspace.json", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.fstat(file)
        os.fchmod(file, 0o600)
        opened = os.fstat(file).st_ctime_ns
        if opened > time.time_ns():  # the state lies on a file system with a clock of its own
            opened = time.clock_gettime_ns(REALTIME_COARSE)
        record = WorkspaceRecord(
            lower=os.fsencode(lower).decode("utf-8", "replace"),
            path=os.fsencode(lower),
            opened=opened,
            boot=boot_id(),
            since_boot=time.clock_gettime_ns(time.CLOCK_BOOTTIME),
            inode=inode,
            protect=tuple(map(os.fsencode, rules.protect)),
            hold_back=tuple(map(os.fsencode, rules.hold_back)),
            allow_commit=tuple(map(os.fsencode, rules.allow)),
            own=rules.allow_exec_config,
        )
        # It is so short that it is written whole or, on a full disk, not at all, which is an error.
        os.write(file, msgspec.json.encode(record))
    finally:
        os.close(file)
    return record


def read(layer: str) -> WorkspaceRecord:
    """Return the record of a layer; one without a time is as old as its file."""
    path = f"{layer}/workspace.json"
    try:
        with open(path, "rb") as file:
            record = msgspec.json.decode(file.read(), type=WorkspaceRecord)
            written = os.fstat(file.fileno()).st_mtime_ns
    except (OSError, msgspec.MsgspecError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is damaged"
        raise SetupError(
            f"cannot read the workspace's record {path}: {why}",
            stage="workspace",
            hint=f"the changed files are in {layer}/upper",
        ) from None
    return record if record.opened else msgspec.structs.replace(record, opened=written)


def rewrite(layer: str, record: WorkspaceRecord) -> None:
    """Replace the record of a layer atomically."""
    part = f"{layer}/workspace.json.new"
    with open(part, "wb", opener=_private) as file:
        file.write(msgspec.json.encode(record))
    os.replace(part, f"{layer}/workspace.json")


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def narrow(layer: str, rules: Rules) -> None:
    """Restrict a commit to what the policy of every run allows."""
    record = read(layer)
    more = WorkspaceRecord(
        lower=record.lower,
        protect=tuple(map(os.fsencode, rules.protect)),
        hold_back=tuple(map(os.fsencode, rules.hold_back)),
        allow_commit=tuple(map(os.fsencode, rules.allow)),
    )
    if (both := strictest(record, [more])) != record:
        rewrite(layer, both)


def strictest(record: WorkspaceRecord, others: Sequence[WorkspaceRecord]) -> WorkspaceRecord:
    """Return the record with everything that any of them protects or holds back, and what all allow."""
    every = (record, *others)
    return msgspec.structs.replace(
        record,
        protect=tuple(dict.fromkeys(path for one in every for path in one.protected)),
        hold_back=tuple(dict.fromkeys(pattern for one in every for pattern in one.hold_back)),
        allow_commit=tuple(
            pattern for pattern in record.allow_commit if all(pattern in one.allow_commit for one in others)
        ),
    )


def add_places(layer: str, places: Iterable[tuple[bytes, bytes]]) -> None:
    """Record the paths that one more policy's grants name: a commit warns when a link replaces one."""
    record = read(layer)
    if more := [place for place in places if place not in record.places]:
        rewrite(layer, msgspec.structs.replace(record, places=(*record.places, *more)))


def threshold(record: WorkspaceRecord) -> int:
    """Return the change time from which on a file may have changed since the workspace was opened.

    After a clock was set back, new changes get earlier times, so the threshold is earlier by as much.
    """
    now = time.time_ns()
    if now < record.opened:
        return 0
    if record.boot != boot_id():
        return record.opened
    passed = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - record.since_boot
    stepped = now - record.opened - passed
    # The two clocks are read one after the other, so a smaller difference is not a step.
    return record.opened + stepped if stepped < -1_000_000_000 else record.opened


class HostFileTable:
    """Facts about the host's files by path, in 24 to 48 bytes for each: there may be very many.

    It stores a keyed digest of each path, so that no program can choose two paths with the same digest.
    """

    def __init__(self) -> None:
        try:
            from _blake2 import blake2b  # hashlib loads OpenSSL first, which takes as long as all of this
        except ImportError:
            from hashlib import blake2b
        self._blake2b, self._key = blake2b, os.urandom(16)
        self._count, self._mask = 0, 255
        #: Digest, number and time; a slot without a digest is empty.
        self._table = array("Q", bytes(24 * 256))

    def _place(self, digest: int) -> int:
        at = digest & self._mask
        while self._table[3 * at] not in (0, digest):
            at = (at + 1) & self._mask
        return 3 * at

    def _digest(self, path: bytes) -> int:
        return int.from_bytes(self._blake2b(path, digest_size=8, key=self._key).digest(), "big") or 1

    def __contains__(self, path: bytes) -> bool:
        return bool(self._table[self._place(self._digest(path))])

    def get(self, path: bytes) -> Sight | None:
        """Return the facts about a path, or None."""
        at = self._place(self._digest(path))
        if not self._table[at]:
            return None
        number, changed = self._table[at + 1 : at + 3]
        return number, changed - (1 << 64) if changed >> 63 else changed

    def add(self, path: bytes, sight: Sight) -> None:
        """Set the facts about a path."""
        digest = self._digest(path)
        self._put(digest, sight[0], sight[1] % (1 << 64))
        if self._count * 3 > self._mask * 2:
            old = self._table
            self._count, self._mask = 0, 2 * self._mask + 1
            self._table = array("Q", bytes(24 * (self._mask + 1)))
            for at in range(0, len(old), 3):
                if old[at]:
                    self._put(*old[at : at + 3])

    def _put(self, digest: int, number: int, changed: int) -> None:
        at = self._place(digest)
        self._count += not self._table[at]
        self._table[at], self._table[at + 1], self._table[at + 2] = digest, number, changed


def seen(layer: str) -> HostFileTable:
    """Return the facts about the host's files; none if the file is missing."""
    found = HostFileTable()
    for path, sight in sights(layer):
        found.add(path, sight)
    return found


def sights(layer: str) -> Iterator[tuple[bytes, Sight]]:
    """Yield the facts about the host's files one by one, with the paths."""
    decode_path, decode_sight = msgspec.msgpack.Decoder(bytes).decode, msgspec.msgpack.Decoder(Sight).decode
    # If it is damaged, the times alone decide.
    with (
        contextlib.suppress(FileNotFoundError, ValueError, msgspec.MsgspecError),
        open(f"{layer}/seen", "rb") as file,
    ):
        from stockade.state.msgpack_stream import MsgpackReader

        reader = MsgpackReader(file)
        for _ in range(reader.count()):
            yield decode_path(reader.value()), decode_sight(reader.value())


def remember(layer: str, more: Iterable[tuple[bytes, Sight]], fresh: HostFileTable | None = None) -> None:
    """Add or update facts about the host's files, and add all facts to `fresh` as well."""
    from stockade.state import msgpack_stream

    part = f"{layer}/seen.new"
    encode = msgspec.msgpack.Encoder().encode
    fresh, count = HostFileTable() if fresh is None else fresh, 0
    with open(part, "wb") as file:
        file.write(msgpack_stream.map_head(0))
        for known in (more, sights(layer)):
            for path, sight in known:
                if path not in fresh:
                    fresh.add(path, sight)
                    file.write(encode(path) + encode(sight))
                    count += 1
        file.seek(0)
        file.write(msgpack_stream.map_head(count))
    os.replace(part, f"{layer}/seen")


def record_lost(layer: str, paths: list[tuple[str, str]]) -> None:
    """Record which changes could not be kept in a layer, and why."""
    with open(f"{layer}/lost", "wb", opener=_private) as file:
        file.write(msgspec.msgpack.encode([(os.fsencode(path), why) for path, why in paths]))


def lost_changes(layer: str) -> list[tuple[str, str]]:
    """Return the changes that could not be kept in a layer, and why."""
    try:
        with open(f"{layer}/lost", "rb") as file:
            known = msgspec.msgpack.decode(file.read(), type=list[tuple[bytes, str]])
    except (FileNotFoundError, msgspec.MsgspecError):
        return []
    return [(os.fsdecode(path), why) for path, why in known]


@contextlib.contextmanager
def keeping_mtime(layer: str) -> Iterator[None]:
    """Keep the layer's modification time while writing a file beside the changes."""
    before = os.stat(layer)
    yield
    os.utime(layer, ns=(before.st_atime_ns, before.st_mtime_ns))


def epoch(layer: str, *, begin: bool = False) -> str:
    """Return an id for the time since a sandbox last used the layer; "" without one; `begin` starts one.

    An empty file identifies it, by its inode and change time.
    """
    path = f"{layer}/{EPOCH}"
    with contextlib.suppress(OSError):  # a full disk must not prevent a diff
        if begin and not os.path.lexists(path):
            with keeping_mtime(layer):
                os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
        known = os.lstat(path)
        return f"{known.st_ino} {known.st_ctime_ns}"
    return ""


def end_epoch(layer: str) -> None:
    """End the epoch: a sandbox is about to enter the layer."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(f"{layer}/{EPOCH}")


def lock(layer: str, id: str, *, shared: bool = False) -> int:
    """Lock the workspace for this process and return a descriptor; closing it releases the lock.

    With `shared`, other processes can hold a shared lock too: enough for reading.
    """
    try:
        directory = os.open(layer, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise NotFoundError(f"there is no workspace {id}") from None
    try:
        fcntl.flock(directory, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        if not os.fstat(directory).st_nlink:
            raise NotFoundError(f"workspace {id} no longer exists")
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
def held(layer: str, id: str, *, shared: bool = False) -> Iterator[WorkspaceLock]:
    """Hold the lock on a workspace without a live sandbox."""
    descriptor = lock(layer, id, shared=shared)
    try:
        yield WorkspaceLock()
    finally:
        os.close(descriptor)


def _holder(directory: int) -> str:
    """Describe the process that holds the lock on an open directory."""
    number = os.fstat(directory).st_ino
    with contextlib.suppress(OSError, ValueError), open("/proc/locks", encoding="utf-8") as table:
        for line in table:
            words = line.split()
            if words[1] == "FLOCK" and words[5].rpartition(":")[2] == str(number):
                pid = int(words[4])
                with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
                    return f"process {pid} ({file.read().strip()})"
    return "another process"
