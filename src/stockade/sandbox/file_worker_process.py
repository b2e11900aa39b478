"""A file worker: a process with the rights of one user inside a sandbox, which makes file calls for outside.

The supervisor forks it. It enters the sandbox's user namespace, and no other:
it stays outside the sandbox's mounts and processes, where nothing inside can
see, signal or trace it. It reaches the sandbox's files through the descriptor
of their root, which is all that it keeps besides its socket. It takes the ids
of its identity; as the sandbox's own user it keeps the capabilities that
programs inside have, as any other none. A system call filter takes away what
no file call needs: executing, sockets, other users, signals.

A fork takes about 1 ms, a new interpreter 20. It is safe here although the
supervisor has threads: the worker imports nothing, and never returns to the
event loop that it is a copy of.
"""

from __future__ import annotations

import _socket as socket
import contextlib
import errno
import gc
import os
import signal
import warnings
from typing import NamedTuple, NoReturn

import msgspec

from stockade.backends.seccomp import syscalls
from stockade.egress.confined import install_filter
from stockade.errors import PolicyError, SetupError, StockadeError
from stockade.linux import process_rights
from stockade.sandbox.file_worker_calls import CALLS, WorkerReply
from stockade.sandbox.file_worker_channel import WorkerFailure, receive_message, send
from stockade.workspace.files.file_errors import refusal
from stockade.workspace.files.identity_files import NO_SUBORDINATE_IDS, IdentityFiles

#: What a worker is called in `ps`.
NAME = "stockade-files"
#: Calls that programs may make, and that no file call needs.
_DENIED = """
execve execveat fork vfork socket socketpair connect bind listen accept accept4 kill tkill tgkill
rt_sigqueueinfo rt_tgsigqueueinfo pidfd_open pidfd_send_signal setuid setgid setreuid setregid setresuid
setresgid setgroups setfsuid setfsgid setsid setpgid prctl capset seccomp mq_open shmget msgget semget
inotify_init inotify_init1
"""


class WorkerIdentity(NamedTuple):
    """A user inside: None is the sandbox's own."""

    uid: int | None
    gid: int | None


class WorkerWalls(NamedTuple):
    """What every worker of a sandbox gets: descriptors, rights and paths."""

    #: The sandbox's user namespace; -1 for one in which every id is what it is outside.
    namespace: int
    #: The sandbox's root.
    root: int
    #: The mask of the capabilities that programs inside have as the sandbox's own user.
    capabilities: int
    filter: bytes
    #: Where relative paths and `~` begin.
    start: str
    home: str


def filter_program(state: str) -> bytes:
    """Return the system call filter of a worker, compiled once per host and kept in the state directory."""
    return syscalls.program(deny=tuple(_DENIED.split()), home=state)


def fork_worker(walls: WorkerWalls, identity: WorkerIdentity) -> tuple[int, socket.socket]:
    """Start a worker; return its pid and the socket on which it says that it is ready, or why it is not."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = os.getpid()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside other threads
            pid = os.fork()
        if pid == 0:
            _live(theirs.fileno(), walls, identity, parent)
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    return pid, ours


def _live(end: int, walls: WorkerWalls, identity: WorkerIdentity, parent: int) -> NoReturn:
    """Be the worker until the supervisor hangs up; never return into the copied program."""
    try:
        # Finalizers of the supervisor's objects would close numbers that are now other files.
        gc.freeze()
        process_rights.leave_signals()
        number, root, *namespace = process_rights.keep_descriptors(
            (end, walls.root, *((walls.namespace,) if walls.namespace >= 0 else ()))
        )
        with contextlib.closing(socket.socket(fileno=number)) as channel:
            try:
                _give_up_rights(walls, identity, namespace, parent)
                files = IdentityFiles(root, start=walls.start, home=walls.home)
            except StockadeError as error:
                send(channel, msgspec.msgpack.encode(WorkerFailure.of(error)))
                os._exit(1)
            send(channel, msgspec.msgpack.encode(None))
            _serve(channel, files)
    finally:
        os._exit(0)


def _give_up_rights(walls: WorkerWalls, identity: WorkerIdentity, namespace: list[int], parent: int) -> None:
    own = identity == (None, None)
    kept = walls.capabilities if own else 0
    try:
        process_rights.name_process(NAME)
        for descriptor in namespace:
            process_rights.enter_user_namespace(descriptor)
            os.close(descriptor)
        if not (own or namespace):
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
        if namespace or os.geteuid() == 0:  # an ordinary user outside has nothing to give up
            process_rights.bound_capabilities(kept)
            process_rights.become(identity.uid, identity.gid)
        process_rights.keep_capabilities(kept)
        process_rights.close_to_debuggers()
        process_rights.die_with(parent)
        os.umask(0o022)
        install_filter(walls.filter)
    except OSError as error:
        if not own and error.errno in (errno.EINVAL, errno.EPERM):
            who = f"uid {identity.uid}, gid {identity.gid}"
            raise PolicyError(f"no file call can be made as {who}: {NO_SUBORDINATE_IDS}") from None
        raise SetupError(
            f"the file worker could not give up its rights: {error.strerror}",
            stage="files",
            errno=error.errno or 0,
        ) from None


def _serve(channel: socket.socket, files: IdentityFiles) -> None:
    """Answer one request after another, until the supervisor hangs up."""
    while (request := receive_message(channel)) is not None:
        message, descriptors = request
        handed: tuple[int, ...] = ()
        failed, answer = False, object()
        try:
            name, *arguments = msgspec.msgpack.decode(message)
            files.refresh()
            answer = _called(files, descriptors, name, arguments)
            if isinstance(answer, WorkerReply):
                answer, handed = answer
        except StockadeError as error:
            failed, answer = True, WorkerFailure.of(error)
        except OSError as error:
            failed, answer = True, WorkerFailure.of(refusal(error, "the file"))
        except Exception as error:  # one request must not end the answers to all others
            what = f"the file worker failed with {type(error).__name__}"
            failed, answer = True, WorkerFailure.of(SetupError(what, stage="files"))
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        try:
            send(channel, msgspec.msgpack.encode((failed, answer)), handed)
        except StockadeError as error:  # the answer is too long
            send(channel, msgspec.msgpack.encode((True, WorkerFailure.of(error))))
        finally:
            for descriptor in handed:
                os.close(descriptor)


def _called(files: IdentityFiles, descriptors: tuple[int, ...], name: str, arguments: list[object]) -> object:
    if name not in CALLS:
        raise SetupError(f"the file worker knows no call {name!r}", stage="files")
    return CALLS[name](files, descriptors, *arguments)


def observe_worker(pid: int, walls: WorkerWalls, identity: WorkerIdentity) -> None:
    """Check in /proc that a worker has the rights that it should have; raise SetupError otherwise."""
    kept = walls.capabilities if identity == (None, None) else 0
    wanted = {
        "CapInh": f"{0:016x}",
        "CapPrm": f"{kept:016x}",
        "CapEff": f"{kept:016x}",
        "CapAmb": f"{0:016x}",
        "NoNewPrivs": "1",
        "Seccomp": "2",
    }
    if walls.namespace >= 0:
        wanted["CapBnd"] = f"{kept:016x}"
    with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
        lines = file.read().splitlines()
    for name, value in wanted.items():
        if f"{name}:\t{value}" not in lines:
            raise SetupError(
                f"the file worker does not have {name} {value}, so it is not used", stage="files"
            )


def kill_worker(pid: int) -> None:
    """End a worker and wait for its end."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)
