"""Talking to the gate.

One resident gate serves one supervising process (a second one where a policy
shares the host's network). It is started on first use and holds nothing
besides its socket. A launch is one message, so threads do not wait for each
other; a forked child of the supervisor starts a resident gate of its own.
"""

from __future__ import annotations

import _socket as socket  # without what makes socket slow to load: names for its numbers, and selectors
import array
import atexit
import contextlib
import errno
import os
import select
import signal
import struct
import threading
import time

import msgspec

from stockade import gate
from stockade.errors import PolicyError, SetupError
from stockade.host.cgroups import scope

TYPE_CHECKING = False
if TYPE_CHECKING:
    from stockade.gate.template import Template

# The numbers of gate.h.
FAILED, BORN, MOUNTED, READY, TERMINAL, STARTED, EXEC_FAILED, EXITED, ROOTS, STOPPED = range(1, 11)
EXEC, SIGNAL, END, WATCH, SHOW_ROOTS, TIME = range(1, 7)
KEPT, TELL, ENTER, ON_TERMINAL, BEHIND, MORE, RESUME, FIRST = 1, 2, 4, 8, 64, 128, 256, 512
#: By the number of the stream that is none of the terminal's.
APART = {1: 16, 2: 32}
EVERYTHING, GIVE_FRONT, GIVE_BEHIND = 1, 2, 4
WATCH_MEMORY, WATCH_COUNTED, WATCH_CPU = 1, 2, 4
ITSELF, BY_TIME, BY_REQUEST, FROM_OUTSIDE, BY_MEMORY, BY_CPU = range(6)

#: What a resident gate is for: sandboxes with a network of their own, with the host's, without namespaces,
#: and those that a helper makes.
OWN_NETWORK, HOST_NETWORK, PLAIN, HELPED = "own-network", "host-network", "plain", "helped"

#: What one launch can carry for its plan, and one exec request for its arguments: gate.h, inside.c.
MOST_DESCRIPTORS = 250
MOST_BYTES = 8 << 20

#: How systemd of a user is found, and how long it may take.
BUS = ("XDG_RUNTIME_DIR", "DBUS_SESSION_BUS_ADDRESS")
SCOPE_SECONDS = 5.0

OPERATIONS = (
    "plan", "namespaces", "hostname", "root", "dir", "file", "link", "bind", "scratch", "proc", "pts",
    "overlay", "show", "view", "pivot", "keyring", "rlimit", "privileges", "landlock", "grant", "seccomp",
    "mask", "cgroup", "image", "helper", "devices",
)  # fmt: skip

_REPLY = struct.Struct("=IIiIIIQQQQQ256s")
_REQUEST = struct.Struct("=IIIIQ")
_BODY = struct.Struct("=IIII36s")
_CREDENTIALS = struct.Struct("=iII")
_ANCILLARY = socket.CMSG_SPACE(16 * 4) + socket.CMSG_SPACE(_CREDENTIALS.size)


class Reply(msgspec.Struct, frozen=True):
    """One status record of the gate."""

    kind: int
    operation: str
    error: int
    status: int
    #: Of a failure the operation's number, of an end how often a network was missed.
    index: int
    #: Who or what ended the run: ITSELF, BY_TIME and so on.
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
    """The socket to whoever attends to a run. Only the supervisor and the gate hold an end."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        end.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)

    def fileno(self) -> int:
        return self._socket.fileno()

    def receive(self) -> Reply | None:
        """The next record; None when the gate has ended."""
        arguments = (_REPLY.size, _ANCILLARY, socket.MSG_CMSG_CLOEXEC)
        try:
            try:
                data, ancillary, flags, _ = self._socket.recvmsg(*arguments)
            except ConnectionResetError:
                # It ended before it read all that we said. That is told once; its own last words come after.
                data, ancillary, flags, _ = self._socket.recvmsg(*arguments)
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
        kind, op, error, status, index, ended, user, system, peak, switches, at, words = _REPLY.unpack(data)
        return Reply(
            kind, OPERATIONS[op], error, status, index, ended, user / 1e6, system / 1e6, peak * 1024,
            switches, words.partition(b"\0")[0].decode("utf-8", "replace"), pid, descriptors, at / 1e6,
        )  # fmt: skip

    def signal(self, number: int, *, everything: bool = False, in_front: bool | None = None) -> None:
        """Signal the program's process group, or every process of the run.

        `in_front` first says whether the program has the foreground of its terminal from now on.
        """
        place = 0 if in_front is None else GIVE_FRONT if in_front else GIVE_BEHIND
        self._send(_REQUEST.pack(SIGNAL, place | (EVERYTHING if everything else 0), number, 0, 0))

    def end(self, grace: float) -> None:
        """Ask every process of the run to end; what is left after the grace is killed."""
        self._send(_REQUEST.pack(END, 0, 0, _milliseconds(grace), 0))

    def allow(self, seconds: float | None) -> None:
        """How long the run may still take."""
        self._send(_REQUEST.pack(TIME, 0, 0, 0, 0 if seconds is None else max(1, int(seconds * 1e6))))

    def _send(self, data: bytes, descriptors: tuple[int, ...] = ()) -> None:
        # The gate may have ended; the reader of its socket learns that and says why.
        try:
            if descriptors:
                _send_fds(self._socket, data, descriptors)
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
        """Let go of this end."""
        self._socket.close()


class Connection(Channel):
    """The socket to one sandbox's gate."""

    def __init__(self, end: socket.socket, resident: Resident) -> None:
        super().__init__(end)
        self.resident = resident
        #: System call filters that the supervisor has itself: every sandbox has one more.
        self.filters_before = resident.filters
        #: Held by whoever must not see a program start meanwhile.
        self.starting = threading.Lock()
        self._lock = threading.Lock()
        self._refused: Reply | None = None

    def refusal(self) -> Reply | None:
        """The record of a failure, if it is among those that have arrived; the same for everyone who asks."""
        with self._lock:
            if self._refused is None and self._socket.fileno() >= 0:
                self._socket.setblocking(False)
                self._refused = self._failure()
            return self._refused

    def _failure(self) -> Reply | None:
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
        program: Program,
        stdio: tuple[int, ...],
        *,
        kept: bool,
        entrance: int | None = None,
        more: tuple[int, ...] = (),
    ) -> Channel:
        """Ask for a program to be started, and return where it is heard of.

        For a program on a terminal `stdio` is only what is `apart` from that; two `more`, or two beyond
        three, are the program's descriptors 3 and 4. Unless the run is `kept`, the sandbox ends with it.
        `entrance` is the file through which it enters a cgroup.
        """
        stdio, more = stdio[:3], (*stdio[3:], *more)
        last = () if entrance is None else (entrance,)
        strings = [program.cwd, *program.argv, *(f"{key}={value}" for key, value in program.env.items())]
        content = "\0".join(strings).encode("utf-8", "surrogateescape") + b"\0"
        if len(content) > MOST_BYTES - _BODY.size:
            raise PolicyError(
                f"the command and its environment take {len(content)} bytes, more than {MOST_BYTES}",
                hint="hand large data in through a file or standard input",
            )
        flags = (
            (KEPT if kept else 0)
            | (ON_TERMINAL if len(stdio) < 3 else 0)
            | sum(APART[number] for number in program.apart)
            | (BEHIND if program.behind else 0)
            | (MORE if more else 0)
            | (TELL if program.tell else 0)
            | (RESUME if program.resumed else 0)
            | (FIRST if program.first else 0)
            | (0 if entrance is None else ENTER)
        )
        lines, columns = program.size
        wall = 0 if program.wall is None else max(1, int(program.wall * 1e6))
        request = _REQUEST.pack(EXEC, flags, lines << 16 | columns, _milliseconds(program.grace), wall)
        settings = program.settings
        header = _BODY.pack(
            _BODY.size + len(content), len(program.argv), len(program.env), bool(settings), settings
        )
        body = _memory("exec", header + content)
        try:
            if not kept:
                with self.starting:
                    self._send(request, (body, *stdio, *more, *last))
                return self
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                channel = Channel(ours)
                with self.starting:
                    self._send(request, (body, *stdio, *more, theirs.fileno(), *last))
                return channel
            except BaseException:
                ours.close()
                raise
            finally:
                theirs.close()
        finally:
            os.close(body)

    def watch(self, memory: int | None, counted: bool, usage: int | None, seconds: float, cores: int) -> None:
        """Let the gate watch the sandbox's memory and processor time, where a cgroup counts them.

        `memory` is pollable: an eventfd, or if `counted` a file with events; `usage` is a file.
        """
        found = [descriptor for descriptor in (memory, usage) if descriptor is not None]
        flags = (
            (0 if memory is None else WATCH_MEMORY)
            | (WATCH_COUNTED if counted else 0)
            | (0 if usage is None else WATCH_CPU)
        )
        self._send(_REQUEST.pack(WATCH, flags, cores, 0, int(seconds * 1e6)), tuple(found))

    def roots(self, seconds: float) -> tuple[int, ...]:
        """Descriptors of the sandbox's root and of its overlay; none if its gate does not answer."""
        with self._lock:
            if self._refused is not None or self._socket.fileno() < 0:
                return ()
            self._send(_REQUEST.pack(SHOW_ROOTS, 0, 0, 0, 0))
            poll = select.poll()
            poll.register(self._socket, select.POLLIN)
            reply = self.receive() if poll.poll(seconds * 1000) else None
            if reply is not None and reply.kind == FAILED:
                self._refused = reply
            return () if reply is None or reply.kind != ROOTS else reply.descriptors

    def stop(self) -> None:
        """End everything inside at once, also for a thread that waits on it or a forked child with a copy."""
        with contextlib.suppress(OSError):
            self.end(0)
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End everything inside and let go."""
        self.stop()
        self._socket.close()

    def forget(self) -> None:
        """Close this process's copy only."""
        self._socket.close()


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """A command, where and with what it is started, and how long it may take."""

    argv: list[str]
    env: dict[str, str]
    cwd: str
    #: Seconds until everything of the run is asked to end, and from then until it is killed.
    wall: float | None = None
    grace: float
    #: Whether the new process says when it is there.
    tell: bool = False
    #: Lines and columns of its terminal, if it has one.
    size: tuple[int, int] = (24, 80)
    #: The terminal's settings as the kernel has them (TCGETS); empty: those of any new one.
    settings: bytes = b""
    #: Which of stdout and stderr (1, 2) are descriptors although there is a terminal.
    apart: tuple[int, ...] = ()
    #: It begins in the terminal's background: it is stopped, and that is told, when it wants to read.
    behind: bool = False
    #: Nothing is executed: it goes on in a copy of the sandbox's template, as `argv` says.
    resumed: bool = False
    #: It is process 2 inside, or refused.
    first: bool = False


def _send_fds(through: socket.socket, data: bytes, descriptors: tuple[int, ...]) -> None:
    message = [data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
    try:
        through.sendmsg(*message)
    except OSError as error:
        if error.errno != errno.ETOOMANYREFS:
            raise
        from stockade.gate.room import unhindered

        with unhindered():
            through.sendmsg(*message)


def _milliseconds(seconds: float) -> int:
    return min(int(seconds * 1000), 0xFFFFFFFF)


class Resident:
    """One resident gate process: a small one of its own, or one in a template."""

    def __init__(self, kind: str, *, scoped: bool, template: Template | None = None) -> None:
        self.owner = os.getpid()
        text = (
            -1 if template is None else _memory("template", template.text(kind, *EXTRA_ARGUMENTS[:1] or [""]))
        )
        try:
            self._begin(kind, scoped, template, text)
        finally:
            if text >= 0:
                os.close(text)

    def _begin(self, kind: str, scoped: bool, template: Template | None, text: int) -> None:
        self.filters = _own_filters()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._supervisor = os.pidfd_open(self.owner)
        except BaseException:
            self._socket.close()
            theirs.close()
            raise
        name, command = "stockade-gate", [gate.executable(), "resident", kind, *EXTRA_ARGUMENTS]
        environ: dict[str, str] = {}
        ends = [theirs.fileno(), self._supervisor]
        if template is not None:
            variables = [f"{key}={value}" for key, value in template.environ.items()]
            command = [gate.executable(), "template", kind, *variables, *template.argv]
            ends.append(text)
        if scoped:
            # systemd-run becomes the gate once it has moved itself.
            command = [*scope(os.environ), *command]
            name = command[0]
            environ = {name: os.environ[name] for name in BUS if name in os.environ}
        # By way of numbers that none has: dup2 onto 3 and 4 could otherwise meet one of them.
        spare = max(*ends, 5) + 1
        try:
            self.pid = os.posix_spawn(
                command[0],
                [name, *command[1:]],
                environ,
                file_actions=[
                    *((os.POSIX_SPAWN_DUP2, end, spare + i) for i, end in enumerate(ends)),
                    *((os.POSIX_SPAWN_OPEN, number, "/dev/null", os.O_RDWR, 0) for number in range(3)),
                    *((os.POSIX_SPAWN_DUP2, spare + i, 3 + i) for i in range(len(ends))),
                    *((os.POSIX_SPAWN_CLOSE, spare + i) for i in range(len(ends))),
                ],
            )
        except BaseException as error:
            self._socket.close()
            os.close(self._supervisor)
            # The spare numbers are beyond what this process may have open.
            if isinstance(error, OSError) and error.errno == errno.EBADF:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE)) from error
            raise
        finally:
            theirs.close()
        if template is not None:
            try:
                template.await_ready(self._socket)
            except BaseException:
                self._kill()
                raise
        elif scoped:
            self._await_scope()

    def _kill(self) -> None:
        """End a template that nobody will use, whatever it is doing."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.close()

    def _await_scope(self) -> None:
        """Wait until the gate runs: then it is where systemd has put it."""
        until = time.monotonic() + SCOPE_SECONDS
        while time.monotonic() < until:
            with contextlib.suppress(OSError), open(f"/proc/{self.pid}/comm", encoding="utf-8") as file:
                if file.read().strip() == "stockade-gate":
                    return
            time.sleep(0.002)
        self.close()
        raise SetupError("systemd did not start the gate in a scope of its own", stage="cgroup")

    def launch(self, plan: bytes, descriptors: tuple[int, ...]) -> Connection:
        """Begin a sandbox. Its gate answers on the connection that is returned."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            memory = _memory("plan", plan)
        except BaseException:
            ours.close()
            theirs.close()
            raise
        try:
            connection = Connection(ours, self)
            passed = (theirs.fileno(), memory, self._supervisor, *descriptors)
            _send_fds(self._socket, b"\0\0\0\0", passed)
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
        self.forget()
        if mine:
            # A host program that waits for any child may have been faster.
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.pid, 0)

    def forget(self) -> None:
        """Close this process's ends only."""
        self._socket.close()
        os.close(self._supervisor)


#: Given to the resident gate besides; the sabotage tests order their sabotage here.
EXTRA_ARGUMENTS: tuple[str, ...] = ()


class _Shared:
    """What the threads of this process share."""

    lock = threading.Lock()


#: Held while a template is started, which takes longer.
_starting: dict[Template, threading.Lock] = {}


#: By kind, whether systemd has started them in a scope, and the template that they live in, if any.
_residents: dict[tuple[object, ...], Resident] = {}


def resident(kind: str, *, scoped: bool, template: Template | None = None) -> Resident:
    """This process's resident gate of that kind, started where it is missing."""
    key = (kind, scoped) if template is None else (kind, scoped, template)
    with _Shared.lock if template is None else _starting.setdefault(template, threading.Lock()):
        if template is not None and template.retired.is_set():
            raise SetupError("the WarmPython is closed", stage="template")
        if key not in _residents:
            _residents[key] = Resident(kind, scoped=scoped, template=template)
        return _residents[key]


def launch(
    plan: bytes,
    descriptors: tuple[int, ...],
    kind: str = OWN_NETWORK,
    *,
    scoped: bool = False,
    template: Template | None = None,
) -> Connection:
    """Begin a sandbox through a resident gate, started again where it has died."""
    for _ in range(3):
        chosen = resident(kind, scoped=scoped, template=template)
        try:
            return chosen.launch(plan, descriptors)
        except OSError as error:
            # It died, or another thread has just replaced it.
            if error.errno not in (errno.EPIPE, errno.ECONNRESET, errno.EBADF, errno.ENOTCONN):
                raise
            renew(chosen)
    raise SetupError("the resident gate does not stay alive", stage="gate")


def renew(old: Resident) -> None:
    """Let the next launch start a new resident gate instead of this one."""
    with _Shared.lock:
        for kind, known in tuple(_residents.items()):
            if known is old:
                del _residents[kind]
                old.close()


def retire(template: Template) -> None:
    """End the resident gates that live in a template, for good; sandboxes that live go on."""
    template.retired.set()
    with _starting.get(template, contextlib.nullcontext()):
        for key, known in tuple(_residents.items()):
            if template in key:
                renew(known)
    _starting.pop(template, None)


def resident_pids() -> set[int]:
    """This process's resident gates."""
    return {resident.pid for resident in _residents.values()}


def shutdown() -> None:
    """End this process's resident gates. The next launch starts a new one."""
    for known in tuple(_residents.values()):
        renew(known)


def _after_fork() -> None:
    """A forked child starts a resident gate of its own, whatever its parent's threads were doing."""
    _Shared.lock = threading.Lock()
    _starting.clear()
    while _residents:
        _residents.popitem()[1].close()


def _at_exit() -> None:
    """The residents end when we do; nobody waits for that."""
    for known in _residents.values():
        known.forget()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)


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
