"""What the gate and its supervisor say to each other.

Every number, flag and size that both sides must know has the name that it has
in `gate/src/wire.h`; a test compares the two. `Channel` sends requests and
receives the gate's replies.
"""

from __future__ import annotations

import _socket as socket  # without what makes socket slow to load: names for its numbers, and selectors
import array
import contextlib
import errno
import os
import struct

import msgspec

from stockade.linux.descriptors import CREDENTIALS, receive

(
    KIND_OWN_NETWORK, KIND_HOST_NETWORK, KIND_PLAIN, KIND_HELPED, KIND_MAPPED_OWN_NETWORK,
    KIND_MAPPED_HOST_NETWORK,
) = (
    "own-network", "host-network", "plain", "helped", "mapped-own-network", "mapped-host-network",
)  # fmt: skip
WORD_UNSHARED, WORD_MAPPED = "unshared", "mapped"

OPEN_CONTROL, OPEN_SUPERVISOR, OPEN_TEXT = range(3, 6)

MAX_DESCRIPTORS = 250
RESIDENT_LAUNCH, RESIDENT_NETWORK = range(2)
RESIDENT_REQUEST_SIZE, MAX_PORTS = 144, 66
NETWORK_SOCKET, NETWORK_NAMESPACE, NETWORK_DESCRIPTORS = range(3)
NETWORK_MORE, NETWORK_LOOPBACK = 1, 2
LAUNCH_SOCKET, LAUNCH_PLAN, LAUNCH_SUPERVISOR, LAUNCH_FIRST = range(4)

(
    HELD_SOCKET, HELD_PLAN, HELD_SUPERVISOR, HELD_GATE, HELD_WORD, HELD_ARGUMENTS, HELD_STATUS, HELD_FIRST,
) = range(3, 11)  # fmt: skip
HELD_BY_FILE, HELD_BY_BIND, HELD_BY_OVERLAY, HELD_BY_VIEW, HELD_BY_SECCOMP, HELD_BY_CGROUP = 1, 2, 2, 1, 1, 1

(
    REPLY_FAILED, REPLY_BORN, REPLY_MOUNTED, REPLY_READY, REPLY_TERMINAL, REPLY_STARTED, REPLY_EXEC_FAILED,
    REPLY_EXITED, REPLY_ROOTS, REPLY_STOPPED, REPLY_NETWORK, REPLY_CONNECTED,
) = range(1, 13)  # fmt: skip
(
    ENDED_ITSELF, ENDED_BY_TIME, ENDED_BY_REQUEST, ENDED_FROM_OUTSIDE, ENDED_BY_MEMORY, ENDED_BY_CPU,
) = range(6)  # fmt: skip
REPLY_SIZE, REPLY_TEXT = 320, 256

(
    REQUEST_EXEC, REQUEST_SIGNAL, REQUEST_END, REQUEST_WATCH, REQUEST_ROOTS, REQUEST_TIME, REQUEST_SERVE,
    REQUEST_CONNECT,
) = range(1, 9)  # fmt: skip
CONNECT_ANY, CONNECT_IPV4, CONNECT_IPV6 = range(3)
EXEC_KEPT, EXEC_TELL, EXEC_ENTER, EXEC_TERMINAL, EXEC_STDOUT = 1, 2, 4, 8, 16
EXEC_STDERR, EXEC_BEHIND, EXEC_LONG, EXEC_RESUME, EXEC_FIRST, EXEC_AWAITED = 32, 64, 128, 256, 512, 1024
EXEC_MORE_AT, EXEC_MORE_MOST = 16, 64
WATCH_MEMORY, WATCH_COUNTED, WATCH_CPU = 1, 2, 4
SIGNAL_ALL, SIGNAL_INFRONT, SIGNAL_BEHIND = 1, 2, 4
REQUEST_SIZE = 24

SETTINGS_SIZE = 36
EXEC_BODY_SIZE, EXEC_MAX_SIZE, EXEC_SHORT = 60, 8 << 20, 4096
NO_ID = 0xFFFFFFFF

MOST_TERMINALS = "64"

CONFINED_SIZE, SHA256_TEXT, CONFINED_TEXT = 212, 65, 128

PLAN_MAGIC = "STKPLAN2"
PLAN_MAX_SIZE, PLAN_MAX_OPS = 16 << 20, 16384
PLAN_HEADER_SIZE, PLAN_RECORD_SIZE = 24, 24

(
    OP_NAMESPACES, OP_HOSTNAME, OP_ROOT, OP_DIR, OP_FILE, OP_LINK, OP_BIND, OP_SCRATCH, OP_PROC, OP_PTS,
    OP_OVERLAY, OP_SHOW, OP_VIEW, OP_PIVOT, OP_KEYRING, OP_RLIMIT, OP_PRIVILEGES, OP_LANDLOCK, OP_GRANT,
    OP_SECCOMP, OP_MASK, OP_CGROUP, OP_IMAGE, OP_HELPER, OP_DEVICES, OP_PORT, OP_OBSERVE,
    OP_PLACE, OP_END,
) = range(1, 30)  # fmt: skip
OBSERVE_REFUSALS, OBSERVE_EVERYTHING = 1, 2
OBSERVATIONS_MAGIC = "STKOBSV1"
OBSERVATIONS_SIZE, OBSERVATIONS_HEADER_SIZE, OBSERVATION_SIZE = 16 << 20, 32, 32
(
    OBSERVED_PROGRAM, OBSERVED_READ, OBSERVED_WRITE, OBSERVED_CREATE, OBSERVED_REMOVE, OBSERVED_RENAME,
    OBSERVED_EXECUTE, OBSERVED_CONNECT, OBSERVED_BIND, OBSERVED_CALL,
) = range(10)  # fmt: skip
STAGING = "/dev/pts"
MAPS_EVERY_ID, MADE_BY_HELPER, JOINS_NETWORK, FEW_MEMBERSHIPS = 1, 2, 4, 8
#: How many groups of IPv4 a socket may join with FEW_MEMBERSHIPS.
MOST_MEMBERSHIPS = 4
ID_ROW_SIZE, MOST_ID_ROWS, USER_ROWS_AT, GROUP_ROWS_AT = 12, 8, 32, 40
KEEPABLE = 0xFB
GRANT_GATE = 1 << 32
OVERLAY_PRIVATE = 1 << 31
SOURCE_ALONE = 1 << 31

#: The operations by their numbers; 0 is the plan as a whole.
OPERATIONS = (
    "plan", "namespaces", "hostname", "root", "dir", "file", "link", "bind", "scratch", "proc", "pts",
    "overlay", "show", "view", "pivot", "keyring", "rlimit", "privileges", "landlock", "grant", "seccomp",
    "mask", "cgroup", "image", "helper", "devices", "port", "observe", "place",
)  # fmt: skip

#: struct resident_request, struct reply, struct request, struct exec_body, struct plan_header,
#: struct plan_record, struct observations, struct observation and struct id_row.
RESIDENT_REQUEST = struct.Struct(f"=II{MAX_PORTS}HHH")
REPLY = struct.Struct(f"=IIiIIIQQQQQ{REPLY_TEXT}s")
REQUEST = struct.Struct("=IIIIQ")
EXEC_BODY = struct.Struct(f"=IIIIII{SETTINGS_SIZE}s")
PLAN_HEADER = struct.Struct("=8sIIII")
PLAN_RECORD = struct.Struct("=IIQQ")
OBSERVATIONS = struct.Struct("=8sQQQ")
OBSERVATION = struct.Struct("=IHHiIQIHH")
ID_ROW = struct.Struct("=III")

_ANCILLARY = socket.CMSG_SPACE(16 * 4) + socket.CMSG_SPACE(CREDENTIALS.size)
#: Of a launch, the part that is not its plan.
_LAUNCH = RESIDENT_REQUEST.pack(RESIDENT_LAUNCH, 0, *[0] * MAX_PORTS, 0, 0)


class Reply(msgspec.Struct, frozen=True):
    """One message of the gate to its supervisor."""

    kind: int
    operation: str
    error: int
    status: int
    #: Of a failure the operation's place in the plan, of an end how often programs missed a network.
    index: int
    #: Who or what ended the run: ENDED_ITSELF, ENDED_BY_TIME and so on.
    ended: int
    user: float
    system: float
    peak: int
    switches: int
    text: str
    #: The sender, as the kernel knows it.
    pid: int
    descriptors: tuple[int, ...]
    #: When a run ended, by the monotonic clock; 0 where that is not known.
    at: float = 0.0


class Channel:
    """The supervisor's socket to the keeper of a run, or to the init that attends to it.

    No program holds an end of it.
    """

    #: How many bytes a reply's descriptors and the sender's credentials take at most.
    _room = _ANCILLARY

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        end.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)

    def fileno(self) -> int:
        return self._socket.fileno()

    def receive(self) -> Reply | None:
        """Return the gate's next reply; None when the gate has ended."""
        try:
            packet = receive(self._socket, REPLY.size, self._room)
        except OSError as failure:
            if failure.errno == errno.EBADF:
                return None  # closed by another thread
            raise
        if packet is None:
            return None
        if packet.flags & socket.MSG_CTRUNC:
            packet.close()
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        if not packet.data:
            return None
        fields = REPLY.unpack(packet.data)
        kind, op, error, status, index, ended, user, system, peak, switches, at, words = fields
        return Reply(
            kind, OPERATIONS[op], error, status, index, ended, user / 1e6, system / 1e6, peak * 1024,
            switches, words.partition(b"\0")[0].decode("utf-8", "replace"),
            packet.pid, packet.descriptors, at / 1e6,
        )  # fmt: skip

    def signal(self, number: int, *, everything: bool = False, in_front: bool | None = None) -> None:
        """Signal the program's process group, or every process of the run.

        `in_front` first says whether the program has the foreground of its terminal from now on.
        """
        place = 0 if in_front is None else SIGNAL_INFRONT if in_front else SIGNAL_BEHIND
        self._send(REQUEST.pack(REQUEST_SIGNAL, place | (SIGNAL_ALL if everything else 0), number, 0, 0))

    def end(self, grace: float) -> None:
        """Ask every process of the run to end; what is left after the grace is killed."""
        self._send(REQUEST.pack(REQUEST_END, 0, 0, milliseconds(grace), 0))

    def allow(self, seconds: float | None) -> None:
        """Let the run take so many seconds from now; None: as long as it wants."""
        self._send(REQUEST.pack(REQUEST_TIME, 0, 0, 0, 0 if seconds is None else max(1, int(seconds * 1e6))))

    def _send(self, data: bytes, descriptors: tuple[int, ...] = ()) -> None:
        # The gate may have ended: `receive` then says why.
        try:
            if descriptors:
                send_with_descriptors(self._socket, data, descriptors)
            else:
                self._socket.send(data)
        except OSError as failure:
            if failure.errno not in (errno.EPIPE, errno.ECONNRESET, errno.EBADF):
                raise

    def hang_up(self) -> None:
        """End the connection, also for a thread that waits on it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close this end."""
        self._socket.close()


def send_with_descriptors(through: socket.socket, data: bytes, descriptors: tuple[int, ...]) -> None:
    """Send one message with descriptors, also where the kernel counts too many that nobody received yet."""
    message = [data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
    try:
        through.sendmsg(*message)
    except OSError as error:
        if error.errno != errno.ETOOMANYREFS:
            raise
        from stockade.linux.sockets import unhindered

        with unhindered():
            through.sendmsg(*message)


def send_launch(
    through: socket.socket, own: int, plan: int, supervisor: int, descriptors: tuple[int, ...]
) -> None:
    """Hand a resident gate a launch: the sandbox's socket, its plan, our pidfd, and what the plan names."""
    order = {LAUNCH_SOCKET: own, LAUNCH_PLAN: plan, LAUNCH_SUPERVISOR: supervisor}
    passed = (*(order[place] for place in range(LAUNCH_FIRST)), *descriptors)
    send_with_descriptors(through, _LAUNCH, passed)


def milliseconds(seconds: float) -> int:
    """Return seconds as a request holds them."""
    return min(int(seconds * 1000), 0xFFFFFFFF)
