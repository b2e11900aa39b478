"""The egress process of one sandbox, seen from the supervisor: its start, its walls, and its end.

It is a copy of the egress template in a sandbox of its own, with the host's network and none of its files
(`backends/egress_plan.py`). The supervisor observes its walls like those of any sandbox. The process then
installs a second system call filter, which the supervisor sees in /proc, and only then gets the sandbox's
listeners.
"""

from __future__ import annotations

import _socket
import contextlib
import errno
import os
import resource
import select
import threading
import time
from collections.abc import Mapping

import msgspec

from stockade.backends.egress_plan import EgressInputs, compile_egress_plan
from stockade.backends.seccomp import egress_calls
from stockade.errors import SetupError
from stockade.gate import client, wire
from stockade.gate.operations import LandlockRules, Plan
from stockade.gate.template import Template
from stockade.host import host
from stockade.linux import descriptors as packets
from stockade.linux import os_errors
from stockade.linux.sha256 import sha256
from stockade.runs.evidence import Evidence, observe_filter
from stockade.runs.io.eventloop import Events, Steps
from stockade.runs.launch import GateDiedError, LaunchWatch, abandon, observe_launch, wait_for_end
from stockade.runs.network.egress_template import egress_template

#: Two sockets and four ends of pipes for each of 1,024 connections, the listeners, and 512 flows.
FILES = 8192
#: How long the process may take to answer; what it does takes milliseconds.
ANSWER_SECONDS = 10.0
#: How long it may go on passing on what programs have sent before their sandbox ended.
DRAIN_SECONDS = 3.0
#: How often a launch is tried: a template may end or become stale meanwhile.
ATTEMPTS = 4
#: How often a launch looks whether another thread has heard that the template is ready.
LOOK_AGAIN = 0.02
#: The longest answer.
ANSWER_SIZE = 65536
#: The most descriptors that it may hand over: 65 ports in two families, DNS, and 64 published ports.
MOST_HANDED = 2 * 65 + 2 + 64
_CREDENTIALS = _socket.CMSG_SPACE(packets.CREDENTIALS.size) + _socket.CMSG_SPACE(16)
#: What the copy executes, with the filter in hexadecimal as its argument. At its end nothing is taken apart:
#: that would only write to pages that it shares with the template.
CODE = """\
import os, sys
from stockade.egress import confined, process
confined.confine(3, sys.argv[1])
process.main(3)
os._exit(0)
"""


class EgressEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """The walls of an egress process, as the supervisor observed them."""

    walls: Evidence
    #: The hash of its plan.
    plan: str
    #: The TCP ports that Landlock lets it connect to; None where this kernel's Landlock knows no ports.
    ports: tuple[int, ...] | None
    #: How many system call filters its process is under, read from the kernel.
    filters: int
    #: The SHA-256 of the second one, by the word of the process that installed it.
    relay_filter: str


class EgressProcess:
    """A running egress process. Its end shows as a readable `pidfd`."""

    def __init__(
        self,
        connection: client.Connection,
        pidfd: int,
        control: _socket.socket,
        evidence: EgressEvidence,
        pid: int,
    ) -> None:
        #: As the supervisor's /proc has it.
        self.pid = pid
        self._connection = connection
        self._control = control
        self._owner = os.getpid()
        self.pidfd = pidfd
        self.evidence = evidence
        self.is_closed = False
        #: How it ended by itself, which its gate says once.
        self._ending: tuple[float, str] | None = None
        self._asking = threading.Lock()
        #: Messages that it has not answered.
        self._unanswered = 0

    @property
    def alive(self) -> bool:
        """Whether its sandbox still exists."""
        if self.is_closed:
            return False
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return not poll.poll(0)

    def ending(self) -> tuple[float, str] | None:
        """Return when it ended by itself, in seconds since 1970, and how; None while it goes on."""
        with self._asking:
            if self._ending is None and not self.is_closed and not self.alive:
                self._ending = self._read_ending()
            return self._ending

    def _read_ending(self) -> tuple[float, str]:
        how, at = "it was killed", time.time()
        poll = select.poll()
        poll.register(self._connection.fileno(), select.POLLIN)
        while poll.poll(0) and (reply := self._connection.receive()) is not None:
            if reply.kind == wire.REPLY_EXITED:
                at -= max(0.0, time.monotonic() - reply.at) if reply.at else 0.0
                code = os.waitstatus_to_exitcode(reply.status)
                how = f"with exit code {code}" if code >= 0 else f"by signal {-code}"
        return at, how

    def hang_up(self) -> None:
        """Let it end once it has passed on what programs have sent; does not wait."""
        if not self.is_closed and self._owner == os.getpid():
            with contextlib.suppress(OSError):
                self._control.shutdown(_socket.SHUT_WR)

    def drained(self, events: Events) -> Steps[None]:
        """Let it pass on what programs have sent, and wait until it has ended, for a moment at most."""
        if self.is_closed or self._owner != os.getpid():
            return
        self.hang_up()
        late = time.monotonic() + DRAIN_SECONDS
        events.watch(self.pidfd)
        try:
            while (left := late - time.monotonic()) > 0:
                yield left
                if self.pidfd in events.ready:
                    return
        finally:
            events.forget(self.pidfd)

    def configure(
        self,
        message: Mapping[str, object],
        descriptors: tuple[int, ...],
        events: Events,
        values: memoryview | None = None,
    ) -> Steps[object]:
        """Hand it the rules, the listeners and the values of secrets, and wait until it relays.

        Returns its authority, if it has one.
        """
        answer = yield from self.ask(message, descriptors, events, values)
        if answer.get("ready") is not True:
            raise _failure("the egress process did not get ready", answer)
        return answer.get("authority")

    def ask(
        self,
        message: Mapping[str, object],
        descriptors: tuple[int, ...],
        events: Events,
        values: memoryview | None = None,
    ) -> Steps[dict[str, object]]:
        """Send it a message and return its answer. Only one caller at a time.

        `values` are those of the secrets that the message describes, in a packet of their own: they go from
        their locked memory to that of the process, and through no other.
        """
        with os_errors.setup_errors():
            encoded = msgspec.json.encode(message)
            answer, _ = yield from self._exchange(encoded, descriptors, 0, events, values)
            return answer

    def take_over(self, names: int, events: Events) -> Steps[tuple[dict[str, object], tuple[int, ...]]]:
        """Take its listeners, which it then has no more, and let it write its names to a file in memory.

        Returns its answer and the descriptors, whatever they are: it is not trusted.
        """
        with os_errors.setup_errors():
            return (yield from self._exchange(b'{"handover": true}', (names,), MOST_HANDED, events))

    def _exchange(
        self,
        message: bytes,
        descriptors: tuple[int, ...],
        most: int,
        events: Events,
        values: memoryview | None = None,
    ) -> Steps[tuple[dict[str, object], tuple[int, ...]]]:
        """Send a message, and return its answer with at most so many descriptors."""
        try:
            wire.send_with_descriptors(self._control, message, descriptors)
            if values is not None:
                self._control.send(values)
        except BrokenPipeError:
            raise _failure("the egress process has ended") from None
        self._unanswered += 1
        while True:
            answer, _, handed = yield from _receive(self._control, events, most=most)
            self._unanswered -= 1
            if not self._unanswered:
                return answer, handed
            # It answers, too late, what an earlier caller has asked.
            for descriptor in handed:
                os.close(descriptor)

    def closed(self, events: Events) -> Steps[None]:
        """End it and wait until it is gone. A forked child only closes its copies."""
        if self.is_closed:
            return
        self.is_closed = True
        self._control.close()
        if self._owner != os.getpid():
            self._connection.forget()
            os.close(self.pidfd)
            return
        self._connection.close()
        yield from wait_for_end(self.pidfd, events)


def launch_egress(
    ports: tuple[int, ...], events: Events, *, home: str = "", judges: bool = False, udp: bool = False
) -> Steps[EgressProcess]:
    """Start an egress process that may connect to these TCP ports, and check its walls.

    With `judges` it can end TLS and judge requests, with `udp` make sockets for datagrams.

    `home` is the state directory, where compiled filters are kept. A failure leaves nothing behind.
    """
    return (yield from launch_in_copy(ports, events, CODE, home=home, judges=judges, udp=udp))


def launch_in_copy(
    ports: tuple[int, ...],
    events: Events,
    code: str,
    *,
    home: str = "",
    judges: bool = False,
    udp: bool = False,
) -> Steps[EgressProcess]:
    """Do what `launch_egress` does with other code, which has to report the second filter as that does."""
    with os_errors.setup_errors():
        plan = egress_plan(ports, home, udp=udp)
        relay = egress_calls.program("relay-udp" if udp else "relay", home)
        for attempt in range(ATTEMPTS):
            template = egress_template(judges=judges)
            try:
                return (yield from _launch(plan, template, code, relay, events))
            except (SetupError, OSError, ValueError) as error:
                # The template died before it read the request, or another thread has found that, or that it
                # is stale, and has closed the socket to it: then its number is -1, a ValueError.
                closed = isinstance(error, OSError) and error.errno == errno.EBADF
                again = template.retired.is_set() or isinstance(error, GateDiedError | ValueError) or closed
                if not again or attempt == ATTEMPTS - 1:
                    raise
    raise AssertionError("unreachable")


def egress_plan(ports: tuple[int, ...], home: str = "", *, udp: bool = False) -> Plan:
    """Return the plan of an egress process on this host; with `udp` it may make sockets for datagrams."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return compile_egress_plan(
        EgressInputs(
            root=os.geteuid() == 0,
            landlock=host().landlock,
            ports=ports,
            files=FILES if most == resource.RLIM_INFINITY else min(FILES, most),
            program=egress_calls.program("gate-udp" if udp else "gate", home),
        )
    )


def _launch(plan: Plan, template: Template, code: str, relay: bytes, events: Events) -> Steps[EgressProcess]:
    yield from _until_ready(template, events)
    connection = client.launch(plan.encoded, (), wire.KIND_HOST_NETWORK, template=template)
    held: list[int] = []
    evidence = Evidence()
    control: _socket.socket | None = None
    try:
        events.watch(connection.fileno())
        reply = yield from observe_launch(connection, plan, held, evidence, events, LaunchWatch())
        if reply.kind != wire.REPLY_READY:
            from stockade.runs.explain.gate_refused import failure

            raise failure(reply)
        control = _start(connection, code, relay)
        said, pid, _ = yield from _receive(control, events, connection)
        filters = observe_filter(pid, reply.pid, connection.filters_before + 2)
        if said.get("filter") != sha256(relay).hexdigest():
            raise _failure("the egress process installed another filter than the one it was given", said)
    except BaseException as error:
        if control is not None:
            control.close()
        yield from abandon(connection, held, events)
        if isinstance(error, GateDiedError) and not held:
            client.renew(connection.resident)
        raise
    events.forget(connection.fileno())
    for descriptor in held[1:]:
        os.close(descriptor)
    by_port = any(op.network for op in plan.ops if isinstance(op, LandlockRules))
    return EgressProcess(
        connection,
        held[0],
        control,
        EgressEvidence(
            walls=evidence,
            plan=plan.hash,
            ports=plan.ports if by_port else None,
            filters=filters,
            relay_filter=str(said["filter"]),
        ),
        pid,
    )


def _until_ready(template: Template, events: Events) -> Steps[None]:
    """Wait until the template has loaded its modules, without keeping other steps from going on."""
    resident = client.resident(wire.KIND_HOST_NETWORK, scoped=False, template=template, wait=False)
    if not resident.loading:
        return
    until = time.monotonic() + template.seconds
    try:
        # A copy: another thread that finds the template stale closes the socket.
        ready = os.dup(resident.fileno())
        try:
            events.watch(ready)
            while resident.loading and time.monotonic() < until:
                yield LOOK_AGAIN
                if template.retired.is_set():
                    raise _failure("the egress template became stale while it started")
                if ready in events.ready:
                    resident.await_template()
        finally:
            events.forget(ready)
            os.close(ready)
        resident.await_template()
    except SetupError:
        client.discard(resident)
        raise


def _start(connection: client.Connection, code: str, relay: bytes) -> _socket.socket:
    """Let the code go on in the copy, with a socket to this process as its descriptor 3; return our end."""
    ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    ours.setsockopt(_socket.SOL_SOCKET, _socket.SO_PASSCRED, 1)
    nothing = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    try:
        program = client.Program(
            argv=["stockade-egress", "-c", code, relay.hex()], env={}, cwd="/", grace=0.0, resumed=True
        )
        stdio = (nothing, nothing, nothing)
        connection.execute(program, stdio, kept=False, more=(theirs.fileno(), nothing))
        return ours
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
        os.close(nothing)


def _receive(
    control: _socket.socket, events: Events, connection: client.Connection | None = None, *, most: int = 0
) -> Steps[tuple[dict[str, object], int, tuple[int, ...]]]:
    """Return the next message of the process, its pid as the kernel has it, and up to `most` descriptors."""
    late = time.monotonic() + ANSWER_SECONDS
    events.watch(control.fileno())
    try:
        while True:
            yield max(0.0, late - time.monotonic())
            if control.fileno() in events.ready:
                break
            if connection is not None and connection.fileno() in events.ready:
                raise _failure(f"the egress process ended at once{_why(connection.receive())}")
            if time.monotonic() >= late:
                raise _failure(f"the egress process did not answer within {ANSWER_SECONDS:g} s")
    finally:
        events.forget(control.fileno())
    packet = packets.receive(control, ANSWER_SIZE, _CREDENTIALS + _socket.CMSG_SPACE(4 * most))
    if packet is None or not packet.data:
        raise _failure("the egress process has ended")
    try:
        answer = msgspec.json.decode(packet.data, type=dict[str, object])
    except (msgspec.MsgspecError, RecursionError):
        packet.close()
        raise _failure("the egress process said something that is no answer") from None
    if len(packet.descriptors) > most:
        packet.close()
    return answer, packet.pid, packet.descriptors if len(packet.descriptors) <= most else ()


def _why(reply: wire.Reply | None) -> str:
    if reply is None:
        return ""
    if reply.kind == wire.REPLY_EXEC_FAILED:
        return f": {reply.text}: {os.strerror(reply.error)}"
    return f", with status {reply.status}"


def _failure(what: str, answer: Mapping[str, object] | None = None) -> SetupError:
    said = "" if answer is None else f": {msgspec.json.encode(answer).decode()[:200]}"
    return SetupError(
        f"{what}{said}",
        stage="egress",
        hint="this is a bug in Stockade or in this kernel; please report it with `stockade doctor --json`",
    )
