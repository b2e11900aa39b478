"""Talking to the gate.

One resident gate serves one supervising process (a second one where a policy
shares the host's network). It is started on first use and holds nothing
besides its socket. A launch is one message, so threads do not wait for each
other; a forked child of the supervisor starts a resident gate of its own.
"""

from __future__ import annotations

import array
import contextlib
import errno
import os
import socket
import struct
import threading

import msgspec

from stockade import gate
from stockade.errors import PolicyError, SetupError

FAILED, BORN, MOUNTED, READY, EXEC_FAILED, EXITED = 1, 2, 3, 4, 5, 6
EXEC, SIGNAL = 1, 2
LAST, ALL = 1, 2

#: What one launch can carry for its plan, and one exec request for its arguments: gate.h, inside.c.
MOST_DESCRIPTORS = 250
MOST_BYTES = 8 << 20

OPERATIONS = (
    "plan", "namespaces", "hostname", "root", "dir", "file", "link", "bind", "scratch", "proc", "pts",
    "overlay", "show", "view", "pivot", "keyring", "rlimit", "privileges", "landlock", "grant", "seccomp",
    "mask",
)  # fmt: skip

_REPLY = struct.Struct("=IIIiIIQQQQ256s")
_REQUEST = struct.Struct("=IIII")
_BODY = struct.Struct("=III")
_CREDENTIALS = struct.Struct("=iII")
_ANCILLARY = socket.CMSG_SPACE(16 * 4) + socket.CMSG_SPACE(_CREDENTIALS.size)


class Reply(msgspec.Struct, frozen=True):
    """One status record of the gate."""

    kind: int
    id: int
    operation: str
    error: int
    status: int
    index: int
    user: float
    system: float
    peak: int
    switches: int
    text: str
    #: The sender, as the kernel knows it.
    pid: int
    descriptors: tuple[int, ...]


class Connection:
    """The socket to one sandbox's gate. Only the supervisor and the gate hold an end."""

    def __init__(self, end: socket.socket, resident: Resident) -> None:
        self._socket = end
        self.resident = resident
        #: System call filters that the supervisor has itself: every sandbox has one more.
        self.filters_before = resident.filters
        end.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)

    def fileno(self) -> int:
        return self._socket.fileno()

    def receive(self) -> Reply | None:
        """The next record; None when the gate has ended."""
        try:
            data, ancillary, flags, _ = self._socket.recvmsg(_REPLY.size, _ANCILLARY, socket.MSG_CMSG_CLOEXEC)
        except ConnectionResetError:
            return None
        except OSError as failure:
            if failure.errno == errno.EBADF:
                return None  # closed by another thread
            raise
        descriptors: tuple[int, ...] = ()
        pid = 0
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                numbers = array.array("i")
                numbers.frombytes(content[: len(content) // 4 * 4])
                descriptors = tuple(numbers)
            elif level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
                pid = _CREDENTIALS.unpack(content)[0]
        if flags & socket.MSG_CTRUNC:
            for descriptor in descriptors:
                os.close(descriptor)
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        if not data:
            return None
        kind, id, op, error, status, index, user, system, peak, switches, words = _REPLY.unpack(data)
        return Reply(
            kind, id, OPERATIONS[op], error, status, index, user / 1e6, system / 1e6, peak * 1024, switches,
            words.partition(b"\0")[0].decode("utf-8", "replace"), pid, descriptors,
        )  # fmt: skip

    def refusal(self) -> Reply | None:
        """The record of a failure, if it is among those that have arrived."""
        self._socket.setblocking(False)
        try:
            while (reply := self.receive()) is not None:
                if reply.kind == FAILED:
                    return reply
                for descriptor in reply.descriptors:
                    os.close(descriptor)
        except BlockingIOError:
            pass
        return None

    def execute(
        self,
        id: int,
        argv: list[str],
        env: dict[str, str],
        cwd: str,
        stdio: tuple[int, int, int],
        *,
        last: bool,
    ) -> None:
        """Ask for a program to be started. With `last` the sandbox ends with it."""
        strings = [cwd, *argv, *(f"{key}={value}" for key, value in env.items())]
        content = "\0".join(strings).encode("utf-8", "surrogateescape") + b"\0"
        if len(content) > MOST_BYTES - _BODY.size:
            raise PolicyError(
                f"the command and its environment take {len(content)} bytes, more than {MOST_BYTES}",
                hint="hand large data in through a file or standard input",
            )
        body = _memory("exec", _BODY.pack(_BODY.size + len(content), len(argv), len(env)) + content)
        try:
            self._send(_REQUEST.pack(EXEC, id, LAST if last else 0, 0), (body, *stdio))
        finally:
            os.close(body)

    def signal(self, id: int, number: int, *, everything: bool = False) -> None:
        """Signal a run's process group, or everything in the sandbox."""
        self._send(_REQUEST.pack(SIGNAL, id, ALL if everything else 0, number), ())

    def _send(self, data: bytes, descriptors: tuple[int, ...]) -> None:
        # The gate may have ended; the reader of its socket learns that and says why.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(self._socket, [data], list(descriptors))

    def stop(self) -> None:
        """End the connection for every holder: a thread that waits on it, a forked child with a copy."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection and let go of it."""
        self.stop()
        self._socket.close()

    def forget(self) -> None:
        """Close this process's copy only."""
        self._socket.close()


class Resident:
    """One resident gate process."""

    def __init__(self, *, host_network: bool) -> None:
        self.owner = os.getpid()
        self.filters = _own_filters()
        self._supervisor = os.pidfd_open(self.owner)
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        network = "host-network" if host_network else "own-network"
        # By way of numbers that neither has: dup2 onto 3 and 4 could otherwise meet one of them.
        ends = (theirs.fileno(), self._supervisor)
        spare = max(*ends, 4) + 1
        try:
            self.pid = os.posix_spawn(
                gate.executable(),
                ["stockade-gate", "resident", network, *EXTRA_ARGUMENTS],
                {},
                file_actions=[
                    *((os.POSIX_SPAWN_DUP2, end, spare + i) for i, end in enumerate(ends)),
                    *((os.POSIX_SPAWN_OPEN, number, "/dev/null", os.O_RDWR, 0) for number in range(3)),
                    *((os.POSIX_SPAWN_DUP2, spare + i, 3 + i) for i in range(2)),
                    *((os.POSIX_SPAWN_CLOSE, spare + i) for i in range(2)),
                ],
            )
        except BaseException:
            self._socket.close()
            os.close(self._supervisor)
            raise
        finally:
            theirs.close()

    def launch(self, plan: bytes, descriptors: tuple[int, ...]) -> Connection:
        """Begin a sandbox. Its gate answers on the connection that is returned."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        memory = _memory("plan", plan)
        try:
            connection = Connection(ours, self)
            passed = [theirs.fileno(), memory, self._supervisor, *descriptors]
            socket.send_fds(self._socket, [b"\0\0\0\0"], passed)
            return connection
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
            os.close(memory)

    def close(self) -> None:
        """End the resident gate; sandboxes that live go on. A forked child only lets go of its copy."""
        mine = self.owner == os.getpid()
        if mine:
            # Copies in forked children would keep the resident waiting for more.
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        os.close(self._supervisor)
        if mine:
            # A host program that waits for any child may have been faster.
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.pid, 0)


#: Given to the resident gate besides; the sabotage tests order their sabotage here.
EXTRA_ARGUMENTS: tuple[str, ...] = ()


class _Shared:
    """What the threads of this process share."""

    lock = threading.Lock()


_residents: dict[bool, Resident] = {}


def launch(plan: bytes, descriptors: tuple[int, ...], *, host_network: bool) -> Connection:
    """Begin a sandbox through this process's resident gate, started where it is missing or has died."""
    for _ in range(3):
        with _Shared.lock:
            resident = _residents.get(host_network)
            if resident is None:
                resident = _residents[host_network] = Resident(host_network=host_network)
        try:
            return resident.launch(plan, descriptors)
        except OSError as error:
            # It died, or another thread has just replaced it.
            if error.errno not in (errno.EPIPE, errno.ECONNRESET, errno.EBADF, errno.ENOTCONN):
                raise
            renew(resident)
    raise SetupError("the resident gate does not stay alive", stage="gate")


def renew(old: Resident) -> None:
    """Let the next launch start a new resident gate instead of this one."""
    with _Shared.lock:
        for host_network, resident in tuple(_residents.items()):
            if resident is old:
                del _residents[host_network]
                old.close()


def shutdown() -> None:
    """End this process's resident gates. The next launch starts a new one."""
    for resident in tuple(_residents.values()):
        renew(resident)


def _after_fork() -> None:
    """A forked child starts a resident gate of its own, whatever its parent's threads were doing."""
    _Shared.lock = threading.Lock()
    while _residents:
        _residents.popitem()[1].close()


os.register_at_fork(after_in_child=_after_fork)


def _own_filters() -> int:
    """How many system call filters this process is under already."""
    with open("/proc/self/status", "rb", buffering=0) as file:
        lines = file.read().splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith(b"Seccomp_filters:")), 0)


def _memory(name: str, content: bytes) -> int:
    """An anonymous file with the content."""
    file = os.memfd_create(name)
    try:
        view = memoryview(content)
        while view:
            view = view[os.write(file, view) :]
        return file
    except BaseException:
        os.close(file)
        raise
