"""Talking to the gate.

One resident gate serves one supervising process (a second one where a policy
shares the host's network). It is started on first use and holds nothing
besides its socket. Launches are single messages, so threads need no lock; a
forked child of the supervisor starts a resident gate of its own.
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

    def __init__(self, end: socket.socket, filters_before: int) -> None:
        self._socket = end
        #: System call filters that the supervisor has itself: every sandbox has one more.
        self.filters_before = filters_before
        end.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)

    def fileno(self) -> int:
        return self._socket.fileno()

    def receive(self) -> Reply | None:
        """The next record; None when the gate has ended."""
        try:
            data, ancillary, flags, _ = self._socket.recvmsg(_REPLY.size, _ANCILLARY)
        except ConnectionResetError:
            return None
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

    def close(self) -> None:
        self._socket.close()


class Resident:
    """One resident gate process."""

    def __init__(self, *, host_network: bool) -> None:
        self.owner = os.getpid()
        self._filters = _own_filters()
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
            connection = Connection(ours, self._filters)
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
        """End the resident gate; sandboxes that live go on."""
        self._socket.close()
        os.close(self._supervisor)
        if self.owner == os.getpid():
            # A host program that waits for any child may have been faster.
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.pid, 0)


#: Given to the resident gate besides; the sabotage tests order their sabotage here.
EXTRA_ARGUMENTS: tuple[str, ...] = ()

_lock = threading.Lock()
_residents: dict[bool, Resident] = {}


def launch(plan: bytes, descriptors: tuple[int, ...], *, host_network: bool) -> Connection:
    """Begin a sandbox through this process's resident gate, started where it is missing or has died."""
    for attempt in range(2):
        with _lock:
            resident = _residents.get(host_network)
            if resident is not None and resident.owner != os.getpid():
                resident.close()
                resident = None
            if resident is None:
                resident = _residents[host_network] = Resident(host_network=host_network)
        try:
            return resident.launch(plan, descriptors)
        except (BrokenPipeError, ConnectionResetError):
            with _lock:
                if _residents.get(host_network) is resident:
                    del _residents[host_network]
                    resident.close()
            if attempt:
                raise SetupError("the resident gate does not stay alive", stage="gate") from None
    raise AssertionError("unreachable")


def shutdown() -> None:
    """End this process's resident gates. The next launch starts a new one."""
    with _lock:
        while _residents:
            _residents.popitem()[1].close()


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
