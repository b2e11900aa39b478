"""The journal of a commit: what decides, after a crash, between as before and as after.

Everything new lies ready in a staging directory of the workspace before the
journal says "commit"; from then on the host's tree changes by renames only.
Killed before that mark, the staging is removed; killed after it, the steps
are taken again. Each step sees for itself whether it was taken already. One
that cannot be taken, on a full disk say, makes all of them be taken back.

    staging   the staging directory may be there: remove it
    commit    take every step
    undo      a step could not be taken: take back those that were
    done      every step was taken: remove the staging directory, which holds what was replaced
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterable, Iterator
from typing import Literal

import msgspec

from stockade.errors import SetupError
from stockade.workspace import descend, record
from stockade.workspace.descend import parents

FILE = "commit.journal"
#: So many files or directories are made durable one by one; more of them by one call for all.
MANY = 100

#: What a step expects to find: inode, change of content, size. A change time would change with every
#: rename of another name of the same file.
Identity = tuple[int, int, int]


class Step(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """One change of the host's tree."""

    path: bytes


class Unlock(Step, frozen=True):
    """Let the owner change a directory until it is settled."""

    mode: int


class Aside(Step, frozen=True):
    """Move what is there into the staging directory, with everything in it."""

    slot: str
    expected: Identity
    then: str = ""
    """What takes its place: the slot of a file, or / for a directory. If that is there, this was done."""


class Make(Step, frozen=True):
    """Make a directory, private until it is settled."""


class Put(Step, frozen=True):
    """Move a finished file from the staging directory to its place."""

    slot: str
    expected: Identity | None
    old: str = ""
    """Where a second name of what it replaces is kept."""


class Settle(Step, frozen=True):
    """Give a directory its mode, and if it is new its owner and times."""

    mode: int
    owner: tuple[int, int] | None = None
    times: tuple[int, int] | None = None


class Journal(msgspec.Struct, frozen=True):
    """What is being done, or was when the process ended."""

    state: Literal["staging", "commit", "undo", "done"]
    root: int
    staging: str
    inode: int = 0
    steps: tuple[Unlock | Aside | Make | Put | Settle, ...] = ()


def read(layer: str) -> Journal | None:
    """The journal of an unfinished commit."""
    try:
        with open(f"{layer}/{FILE}", "rb") as file:
            return msgspec.msgpack.decode(file.read(), type=Journal)
    except FileNotFoundError:
        return None
    except msgspec.MsgspecError:
        raise SetupError(f"{layer}/{FILE} is damaged", stage="commit") from None


def write(layer: str, journal: Journal) -> None:
    """Replace the journal, so that it is there as a whole whatever happens."""
    directory = os.open(layer, descend.DIRECTORY)
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        file = os.open(f"{FILE}.new", flags, 0o600, dir_fd=directory)
        try:
            pending = memoryview(msgspec.msgpack.encode(journal))
            while pending:
                pending = pending[os.write(file, pending) :]
            os.fsync(file)
        finally:
            os.close(file)
        os.rename(f"{FILE}.new", FILE, src_dir_fd=directory, dst_dir_fd=directory)
        os.fsync(directory)
    finally:
        os.close(directory)


def recover(layer: str, root: int) -> str:
    """Bring an unfinished commit to one of its two ends, and say which; empty if there is none."""
    journal = read(layer)
    if journal is None:
        return ""
    if os.fstat(root).st_ino != journal.root:
        raise SetupError(
            "a commit was interrupted, and another directory has taken the workspace's place",
            stage="commit",
            hint="move the directory back, or discard the workspace",
        )
    if journal.state == "commit" and descend.look(root, journal.staging) is not None:
        apply(layer, root, journal)
        return "finished"
    if journal.state == "undo" and descend.look(root, journal.staging) is not None:
        undo(layer, root, journal)
        return "rolled back"
    # Without its staging directory nothing can go on; what is not yet in the tree is still in the layer.
    clean(layer, root, journal)
    return "finished" if journal.state == "done" else "rolled back"


def apply(layer: str, root: int, journal: Journal) -> list[tuple[str, str]]:
    """Take every step, make it last, and clean up. The result says what of the host's was kept beside."""
    kept: list[tuple[str, str]] = []
    at = journal.staging
    try:
        with _staging(root, journal) as staging:
            for step in journal.steps:
                at = os.fsdecode(step.path)
                _take(root, staging, step, kept)
            durable(root, {descend.split(os.fsdecode(step.path))[0] for step in journal.steps})
        record.remember(layer, _left(root, journal.steps))
    except OSError as error:
        undo(layer, root, journal)
        raise SetupError(
            f"the commit stopped at {at!r}: {error.strerror}; everything is as it was before",
            stage="commit",
            errno=error.errno or 0,
            hint="mend that, and commit again",
        ) from error
    finished = msgspec.structs.replace(journal, state="done")
    write(layer, finished)
    clean(layer, root, finished)
    return kept


def undo(layer: str, root: int, journal: Journal) -> None:
    """Take back every step that was taken, the last one first, and clean up."""
    write(layer, msgspec.structs.replace(journal, state="undo"))
    at = journal.staging
    try:
        with _staging(root, journal) as staging:
            for step in reversed(journal.steps):
                at = os.fsdecode(step.path)
                _revert(root, staging, step)
        durable(root, {descend.split(os.fsdecode(step.path))[0] for step in journal.steps})
    except OSError as error:
        raise SetupError(
            f"the commit stopped and cannot be taken back, because of {at!r}: {error.strerror}",
            stage="commit",
            errno=error.errno or 0,
            hint="mend that: the next command for this workspace takes the rest back",
        ) from error
    # Renames there and back have changed times that a commit judges by.
    back = [step for step in journal.steps if not isinstance(step, Put | Aside) or _is_back(root, step)]
    record.remember(layer, _left(root, back))
    gone = msgspec.structs.replace(journal, state="staging", steps=())
    write(layer, gone)
    clean(layer, root, gone)


@contextlib.contextmanager
def _staging(root: int, journal: Journal) -> Iterator[int]:
    """The staging directory, and no other that was given its name."""
    with descend.reached(root, journal.staging) as staging:
        if os.fstat(staging).st_ino != journal.inode:
            raise OSError(errno.ESTALE, "another directory has taken its place", journal.staging)
        yield staging


def _revert(root: int, staging: int, step: Step) -> None:
    path = os.fsdecode(step.path)
    parent, name = descend.split(path)
    if isinstance(step, Put | Aside):
        old = step.old if isinstance(step, Put) else step.slot
        if old and descend.look(staging, old) is not None:
            with descend.reached(root, parent) as directory:
                if isinstance(step, Aside) and descend.look(directory, name) is not None:
                    _keep(directory, name, path, [])
                os.rename(old, name, src_dir_fd=staging, dst_dir_fd=directory)
                # Between two names of one file a rename does nothing.
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(old, dir_fd=staging)
        elif isinstance(step, Put) and step.expected is None and descend.look(staging, step.slot) is None:
            with descend.reached(root, parent) as directory:
                os.rename(name, step.slot, src_dir_fd=directory, dst_dir_fd=staging)
        return
    if isinstance(step, Make):
        # One into which somebody has put something stays.
        with contextlib.suppress(OSError), descend.reached(root, parent) as directory:
            os.rmdir(name, dir_fd=directory)
        return
    # One that is not where it was any more has taken its mode along.
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), descend.reached(root, path) as node:
        mode = step.mode if isinstance(step, Unlock) else os.fstat(node).st_mode | 0o700
        os.chmod(f"/proc/self/fd/{node}", stat.S_IMODE(mode))


def _is_back(root: int, step: Put | Aside) -> bool:
    parent, name = descend.split(os.fsdecode(step.path))
    with contextlib.suppress(OSError), descend.reached(root, parent) as directory:
        there = descend.look(directory, name)
        return there is not None and identity(there) == step.expected
    return False


def _left(root: int, steps: Iterable[Step]) -> record.Seen:
    """What is in the tree now: the next commit must not take it for the host's own change."""
    known: record.Seen = {}
    paths = [os.fsdecode(step.path) for step in steps]
    for path in {one for below in paths for one in (*parents(below), below)} - {""}:
        parent, name = descend.split(path)
        # In a directory that its new mode has closed nothing can be known.
        with contextlib.suppress(OSError), descend.reached(root, parent) as directory:
            try:
                info = os.stat(name, dir_fd=directory, follow_symlinks=False)
                known[os.fsencode(path)] = (info.st_ino, info.st_ctime_ns)
            except FileNotFoundError:
                known[os.fsencode(path)] = record.ABSENT
    return known


def clean(layer: str, root: int, journal: Journal) -> None:
    """Remove the staging directory, and then the journal that names it."""
    descend.remove(root, journal.staging)
    durable(root, {""})
    with contextlib.suppress(FileNotFoundError):
        os.unlink(f"{layer}/{FILE}")
    durable_file(layer)


def _take(root: int, staging: int, step: Step, kept: list[tuple[str, str]]) -> None:
    path = os.fsdecode(step.path)
    parent, name = descend.split(path)
    if isinstance(step, Unlock | Settle):
        _mode(root, path, step)
        return
    with descend.reached(root, parent) as directory:
        if isinstance(step, Make):
            there = descend.look(directory, name)
            if there is not None and not stat.S_ISDIR(there.st_mode):
                _keep(directory, name, path, kept)
                there = None
            if there is None:
                os.mkdir(name, 0o700, dir_fd=directory)
            else:
                _unlock(directory, name)  # it may have been settled already when the process was killed
        elif isinstance(step, Put):
            if descend.look(staging, step.slot) is None:
                return
            there = descend.look(directory, name)
            if there is not None and identity(there) != step.expected:
                _keep(directory, name, path, kept)
            elif there is not None:
                _save(directory, name, staging, step.old)
            os.rename(step.slot, name, src_dir_fd=staging, dst_dir_fd=directory)
        elif isinstance(step, Aside):
            _aside(directory, name, staging, step, kept)


def _aside(directory: int, name: str, staging: int, step: Aside, kept: list[tuple[str, str]]) -> None:
    there = descend.look(directory, name)
    if there is None or descend.look(staging, step.slot) is not None:
        return
    if step.then and (
        stat.S_ISDIR(there.st_mode) if step.then == "/" else descend.look(staging, step.then) is None
    ):
        return
    if identity(there) != step.expected:
        _keep(directory, name, os.fsdecode(step.path), kept)
        return
    if stat.S_ISDIR(there.st_mode) and there.st_mode & 0o300 != 0o300:
        _unlock(directory, name)  # to move a directory is to write into it: its .. changes
    os.rename(name, step.slot, src_dir_fd=directory, dst_dir_fd=staging)


def _save(directory: int, name: str, staging: int, old: str) -> None:
    """Give a file that is to be replaced a second name, so that it can come back."""
    try:
        os.link(name, old, src_dir_fd=directory, dst_dir_fd=staging, follow_symlinks=False)
    except FileExistsError:
        return
    except OSError:  # no second names on this file system, or not for files of others
        os.rename(name, old, src_dir_fd=directory, dst_dir_fd=staging)


def _unlock(directory: int, name: str) -> None:
    with descend.reached(directory, name) as node:
        os.chmod(f"/proc/self/fd/{node}", stat.S_IMODE(os.fstat(node).st_mode) | 0o700)


def _keep(directory: int, name: str, path: str, kept: list[tuple[str, str]]) -> None:
    """Move a file of the host's out of the way that was not there, or not this one, when it was looked at."""
    beside = os.fsdecode(os.fsencode(name)[:230]) + f".kept-{os.urandom(4).hex()}"
    os.rename(name, beside, src_dir_fd=directory, dst_dir_fd=directory)
    kept.append((path, f"the host changed it meanwhile; its version is kept as {beside}"))


def _mode(root: int, path: str, step: Unlock | Settle) -> None:
    with descend.reached(root, path) as node:
        here = f"/proc/self/fd/{node}"
        if isinstance(step, Unlock):
            os.chmod(here, stat.S_IMODE(os.fstat(node).st_mode) | 0o700)
            return
        if step.owner is not None and os.geteuid() == 0:
            os.chown(here, *step.owner)
        if step.times is not None:
            os.utime(here, ns=step.times)
        os.chmod(here, step.mode)


def identity(info: os.stat_result) -> Identity:
    """What tells whether a file is still the same; of a directory the number alone."""
    if stat.S_ISDIR(info.st_mode):
        return info.st_ino, 0, 0
    return info.st_ino, info.st_mtime_ns, info.st_size


def durable(root: int, directories: Iterable[str]) -> None:
    """Make the names in some directories of a tree last."""
    wanted = sorted(set(directories))
    if len(wanted) > MANY:
        everything(root)
        return
    for path in wanted:
        # One that its mode has closed by now cannot be opened to be synced; its file system can.
        try:
            with descend.listed(root, path) as directory:
                os.fsync(directory)
        except (FileNotFoundError, NotADirectoryError):
            continue  # gone with what was in it
        except PermissionError:
            everything(root)
            return


def durable_file(path: str) -> None:
    """Make one directory of the state last."""
    directory = os.open(path, descend.DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def everything(descriptor: int) -> None:
    """Make everything on a file system last."""
    import ctypes

    opened = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.syncfs(opened):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    finally:
        os.close(opened)
