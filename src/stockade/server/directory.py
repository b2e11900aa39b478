"""The directories of sandboxes: `sandboxes/ID` with the record, the socket, the lock, the trees and the logs.

A supervisor holds a record lock on `lock` as long as it lives, as in the register: the kernel frees it with
the process, and a child does not inherit it. A directory without a record whose lock is free is what a create
that died has left.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
import time
from typing import NamedTuple

from stockade import state
from stockade.errors import StockadeError
from stockade.sandbox.private_tree import remove_tree
from stockade.server.record import LOCK, RECORD, SOCKET, ServerRecord, is_id, open_directory, read_record

#: The entries of a sandbox's directory that are directories.
TREE, LOGS = "tree", "logs"
#: The state directory's entries of the server.
SANDBOXES, SERVER = "sandboxes", "server"
#: Seconds after which a directory without a lock counts as abandoned: its maker takes the lock at once.
ABANDONED = 10.0

_log = logging.getLogger("stockade.server")


class DirectoryState(NamedTuple):
    """What a sandbox's directory says."""

    #: None if the supervisor has not opened the sandbox yet.
    record: ServerRecord | None
    #: Whether the supervisor lives.
    lives: bool


def sandboxes_root(home: str, upper_root: str) -> str:
    """Return the directory of all sandboxes; make it if it is missing."""
    path = upper_root or os.path.join(state.ensure(home), SANDBOXES)
    with contextlib.suppress(FileExistsError):
        os.makedirs(path, 0o700)
    state.check_private(path)
    return path


def server_directory(home: str) -> str:
    """Return the server's own directory; make it if it is missing."""
    path = os.path.join(state.ensure(home), SERVER)
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    return path


def is_serving(home: str) -> bool:
    """Whether a server runs with this state directory."""
    try:
        lock = os.open(os.path.join(home, SERVER, LOCK), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.lockf(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(lock)
    return False


def how_to_end(home: str) -> str:
    """Return what to type to end the server that runs with this state directory."""
    with contextlib.suppress(OSError), open(os.path.join(home, SERVER, LOCK)) as lock:
        pid = lock.read(20).strip()
        if pid.isdecimal():
            return f"`kill {pid}` ends it, not its sandboxes"
    return "end it with Ctrl-C"


def make_directory(root: str, id: str) -> tuple[int, int]:
    """Make a sandbox's directory and lock it; return descriptors of the directory and of the lock."""
    path = os.path.join(root, id)
    os.mkdir(path, 0o700)
    directory = open_directory(path)
    lock = os.open(LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=directory)
    fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.mkdir(LOGS, 0o700, dir_fd=directory)
    return directory, lock


def is_supervised(directory: int) -> bool:
    """Whether a process holds the lock of a sandbox's directory, or has just made the directory."""
    try:
        lock = os.open(LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
    except FileNotFoundError:
        return time.time() - os.fstat(directory).st_mtime < ABANDONED
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return True
    finally:
        os.close(lock)
    return False


def remove_directory(root: str, id: str) -> None:
    """Remove a sandbox's files, the record last: a removal that was interrupted can be repeated."""
    path = os.path.join(root, id)
    try:
        names = os.listdir(path)
    except FileNotFoundError:
        return
    for name in sorted(names, key=lambda name: name == RECORD):
        one = os.path.join(path, name)
        if os.path.isdir(one) and not os.path.islink(one):
            remove_tree(one)
        else:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(one)
    os.rmdir(path)


def survey(root: str) -> dict[str, DirectoryState]:
    """Return what is known of each sandbox; remove what creates have left."""
    found = {id: look_at(root, id) for id in sorted(os.listdir(root)) if is_id(id)}
    return {id: state for id, state in found.items() if state is not None}


def look_at(root: str, id: str) -> DirectoryState | None:
    """Return what is known of a sandbox, None if there is none; remove what its create has left."""
    try:
        directory = open_directory(os.path.join(root, id))
    except FileNotFoundError:
        return None
    try:
        # In this order: a supervisor that has just ended leaves no record.
        lives, record = is_supervised(directory), read_record(directory)
    finally:
        os.close(directory)
    if record is not None and record.id != id:
        record = None
    if record is None and not lives:
        try:
            remove_directory(root, id)
        except (OSError, StockadeError):  # no reason not to serve the others
            _log.exception("what a create has left in sandbox %s cannot be removed", id)
        return None
    return DirectoryState(record, lives)


def listen_in(directory: int) -> socket.socket:
    """Listen on the socket of a sandbox's directory, whose path may be longer than an address can be."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(f"/proc/self/fd/{directory}/{SOCKET}")
        listener.listen(1024)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener
