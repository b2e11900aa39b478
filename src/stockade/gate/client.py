"""The supervisor's end of the gate: starts resident gates, launches sandboxes, runs programs in them.

A supervisor has one resident gate for each kind of sandbox, which `launch`
starts on first use. A launch is one message, so threads do not wait for each
other; a forked child of the supervisor starts resident gates of its own.
"""

from __future__ import annotations

import _socket as socket  # without what makes socket slow to load: names for its numbers, and selectors
import atexit
import contextlib
import errno
import os
import select
import signal
import threading
import time

import msgspec

from stockade import gate
from stockade.errors import PolicyError, SetupError
from stockade.gate import wire
from stockade.gate.wire import Channel, Reply
from stockade.linux.cgroups import scope
from stockade.linux.descriptors import memory_file

TYPE_CHECKING = False
if TYPE_CHECKING:
    from stockade.gate.network import NetworkRequest
    from stockade.gate.template import Template

#: By the number of the stream that has a descriptor of its own although there is a terminal.
APART = {1: wire.EXEC_STDOUT, 2: wire.EXEC_STDERR}

#: The kinds whose residents need the supervisor to map the caller's subordinate ids, unless that is root.
MAPPED = (wire.KIND_MAPPED_OWN_NETWORK, wire.KIND_MAPPED_HOST_NETWORK)
UNSHARE_SECONDS = 5.0
#: How systemd of a user is found, and how long it may take.
BUS = ("XDG_RUNTIME_DIR", "DBUS_SESSION_BUS_ADDRESS")
SCOPE_SECONDS = 5.0


class Connection(Channel):
    """The supervisor's socket to the init of one sandbox."""

    def __init__(self, end: socket.socket, resident: Resident) -> None:
        super().__init__(end)
        self.resident = resident
        #: System call filters that the supervisor has itself: every sandbox has one more.
        self.filters_before = resident.filters
        #: Held while no program may start.
        self.starting = threading.Lock()
        self._lock = threading.Lock()
        self._refused: Reply | None = None

    def refusal(self) -> Reply | None:
        """Return the failure that the gate has reported, or None; every caller gets the same one."""
        with self._lock:
            if self._refused is None and self._socket.fileno() >= 0:
                self._socket.setblocking(False)
                self._refused = self._failure()
            return self._refused

    def _failure(self) -> Reply | None:
        try:
            while (reply := self.receive()) is not None:
                if reply.kind == wire.REPLY_FAILED:
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
        awaited: bool = False,
        entrance: int | None = None,
        more: tuple[int, ...] = (),
    ) -> Channel:
        """Start a program in the sandbox, and return the channel of its run.

        For a program on a terminal, `stdio` has only the streams that are `apart` from the terminal. The
        descriptors in `more`, or beyond three in `stdio`, become the program's 3, 4 and so on. Unless the run
        is `kept`, the sandbox ends with it. A kept run that the caller waits for (`awaited`) has no keeper if
        nothing else runs inside. `entrance` is the file through which the program enters a cgroup.
        """
        stdio, more = stdio[:3], (*stdio[3:], *more)
        if len(more) > wire.EXEC_MORE_MOST:
            raise PolicyError(f"a program gets at most {wire.EXEC_MORE_MOST} descriptors besides its streams")
        last = () if entrance is None else (entrance,)
        strings = [program.cwd, *program.argv, *(f"{key}={value}" for key, value in program.env.items())]
        content = "\0".join(strings).encode("utf-8", "surrogateescape") + b"\0"
        if len(content) > wire.EXEC_MAX_SIZE - wire.EXEC_BODY.size:
            raise PolicyError(
                f"the command and its environment take {len(content)} bytes, more than {wire.EXEC_MAX_SIZE}",
                hint="hand large data in through a file or standard input",
            )
        settings = program.settings
        header = wire.EXEC_BODY.pack(
            wire.EXEC_BODY.size + len(content), len(program.argv), len(program.env), *program.ids,
            bool(settings), settings,
        )  # fmt: skip
        body = header + content
        flags = (
            (wire.EXEC_KEPT if kept else 0)
            | (wire.EXEC_AWAITED if awaited else 0)
            | (wire.EXEC_TERMINAL if len(stdio) < 3 else 0)
            | sum(APART[number] for number in program.apart)
            | (wire.EXEC_BEHIND if program.behind else 0)
            | (wire.EXEC_LONG if len(body) > wire.EXEC_SHORT else 0)
            | len(more) << wire.EXEC_MORE_AT
            | (wire.EXEC_TELL if program.tell else 0)
            | (wire.EXEC_RESUME if program.resumed else 0)
            | (wire.EXEC_FIRST if program.first else 0)
            | (0 if entrance is None else wire.EXEC_ENTER)
        )
        lines, columns = program.size
        wall = 0 if program.wall is None else max(1, int(program.wall * 1e6))
        grace = wire.milliseconds(program.grace)
        request = wire.REQUEST.pack(wire.REQUEST_EXEC, flags, lines << 16 | columns, grace, wall)
        if not kept:
            self._start(request, body, (*stdio, *more, *last))
            return self
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            channel = Channel(ours)
            self._start(request, body, (*stdio, *more, theirs.fileno(), *last))
            return channel
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()

    def _start(self, request: bytes, body: bytes, descriptors: tuple[int, ...]) -> None:
        """Send a request with its body: behind it, or if that is long, as a file."""
        file = memory_file("exec", body) if len(body) > wire.EXEC_SHORT else -1
        try:
            with self.starting:
                if file < 0:
                    self._send(request + body, descriptors)
                else:
                    self._send(request, (file, *descriptors))
        finally:
            if file >= 0:
                os.close(file)

    def watch(self, memory: int | None, counted: bool, usage: int | None, seconds: float, cores: int) -> None:
        """Let init watch the sandbox's memory and processor time, where a cgroup counts them.

        `memory` is pollable: an eventfd, or if `counted` a file with events; `usage` is a file.
        """
        found = [descriptor for descriptor in (memory, usage) if descriptor is not None]
        flags = (
            (0 if memory is None else wire.WATCH_MEMORY)
            | (wire.WATCH_COUNTED if counted else 0)
            | (0 if usage is None else wire.WATCH_CPU)
        )
        self._send(wire.REQUEST.pack(wire.REQUEST_WATCH, flags, cores, 0, int(seconds * 1e6)), tuple(found))

    def serve_publisher(self, end: int) -> None:
        """Hand init a SOCK_SEQPACKET socket whose other end may ask for connections to the sandbox's ports.

        It replaces the last one. Init closes it where the sandbox has the host's network.
        """
        self._send(wire.REQUEST.pack(wire.REQUEST_SERVE, 0, 0, 0, 0), (end,))

    def roots(self, seconds: float) -> tuple[int, ...]:
        """Return descriptors of the sandbox's root and of its overlay; none if its init does not answer."""
        with self._lock:
            if self._refused is not None or self._socket.fileno() < 0:
                return ()
            self._send(wire.REQUEST.pack(wire.REQUEST_ROOTS, 0, 0, 0, 0))
            poll = select.poll()
            poll.register(self._socket, select.POLLIN)
            reply = self.receive() if poll.poll(seconds * 1000) else None
            if reply is not None and reply.kind == wire.REPLY_FAILED:
                self._refused = reply
            return () if reply is None or reply.kind != wire.REPLY_ROOTS else reply.descriptors

    def stop(self) -> None:
        """Kill everything inside at once, also where another thread waits or a forked child has a copy."""
        with contextlib.suppress(OSError):
            self.end(0)
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Kill everything inside and close the socket."""
        self.stop()
        self._socket.close()

    def forget(self) -> None:
        """Close this process's copy of the socket only."""
        self._socket.close()


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """A command, where and with what it is started, and how long it may take."""

    argv: list[str]
    env: dict[str, str]
    cwd: str
    #: Seconds until the gate asks every process of the run to end, and from then until it kills them.
    wall: float | None = None
    grace: float
    #: Whether the gate replies REPLY_STARTED when the new process is about to execute.
    tell: bool = False
    #: Lines and columns of its terminal, if it has one.
    size: tuple[int, int] = (24, 80)
    #: The terminal's settings as the kernel has them (TCGETS); empty: those of any new one.
    settings: bytes = b""
    #: Which of stdout and stderr (1, 2) are descriptors although there is a terminal.
    apart: tuple[int, ...] = ()
    #: It begins in the terminal's background: the kernel stops it when it wants to read; the gate says so.
    behind: bool = False
    #: Nothing is executed: it goes on in a copy of the sandbox's template, as `argv` says.
    resumed: bool = False
    #: It must become process 2 inside; the gate refuses it otherwise.
    first: bool = False
    #: The user and the group inside that it runs as, without further groups; None: as the sandbox's root, or
    #: where it maps none, as the caller. The group of a user alone has the user's number.
    uid: int | None = None
    gid: int | None = None

    def __post_init__(self) -> None:
        if self.gid is not None and self.uid is None:
            raise PolicyError("a group without a user", hint="say as which user the program runs: uid")
        for id in (self.uid, self.gid):
            if id is not None and not 0 <= id < wire.NO_ID:
                raise PolicyError(f"{id} is not an id of a user or group", hint="write a number from 0")

    @property
    def ids(self) -> tuple[int, int]:
        """User and group as a request has them."""
        if self.uid is None:
            return wire.NO_ID, wire.NO_ID
        return self.uid, self.uid if self.gid is None else self.gid


class Resident:
    """One resident gate process: a small one of its own, or one in a template."""

    def __init__(
        self, kind: str, *, scoped: bool, template: Template | None = None, wait: bool = True
    ) -> None:
        self.owner = os.getpid()
        #: The template that has not said yet that it is ready.
        self._loading = template
        self._awaiting = threading.Lock()
        text = -1
        if template is not None:
            text = memory_file("template", template.text(kind, *EXTRA_ARGUMENTS[:1] or [""]))
        try:
            self._begin(kind, scoped, template, text)
        finally:
            if text >= 0:
                os.close(text)
        if wait:
            try:
                self.await_template()
            except BaseException:
                self.kill()
                raise

    @property
    def loading(self) -> bool:
        """Whether its template is still loading modules, as far as this process has heard."""
        return self._loading is not None

    def fileno(self) -> int:
        """Return the descriptor that is readable when a template that was loading is ready, or has failed."""
        return self._socket.fileno()

    def await_template(self) -> None:
        """Wait until the template is ready; raise SetupError with its reason if it cannot be."""
        with self._awaiting:
            if self._loading is not None:
                self._loading.await_ready(self._socket)
                self._loading = None

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
        spare = max(*ends, wire.OPEN_TEXT) + 1
        try:
            self.pid = os.posix_spawn(
                command[0],
                [name, *command[1:]],
                environ,
                file_actions=[
                    *((os.POSIX_SPAWN_DUP2, end, spare + i) for i, end in enumerate(ends)),
                    *((os.POSIX_SPAWN_OPEN, number, "/dev/null", os.O_RDWR, 0) for number in range(3)),
                    *((os.POSIX_SPAWN_DUP2, spare + i, wire.OPEN_CONTROL + i) for i in range(len(ends))),
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
        if template is None and scoped:
            self._await_scope()
        if kind in MAPPED and os.geteuid() != 0:
            try:
                self._map_ids()
            except BaseException:
                self.kill()
                raise

    def _map_ids(self) -> None:
        """Have the caller's subordinate ids mapped in the user namespace that the resident has just made."""
        from stockade.linux import subordinate_ids

        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        said = self._socket.recv(256) if poll.poll(UNSHARE_SECONDS * 1000) else b""
        if said != wire.WORD_UNSHARED.encode():
            raise SetupError(
                f"the gate has no user namespace: {said.decode('utf-8', 'replace') or 'it ended'}",
                stage="namespaces",
                hint="`stockade doctor` says what forbids user namespaces here",
            )
        subordinate_ids.write_maps(self.pid)
        self._socket.send(wire.WORD_MAPPED.encode())

    def kill(self) -> None:
        """End a template that nobody will use, whatever it is doing."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.close()

    def _await_scope(self) -> None:
        """Wait until systemd-run has become the gate, which is then in its scope."""
        until = time.monotonic() + SCOPE_SECONDS
        while time.monotonic() < until:
            with contextlib.suppress(OSError), open(f"/proc/{self.pid}/comm", encoding="utf-8") as file:
                if file.read().strip() == "stockade-gate":
                    return
            time.sleep(0.002)
        self.close()
        raise SetupError(
            "systemd did not start the gate in a scope of its own",
            stage="cgroup",
            hint="try `systemd-run --scope true`, with `--user` unless you are root",
        )

    def launch(self, plan: bytes, descriptors: tuple[int, ...]) -> Connection:
        """Begin a sandbox, and return the connection on which its init answers."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            memory = memory_file("plan", plan)
        except BaseException:
            ours.close()
            theirs.close()
            raise
        try:
            connection = Connection(ours, self)
            wire.send_launch(self._socket, theirs.fileno(), memory, self._supervisor, descriptors)
            return connection
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
            os.close(memory)

    def open_network(
        self,
        namespace: int,
        ports: tuple[int, ...],
        datagrams: tuple[int, ...] = (),
        *,
        more: bool = False,
        loopback: bool = False,
    ) -> NetworkRequest:
        """Ask for listeners in a sandbox's network namespace, on these ports of TCP and UDP; does not wait.

        Without `more` and `loopback` there are also some on port 53 of both.

        With `more`, the network has been opened before, and only listeners on these ports are added. With
        `loopback` they are TCP ports of 127.0.0.1 alone, and nothing is routed.
        """
        from stockade.gate.network import NetworkRequest

        return NetworkRequest(self._socket, namespace, ports, datagrams, more=more, loopback=loopback)

    def close(self) -> None:
        """End the resident gate; living sandboxes go on. A forked child only closes its copy."""
        mine = self.owner == os.getpid()
        if mine:
            # Otherwise copies in forked children would keep the resident gate waiting.
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
        self.forget()
        if mine:
            # A host program that waits for any child may have been faster.
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.pid, 0)

    def forget(self) -> None:
        """Close this process's descriptors only."""
        self._socket.close()
        os.close(self._supervisor)


#: More arguments for the resident gate; tests of sabotage say here what it leaves out.
EXTRA_ARGUMENTS: tuple[str, ...] = ()


class _ResidentTable:
    """The lock over `_residents`, which a forked child replaces."""

    lock = threading.Lock()


#: Held while a template is started, which takes longer.
_starting: dict[Template, threading.Lock] = {}


#: By kind, whether systemd started it in a scope, and the template that it lives in, if any.
_residents: dict[tuple[object, ...], Resident] = {}


def resident(kind: str, *, scoped: bool, template: Template | None = None, wait: bool = True) -> Resident:
    """Return this process's resident gate of that kind, and start it if there is none.

    Without `wait`, the template of a new one may still be loading.
    """
    key = (kind, scoped) if template is None else (kind, scoped, template)
    with _ResidentTable.lock if template is None else _starting.setdefault(template, threading.Lock()):
        if template is not None and template.retired.is_set():
            raise SetupError("the WarmPython is closed", stage="template", hint="open another WarmPython")
        if key not in _residents:
            _residents[key] = Resident(kind, scoped=scoped, template=template, wait=wait)
        return _residents[key]


def launch(
    plan: bytes,
    descriptors: tuple[int, ...],
    kind: str = wire.KIND_OWN_NETWORK,
    *,
    scoped: bool = False,
    template: Template | None = None,
) -> Connection:
    """Begin a sandbox through a resident gate, and start that again if it has died."""
    for _ in range(3):
        chosen = resident(kind, scoped=scoped, template=template)
        try:
            return chosen.launch(plan, descriptors)
        except OSError as error:
            # It died, or another thread has just replaced it.
            if error.errno not in (errno.EPIPE, errno.ECONNRESET, errno.EBADF, errno.ENOTCONN):
                raise
            renew(chosen)
    raise SetupError(
        "the resident gate ended three times in a row",
        stage="gate",
        hint="`stockade doctor` tries out what the gate needs",
    )


def renew(old: Resident) -> None:
    """Let the next launch start a new resident gate instead of this one."""
    with _ResidentTable.lock:
        for kind, known in tuple(_residents.items()):
            if known is old:
                del _residents[kind]
                old.close()


def discard(old: Resident) -> None:
    """Kill a resident gate whose template did not get ready; the next launch starts a new one."""
    with _ResidentTable.lock:
        for kind, known in tuple(_residents.items()):
            if known is old:
                del _residents[kind]
                old.kill()


def retire(template: Template) -> None:
    """End the resident gates that live in a template, for good; living sandboxes go on."""
    template.retired.set()
    with _starting.get(template, contextlib.nullcontext()):
        for key, known in tuple(_residents.items()):
            if template in key:
                renew(known)
    _starting.pop(template, None)


def resident_pids() -> set[int]:
    """Return the process numbers of this process's resident gates."""
    return {resident.pid for resident in _residents.values()}


def shutdown() -> None:
    """End this process's resident gates. The next launch starts a new one."""
    for known in tuple(_residents.values()):
        renew(known)


def _after_fork() -> None:
    """Let a forked child start resident gates of its own, whatever its parent's threads were doing."""
    _ResidentTable.lock = threading.Lock()
    _starting.clear()
    while _residents:
        _residents.popitem()[1].close()


def _at_exit() -> None:
    """Close what leads to the resident gates, which end with this process. A later run starts a new one."""
    while _residents:
        _residents.popitem()[1].forget()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)


def _own_filters() -> int:
    """Return how many system call filters this process is under already."""
    with open("/proc/self/status", "rb", buffering=0) as file:
        lines = file.read().splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith(b"Seccomp_filters:")), 0)
