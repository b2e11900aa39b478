"""The resolver of this supervisor: started on first need, its walls checked, started again if it has died.

`egress/resolver.py` is what it executes.
"""

from __future__ import annotations

import _socket
import contextlib
import os
import resource
import select
import signal
import sys
import threading
import time

import msgspec

from stockade import gate
from stockade.backends.egress_plan import RESOLVER_FILES, RESOLVER_TREES, compile_resolver_plan
from stockade.backends.seccomp import egress_calls
from stockade.errors import SetupError
from stockade.gate import wire
from stockade.gate.operations import Plan
from stockade.host import host
from stockade.linux import os_errors
from stockade.runs.evidence import observe_confined
from stockade.runs.io.eventloop import Events, Steps

#: How long it may take until its walls are up.
START_SECONDS = 20.0
#: How often a launch looks whether another thread has seen that.
LOOK_AGAIN = 0.02
ANSWER_SIZE = 4096
CODE = "import sys; sys.path.append(sys.argv[2]); from stockade.egress.resolver import main; main()"
ENVIRON = {"LANG": "C.UTF-8"}


class ResolverEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """The walls of the resolver, as the supervisor observed them."""

    #: The hash of its plan.
    plan: str
    #: Its user on the host, and how many system call filters it is under, read from the kernel.
    uid: int
    filters: int
    #: The trees that it may read, and the SHA-256 of its filter, by the word of the gate's library in it.
    trees: tuple[str, ...]
    filter: str


class ResolverProcess:
    """One resolver, from its start to its end."""

    def __init__(self, home: str) -> None:
        self.owner = os.getpid()
        self.places = _places()
        self._plan = _plan(home)
        self._filters_before = _own_filters()
        self._checking = threading.Lock()
        self._evidence: ResolverEvidence | None = None
        self._control, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
        supervisor = -1
        try:
            supervisor = os.pidfd_open(self.owner)
            self.pid = _spawn((theirs.fileno(), supervisor))
            self._pidfd = os.pidfd_open(self.pid)
            self._control.send(self._plan.encoded)
        except BaseException:
            self._control.close()
            raise
        finally:
            theirs.close()
            if supervisor >= 0:
                os.close(supervisor)

    @property
    def alive(self) -> bool:
        """Whether its process has not ended."""
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return not poll.poll(0)

    def ready(self, events: Events) -> Steps[ResolverEvidence]:
        """Wait until its walls are up, and check them."""
        late = time.monotonic() + START_SECONDS
        events.watch(self._control.fileno())
        try:
            while self._evidence is None:
                yield LOOK_AGAIN
                if self._control.fileno() in events.ready:
                    self._check()
                if time.monotonic() >= late:
                    raise _failure(f"the resolver had not raised its walls after {START_SECONDS:g} s")
        finally:
            events.forget(self._control.fileno())
        return self._evidence

    def _check(self) -> None:
        with self._checking:
            if self._evidence is not None:
                return
            try:
                said = msgspec.json.decode(self._control.recv(ANSWER_SIZE) or b"{}", type=dict[str, object])
            except ConnectionResetError:
                said = {}
            if said.get("confined") is not True:
                raise _failure(f"the resolver could not confine itself: {said.get('error', 'it ended')}")
            if said.get("filter") != self._plan.filter or said.get("rules") != self._plan.rules:
                raise _failure("the walls of the resolver are not those of its plan")
            filters = self._filters_before + 1
            self._evidence = ResolverEvidence(
                plan=self._plan.hash,
                uid=observe_confined(self.pid, filters, self._plan),
                filters=filters,
                trees=tuple(path for path, _ in self.places),
                filter=self._plan.filter,
            )

    def connect(self) -> int:
        """Return a descriptor for an egress process, on which it may ask for names."""
        ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
        try:
            wire.send_with_descriptors(self._control, b"\0", (theirs.fileno(),))
            return ours.detach()
        finally:
            ours.close()
            theirs.close()

    def close(self) -> None:
        """End it. A forked child only closes its copies."""
        self._control.close()
        if self.owner == os.getpid():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            # A host program that waits for any child may have been faster.
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.pid, 0)
        os.close(self._pidfd)


class _ResolverTable:
    """The resolver of this process."""

    lock = threading.Lock()
    current: ResolverProcess | None = None


def resolver(home: str = "") -> ResolverProcess:
    """Return the resolver, a new one if there is none, it has ended, or the host keeps its files elsewhere.

    Its walls may not be up yet. `home` is the state directory, where compiled filters are kept.
    """
    with _ResolverTable.lock, os_errors.setup_errors():
        current = _ResolverTable.current
        if current is not None and (not current.alive or current.places != _places()):
            _ResolverTable.current = None
            current.close()
        if _ResolverTable.current is None:
            _ResolverTable.current = ResolverProcess(home)
        return _ResolverTable.current


def warm_up(home: str = "") -> None:
    """Start the resolver, if there is none, and do not wait until it is ready."""
    if _ResolverTable.current is None:
        resolver(home)


def connect_resolver(events: Events, home: str = "") -> Steps[tuple[int, ResolverEvidence]]:
    """Return a descriptor by which an egress process asks for names, and the resolver's evidence."""
    with os_errors.setup_errors():
        for attempt in range(2):
            chosen = resolver(home)
            evidence = yield from chosen.ready(events)
            try:
                return chosen.connect(), evidence
            except (BrokenPipeError, ConnectionResetError):
                # It is about to end.
                _discard(chosen)
                if attempt:
                    raise
    raise AssertionError("unreachable")


def _discard(old: ResolverProcess) -> None:
    with _ResolverTable.lock:
        if _ResolverTable.current is old:
            _ResolverTable.current = None
            old.close()


def resolver_pids() -> set[int]:
    """Return the process number of the resolver, if there is one."""
    current = _ResolverTable.current
    return set() if current is None else {current.pid}


def shutdown() -> None:
    """End the resolver. The next launch starts a new one."""
    with _ResolverTable.lock:
        current, _ResolverTable.current = _ResolverTable.current, None
    if current is not None:
        current.close()


def _after_fork() -> None:
    """Let a forked child start a resolver of its own."""
    _ResolverTable.lock = threading.Lock()
    current, _ResolverTable.current = _ResolverTable.current, None
    if current is not None:
        current.close()


os.register_at_fork(after_in_child=_after_fork)


def _places() -> tuple[tuple[str, tuple[int, int]], ...]:
    """Return the trees that a lookup reads, by their real names, with device and inode."""
    trees = [*RESOLVER_TREES, os.path.dirname(os.path.realpath("/etc/resolv.conf"))]
    found: dict[str, tuple[int, int]] = {}
    for tree in map(os.path.realpath, trees):
        with contextlib.suppress(OSError):
            info = os.stat(tree)
            if tree != "/":
                found[tree] = info.st_dev, info.st_ino
    return tuple(sorted(found.items()))


def _plan(home: str) -> Plan:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return compile_resolver_plan(
        host().landlock,
        tuple(path for path, _ in _places()),
        RESOLVER_FILES if most == resource.RLIM_INFINITY else min(RESOLVER_FILES, most),
        egress_calls.program("resolver", home),
    )


def _spawn(ends: tuple[int, ...]) -> int:
    """Start the interpreter with /dev/null as 0, 1 and 2, and the ends as its further descriptors."""
    place = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(gate.__file__))))
    # By way of numbers that none has: dup2 onto 3 and 4 could otherwise meet one of them.
    spare = max(*ends, 4) + 1
    return os.posix_spawn(
        sys.executable,
        [sys.executable, "-I", "-S", "-B", "-c", CODE, gate.library(), place],
        ENVIRON,
        file_actions=[
            *((os.POSIX_SPAWN_DUP2, end, spare + i) for i, end in enumerate(ends)),
            *((os.POSIX_SPAWN_OPEN, number, "/dev/null", os.O_RDWR, 0) for number in range(3)),
            *((os.POSIX_SPAWN_DUP2, spare + i, 3 + i) for i in range(len(ends))),
            *((os.POSIX_SPAWN_CLOSE, spare + i) for i in range(len(ends))),
        ],
        setpgroup=0,
    )


def _own_filters() -> int:
    with open("/proc/self/status", "rb", buffering=0) as file:
        lines = file.read().splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith(b"Seccomp_filters:")), 0)


def _failure(what: str) -> SetupError:
    return SetupError(
        what,
        stage="resolver",
        hint="this is a bug in Stockade or in this kernel; please report it with `stockade doctor --json`",
    )
