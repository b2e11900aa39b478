"""What the register holds: the record of one sandbox, and the process that it speaks of.

A number in a record may have been given to another process since, so it
counts only together with its birth, and only under the boot and in the pid
namespace where it was written.
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
from collections.abc import Iterator, Sequence
from functools import lru_cache

import msgspec

from stockade import state

RUN = "run"
LOCK = "lock"
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
MOST_BYTES = 1 << 17
MOST_COMMAND = 4096

_FLOCK = struct.Struct("hhqqi4x")
_HEX = frozenset("0123456789abcdef")


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One living sandbox. What `register.enter` knows itself need not be given."""

    id: str
    #: The program and its arguments, bounded. They may hold a secret: the file is the owner's alone.
    command: tuple[str, ...] = ()
    #: The directory outside.
    workspace: str = ""
    #: The id of the layer that receives the changes.
    layer: str = ""
    #: The id of its private directory on the host.
    scratch: str = ""
    #: The directories of its cgroups.
    groups: tuple[str, ...] = ()
    #: PID 1 of the sandbox as the supervisor sees it, and its birth.
    gate: int = 0
    gate_born: int = 0
    #: The hashes of its policy and of its plan, for the receipt that a dead supervisor cannot make.
    policy: str = ""
    plan: str = ""
    #: Where a sandboxed program asked for it: that program's sandbox, and the hash of its plan.
    parent: str = ""
    parent_plan: str = ""
    #: Whether its supervisor is a holder: it lives without a terminal, and can be attached to.
    kept: bool = False
    supervisor: int = 0
    supervisor_born: int = 0
    #: The boot and the pid namespace in which the numbers mean something.
    where: str = ""
    #: UTC.
    started: str = ""

    @property
    def here(self) -> bool:
        """Whether its processes can be told apart here."""
        return self.where == where(os.getpid())

    @property
    def supervised(self) -> bool:
        """Whether the supervisor is seen to live, whatever its lock says."""
        return self.here and 0 != self.supervisor_born == born(self.supervisor)

    @property
    def ended(self) -> bool:
        """Whether the gate is seen to be gone."""
        return self.here and 0 != self.gate_born != born(self.gate)


def bounded(command: Sequence[str], room: int = MOST_COMMAND) -> tuple[str, ...]:
    """The words of a command, as many as there is room for, in text that JSON can hold."""
    kept: list[str] = []
    for word in command:
        if len(word) >= room:
            return (*kept, f"{text(word[:room])}…")
        kept.append(text(word))
        room -= len(word) + 1
    return tuple(kept)


def text(words: str) -> str:
    """A name of the system's as JSON can hold it."""
    return words if words.isascii() else os.fsencode(words).decode("utf-8", "replace")


@lru_cache(maxsize=8)
def utc(seconds: int) -> str:
    """A time as text that sorts as time does; one second holds many runs."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))


@lru_cache(maxsize=1)
def where(pid: int) -> str:
    """The boot and the pid namespace of this process."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="utf-8") as file:
            boot = file.read().strip()
    except OSError:
        boot = "?"
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


def born(pid: int) -> int:
    """When a living process began, in ticks since the boot; 0 if there is none."""
    if pid <= 0:
        return 0
    try:
        file = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        try:
            fields = os.read(file, 4096).rpartition(b")")[2].split()
        finally:
            os.close(file)
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return 0 if fields[0] in (b"Z", b"X") else int(fields[19])


@contextlib.contextmanager
def opened_run(home: str) -> Iterator[int | None]:
    """The directory of all supervisors, or None where there is none."""
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
    """Each supervisor's directory, open while it is looked at."""
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
    """The lock of another process's directory. For one's own, closing this would let it go."""
    try:
        return os.open(LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
    except FileNotFoundError:
        return None


def held(directory: int) -> bool:
    """Whether somebody holds another process's lock. To ask disturbs nobody."""
    lock = open_lock(directory)
    if lock is None:
        return False
    try:
        answer = fcntl.fcntl(lock, fcntl.F_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    finally:
        os.close(lock)
    return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)


def read_all(directory: int) -> tuple[list[Record], list[str]]:
    """The records in a supervisor's directory, and the names of files that are none."""
    records, damaged = [], []
    for name in sorted(os.listdir(directory)):
        if not name.endswith(".json"):
            continue
        try:
            record = _read(name, directory)
        except FileNotFoundError:
            continue  # its sandbox has just ended
        except (OSError, ValueError):
            damaged.append(name)
        else:
            if record is not None:
                records.append(record)
    return records, damaged


def _read(name: str, directory: int) -> Record | None:
    """A record; None before its first line has been written."""
    file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise ValueError("not a file")
        content = os.read(file, MOST_BYTES)
    finally:
        os.close(file)
    if not content:
        return None
    record = msgspec.json.decode(content.rpartition(b"\n")[0].rpartition(b"\n")[2], type=Record)
    if f"{record.id}.json" != name or not all(
        _is_id(word) for word in (record.id, record.layer or "0", record.scratch or "0")
    ):
        raise ValueError("not a record of this name")
    return record


def _is_id(word: str) -> bool:
    return 0 < len(word) <= 64 and _HEX.issuperset(word)


def open_gate(record: Record) -> int | None:
    """A pidfd of the gate; None if it is gone or its number means nothing here."""
    if not record.gate_born or not record.here:
        return None
    try:
        pidfd = os.pidfd_open(record.gate)
    except OSError as error:
        if error.errno in (errno.ESRCH, errno.EINVAL, errno.ENOENT):  # the latter: a thread has the number
            return None
        raise
    # Looked at when it is held: if it is another process now, it is not the one that was recorded.
    if born(record.gate) == record.gate_born:
        return pidfd
    os.close(pidfd)
    return None


def send(pidfd: int, number: int, patience: float) -> bool:
    """Signal a process and wait for its end; whether it came in time."""
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, number)
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    deadline = time.monotonic() + patience
    while not (gone := poll.poll(100)) and time.monotonic() < deadline:
        pass
    return bool(gone)
