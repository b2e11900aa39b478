"""Launch a prepared sandbox: raise its walls, check them, and wait behind them for the first program."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial

from stockade.errors import PolicyError, SetupError
from stockade.gate import client, wire
from stockade.gate.operations import Plan
from stockade.linux import os_errors
from stockade.linux.mount_table import alone
from stockade.receipt.account import policy_hash
from stockade.runs import living_networks
from stockade.runs.evidence import (
    NAMESPACES,
    Evidence,
    incomplete,
    observe_birth,
    observe_joined,
    observe_mounts,
    observe_plain,
    observe_walls,
    shared_network,
)
from stockade.runs.io.eventloop import Events, Steps
from stockade.runs.limits import cores
from stockade.runs.prepare import RunPreparation

TYPE_CHECKING = False
if TYPE_CHECKING:
    from stockade.runs.network.egress_handle import EgressHandle

#: A set-up takes milliseconds; one that takes this long hangs, for example on a dead network file system.
SETUP_SECONDS = 30
#: How long a gate may take to end after the supervisor closed its connection.
GONE_SECONDS = 2
#: How long the kernel may take to end a sandbox whose first process has ended.
LAST_MOMENT = 0.2


class LaunchedSandbox:
    """A sandbox whose gate waits for requests.

    `held` are a pidfd and the namespaces. Those that it does not need it takes from the list and closes: what
    is listed belongs to the launch until that has returned the sandbox, and is closed by one of them alone.
    """

    def __init__(
        self,
        connection: client.Connection,
        held: list[int],
        prepared: RunPreparation,
        evidence: Evidence,
    ) -> None:
        self.connection = connection
        self.evidence = evidence
        self.pidfd, *namespaces = held
        places = dict(zip(NAMESPACES, namespaces, strict=True))
        #: The inode number of the network namespace, which no other gets while the descriptor is open.
        self._network = evidence.namespaces["net"]
        #: Another sandbox of this process can join it: `RunPreparation.network`.
        self.network_fd = places["net"]
        #: The user namespace, if the plan maps ids of its own: a process that enters it sees files as the
        #: programs inside do. -1 otherwise.
        self.user_fd = places["user"] if prepared.plan.namespaces.ids else -1
        kept = [one for one in (self.pidfd, self.network_fd, self.user_fd) if one >= 0]
        held[:] = [*kept, *(one for one in namespaces if one not in kept)]
        while len(held) > len(kept):
            os.close(held.pop())
        self.owner = os.getpid()
        self.group = prepared.group
        #: What relays its connections, with network rules or published ports.
        self.egress: EgressHandle | None = None
        #: The pidfd of that process if runs are to end with it; otherwise -1.
        self.egress_needed = -1
        #: The keepers of runs that stay stopped until their callers resume them; changed under the lock.
        self.paused: set[int] = set()
        self.pausing = threading.Lock()
        #: Once it is closed, its descriptor numbers may belong to other files.
        self.is_closed = False
        self._closing = threading.Lock()

    def last_words(self) -> wire.Reply | None:
        """Return the refusal that a dead gate sent before it ended, if it sent one."""
        return None if self.is_closed else self.connection.refusal()

    def number(self) -> int:
        """Return the PID of its first process on the host; -1 if that has ended."""
        with self._closing:
            if self.is_closed:
                return -1
            with open(f"/proc/self/fdinfo/{self.pidfd}", encoding="ascii") as file:
                return next(int(line.split()[1]) for line in file if line.startswith("Pid:"))

    def roots(self) -> tuple[int, ...]:
        """Return descriptors of its root and, if it has one, of its overlay."""
        roots = self.connection.roots(SETUP_SECONDS)
        if not roots:
            raise SetupError("the gate did not pass the root directory of the sandbox", stage="files")
        return roots

    def closed(self, events: Events) -> Steps[None]:
        """End everything inside and wait until it is gone. A forked child only closes its copies."""
        with self._closing:
            self.is_closed = True
        if self.owner != os.getpid():
            self.connection.forget()
            os.close(self.pidfd)
            self._close_namespaces()
            if self.egress is not None:
                yield from self.egress.closed(events)
            return
        self.connection.close()
        if self.group is not None:
            self.group.lift_cpu()
        try:
            yield from wait_for_end(self.pidfd, events)
        finally:
            living_networks.leave(self._network, self.pidfd)
            self._close_namespaces()
            # Last, so that it has recorded everything that was done inside.
            if self.egress is not None:
                yield from self.egress.closed(events)

    def _close_namespaces(self) -> None:
        os.close(self.network_fd)
        if self.user_fd >= 0:
            os.close(self.user_fd)


def gate_ended(pidfd: int, events: Events) -> Steps[bool]:
    """Return whether the gate itself ended soon after a keeper: the kernel ends keepers first."""
    until = time.monotonic() + LAST_MOMENT
    events.watch(pidfd)
    try:
        while (left := until - time.monotonic()) > 0:
            yield left
            if pidfd in events.ready:
                return True
        return False
    finally:
        events.forget(pidfd)


def wait_for_end(pidfd: int, events: Events) -> Steps[None]:
    """Wait for the end of a gate whose connection is closed; kill it if it is stuck.

    Nothing interrupts this: an exception that arrives meanwhile is raised afterwards.
    """
    events.watch(pidfd)
    late = time.monotonic() + GONE_SECONDS
    interruption: BaseException | None = None
    while pidfd not in events.ready:
        try:
            yield max(0.0, late - time.monotonic())
        except BaseException as error:
            interruption = error
        if time.monotonic() >= late:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            late += GONE_SECONDS
    events.forget(pidfd)
    os.close(pidfd)
    if interruption is not None:
        raise interruption


def launch(
    prepared: RunPreparation, events: Events, meanwhile: Callable[[], object] = lambda: None
) -> Steps[LaunchedSandbox]:
    """Raise the walls and check them; a failure leaves nothing behind.

    `meanwhile` is called once while the gate is busy. The connection to the gate stays watched.
    """
    joins = prepared.plan.namespaces.joins_network
    if len(prepared.descriptors) + joins > wire.MAX_DESCRIPTORS:
        raise PolicyError(
            f"the policy grants {len(prepared.descriptors)} paths, more than {wire.MAX_DESCRIPTORS}",
            hint="grant the directories that contain them",
        )
    with os_errors.setup_errors():
        net = prepared.resolved.policy.net
        # Where it joins a network, another sandbox has what relays the connections of both.
        if not joins and (prepared.made.published is not None or (net and net != "open")):
            from stockade.runs.network.egress_launch import launch_with_egress

            return (yield from launch_with_egress(prepared, events, meanwhile))
        return (yield from launch_with_retry(prepared, events, meanwhile))


def launch_with_retry(
    prepared: RunPreparation,
    events: Events,
    meanwhile: Callable[[], object],
    born: Callable[[client.Resident, int, int], object] = lambda resident, pid, network: None,
) -> Steps[LaunchedSandbox]:
    """Raise the walls, a second time if the resident gate died or is out of date.

    `born` is called as soon as the sandbox has its namespaces, with the resident gate, the pid of the
    sandbox's first process and a descriptor of its network namespace.
    """
    joins = prepared.plan.namespaces.joins_network
    for attempt in range(2):
        mounts = _mounts_of(prepared)
        descriptors = tuple(mounts.get(descriptor, descriptor) for descriptor in prepared.descriptors)
        try:
            if joins:
                connection = living_networks.launch_joined(
                    prepared.plan.encoded, descriptors, prepared.network
                )
            else:
                connection = client.launch(
                    prepared.plan.encoded,
                    descriptors,
                    prepared.gate,
                    scoped=prepared.scoped,
                    template=prepared.template,
                )
        finally:
            for mount in mounts.values():
                os.close(mount)
        held: list[int] = []
        evidence = Evidence()
        try:
            events.watch(connection.fileno())
            if not attempt:
                meanwhile()
            watch = _PreparedWatch(prepared, evidence, partial(born, connection.resident))
            reply = yield from observe_launch(connection, prepared.plan, held, evidence, events, watch)
            if reply.kind == wire.REPLY_READY:
                prepared.made.close_entrances()
                _guard_limits(connection, prepared)
                return _launched_sandbox(connection, held, prepared, evidence)
        except BaseException as error:
            if held and "net" in evidence.namespaces:
                living_networks.leave(evidence.namespaces["net"], held[0])
            yield from abandon(connection, held, events)
            # The resident died before it read the request: a child that it was cloning kept its socket open.
            if attempt or joins or held or not isinstance(error, GateDiedError):
                raise
            client.renew(connection.resident)
            continue
        yield from abandon(connection, held, events)
        # The resident may have copied the host's mounts before this one was made.
        if attempt or joins or reply.error != errno.ESTALE:
            break
        client.renew(connection.resident)
    from stockade.runs.explain.gate_refused import failure

    raise failure(reply)


def _mounts_of(prepared: RunPreparation) -> dict[int, int]:
    """Return detached mounts to pass instead of these descriptors; each can be attached only once."""
    resolved = prepared.resolved
    trees = [
        grant.fd for grant in (*resolved.grants, resolved.workspace) if grant is not None and grant.alone
    ]
    mounts: dict[int, int] = {}
    for directory in (*trees, *prepared.made.image):
        mount = alone(directory)
        if mount is not None:
            mounts[directory] = mount
    return mounts


class LaunchWatch:
    """What else is done while the walls come up; here nothing."""

    def born(self, reply: wire.Reply) -> None:
        """The gate has its namespaces."""

    def mounted(self, reply: wire.Reply) -> None:
        """The gate has made its mounts; it passed no descriptor of them."""
        if reply.descriptors:
            for descriptor in reply.descriptors:
                os.close(descriptor)
            raise incomplete()

    def entered(self, pid: int) -> None:
        """The gate is in its cgroups."""


class _PreparedWatch(LaunchWatch):
    """Registers a prepared sandbox, and takes over its layer and its cgroups."""

    def __init__(
        self, prepared: RunPreparation, evidence: Evidence, network: Callable[[int, int], object]
    ) -> None:
        self._prepared = prepared
        self._evidence = evidence
        self._network = network

    def born(self, reply: wire.Reply) -> None:
        prepared = self._prepared
        if prepared.plan.namespaces.joins_network:
            observe_joined(self._evidence, prepared.network)
        self._network(reply.status, reply.descriptors[1 + NAMESPACES.index("net")])
        if prepared.made.entry is not None:
            hashes = {"policy": policy_hash(prepared.resolved.policy), "plan": prepared.plan.hash}
            prepared.made.entry.update(gate=reply.status, **hashes)

    def mounted(self, reply: wire.Reply) -> None:
        _adopt(reply, self._prepared)

    def entered(self, pid: int) -> None:
        group = self._prepared.group
        if group is not None:
            group.confirm(pid)
            self._evidence.cgroups = group.kept


def observe_launch(
    connection: client.Connection,
    plan: Plan,
    held: list[int],
    evidence: Evidence,
    events: Events,
    watch: LaunchWatch,
) -> Steps[wire.Reply]:
    """Check each wall as soon as it is up, and return the gate's last reply: ready, or its refusal.

    Fills `held` with the descriptors that the gate passes (a pidfd, then the namespaces) and `evidence`.
    """
    seen: dict[int, int] = {}
    try:
        while True:
            reply = yield from _next_reply(connection, events)
            if reply.kind == wire.REPLY_BORN:
                held += reply.descriptors
                seen[wire.REPLY_BORN] = reply.status
                observe_birth(reply, plan, evidence)
                watch.born(reply)
            elif reply.kind == wire.REPLY_MOUNTED:
                seen[wire.REPLY_MOUNTED] = reply.pid
                watch.mounted(reply)
                observe_mounts(reply.pid, plan, evidence)
                watch.entered(reply.pid)
            elif reply.kind == wire.REPLY_READY:
                if plan.plain:
                    warden = seen.get(wire.REPLY_BORN)
                    observe_plain(reply, plan, warden, connection.filters_before, evidence)
                    watch.entered(reply.pid)
                    return reply
                if seen != {wire.REPLY_BORN: reply.pid, wire.REPLY_MOUNTED: reply.pid}:
                    raise incomplete()
                observe_walls(reply, plan, connection.filters_before, evidence)
                return reply
            else:
                return reply
    except SetupError:
        # A gate that refused may end before it can be checked; its own reason says more.
        refusal = connection.refusal()
        if refusal is None:
            raise
        return refusal


def _adopt(mounted: wire.Reply, prepared: RunPreparation) -> None:
    """Give each layer the gate's descriptor of an overlay whose changes stay in private memory."""
    layers = prepared.layers if prepared.keeps_privately else ()
    if len(mounted.descriptors) != len(layers):
        for descriptor in mounted.descriptors:
            os.close(descriptor)
        raise incomplete()
    for layer, descriptor in zip(layers, mounted.descriptors, strict=True):
        layer.adopt(descriptor)


def _guard_limits(connection: client.Connection, prepared: RunPreparation) -> None:
    """Have the gate end the sandbox when it uses up its memory or processor time.

    A private environment outlives programs that use up its memory: the kernel ends those, one by one.
    """
    group, seconds = prepared.group, prepared.resolved.limits.cpu_time
    if group is None:
        return
    memory = None if prepared.resolved.environment is not None else group.oom_descriptor()
    if memory is None and not group.limits.cpu_time:
        return
    usage = group.usage_descriptor() if group.limits.cpu_time else None
    try:
        connection.watch(memory, group.counts_oom, usage, seconds or 0, cores())
    finally:
        if usage is not None:
            os.close(usage)


def _launched_sandbox(
    connection: client.Connection, held: list[int], prepared: RunPreparation, evidence: Evidence
) -> LaunchedSandbox:
    if "net" in prepared.plan.namespaces.names:
        network = evidence.namespaces["net"]
        if living_networks.is_used(network) and not prepared.plan.namespaces.joins_network:
            raise shared_network()
        living_networks.enter(network, held[0], connection.resident)
    return LaunchedSandbox(connection, held, prepared, evidence)


def abandon(connection: client.Connection, held: list[int], events: Events) -> Steps[None]:
    """End a gate that will not be used, and wait for its end if there is a pidfd of it."""
    events.forget(connection.fileno())
    connection.close()
    for descriptor in held[1:]:
        os.close(descriptor)
    if held:
        yield from wait_for_end(held[0], events)


class GateDiedError(SetupError):
    """The gate ended before the walls were up, without a reason."""


def _next_reply(connection: client.Connection, events: Events) -> Steps[wire.Reply]:
    late = time.monotonic() + SETUP_SECONDS
    while True:
        yield max(0.0, late - time.monotonic())
        if connection.fileno() in events.ready:
            break
        if time.monotonic() >= late:
            raise SetupError(f"the gate had not raised the walls after {SETUP_SECONDS} s", stage="gate")
    reply = connection.receive()
    if reply is None:
        raise GateDiedError("the gate died while it was raising the walls", stage="gate")
    return reply
