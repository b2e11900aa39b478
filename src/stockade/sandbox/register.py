"""The register of living sandboxes: who supervises what, and what a killed supervisor left.

`run/PID-RANDOM` in the state directory is one supervising process. It holds
`lock`, a record lock on it for as long as it lives, and a file `ID.json` per
living sandbox. The kernel frees the lock at the process's death whatever the
cause, and a forked child does not inherit it: a lock that can be taken is a
supervisor that is gone. Whoever takes it collects what is left.

A record lock has two traps. It goes when its process closes *any* descriptor
of the file, so a process never opens the lock of a directory of its own; and
it does not keep threads apart, so they take turns.

The directory stays while its process lives and goes at the interpreter's
exit: to make and remove one costs several times what a record does.

A record is one line of JSON. A change appends a line, and the last whole line
counts: a reader sees the record before or after, and nothing is renamed over
a file, which ext4 answers by allocating at once.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import os
import signal
import threading
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import msgspec

from stockade import state
from stockade.errors import NotFoundError, SetupError, StockadeError
from stockade.sandbox import records
from stockade.sandbox.records import DIRECTORY, LOCK, RUN, Record, bounded, text

#: What a sandbox that is told to end is given: the grace that the gate gives its programs, and a second.
PATIENCE = 3.0
#: What a killed process is given to go: one that waits for a dead disk does not.
LAST_PATIENCE = 5.0

RemoveGroups = Callable[[tuple[str, ...]], object]


def new_id() -> str:
    """An id for a sandbox."""
    return os.urandom(6).hex()


class Entry:
    """One sandbox of this process in the register. A forked child's copy does nothing."""

    def __init__(self, directory: _Directory, record: Record) -> None:
        self.record = record
        self._directory: _Directory | None = directory
        self._owner = os.getpid()

    def update(self, **fields: Any) -> None:
        """Change fields of the record."""
        directory = self._mine()
        if directory is None:
            return
        record = _complete(msgspec.structs.replace(self.record, **fields))
        try:
            directory.write(record, os.O_APPEND)
        except OSError as error:
            raise _unwritable(directory.path, error) from None
        self.record = record

    def was_killed(self) -> bool:
        """Whether `stockade kill` has named this sandbox."""
        directory = self._mine()
        if directory is None:
            return False
        try:
            os.stat(f"{self.record.id}.killed", dir_fd=directory.fd, follow_symlinks=False)
        except OSError:
            return False
        return True

    def scratch(self, name: str) -> str:
        """Where to write a file that is worth nothing before it is whole, and can be renamed away then.

        What is there when the supervisor has been killed is removed by the next sweep.
        """
        directory = self._mine()
        if directory is None:
            raise SetupError("the sandbox is not in the register", stage="state")
        return f"{directory.path}/{self.record.id}.{name}"

    def close(self) -> None:
        """Take the sandbox out of the register; harmless when repeated."""
        directory, self._directory = self._mine(), None
        if directory is None:
            return
        for name in (f"{self.record.id}.json", f"{self.record.id}.killed"):
            try:
                os.unlink(name, dir_fd=directory.fd)
            except FileNotFoundError:
                pass
            except OSError as error:
                _log(f"{directory.path}/{name} cannot be removed: {error.strerror}")
        _leave(directory)

    def _mine(self) -> _Directory | None:
        return self._directory if self._owner == os.getpid() else None


class _Directory:
    """This process's own directory, locked."""

    def __init__(self, home: str, name: str) -> None:
        """Raises FileNotFoundError where a sweeper took it for a dead process's."""
        self.home = home
        self.path = f"{home}/{RUN}/{name}"
        self.entries = 0
        self._open: list[int] = []
        try:
            os.mkdir(self.path, 0o700)
            self._open.append(os.open(self.path, DIRECTORY))
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            self._open.append(os.open(LOCK, flags, 0o600, dir_fd=self.fd))
            if not _take(self._open[1]):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        except FileNotFoundError:
            self.let_go()
            raise
        except BaseException:
            self.remove()
            raise

    @property
    def fd(self) -> int:
        return self._open[0]

    def write(self, record: Record, flags: int) -> None:
        """Add a line to a record's file: all of it, or nothing that counts."""
        line = msgspec.json.encode(record) + b"\n"
        name = f"{record.id}.json"
        file = os.open(name, flags | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=self.fd)
        try:
            written = os.write(file, line)
            if written < len(line):
                os.ftruncate(file, os.fstat(file).st_size - written)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            if flags & os.O_EXCL:
                os.unlink(name, dir_fd=self.fd)
            raise
        finally:
            os.close(file)

    def remove(self) -> None:
        """Remove it with everything in it, and let the lock go."""
        with contextlib.suppress(OSError):  # what stays is swept by the next process
            if self._open:
                _empty(self.fd)
            os.rmdir(self.path)
        self.let_go()

    def let_go(self) -> None:
        while self._open:
            os.close(self._open.pop())


class _Shared:
    """What the threads of this process share."""

    lock = threading.Lock()
    sweeping = threading.Lock()


#: By the state directory.
_own: dict[str, _Directory] = {}
#: What is ours is never swept; a name is noted before its directory is made.
_names: set[str] = set()
_swept: set[str] = set()


def enter(home: str, record: Record) -> Entry:
    """Put a sandbox into the register; the first one of a process collects what dead supervisors left."""
    if home not in _swept:
        _swept.add(home)
        sweep(home)
    record = _complete(record)
    try:
        return _enter(home, record)
    except FileNotFoundError:
        pass  # somebody has removed the state directory under this process
    try:
        return _enter(home, record)
    except FileNotFoundError as error:
        raise _unwritable(f"{home}/{RUN}", error) from None


def own_names() -> frozenset[str]:
    """The names of this process's directories."""
    return frozenset(_names)


def shutdown() -> None:
    """Remove this process's directories, unless a sandbox is in them. The next sandbox makes another."""
    with _Shared.lock:
        for home, directory in tuple(_own.items()):
            if not directory.entries:
                del _own[home]
                directory.remove()


def _enter(home: str, record: Record) -> Entry:
    directory = _join(home)
    try:
        directory.write(record, os.O_CREAT | os.O_EXCL)
        return Entry(directory, record)
    except FileNotFoundError:
        _leave(directory, lost=True)
        raise
    except OSError as error:
        _leave(directory)
        raise _unwritable(directory.path, error) from None
    except BaseException:
        _leave(directory)
        raise


def _join(home: str) -> _Directory:
    with _Shared.lock:
        directory = _own.get(home)
        if directory is None:
            directory = _own[home] = _make(home)
        directory.entries += 1
        return directory


def _leave(directory: _Directory, *, lost: bool = False) -> None:
    with _Shared.lock:
        directory.entries -= 1
        if lost and _own.get(directory.home) is directory:
            del _own[directory.home]
        if not directory.entries and _own.get(directory.home) is not directory:
            directory.remove()


def _make(home: str) -> _Directory:
    state.ensure(home)
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(f"{home}/{RUN}", 0o700)
        for _ in range(16):
            name = f"{os.getpid()}-{new_id()}"
            _names.add(name)
            with contextlib.suppress(FileNotFoundError):
                return _Directory(home, name)
    except OSError as error:
        raise _unwritable(f"{home}/{RUN}", error) from None
    raise SetupError(f"somebody removes what is made in {home}/{RUN}", stage="state")


def _take(lock: int) -> bool:
    """Take a lock, unless another process has it or has removed its file."""
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return os.fstat(lock).st_nlink > 0


def _after_fork() -> None:
    """A forked child has no sandboxes and holds no lock, whatever its parent's threads were doing."""
    _Shared.lock = threading.Lock()
    _Shared.sweeping = threading.Lock()
    while _own:
        _own.popitem()[1].let_go()
    _names.clear()
    _swept.clear()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(shutdown)


def _complete(record: Record) -> Record:
    """The record with what is known here, bounded, and in text that JSON can hold."""
    pid = os.getpid()
    return msgspec.structs.replace(
        record,
        command=bounded(record.command),
        workspace=text(record.workspace),
        gate_born=record.gate_born or records.born(record.gate),
        supervisor=pid,
        supervisor_born=_own_birth(pid),
        where=records.where(pid),
        started=record.started or f"{records.utc(int(time.time()))}Z",
    )


@lru_cache(maxsize=1)
def _own_birth(pid: int) -> int:
    return records.born(pid)


def _unwritable(path: str, error: OSError) -> SetupError:
    hint = "set STOCKADE_HOME to a directory you can write to"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        hint = "free some space, or set STOCKADE_HOME to a directory elsewhere"
    return SetupError(
        f"cannot record the sandbox in {path}: {error.strerror}",
        stage="state",
        errno=error.errno or 0,
        hint=hint,
    )


def _log(sentence: str) -> None:
    import logging

    logger = logging.getLogger("stockade")
    if not logger.handlers:
        logger.addHandler(logging.NullHandler())  # else the interpreter prints it
    logger.warning("%s", sentence)


def survey(home: str) -> tuple[list[Record], list[str]]:
    """The sandboxes that live now, the oldest first, and a sentence for each record that cannot be read."""
    found: list[Record] = []
    remarks: list[str] = []
    # To close a lock's file here would let go of it in a thread that is sweeping.
    with _Shared.sweeping, records.opened_run(home) as run:
        for name, directory in records.directories(run):
            held = name in _names or records.held(directory)
            read, damaged = records.read_all(directory)
            found += [one for one in read if (held or one.supervised) and not one.ended]
            remarks += [f"{home}/{RUN}/{name}/{file} is damaged and was skipped" for file in damaged]
    return sorted(found, key=lambda record: (record.started, record.id)), remarks


def living(home: str) -> list[Record]:
    """The sandboxes that live now, of all processes, the oldest first."""
    found, remarks = survey(home)
    for remark in remarks:
        _log(remark)
    return found


def sweep(home: str, remove_groups: RemoveGroups | None = None) -> list[str]:
    """Collect what dead supervisors left; the ids of the sandboxes it was. Never fails: it is logged."""
    found: list[str] = []
    with _Shared.sweeping:
        try:
            with records.opened_run(home) as run:
                for name, directory in records.directories(run):
                    if run is not None and name not in _names:
                        found += _collect(home, name, run, directory, remove_groups or _remove_groups)
        except StockadeError as error:
            _log(f"what dead supervisors left was not looked for: {error}")
    return found


def put_to_rest(home: str, layer: str) -> None:
    """End what dead supervisors left, or refuse where something still lives in that layer.

    The caller has locked it, so nobody begins there.
    """
    sweep(home)
    with _Shared.sweeping, records.opened_run(home) as run:
        for _, directory in records.directories(run):
            for one in records.read_all(directory)[0]:
                if one.layer == layer and (pidfd := records.open_gate(one)) is not None:
                    os.close(pidfd)
                    raise SetupError(
                        f"the sandbox in workspace {layer} has not ended", stage="workspace", hint="try again"
                    )


def _collect(home: str, name: str, run: int, directory: int, remove_groups: RemoveGroups) -> list[str]:
    """Remove a supervisor's directory and what its records name, if it is dead."""
    lock = records.open_lock(directory)
    if lock is None:
        # Just being made, and its maker takes another name then; or a sweeper died at the last step.
        with contextlib.suppress(OSError):
            os.rmdir(name, dir_fd=run)
        return []
    found: list[str] = []
    try:
        if not _take(lock):
            return []
        read, damaged = records.read_all(directory)
        if any(record.supervised for record in read):
            return []  # a host program that closed the lock's file by accident
        for file in damaged:
            _log(f"{home}/{RUN}/{name}/{file} is damaged: what it recorded may be left")
        for record in read:
            if _remains(home, record, remove_groups):
                os.unlink(f"{record.id}.json", dir_fd=directory)
                found.append(record.id)
        if len(found) == len(read):
            _empty(directory)
            os.rmdir(name, dir_fd=run)
    except OSError as error:
        _log(f"{home}/{RUN}/{name}, left by a dead supervisor, cannot be removed: {error}")
    finally:
        os.close(lock)
    return found


def _remains(home: str, record: Record, remove_groups: RemoveGroups) -> bool:
    """Remove what is left of one sandbox; whether nothing is left to do."""
    try:
        pidfd = records.open_gate(record)
        if pidfd is not None:
            try:
                if not records.send(pidfd, signal.SIGKILL, LAST_PATIENCE):
                    raise SetupError(f"process {record.gate} does not end", stage="state")
            finally:
                os.close(pidfd)
        # After another boot or in another container these names are somebody else's.
        if record.groups and record.here:
            remove_groups(record.groups)
        if record.layer:
            _remove_unchanged(home, record)
        if record.scratch:
            from stockade.sandbox import scratch

            scratch.remove(home, record.scratch)
        # Its supervisor may have been killed before it could make one.
        if record.command and record.policy:
            from stockade.receipt import making

            making.orphaned(home, record)
    except Exception as error:  # whatever it is, the sandbox that is about to start has no part in it
        _log(f"what is left of sandbox {record.id} cannot be removed yet: {error}")
        return False
    return True


def _remove_groups(paths: tuple[str, ...]) -> None:

    from stockade.sandbox.cgroup import remove

    remove(paths)


def _remove_unchanged(home: str, record: Record) -> None:
    """Remove a layer, unless there is a change in it or that cannot be found out: it is the user's then."""
    from stockade.workspace import image, journal, layers
    from stockade.workspace.record import InUseError
    from stockade.workspace.record import held as alone

    path = f"{home}/workspaces/{record.layer}"
    if not os.path.lexists(f"{path}/workspace.json"):
        layers.remove(path)  # it was only begun
        return
    held: list[int] = []
    # One that is in use is being continued, and one that is gone was discarded.
    with contextlib.suppress(NotFoundError, InUseError), alone(path, record.layer):
        image.recover(path)
        try:
            held.append(os.open(path, DIRECTORY))
            held.append(os.open("upper", DIRECTORY, dir_fd=held[0]))
            held.append(os.open(record.workspace, DIRECTORY))
            journal.recover(path, held[2])
            unchanged = layers.is_unchanged(path, held[1], held[2])
        except OSError:
            return
        finally:
            for descriptor in held:
                os.close(descriptor)
        if unchanged:
            layers.remove(path)


def _empty(directory: int) -> None:
    """Unlink what is in a supervisor's directory, the lock last."""
    for name in sorted(os.listdir(directory), key=LOCK.__eq__):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=directory)


def find(home: str, id: str) -> Record:
    """The living sandbox that an id, or the beginning of one, names."""
    found = [record for record in living(home) if id and record.id.startswith(id)]
    if not found:
        raise NotFoundError(f"there is no living sandbox {id!r}", hint="`stockade ps` lists them")
    if len(found) > 1:
        several = ", ".join(record.id for record in found)
        raise NotFoundError(f"{id!r} is the beginning of several: {several}", hint="write more of it")
    return found[0]


def end(home: str, id: str, *, now: bool) -> None:
    """End one living sandbox, of whatever process, with everything in it."""
    stop(home, find(home, id), now=now)


def stop(home: str, record: Record, *, now: bool) -> None:
    """TERM, a grace, KILL; with `now` KILL at once. Returns when it is gone."""
    if not record.here:
        raise SetupError(
            f"sandbox {record.id} was started in another container: its processes are not known here",
            stage="kill",
            hint="run `stockade kill` there",
        )
    _mark(home, record)
    pidfd = records.open_gate(_launched(home, record))
    if pidfd is None:
        return
    try:
        if not now and records.send(pidfd, signal.SIGTERM, PATIENCE):
            return
        if not records.send(pidfd, signal.SIGKILL, LAST_PATIENCE):
            raise SetupError(
                f"sandbox {record.id} was killed and does not end",
                stage="kill",
                hint="a process in it waits for a disk or a network file system",
            )
    finally:
        os.close(pidfd)


def _mark(home: str, record: Record) -> None:
    """Tell the supervisor who it was. Where that cannot be written the sandbox ends all the same."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    with records.opened_run(home) as run:
        for _, directory in records.directories(run):
            with contextlib.suppress(OSError):
                os.stat(f"{record.id}.json", dir_fd=directory, follow_symlinks=False)
                os.close(os.open(f"{record.id}.killed", flags, 0o600, dir_fd=directory))


def _launched(home: str, record: Record) -> Record:
    """The record with its gate, waited for while the walls are being raised."""
    deadline = time.monotonic() + PATIENCE
    while not record.gate:
        if time.monotonic() > deadline:
            raise SetupError(f"sandbox {record.id} is still being started", stage="kill", hint="try again")
        time.sleep(0.01)
        known = {one.id: one for one in living(home)}
        if record.id not in known:
            break
        record = known[record.id]
    return record
