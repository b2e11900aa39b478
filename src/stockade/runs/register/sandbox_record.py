"""The record of one sandbox in the register, and the processes that it names.

Another process may have got a PID of a record since, so a PID counts only together with the start time of its
process, and only in the boot and the PID namespace in which it was written.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import signal
import stat
import struct
import time
from collections.abc import Iterator
from functools import lru_cache

import msgspec

from stockade import state
from stockade.linux.boot import boot_id
from stockade.linux.procstat import BORN, STATE, stat_fields
from stockade.runs.register import record_file

RUN = "run"
LOCK = "lock"
#: The kernel's own limit.
HIGHEST_PID = 1 << 22
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

_FLOCK = struct.Struct("hhqqi4x")
_HEX = frozenset("0123456789abcdef")


class SandboxRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One living sandbox. `register.enter` fills in the fields about its supervisor."""

    id: str
    #: The name that the user gave it.
    name: str = ""
    #: The program and its arguments, bounded. They may hold a secret: the file is the owner's alone.
    command: tuple[str, ...] = ()
    #: The directory outside.
    workspace: str = ""
    #: The id of the layer that receives the changes.
    layer: str = ""
    #: The ids of the layers of a private environment.
    layers: tuple[str, ...] = ()
    #: The id of its private directory on the host.
    scratch: str = ""
    #: The directories of its cgroups.
    groups: tuple[str, ...] = ()
    #: Whether it is no sandbox: its cgroup waits for the next one of the supervisor.
    idle: bool = False
    #: The ports of the host that lead inside, each as HOST:PORT:PORT.
    published: tuple[str, ...] = ()
    #: The PID of the sandbox's first process as the supervisor sees it, and its start time.
    gate: int = 0
    gate_born: int = 0
    #: The hashes of its policy and of its plan, for a receipt if the supervisor dies.
    policy: str = ""
    plan: str = ""
    #: If a sandboxed program asked for it: the sandbox of that program, and the hash of its plan.
    parent: str = ""
    parent_plan: str = ""
    #: Whether its supervisor is a holder: the sandbox lives without a terminal, and you can attach to it.
    kept: bool = False
    supervisor: int = 0
    supervisor_born: int = 0
    #: The boot and the PID namespace in which the PIDs are valid.
    where: str = ""
    #: UTC.
    started: str = ""

    @property
    def here(self) -> bool:
        """Whether its PIDs are valid in this boot and PID namespace."""
        return self.where == where(os.getpid())

    @property
    def supervised(self) -> bool:
        """Whether the supervisor's process lives, whatever its lock says."""
        return self.here and 0 != self.supervisor_born == born(self.supervisor)

    @property
    def ended(self) -> bool:
        """Whether the gate's process is known to have ended."""
        return self.here and 0 != self.gate_born != born(self.gate)


@lru_cache(maxsize=1)
def where(pid: int) -> str:
    """Return the boot and the PID namespace of this process."""
    return f"{boot_id()} {os.readlink('/proc/self/ns/pid')}"


def born(pid: int) -> int:
    """Return the start time of a living process in ticks since the boot; 0 if it does not live."""
    if pid <= 0:
        return 0
    fields = stat_fields(f"/proc/{pid}")
    return 0 if not fields or fields[STATE] in (b"Z", b"X") else int(fields[BORN])


@contextlib.contextmanager
def opened_run(home: str) -> Iterator[int | None]:
    """Open the directory of all supervisors; yields None if there is none."""
    try:
        run = None
        with contextlib.suppress(FileNotFoundError):
            state.check(home)
            run = os.open(f"{home}/{RUN}", DIRECTORY)
        try:
            yield run
        finally:
            if run is not None:
                os.close(run)
    except OSError as error:
        raise state.unusable(f"{home}/{RUN}", error) from None


def directories(run: int | None) -> Iterator[tuple[str, int]]:
    """Yield the name and a descriptor of each supervisor's directory, open until the next one."""
    for name in sorted(os.listdir(run)) if run is not None else ():
        try:
            directory = os.open(name, DIRECTORY, dir_fd=run)
        except (FileNotFoundError, NotADirectoryError):
            continue
        try:
            yield name, directory
        finally:
            os.close(directory)


def open_lock(directory: int) -> int | None:
    """Open the lock of another process's directory. Closing one's own lock this way would release it."""
    try:
        return os.open(LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
    except FileNotFoundError:
        return None


def is_locked(directory: int) -> bool:
    """Whether the lock of another process's directory is held. Does not take it."""
    lock = open_lock(directory)
    if lock is None:
        return False
    try:
        answer = fcntl.fcntl(lock, fcntl.F_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    finally:
        os.close(lock)
    return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)


class StoredRecord(msgspec.Struct, frozen=True):
    """A record, and the places of its slots: more than one only while, or because, a change was cut off."""

    record: SandboxRecord
    slots: list[int]


def read_all(directory: int) -> tuple[list[SandboxRecord], bool]:
    """Return the records in a supervisor's directory, and whether others cannot be read."""
    stored, damaged = read_stored(directory)
    return [one.record for one in stored], damaged


def read_stored(directory: int) -> tuple[list[StoredRecord], bool]:
    """Return the records in a supervisor's directory with their slots, and whether others cannot be read."""
    try:
        with opened_records(directory, os.O_RDONLY) as file:
            read, damaged = record_file.read(file)
    except FileNotFoundError:
        return [], False  # it is just being made, or has just been removed
    except OSError:
        return [], True
    records: dict[str, StoredRecord] = {}
    for one in sorted(read, key=lambda one: one.number):
        try:
            record = _decode(one.record)
        except ValueError:
            damaged = True
        else:
            earlier = records[record.id].slots if record.id in records else []
            records[record.id] = StoredRecord(record, [*earlier, one.at])
    return list(records.values()), damaged


@contextlib.contextmanager
def opened_records(directory: int, flags: int) -> Iterator[int]:
    """Open the records of a supervisor's directory."""
    file = os.open(record_file.FILE, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        yield file
    finally:
        os.close(file)


def mark(directory: int, id: str) -> None:
    """Mark a sandbox as killed, if it is in a supervisor's directory."""
    marked: set[int] = set()
    # Again until no slot is new: the record may have moved to another one meanwhile.
    while new := _slots_of(directory, id) - marked:
        with opened_records(directory, os.O_RDWR) as file:
            for at in new:
                record_file.mark(file, at, id)
        marked |= new


def _slots_of(directory: int, id: str) -> set[int]:
    return {at for one in read_stored(directory)[0] if one.record.id == id for at in one.slots}


def _decode(data: bytes) -> SandboxRecord:
    try:
        record = msgspec.json.decode(data, type=SandboxRecord)
    except RecursionError:  # in a field that this version does not know
        raise ValueError("not a record") from None
    ids = (record.id, record.layer or "0", record.scratch or "0", *record.layers)
    pids = (record.gate, record.supervisor)
    if not all(map(_is_id, ids)) or not all(0 <= pid <= HIGHEST_PID for pid in pids):
        raise ValueError("not a record")
    return record


def _is_id(word: str) -> bool:
    return 0 < len(word) <= 64 and _HEX.issuperset(word)


def open_gate(record: SandboxRecord) -> int | None:
    """Open a pidfd of the gate; None if it has ended or its PID is not valid here."""
    if not record.gate_born or not record.here:
        return None
    try:
        pidfd = os.pidfd_open(record.gate)
    except OSError as error:
        if error.errno in (errno.ESRCH, errno.EINVAL, errno.ENOENT):  # the latter: it is a thread's id now
            return None
        raise
    # Checked after opening: if the PID still has the recorded start time, the pidfd is of that process.
    if born(record.gate) == record.gate_born:
        return pidfd
    os.close(pidfd)
    return None


def send(pidfd: int, number: int, patience: float) -> bool:
    """Signal a process and wait for its end; return whether it ended in time."""
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, number)
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    deadline = time.monotonic() + patience
    while not (gone := poll.poll(100)) and time.monotonic() < deadline:
        pass
    return bool(gone)
