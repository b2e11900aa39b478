"""The register of living sandboxes: which process supervises which, and what a killed supervisor left.

Each supervisor has a directory `run/PID-RANDOM` in the state directory. It contains `lock`, on which the
supervisor holds a record lock as long as it lives, and `sandboxes`, which has the records of its living
sandboxes (`record_file`). The kernel frees the lock when the process dies, whatever the cause, and a forked
child does not inherit it. So if another process can take the lock, the supervisor is gone, and that process
cleans up after it. A record is complete before anything that it names is made.

A record lock has two traps. The kernel frees it when its process closes *any* descriptor of the file, so a
process never opens the lock of its own directory, and the records are in another file; and it does not
exclude threads of the same process, so they take turns.

The directory stays until the interpreter exits: to make and remove one costs several times what a record
does.
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
from stockade.linux import plain_text
from stockade.linux.plain_text import bounded, text
from stockade.runs.register import record_file, sandbox_record
from stockade.runs.register.record_file import RecordFile, Slot
from stockade.runs.register.sandbox_record import DIRECTORY, LOCK, RUN, SandboxRecord

#: Seconds for a sandbox to end after SIGTERM: the grace that the gate gives its programs, and one more.
PATIENCE = 3.0
#: Seconds for a killed process to end: one that waits for a dead disk does not.
LAST_PATIENCE = 5.0

RemoveGroups = Callable[[tuple[str, ...]], object]


def new_id() -> str:
    """Return a new id for a sandbox."""
    return os.urandom(6).hex()


class RegisterEntry:
    """One sandbox of this process in the register. A forked child's copy does nothing."""

    def __init__(self, directory: _Directory, record: SandboxRecord, slot: Slot | None) -> None:
        self.record = record
        #: None until the first update, if the record names nothing to clean up.
        self._slot = slot
        self._directory: _Directory | None = directory
        self._owner = os.getpid()

    def update(self, **fields: Any) -> None:
        """Change fields of the record."""
        directory = self._mine()
        if directory is None:
            return
        record = _complete(msgspec.structs.replace(self.record, **fields))
        encoded = msgspec.json.encode(record)
        try:
            if self._slot is None:
                self._slot = directory.records.add(encoded)
            else:
                self._slot = directory.records.change(self._slot, encoded, record.id)
        except OSError as error:
            if self._slot is not None:
                raise _unwritable(directory.path, error) from None
        self.record = record

    def was_killed(self) -> bool:
        """Whether `stockade kill` has named this sandbox."""
        directory = self._mine()
        if directory is None or self._slot is None:
            return False
        return directory.records.is_marked(self._slot, self.record.id)

    def scratch(self, name: str) -> str:
        """Return a path for a file that is useless until it is complete; it can be renamed away then.

        If the supervisor is killed before that, the next sweep removes the file.
        """
        directory = self._mine()
        if directory is None:
            raise SetupError("the sandbox is not in the register", stage="state")
        return f"{directory.path}/{self.record.id}.{name}"

    def close(self) -> None:
        """Remove the sandbox from the register; may be called again."""
        directory, self._directory = self._mine(), None
        if directory is None:
            return
        try:
            if self._slot is not None:
                directory.records.free(self._slot)
        except OSError as error:
            _log(f"a record in {directory.path} cannot be removed: {error.strerror}")
        _leave(directory)

    def _mine(self) -> _Directory | None:
        return self._directory if self._owner == os.getpid() else None


class _Directory:
    """This process's own directory, locked."""

    def __init__(self, home: str, name: str) -> None:
        """Make it; raises FileNotFoundError if a sweep in another process removed it before the lock."""
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
                raise _gone()
            self._open.append(os.open(record_file.FILE, flags, 0o600, dir_fd=self.fd))
            self.records = RecordFile(self._open[2])
        except FileNotFoundError:
            self.let_go()
            raise
        except BaseException:
            self.remove()
            raise

    @property
    def fd(self) -> int:
        return self._open[0]

    def write(self, record: SandboxRecord, *, later: bool) -> Slot | None:
        """Write the record of a new sandbox, unless `later`.

        Raises FileNotFoundError if the directory was removed.
        """
        slot = None if later else self.records.add(msgspec.json.encode(record))
        if self.records.is_gone:
            raise _gone()
        return slot

    def remove(self) -> None:
        """Remove it with everything in it, and release the lock."""
        with contextlib.suppress(OSError):  # what stays is swept by the next process
            if self._open:
                _empty(self.fd)
            os.rmdir(self.path)
        self.let_go()

    def let_go(self) -> None:
        while self._open:
            os.close(self._open.pop())


class _RegisterState:
    """The locks that the threads of this process share."""

    lock = threading.Lock()
    sweeping = threading.Lock()


#: By state directory.
_own: dict[str, _Directory] = {}
#: The names of our own directories, which are never swept; each is added before its directory is made.
_names: set[str] = set()
_swept: set[str] = set()


def enter(home: str, record: SandboxRecord, *, later: bool = False) -> RegisterEntry:
    """Add a sandbox to the register; the first call of a process cleans up after dead supervisors.

    If `later`, the record names nothing to clean up, and the first update writes it. If that fails, only
    `stockade ps` misses the sandbox.
    """
    if home not in _swept:
        _swept.add(home)
        sweep(home)
    record = _complete(record)
    try:
        return _write_entry(home, record, later=later)
    except FileNotFoundError:
        pass  # the state directory was removed while this process ran
    try:
        return _write_entry(home, record, later=later)
    except FileNotFoundError as error:
        raise _unwritable(f"{home}/{RUN}", error) from None


def own_names() -> frozenset[str]:
    """Return the names of this process's directories."""
    return frozenset(_names)


def shutdown() -> None:
    """Remove this process's directories that have no sandbox. The next sandbox makes a new one."""
    with _RegisterState.lock:
        for home, directory in tuple(_own.items()):
            if not directory.entries:
                del _own[home]
                directory.remove()


def _write_entry(home: str, record: SandboxRecord, *, later: bool) -> RegisterEntry:
    directory = _join(home)
    try:
        return RegisterEntry(directory, record, directory.write(record, later=later))
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
    with _RegisterState.lock:
        directory = _own.get(home)
        if directory is None:
            directory = _own[home] = _make(home)
        directory.entries += 1
        return directory


def _leave(directory: _Directory, *, lost: bool = False) -> None:
    with _RegisterState.lock:
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
    raise SetupError(f"another process keeps removing what Stockade makes in {home}/{RUN}", stage="state")


def _take(lock: int) -> bool:
    """Try to take a lock; False if another process holds it or has removed its file."""
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return os.fstat(lock).st_nlink > 0


def _after_fork() -> None:
    """Reset a forked child: it has no sandboxes and holds no lock, whatever its parent's threads did."""
    _RegisterState.lock = threading.Lock()
    _RegisterState.sweeping = threading.Lock()
    while _own:
        _own.popitem()[1].let_go()
    _names.clear()
    _swept.clear()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(shutdown)


def _complete(record: SandboxRecord) -> SandboxRecord:
    """Return the record with this process's details, bounded, and in text that JSON can hold."""
    pid = os.getpid()
    return msgspec.structs.replace(
        record,
        command=bounded(record.command),
        workspace=text(record.workspace),
        gate_born=record.gate_born or sandbox_record.born(record.gate),
        supervisor=pid,
        supervisor_born=_own_birth(pid),
        where=sandbox_record.where(pid),
        started=record.started or f"{plain_text.utc(int(time.time()))}Z",
    )


@lru_cache(maxsize=1)
def _own_birth(pid: int) -> int:
    return sandbox_record.born(pid)


def _gone() -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))


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
        logger.addHandler(logging.NullHandler())  # without a handler the interpreter prints it
    logger.warning("%s", sentence)


def survey(home: str) -> tuple[list[SandboxRecord], list[str]]:
    """Return the living sandboxes, oldest first, and a sentence for each record that cannot be read."""
    found: list[SandboxRecord] = []
    remarks: list[str] = []
    # Closing a lock's file here would release the lock that a sweeping thread has taken.
    with _RegisterState.sweeping, sandbox_record.opened_run(home) as run:
        for name, directory in sandbox_record.directories(run):
            locked = name in _names or sandbox_record.is_locked(directory)
            read, damaged = sandbox_record.read_all(directory)
            living = [one for one in read if not (one.ended or one.idle)]
            found += [one for one in living if locked or one.supervised]
            if damaged:
                path = f"{home}/{RUN}/{name}/{record_file.FILE}"
                remarks.append(f"{path} is damaged, and what cannot be read was skipped")
    return sorted(found, key=lambda record: (record.started, record.id)), remarks


def living(home: str) -> list[SandboxRecord]:
    """Return the living sandboxes of all processes, oldest first."""
    found, remarks = survey(home)
    for remark in remarks:
        _log(remark)
    return found


def sweep(home: str, remove_groups: RemoveGroups | None = None) -> list[str]:
    """Clean up after dead supervisors, and return the ids of their sandboxes. Logs failures, raises none."""
    found: list[str] = []
    with _RegisterState.sweeping:
        try:
            with sandbox_record.opened_run(home) as run:
                for name, directory in sandbox_record.directories(run):
                    if run is not None and name not in _names:
                        found += _collect(home, name, run, directory, remove_groups or _remove_groups)
        except StockadeError as error:
            _log(f"cannot look for what dead supervisors left: {error}")
    return found


def put_to_rest(home: str, layer: str) -> None:
    """End what dead supervisors left, and refuse if a sandbox still lives in that layer.

    The caller has locked the layer, so no new sandbox can begin in it.
    """
    sweep(home)
    with _RegisterState.sweeping, sandbox_record.opened_run(home) as run:
        for _, directory in sandbox_record.directories(run):
            for one in sandbox_record.read_all(directory)[0]:
                if layer in (one.layer, *one.layers) and (pidfd := sandbox_record.open_gate(one)) is not None:
                    os.close(pidfd)
                    raise SetupError(
                        f"a sandbox still runs in workspace {layer}", stage="workspace", hint="try again"
                    )


def _collect(home: str, name: str, run: int, directory: int, remove_groups: RemoveGroups) -> list[str]:
    """If a supervisor is dead, remove its directory and what its records name; return their ids."""
    lock = sandbox_record.open_lock(directory)
    if lock is None:
        # It is just being made, and its maker will take another name; or a sweep died at its last step.
        with contextlib.suppress(OSError):
            os.rmdir(name, dir_fd=run)
        return []
    gone: list[SandboxRecord] = []
    try:
        if not _take(lock):
            return []
        stored, damaged = sandbox_record.read_stored(directory)
        if any(one.record.supervised for one in stored):
            return []  # the supervising program closed the lock's file by accident
        if damaged:
            path = f"{home}/{RUN}/{name}/{record_file.FILE}"
            _log(f"{path} is damaged: what it recorded may stay behind")
        for one in stored:
            if _remove_remains(home, one.record, remove_groups):
                with sandbox_record.opened_records(directory, os.O_RDWR) as file:
                    for at in one.slots:
                        record_file.clear(file, at)
                gone.append(one.record)
        if len(gone) == len(stored):
            _empty(directory)
            os.rmdir(name, dir_fd=run)
    except OSError as error:
        _log(f"{home}/{RUN}/{name}, left by a dead supervisor, cannot be removed: {error}")
    finally:
        os.close(lock)
    return [record.id for record in gone if not record.idle]


def _remove_remains(home: str, record: SandboxRecord, remove_groups: RemoveGroups) -> bool:
    """Remove what is left of one sandbox, and return whether all of it is gone."""
    try:
        pidfd = sandbox_record.open_gate(record)
        if pidfd is not None:
            try:
                if not sandbox_record.send(pidfd, signal.SIGKILL, LAST_PATIENCE):
                    raise SetupError(f"process {record.gate} does not end", stage="state")
            finally:
                os.close(pidfd)
        # After a reboot or in another container, other sandboxes may have these names.
        if record.groups and record.here:
            remove_groups(record.groups)
        for layer in filter(None, (record.layer, *record.layers)):
            _remove_unchanged(home, layer)
        if record.scratch:
            from stockade.runs import scratch

            scratch.remove(home, record.scratch)
        # Its supervisor may have been killed before it could make the receipt.
        if record.command and record.policy:
            from stockade.receipt import builder

            builder.orphaned(home, record)
    except Exception as error:  # no failure here may keep the next sandbox from starting
        _log(f"what is left of sandbox {record.id} cannot be removed yet: {error}")
        return False
    return True


def _remove_groups(paths: tuple[str, ...]) -> None:

    from stockade.runs.cgroup import remove

    remove(paths)


def _remove_unchanged(home: str, layer: str) -> None:
    """Remove a layer without changes. One with changes, or that cannot be read, is left for the user."""
    from stockade.workspace import disk_image, journal, metadata, overlay
    from stockade.workspace.metadata import InUseError
    from stockade.workspace.metadata import held as alone

    path = f"{home}/workspaces/{layer}"
    if not os.path.lexists(f"{path}/workspace.json"):
        overlay.remove(path)  # its supervisor was killed while it made the layer
        return
    opened: list[int] = []
    # A layer that is in use is being continued, and one that is gone was discarded.
    with contextlib.suppress(NotFoundError, InUseError), alone(path, layer):
        disk_image.recover(path)
        try:
            opened.append(os.open(path, DIRECTORY))
            opened.append(os.open("upper", DIRECTORY, dir_fd=opened[0]))
            tree = metadata.read(path).tree
            opened.append(os.open(tree, DIRECTORY))
            # A program that can replace a part of the path with a link must not choose where changes go.
            if os.readlink(f"/proc/self/fd/{opened[2]}") != tree:
                return
            journal.recover(path, opened[2])
            unchanged = overlay.is_unchanged(path, opened[1], opened[2])
        except (OSError, SetupError):
            return
        finally:
            for descriptor in opened:
                os.close(descriptor)
        if unchanged:
            overlay.remove(path)


def _empty(directory: int) -> None:
    """Unlink what is in a supervisor's directory, the lock last."""
    for name in sorted(os.listdir(directory), key=LOCK.__eq__):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=directory)


def find(home: str, id: str) -> SandboxRecord:
    """Return the living sandbox that an id, the beginning of one, or a name stands for.

    The sandboxes of the server have the id that its clients know as their name.
    """
    from stockade.state.ids import SHORTENED, matching

    all_living = living(home)
    known = {record.id: record for record in all_living}
    found = [known[name] for name in matching(id, known)]
    if not found:
        meant = matching(id, (record.name for record in all_living if record.name))
        found = [record for record in all_living if record.name in meant]
    if not found:
        raise NotFoundError(
            f"there is no living sandbox {id!r}", hint=f"`stockade ps` lists them; {SHORTENED}"
        )
    if len(found) > 1:
        several = ", ".join(record.id for record in found)
        raise NotFoundError(
            f"{id!r} stands for several sandboxes: {several}", hint="write more of it, or one of these ids"
        )
    return found[0]


def end(home: str, id: str, *, now: bool) -> None:
    """End a living sandbox of any process, with everything in it."""
    stop(home, find(home, id), now=now)


def stop(home: str, record: SandboxRecord, *, now: bool) -> None:
    """End a sandbox (TERM, grace, KILL; with `now` only KILL) and wait until it is gone."""
    if not record.here:
        raise SetupError(
            f"sandbox {record.id} was started in another container: its processes cannot be seen from here",
            stage="kill",
            hint="run `stockade kill` there",
        )
    _mark(home, record)
    pidfd = sandbox_record.open_gate(_wait_for_gate(home, record))
    if pidfd is None:
        return
    try:
        if not now and sandbox_record.send(pidfd, signal.SIGTERM, PATIENCE):
            return
        if not sandbox_record.send(pidfd, signal.SIGKILL, LAST_PATIENCE):
            raise SetupError(
                f"sandbox {record.id} was killed and has not ended",
                stage="kill",
                hint="a process in it waits for a disk or a network file system",
            )
    finally:
        os.close(pidfd)


def _mark(home: str, record: SandboxRecord) -> None:
    """Leave a mark for the supervisor that `stockade kill` ended it; a failure to write it is ignored."""
    with sandbox_record.opened_run(home) as run:
        for _, directory in sandbox_record.directories(run):
            with contextlib.suppress(OSError):
                sandbox_record.mark(directory, record.id)


def _wait_for_gate(home: str, record: SandboxRecord) -> SandboxRecord:
    """Wait until a sandbox that is being launched has a gate, and return its record."""
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
