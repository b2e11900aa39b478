"""From a policy to a sandbox that waits behind its walls for the first program."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import msgspec

from stockade import backends, state
from stockade.backends.base import Given
from stockade.backends.select import chosen
from stockade.errors import PolicyError, SetupError
from stockade.gate import client
from stockade.gate.plan import Plan
from stockade.host import host
from stockade.host.model import Host
from stockade.policy import Caller, Policy, Resolved, resolve
from stockade.policy.mounted import alone
from stockade.policy.resolve import Grant
from stockade.receipt.account import policy_hash
from stockade.sandbox import continued, register, scarce
from stockade.sandbox.cgroup import Group
from stockade.sandbox.evidence import (
    NAMESPACES,
    Chosen,
    Evidence,
    incomplete,
    observe_birth,
    observe_mounts,
    observe_plain,
    observe_walls,
    reported,
    shared_network,
)
from stockade.sandbox.limits import Kept, cores, kept_by_cgroup, most_files
from stockade.sandbox.records import Record
from stockade.sandbox.register import Entry
from stockade.sandbox.result import Enforced
from stockade.sandbox.steps import Events, Steps
from stockade.workspace.layers import Layer, has_snapshots

if TYPE_CHECKING:
    from stockade.gate.template import Template
    from stockade.sandbox.scratch import Scratch
    from stockade.workspace.workspace import Workspace

#: A set-up takes milliseconds; one that takes this long hangs, as on a dead network file system.
SETUP_SECONDS = 30
#: How long a gate may take to end when it is told to.
GONE_SECONDS = 2
#: How long the kernel may take to end a sandbox whose first process has ended.
LAST_MOMENT = 0.2


class Prepared(msgspec.Struct, frozen=True):
    """Everything that is decided and made before the gate is asked. Whoever prepares it closes it."""

    chosen: Chosen
    resolved: Resolved
    plan: Plan
    #: The kind of resident gate that starts it.
    gate: str
    home: str
    #: Stockade's own directory.
    state: str
    made: Made
    #: Whether its cgroups are below a scope that systemd made for the resident gate.
    scoped: bool
    #: What its first process is to be a copy of.
    template: Template | None = None

    @property
    def controls(self) -> dict[str, Enforced]:
        """What is reported of each."""
        return self.chosen.controls

    @property
    def descriptors(self) -> tuple[int, ...]:
        """In the order in which the plan counts them."""
        found = [grant.fd for grant in self.resolved.grants]
        if self.resolved.workspace is not None:
            found.append(self.resolved.workspace.fd)
        if self.layer is not None and not self.keeps_privately:
            found += self.layer.descriptors
        if self.made.scratch is not None:
            found.append(self.made.scratch.descriptor)
        return (*found, *self.made.image, *self.made.entrances)

    @property
    def environ(self) -> dict[str, str]:
        """What every command inside finds in its environment."""
        private = {} if self.made.scratch is None else {"TMPDIR": self.home}
        return {**private, **self.resolved.environ, "HOME": self.home}

    @property
    def keeps_privately(self) -> bool:
        """Whether the changes stay in private memory, which is limited, until the sandbox has ended."""
        return self.layer is not None and self.resolved.limits.disk is not None

    @property
    def layer(self) -> Layer | None:
        return self.made.layer

    @property
    def group(self) -> Group | None:
        return self.made.group

    def close(self, *, discard: bool, earlier: bool = False) -> None:
        """Let go of everything; `discard` forgets the changes, `earlier` also what a workspace had before."""
        try:
            self.made.close(discard=discard, earlier=earlier)
        finally:
            self.resolved.close()

    def unchanged(self) -> bool:
        """Whether the workspace is as it was, so that nothing need be kept."""
        layer = self.layer
        return layer is None or not (layer.changes() or layer.continued or has_snapshots(layer.path))


class Made:
    """What a sandbox has on the host besides its processes: noted in the register, then made."""

    def __init__(self) -> None:
        self._owner = os.getpid()
        self.entry: Entry | None = None
        self.layer: Layer | None = None
        self.scratch: Scratch | None = None
        self.group: Group | None = None
        #: The descriptors through which the gate enters its cgroups, and the mount of an image.
        self.entrances: tuple[int, ...] = ()
        self.image: tuple[int, ...] = ()
        self._layer_path = ""

    def make(
        self,
        home: str,
        resolved: Resolved,
        kept: Kept | None,
        *,
        living: bool,
        command: tuple[str, ...],
        again: str = "",
        scratch: bool = False,
    ) -> None:
        """Make it all; `again` is the id of a layer that is there already, and is continued.

        `scratch` asks for a private directory.
        """
        workspace = resolved.workspace
        id = register.new_id()
        group = f"{os.getpid()}-{id}"  # says whose it is to whoever finds it
        overlay = workspace is not None and workspace.access == "overlay"
        record = Record(
            id=id,
            command=command,
            workspace="" if workspace is None else workspace.path,
            # One that is continued is not a sweeper's to remove.
            layer=id if overlay and not again else "",
            scratch=id if scratch else "",
            groups=() if kept is None else kept.paths(group),
        )
        try:
            self.entry = register.enter(home, record)
        except SetupError:
            # Nothing would be left to collect, so that only `stockade ps` misses it.
            if record.layer or record.groups or record.scratch:
                raise
        if scratch:
            from stockade.sandbox.scratch import Scratch

            self.scratch = Scratch(home, id)
        if workspace is not None and overlay:
            held = _held_back(resolved, workspace)
            if again:
                self.layer = Layer(home, workspace.fd, workspace.path, again, held, continued=True)
                register.sweep(home)  # what still dies in it after its supervisor was killed
                continued.refuse_shown(self.layer, resolved, workspace)
            else:
                self._layer_path = f"{home}/workspaces/{id}"
                self.layer = Layer(home, workspace.fd, workspace.path, id, held)
                if resolved.needs_image:
                    self.image = (self.layer.make_image(resolved.limits.disk or 0),)
        if kept is not None:
            self.group = Group(group, kept.limits, kept.places, living=living)
            self.entrances = tuple(entrance for _, entrance in self.group.entrances())

    def entered(self) -> None:
        """The gate is in; nobody needs the way any more."""
        for entrance in (*self.entrances, *self.image):
            os.close(entrance)
        self.entrances = self.image = ()

    def close(self, *, discard: bool, earlier: bool = False) -> None:
        self.entered()
        try:
            if self.layer is not None:
                forget = discard and (earlier or not self.layer.continued)
                with contextlib.suppress(OSError):  # then it is left
                    self.layer.discard() if forget else self.layer.close()
        finally:
            if self.group is not None and self._owner == os.getpid():
                self.group.close()
            if self.scratch is not None:
                with contextlib.suppress(OSError):  # then it is left
                    self.scratch.close(ours=self._owner == os.getpid())
            # What is left stays in the register, and goes when somebody sweeps.
            if self.entry is not None and not (self._scratch_left or (discard and self._left)):
                self.entry.close()

    @property
    def _scratch_left(self) -> bool:
        return self.scratch is not None and self.scratch.left

    @property
    def _left(self) -> bool:
        layer = self._layer_path and os.path.lexists(self._layer_path)
        return bool(layer or (self.group is not None and self.group.paths))


def _held_back(resolved: Resolved, workspace: Grant) -> tuple[str, ...]:
    """What no commit takes over unasked: the protected, and what was made in place of the denied."""
    tree = workspace.path + "/"
    hidden = [path.removeprefix(tree) for path in resolved.denied if path.startswith(tree)]
    return (*resolved.policy.protect, *hidden)


class Box:
    """A sandbox whose gate waits for requests."""

    def __init__(
        self,
        connection: client.Connection,
        held: list[int],
        prepared: Prepared,
        evidence: Evidence,
    ) -> None:
        self.connection = connection
        self.evidence = evidence
        self.pidfd, *namespaces = held
        #: The network namespace's number, and a descriptor: while that is open, it is nobody else's.
        self._network = evidence.namespaces["net"]
        self.network_fd = namespaces.pop(NAMESPACES.index("net"))
        for descriptor in namespaces:
            os.close(descriptor)
        self.owner = os.getpid()
        self.group = prepared.group
        #: Whether it was closed: its descriptors are somebody else's then.
        self.is_closed = False
        self._closing = threading.Lock()

    def last_words(self) -> client.Reply | None:
        """Why a gate that has died gave up, if it said so."""
        return None if self.is_closed else self.connection.refusal()

    def number(self) -> int:
        """The number of its first process on the host; -1 if that has ended."""
        with self._closing:
            if self.is_closed:
                return -1
            with open(f"/proc/self/fdinfo/{self.pidfd}", encoding="ascii") as file:
                return next(int(line.split()[1]) for line in file if line.startswith("Pid:"))

    def roots(self) -> tuple[int, ...]:
        """Descriptors of its root and, if it has one, of its overlay."""
        roots = self.connection.roots(SETUP_SECONDS)
        if not roots:
            raise SetupError("the sandbox does not show its files", stage="files")
        return roots

    def closed(self, events: Events) -> Steps[None]:
        """End everything inside and wait until it is gone. A forked child only lets go of its copy."""
        with self._closing:
            self.is_closed = True
        if self.owner != os.getpid():
            self.connection.forget()
            os.close(self.pidfd)
            os.close(self.network_fd)
            return
        self.connection.close()
        try:
            yield from _gone(self.pidfd, events)
        finally:
            _networks.discard(self._network)
            os.close(self.network_fd)


def died(pidfd: int, events: Events) -> Steps[bool]:
    """Whether the gate itself has ended, where a keeper has. The kernel ends keepers first."""
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


#: The network namespaces of this process's living sandboxes. They are made ahead, so it is seen to
#: that none is given away twice.
_networks: set[int] = set()


def _gone(pidfd: int, events: Events) -> Steps[None]:
    """Wait for the end of a gate whose connection is closed; a stuck one is killed.

    Nothing cuts this short: what is raised meanwhile is raised afterwards.
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


@lru_cache(maxsize=64)
def _selected(policy: Policy, uid: int, probed: int) -> Chosen:
    selection = chosen(policy, host)
    backend = backends.load(selection.backend)
    return Chosen(backend, selection, reported(backend, selection, policy))


def prepare(
    policy: Policy,
    *,
    pinned: bool = False,
    dry: bool = False,
    living: bool = False,
    command: Sequence[str] = (),
    workspace: Workspace | None = None,
    template: Template | None = None,
) -> Prepared:
    """Select, resolve, make and compile. With `dry` nothing is made: the plan is for reading.

    `living` says that several commands will run, `command` which is known to, `workspace` what is continued,
    `template` what the sandbox's first process is to be a copy of.
    """
    with scarce.refused():
        return _prepare(policy, pinned, dry, living, tuple(command), workspace, template)


def _prepare(
    policy: Policy,
    pinned: bool,
    dry: bool,
    living: bool,
    command: tuple[str, ...],
    workspace: Workspace | None,
    template: Template | None,
) -> Prepared:
    caller = Caller.current()
    home = state.state_dir(caller.environ, caller.home)
    if workspace is not None:
        policy = continued.laid(policy, workspace, home)
    known: Host = host()
    decided = _selected(policy, caller.uid, id(known))
    backend, selection = decided.backend, decided.selection
    if template is not None and not backend.copies:
        from stockade.sandbox.failures import no_copies

        raise no_copies(backend.name)
    resolved = resolve(policy, caller, home, pinned=pinned, command=command[0] if command else "")
    made = Made()
    try:
        if template is not None:
            template.check(resolved)
        if workspace is not None:
            continued.check_tree(resolved, workspace)
        gate = backend.resident(policy)
        kept = kept_by_cgroup(selection, resolved, known, gate)
        if not dry:
            again = "" if workspace is None else workspace.id
            made.make(
                home, resolved, kept, living=living, command=command, again=again, scratch=backend.scratch
            )
        plan = backend.plan(
            Given(
                resolved=resolved,
                selection=selection,
                landlock=known.landlock,
                files=most_files(resolved),
                layer="/overlay" if made.layer is None else made.layer.path,
                groups=((), "") if kept is None else (kept.versions, kept.words),
                state="" if dry else home,
            )
        )
        inside = backend.home(resolved, "" if made.scratch is None else made.scratch.path)
        scoped = kept is not None and kept.scoped
        return Prepared(decided, resolved, plan, gate, inside, home, made, scoped, template)
    except BaseException:
        made.close(discard=True)
        resolved.close()
        raise


def launch(prepared: Prepared, events: Events, meanwhile: Callable[[], object] = lambda: None) -> Steps[Box]:
    """Raise the walls and look at them; on any failure nothing is left.

    `meanwhile` is called once while the gate is busy. The connection to the gate is watched afterwards.
    """
    if len(prepared.descriptors) > client.MOST_DESCRIPTORS:
        raise PolicyError(
            f"the policy grants {len(prepared.descriptors)} paths, more than {client.MOST_DESCRIPTORS}",
            hint="grant the directories they are in",
        )
    with scarce.refused():
        return (yield from _launch(prepared, events, meanwhile))


def _launch(prepared: Prepared, events: Events, meanwhile: Callable[[], object]) -> Steps[Box]:
    for attempt in range(2):
        mounts = _mounts_of(prepared)
        try:
            connection = client.launch(
                prepared.plan.encoded,
                tuple(mounts.get(descriptor, descriptor) for descriptor in prepared.descriptors),
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
            reply = yield from _raised(connection, prepared, held, evidence, events)
            if reply.kind == client.READY:
                prepared.made.entered()
                _guard(connection, prepared)
                return _box(connection, held, prepared, evidence)
        except BaseException as error:
            yield from _abandon(connection, held, events)
            # The resident gate died with the request: whoever it was just cloning kept its socket open.
            if attempt or held or not isinstance(error, GateDiedError):
                raise
            client.renew(connection.resident)
            continue
        yield from _abandon(connection, held, events)
        # The resident gate may have looked at the host's mounts before this one was made.
        if attempt or reply.error != errno.ESTALE:
            break
        client.renew(connection.resident)
    from stockade.sandbox.failures import failure

    raise failure(reply)


def _mounts_of(prepared: Prepared) -> dict[int, int]:
    """The mounts that are passed for descriptors, by these: each can be attached once only."""
    resolved = prepared.resolved
    trees = [
        grant.fd for grant in (*resolved.grants, resolved.workspace) if grant is not None and grant.alone
    ]
    found: dict[int, int] = {}
    for directory in (*trees, *prepared.made.image):
        mount = alone(directory)
        if mount is not None:
            found[directory] = mount
    return found


def _raised(
    connection: client.Connection, prepared: Prepared, held: list[int], evidence: Evidence, events: Events
) -> Steps[client.Reply]:
    """Look at each thing as soon as it can be seen, until the gate is ready or has refused.

    `held` receives the descriptors that are passed: a pidfd and the namespaces; `evidence` what was seen.
    """
    seen: dict[int, int] = {}
    try:
        while True:
            reply = yield from _next(connection, events)
            if reply.kind == client.BORN:
                held += reply.descriptors
                seen[client.BORN] = reply.status
                observe_birth(reply, prepared.plan, evidence)
                if prepared.made.entry is not None:
                    said = {"policy": policy_hash(prepared.resolved.policy), "plan": prepared.plan.hash}
                    prepared.made.entry.update(gate=reply.status, **said)
            elif reply.kind == client.MOUNTED:
                seen[client.MOUNTED] = reply.pid
                _adopt(reply, prepared)
                observe_mounts(reply.pid, prepared.plan, evidence)
                if prepared.group is not None:
                    prepared.group.confirm(reply.pid)
                    evidence.cgroups = prepared.group.kept
            elif reply.kind == client.READY:
                if prepared.plan.plain:
                    warden = seen.get(client.BORN)
                    observe_plain(reply, prepared.plan, warden, connection.filters_before, evidence)
                    if prepared.group is not None:
                        prepared.group.confirm(reply.pid)
                        evidence.cgroups = prepared.group.kept
                    return reply
                if seen != {client.BORN: reply.pid, client.MOUNTED: reply.pid}:
                    raise incomplete()
                observe_walls(reply, prepared.plan, connection.filters_before, evidence)
                return reply
            else:
                return reply
    except SetupError:
        # A gate that refused is gone before it could be looked at; its own reason says more.
        refusal = connection.refusal()
        if refusal is None:
            raise
        return refusal


def _adopt(mounted: client.Reply, prepared: Prepared) -> None:
    """Take what shows the changes of an overlay in private memory, which is there if it was asked for."""
    if len(mounted.descriptors) != prepared.keeps_privately:
        for descriptor in mounted.descriptors:
            os.close(descriptor)
        raise incomplete()
    for descriptor in mounted.descriptors:
        assert prepared.layer is not None
        prepared.layer.adopt(descriptor)


def _guard(connection: client.Connection, prepared: Prepared) -> None:
    """Let the gate end what uses up the memory or the processor time of the whole sandbox."""
    group, seconds = prepared.group, prepared.resolved.limits.cpu_time
    if group is None or not (group.limits.cpu_time or group.limits.memory is not None):
        return
    usage = group.usage_descriptor() if group.limits.cpu_time else None
    try:
        connection.watch(group.oom_descriptor(), group.counts_oom, usage, seconds or 0, cores())
    finally:
        if usage is not None:
            os.close(usage)


def _box(connection: client.Connection, held: list[int], prepared: Prepared, evidence: Evidence) -> Box:
    if "net" in prepared.plan.namespaces.names:
        network = evidence.namespaces["net"]
        if network in _networks:
            raise shared_network()
        _networks.add(network)
    return Box(connection, held, prepared, evidence)


def _abandon(connection: client.Connection, held: list[int], events: Events) -> Steps[None]:
    """End a gate that is not to be used, and wait for its end where it is known."""
    events.forget(connection.fileno())
    connection.close()
    for descriptor in held[1:]:
        os.close(descriptor)
    if held:
        yield from _gone(held[0], events)


class GateDiedError(SetupError):
    """The gate ended before the walls were up, and said nothing."""


def _next(connection: client.Connection, events: Events) -> Steps[client.Reply]:
    late = time.monotonic() + SETUP_SECONDS
    while True:
        yield max(0.0, late - time.monotonic())
        if connection.fileno() in events.ready:
            break
        if time.monotonic() >= late:
            raise SetupError(f"the walls were not up after {SETUP_SECONDS} s", stage="gate")
    reply = connection.receive()
    if reply is None:
        raise GateDiedError("the gate died while it raised the walls", stage="gate")
    return reply
