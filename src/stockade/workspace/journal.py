"""The journal of a commit: after a crash it decides whether the tree is as before or as after.

Everything new is in a staging directory of the workspace before the journal
says "commit"; from then on the host's tree changes by renames only. After a
crash before that mark, the staging directory is removed; after a crash
behind it, the steps are repeated, and each step checks whether it was done
already. If a step fails, on a full disk say, all of them are undone.

    staging   the staging directory may exist: remove it
    commit    do every step
    undo      a step failed: undo those that were done
    done      every step was done: remove the staging directory, which holds the replaced files
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import msgspec

from stockade.errors import SetupError
from stockade.linux import dirwalk
from stockade.state import msgpack_stream
from stockade.state.spool import Spool
from stockade.workspace import metadata
from stockade.workspace.diff.layer_walk import FileStat

FILE = "commit.journal"
#: Up to this number, files or directories are synced one by one; beyond it, with one call for all.
MANY = 100

#: The identity of the file that a step expects: inode, modification time, size. A change time would change
#: with every rename of another name of the same file.
Identity = tuple[int, int, int]


class JournalStep(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """One change of the host's tree."""

    path: bytes


class UnlockStep(JournalStep, frozen=True, gc=False, tag="Unlock"):
    """Let the owner change a directory until its settle step."""

    mode: int


class SetAsideStep(JournalStep, frozen=True, gc=False, tag="Aside"):
    """Move the existing file or directory into the staging directory, with everything in it."""

    slot: str
    expected: Identity
    then: str = ""
    """What replaces it: the slot of a file, or / for a directory. If that is in place, this step was done."""


class MakeStep(JournalStep, frozen=True, gc=False, tag="Make"):
    """Create a directory, private until its settle step."""


class PutStep(JournalStep, frozen=True, gc=False, tag="Put"):
    """Move a finished file from the staging directory to its place."""

    slot: str
    expected: Identity | None
    old: str = ""
    """The slot that keeps a second name of the file that it replaces."""


class SettleStep(JournalStep, frozen=True, gc=False, tag="Settle"):
    """Set the mode of a directory, and if it is new its owner and times."""

    mode: int
    owner: tuple[int, int] | None = None
    times: tuple[int, int] | None = None


def no_steps() -> Spool[JournalStep]:
    """Return an empty sequence of steps, of which there may be very many."""
    decoder = msgspec.msgpack.Decoder(UnlockStep | SetAsideStep | MakeStep | PutStep | SettleStep)
    return Spool(msgspec.msgpack.Encoder().encode, decoder.decode)


class _Head(msgspec.Struct, frozen=True):
    state: Literal["staging", "commit", "undo", "done"]
    root: int
    staging: str
    inode: int = 0


class Journal(_Head, frozen=True):
    """The state of a commit, running or interrupted."""

    steps: Spool[JournalStep] = msgspec.field(default_factory=no_steps)


def read(layer: str) -> Journal | None:
    """Return the journal of an unfinished commit, or None."""
    try:
        with open(f"{layer}/{FILE}", "rb") as file:
            return _decode(msgpack_stream.MsgpackReader(file))
    except FileNotFoundError:
        return None
    except (msgspec.MsgspecError, ValueError, TypeError):
        raise SetupError(f"{layer}/{FILE} is damaged", stage="commit") from None


def _decode(reader: msgpack_stream.MsgpackReader) -> Journal:
    decode = msgspec.msgpack.decode
    found, taken = dict[str, Any](), no_steps()
    for _ in range(reader.count()):
        if (key := decode(reader.value(), type=str)) != "steps":
            found[key] = decode(reader.value())
            continue
        for _ in range(reader.count()):
            taken.append_encoded(reader.value())
    for _ in taken:  # decodes every step, to find damage now
        pass
    head = msgspec.convert(found, _Head)
    return Journal(head.state, head.root, head.staging, head.inode, taken)


def write(layer: str, journal: Journal) -> None:
    """Replace the journal atomically and durably."""
    directory = os.open(layer, dirwalk.DIRECTORY)
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        file = os.open(f"{FILE}.new", flags, 0o600, dir_fd=directory)
        try:
            with open(file, "wb", closefd=False) as stream:
                stream.writelines(_encode(journal))
            os.fsync(file)
        finally:
            os.close(file)
        os.rename(f"{FILE}.new", FILE, src_dir_fd=directory, dst_dir_fd=directory)
        os.fsync(directory)
    finally:
        os.close(directory)


def _encode(journal: Journal) -> Iterator[bytes]:
    """Encode the journal as MessagePack, in pieces."""
    encode = msgspec.msgpack.encode
    fields = msgspec.structs.asdict(journal)
    del fields["steps"]
    yield msgpack_stream.map_head(len(fields) + 1)
    for name, value in fields.items():
        yield encode(name) + encode(value)
    yield encode("steps") + msgpack_stream.array_head(len(journal.steps))
    yield from journal.steps.encoded()


def recover(layer: str, root: int) -> str:
    """Finish or undo an unfinished commit, and say which; "" if there is none."""
    journal = read(layer)
    if journal is None:
        return ""
    if os.fstat(root).st_ino != journal.root:
        raise SetupError(
            "a commit was interrupted, and another directory has replaced the workspace since",
            stage="commit",
            hint="move the directory back, or discard the workspace",
        )
    if journal.state == "commit" and dirwalk.look(root, journal.staging) is not None:
        apply(layer, root, journal)
        return "finished"
    if journal.state == "undo" and dirwalk.look(root, journal.staging) is not None:
        undo(layer, root, journal)
        return "rolled back"
    # Without its staging directory nothing can be done; what is not yet in the tree is still in the layer.
    clean(layer, root, journal)
    return "finished" if journal.state == "done" else "rolled back"


def apply(layer: str, root: int, journal: Journal) -> list[tuple[str, str]]:
    """Do every step, sync, and clean up. Return the host's files that were kept beside the new ones."""
    kept: list[tuple[str, str]] = []
    at = journal.staging
    try:
        with _staging(root, journal) as staging:
            for step in journal.steps:
                at = os.fsdecode(step.path)
                _do_step(root, staging, step, kept)
            sync_directories(root, _directories(journal.steps))
        _record_files(layer, root, journal.steps)
    except OSError as error:
        undo(layer, root, journal)
        raise SetupError(
            f"the commit stopped at {at!r}: {error.strerror}; it was undone, and your files are as before",
            stage="commit",
            errno=error.errno or 0,
            hint="fix the cause, and commit again",
        ) from error
    finished = msgspec.structs.replace(journal, state="done")
    write(layer, finished)
    clean(layer, root, finished)
    return kept


def undo(layer: str, root: int, journal: Journal) -> None:
    """Undo every step that was done, the last one first, and clean up."""
    write(layer, msgspec.structs.replace(journal, state="undo"))
    at = journal.staging
    try:
        with _staging(root, journal) as staging:
            for step in reversed(journal.steps):
                at = os.fsdecode(step.path)
                _undo_step(root, staging, step)
        sync_directories(root, _directories(journal.steps))
    except OSError as error:
        raise SetupError(
            f"the commit stopped and cannot be undone, because of {at!r}: {error.strerror}",
            stage="commit",
            errno=error.errno or 0,
            hint="fix the cause: the next command for this workspace undoes the rest",
        ) from error
    # Renaming forth and back changed the times by which a commit detects conflicts.
    back = (
        step
        for step in journal.steps
        if not isinstance(step, PutStep | SetAsideStep) or _is_restored(root, step)
    )
    _record_files(layer, root, back)
    gone = msgspec.structs.replace(journal, state="staging", steps=no_steps())
    write(layer, gone)
    clean(layer, root, gone)


@contextlib.contextmanager
def _staging(root: int, journal: Journal) -> Iterator[int]:
    """Open the staging directory, and no other directory of that name."""
    with dirwalk.reached(root, journal.staging) as staging:
        if os.fstat(staging).st_ino != journal.inode:
            raise OSError(errno.ESTALE, "another directory has replaced it", journal.staging)
        yield staging


def _undo_step(root: int, staging: int, step: JournalStep) -> None:
    path = os.fsdecode(step.path)
    parent, name = dirwalk.split(path)
    if isinstance(step, PutStep | SetAsideStep):
        old = step.old if isinstance(step, PutStep) else step.slot
        if old and dirwalk.look(staging, old) is not None:
            with dirwalk.reached(root, parent) as directory:
                if isinstance(step, SetAsideStep) and dirwalk.look(directory, name) is not None:
                    _move_out_of_way(directory, name, path, [])
                os.rename(old, name, src_dir_fd=staging, dst_dir_fd=directory)
                # A rename between two names of one file does nothing.
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(old, dir_fd=staging)
        elif isinstance(step, PutStep) and step.expected is None and dirwalk.look(staging, step.slot) is None:
            with dirwalk.reached(root, parent) as directory:
                os.rename(name, step.slot, src_dir_fd=directory, dst_dir_fd=staging)
        return
    if isinstance(step, MakeStep):
        # A directory that is no longer empty stays.
        with contextlib.suppress(OSError), dirwalk.reached(root, parent) as directory:
            os.rmdir(name, dir_fd=directory)
        return
    # A directory that was moved away keeps its mode.
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), dirwalk.reached(root, path) as node:
        mode = step.mode if isinstance(step, UnlockStep) else os.fstat(node).st_mode | 0o700
        os.chmod(f"/proc/self/fd/{node}", stat.S_IMODE(mode))


def _is_restored(root: int, step: PutStep | SetAsideStep) -> bool:
    parent, name = dirwalk.split(os.fsdecode(step.path))
    with contextlib.suppress(OSError), dirwalk.reached(root, parent) as directory:
        there = dirwalk.look(directory, name)
        return there is not None and identity(there) == step.expected
    return False


def _directories(taken: Iterable[JournalStep]) -> set[str]:
    """Return the directories in which steps change names; of very many, some."""
    found: set[str] = set()
    for step in taken:
        found.add(dirwalk.split(os.fsdecode(step.path))[0])
        if len(found) > MANY:
            break
    return found


def _record_files(layer: str, root: int, taken: Iterable[JournalStep]) -> None:
    """Record what is in the tree now: the next commit must not treat it as the host's own change."""
    known = metadata.HostFileTable()
    metadata.remember(layer, _current_files(root, taken, known), known)


def _current_files(
    root: int, taken: Iterable[JournalStep], known: metadata.HostFileTable
) -> Iterator[tuple[bytes, metadata.Sight]]:
    for encoded in _with_parents(step.path for step in taken):
        if not encoded or encoded in known:
            continue
        parent, name = dirwalk.split(os.fsdecode(encoded))
        # A directory that its new mode makes inaccessible reveals nothing.
        with contextlib.suppress(OSError), dirwalk.reached(root, parent) as directory:
            try:
                info = os.stat(name, dir_fd=directory, follow_symlinks=False)
                sight = info.st_ino, info.st_ctime_ns
            except FileNotFoundError:
                sight = metadata.ABSENT
            yield encoded, sight


def _with_parents(paths: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the paths and every directory above them except the workspace; repeated neighbours once."""
    last = b""
    for path in paths:
        parent = place = path.rpartition(b"/")[0]
        new: list[bytes] = []
        while place and place != last and not last.startswith(place + b"/"):
            new.append(place)
            place = place.rpartition(b"/")[0]
        yield from reversed(new)
        last = parent
        yield path


def clean(layer: str, root: int, journal: Journal) -> None:
    """Remove the staging directory, and then the journal that names it."""
    dirwalk.remove(root, journal.staging)
    sync_directories(root, {""})
    with contextlib.suppress(FileNotFoundError):
        os.unlink(f"{layer}/{FILE}")
    sync_state_directory(layer)


def _do_step(root: int, staging: int, step: JournalStep, kept: list[tuple[str, str]]) -> None:
    path = os.fsdecode(step.path)
    parent, name = dirwalk.split(path)
    if isinstance(step, UnlockStep | SettleStep):
        _set_mode(root, path, step)
        return
    with dirwalk.reached(root, parent) as directory:
        if isinstance(step, MakeStep):
            there = dirwalk.look(directory, name)
            if there is not None and not stat.S_ISDIR(there.st_mode):
                _move_out_of_way(directory, name, path, kept)
                there = None
            if there is None:
                os.mkdir(name, 0o700, dir_fd=directory)
            else:
                _unlock(directory, name)  # an interrupted commit may have settled it already
        elif isinstance(step, PutStep):
            if dirwalk.look(staging, step.slot) is None:
                return
            there = dirwalk.look(directory, name)
            if there is not None and identity(there) != step.expected:
                _move_out_of_way(directory, name, path, kept)
            elif there is not None:
                _keep_second_name(directory, name, staging, step.old)
            os.rename(step.slot, name, src_dir_fd=staging, dst_dir_fd=directory)
        elif isinstance(step, SetAsideStep):
            _set_aside(directory, name, staging, step, kept)


def _set_aside(
    directory: int, name: str, staging: int, step: SetAsideStep, kept: list[tuple[str, str]]
) -> None:
    there = dirwalk.look(directory, name)
    if there is None or dirwalk.look(staging, step.slot) is not None:
        return
    if step.then and (
        stat.S_ISDIR(there.st_mode) if step.then == "/" else dirwalk.look(staging, step.then) is None
    ):
        return
    if identity(there) != step.expected:
        _move_out_of_way(directory, name, os.fsdecode(step.path), kept)
        return
    if stat.S_ISDIR(there.st_mode) and there.st_mode & 0o300 != 0o300:
        _unlock(directory, name)  # moving a directory writes to it: its .. changes
    os.rename(name, step.slot, src_dir_fd=directory, dst_dir_fd=staging)


def _keep_second_name(directory: int, name: str, staging: int, old: str) -> None:
    """Keep a file that is about to be replaced under a second name, so that it can be restored."""
    try:
        os.link(name, old, src_dir_fd=directory, dst_dir_fd=staging, follow_symlinks=False)
    except FileExistsError:
        return
    except OSError:  # no hard links on this file system, or not for other users' files
        os.rename(name, old, src_dir_fd=directory, dst_dir_fd=staging)


def _unlock(directory: int, name: str) -> None:
    with dirwalk.reached(directory, name) as node:
        os.chmod(f"/proc/self/fd/{node}", stat.S_IMODE(os.fstat(node).st_mode) | 0o700)


def _move_out_of_way(directory: int, name: str, path: str, kept: list[tuple[str, str]]) -> None:
    """Move a file of the host's aside that appeared or changed after the conflict check."""
    beside = os.fsdecode(os.fsencode(name)[:230]) + f".kept-{os.urandom(4).hex()}"
    os.rename(name, beside, src_dir_fd=directory, dst_dir_fd=directory)
    kept.append((path, f"the host changed it during the commit; its version is kept as {beside}"))


def _set_mode(root: int, path: str, step: UnlockStep | SettleStep) -> None:
    with dirwalk.reached(root, path) as node:
        here = f"/proc/self/fd/{node}"
        if isinstance(step, UnlockStep):
            os.chmod(here, stat.S_IMODE(os.fstat(node).st_mode) | 0o700)
            return
        if step.owner is not None and os.geteuid() == 0:
            os.chown(here, *step.owner)
        if step.times is not None:
            os.utime(here, ns=step.times)
        os.chmod(here, step.mode)


def identity(info: os.stat_result | FileStat) -> Identity:
    """Return what identifies an unchanged file; for a directory only its inode number."""
    if stat.S_ISDIR(info.st_mode):
        return info.st_ino, 0, 0
    return info.st_ino, info.st_mtime_ns, info.st_size


def sync_directories(root: int, directories: Iterable[str]) -> None:
    """Sync the names in some directories of a tree to the disk."""
    wanted = sorted(set(directories))
    if len(wanted) > MANY:
        sync_file_system(root)
        return
    for path in wanted:
        # A directory that its new mode makes inaccessible cannot be synced; its file system can.
        try:
            with dirwalk.listed(root, path) as directory:
                os.fsync(directory)
        except (FileNotFoundError, NotADirectoryError):
            continue  # removed, with everything in it
        except PermissionError:
            sync_file_system(root)
            return


def sync_state_directory(path: str) -> None:
    """Sync one directory of the state to the disk."""
    directory = os.open(path, dirwalk.DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def sync_file_system(descriptor: int) -> None:
    """Sync a whole file system to the disk."""
    import ctypes

    opened = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.syncfs(opened):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    finally:
        os.close(opened)
