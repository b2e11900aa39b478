"""From a policy to a sandbox that waits behind its walls for the first program."""

from __future__ import annotations

import errno
import os
import select
import signal
from collections.abc import Callable
from functools import lru_cache

import msgspec

from stockade import state
from stockade.backends import native, syscalls
from stockade.backends.select import Selection
from stockade.backends.select import select as select_backend
from stockade.controls import Control
from stockade.errors import PolicyError, SetupError
from stockade.gate import client
from stockade.gate.plan import Plan
from stockade.host import host
from stockade.host.model import Host
from stockade.policy import Caller, Policy, Resolved, resolve
from stockade.sandbox.evidence import (
    NAMESPACES,
    OBSERVED,
    identity,
    incomplete,
    observe_birth,
    observe_mounts,
    observe_privileges,
    shared_network,
)
from stockade.sandbox.result import Enforced
from stockade.workspace.layers import Layer

#: A set-up takes milliseconds; one that takes this long hangs, as on a dead network file system.
SETUP_SECONDS = 30


class Prepared(msgspec.Struct, frozen=True):
    """Everything that is decided before the gate is asked."""

    controls: dict[str, Enforced]
    resolved: Resolved
    plan: Plan
    layer: Layer | None
    home: str

    @property
    def descriptors(self) -> tuple[int, ...]:
        """In the order in which the plan counts them."""
        found = [grant.fd for grant in self.resolved.grants]
        if self.resolved.workspace is not None:
            found.append(self.resolved.workspace.fd)
        if self.layer is not None:
            found += self.layer.descriptors
        return tuple(found)

    def close(self, *, discard: bool) -> None:
        if self.layer is not None:
            self.layer.discard() if discard else self.layer.close()
        self.resolved.close()

    def unchanged(self) -> bool:
        """Whether the workspace is as it was, so that nothing need be kept."""
        return self.layer is None or not self.layer.changes()


class Box(msgspec.Struct, frozen=True):
    """A sandbox whose gate waits for requests."""

    connection: client.Connection
    pidfd: int
    #: The network namespace and a descriptor of it: while it is open, its number is nobody else's.
    network: tuple[int, int]
    network_fd: int
    owner: int

    def close(self) -> None:
        """End everything inside and wait until it is gone. A forked child only lets go of its copy."""
        if self.owner != os.getpid():
            self.connection.forget()
            os.close(self.pidfd)
            os.close(self.network_fd)
            return
        self.connection.close()
        _gone(self.pidfd)
        _networks.discard(self.network)
        os.close(self.network_fd)


#: The network namespaces of this process's living sandboxes. They are made ahead, so it is seen to
#: that none is given away twice.
_networks: set[tuple[int, int]] = set()


def _gone(pidfd: int) -> None:
    """Wait for the end of a gate whose connection is closed; a stuck one is killed."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    if not poll.poll(2000):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        poll.poll()
    os.close(pidfd)


@lru_cache(maxsize=64)
def _selected(policy: Policy, uid: int, probed: int) -> tuple[Selection, dict[str, Enforced]]:
    """The backend for a policy, and what a run under it reports once everything has been observed."""
    selection = select_backend(policy, host())
    controls = {
        control.value: Enforced(
            requested=chosen.requested,
            mechanism=f"none: {chosen.reason}" if chosen.weaker else chosen.mechanism,
            observed="accepted weaker" if chosen.weaker else OBSERVED[control],
        )
        for control, chosen in selection.controls.items()
    }
    kept = controls[Control.IPC]
    if policy.write or (policy.workspace is not None and policy.workspace.mode == "rw"):
        shared = f"{kept.mechanism}; sockets in writable grants are shared with the host"
        kept = msgspec.structs.replace(kept, mechanism=shared)
    if Control.IPC in policy.accept:
        shared = f"{kept.mechanism}; sockets in what is shown read-only can be reached"
        kept = msgspec.structs.replace(kept, mechanism=shared, observed="accepted weaker")
    controls[Control.IPC] = kept
    return selection, controls


def prepare(policy: Policy, *, pinned: bool = False, dry: bool = False) -> Prepared:
    """Select, resolve and compile. With `dry` nothing is made: the plan is for reading."""
    caller = Caller.current()
    home = state.state_dir(caller.environ, caller.home)
    known: Host = host()
    selection, controls = _selected(policy, caller.uid, id(known))
    resolved = resolve(policy, caller, home, pinned=pinned)
    layer = None
    try:
        workspace = resolved.workspace
        place = "/overlay"
        if workspace is not None and workspace.access == "overlay" and not dry:
            layer = Layer(home, workspace.fd, workspace.path)
            place = layer.path
        kept = "" if dry else home
        program = syscalls.program(policy.syscalls.allow, policy.syscalls.deny, kept, policy.exec is not None)
        tasks = not selection.controls[Control.LIMITS_TASKS].weaker
        plan = native.compile_plan(
            native.inputs(resolved, known.landlock, program, place, tasks, _files(resolved))
        )
        return Prepared(
            controls, resolved, plan, layer, native.home_inside(caller.home, resolved.profile.system)
        )
    except BaseException:
        if layer is not None:
            layer.discard()
        resolved.close()
        raise


def _files(resolved: Resolved) -> int:
    """The limit of open files: what the policy writes or is refused, or the default as far as it goes."""
    import resource

    wanted = resolved.limits.files or 0
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if most == resource.RLIM_INFINITY or wanted <= most:
        return wanted
    if resolved.policy.limits.files is None:
        return most
    raise PolicyError(
        f"limits.files = {wanted}: this process may not open more than {most} files itself",
        hint=f"write at most {most}, or raise the hard limit: `ulimit -Hn`",
    )


def launch(prepared: Prepared, meanwhile: Callable[[], object] = lambda: None) -> Box:
    """Raise the walls and look at them; on any failure nothing is left.

    `meanwhile` is called once while the gate is busy.
    """
    host_network = "net" not in prepared.plan.namespaces.names
    if len(prepared.descriptors) > client.MOST_DESCRIPTORS:
        raise PolicyError(
            f"the policy grants {len(prepared.descriptors)} paths, more than {client.MOST_DESCRIPTORS}",
            hint="grant the directories they are in",
        )
    try:
        return _launch(prepared, host_network, meanwhile)
    except OSError as error:
        used_up = error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EFBIG, errno.EAGAIN)
        raise SetupError(
            f"nothing was run: {error.strerror}",
            stage="supervisor",
            errno=error.errno or 0,
            hint="this process has used up what it may: see `ulimit -a`" if used_up else "",
        ) from error


def _launch(prepared: Prepared, host_network: bool, meanwhile: Callable[[], object]) -> Box:
    for attempt in range(2):
        connection = client.launch(prepared.plan.encoded, prepared.descriptors, host_network=host_network)
        held: list[int] = []
        try:
            if not attempt:
                meanwhile()
            reply = _raised(connection, prepared.plan, held)
            if reply.kind == client.READY:
                return _box(connection, held, prepared.plan)
        except BaseException:
            _abandon(connection, held)
            raise
        _abandon(connection, held)
        # The resident gate may have looked at the host's mounts before this one was made.
        if attempt or reply.error != errno.ESTALE:
            break
        client.renew(connection.resident)
    raise _failure(reply)


def _raised(connection: client.Connection, plan: Plan, held: list[int]) -> client.Reply:
    """Look at each thing as soon as it can be seen, until the gate is ready or has refused.

    `held` receives the descriptors that are passed: a pidfd and the namespaces.
    """
    seen: dict[int, int] = {}
    try:
        while True:
            reply = _next(connection)
            if reply.kind == client.BORN:
                held += reply.descriptors
                seen[client.BORN] = reply.status
                observe_birth(reply, plan)
            elif reply.kind == client.MOUNTED:
                seen[client.MOUNTED] = reply.pid
                observe_mounts(reply.pid, plan)
            elif reply.kind == client.READY:
                if seen != {client.BORN: reply.pid, client.MOUNTED: reply.pid}:
                    raise incomplete()
                observe_privileges(reply.pid, connection.filters_before)
                return reply
            else:
                return reply
    except SetupError:
        # A gate that refused is gone before it could be looked at; its own reason says more.
        refusal = connection.refusal()
        if refusal is None:
            raise
        return refusal


def _box(connection: client.Connection, held: list[int], plan: Plan) -> Box:
    pidfd, *namespaces = held
    network_fd = namespaces[NAMESPACES.index("net")]
    network = identity(network_fd)
    if "net" in plan.namespaces.names:
        if network in _networks:
            raise shared_network()
        _networks.add(network)
    for descriptor in namespaces:
        if descriptor != network_fd:
            os.close(descriptor)
    return Box(connection, pidfd, network, network_fd, os.getpid())


def _abandon(connection: client.Connection, held: list[int]) -> None:
    """End a gate that is not to be used, and wait for its end where it is known."""
    connection.close()
    for descriptor in held[1:]:
        os.close(descriptor)
    if held:
        _gone(held[0])


def _next(connection: client.Connection) -> client.Reply:
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLIN)
    if not poll.poll(SETUP_SECONDS * 1000):
        raise SetupError(f"the walls were not up after {SETUP_SECONDS} s", stage="gate")
    reply = connection.receive()
    if reply is None:
        raise SetupError("the gate died while it raised the walls", stage="gate")
    return reply


#: What to tell a user about a failure that is likelier theirs than ours.
HINTS = {
    ("view", errno.EINVAL): "its file system cannot be shown through an overlay: copy what is needed",
    ("mask", errno.EACCES): "it is in a directory that you may not enter: deny that one",
    ("bind", errno.ENOENT): "it was removed after it was looked up: try again",
    ("bind", errno.ELOOP): "a directory on the way was replaced by a link after it was looked up",
    ("bind", errno.ESTALE): "another file has taken its place since it was looked up: try again",
    (
        "overlay",
        errno.EINVAL,
    ): 'the file system cannot be the lower layer of an overlay: use mode "ro" or "rw"',
    ("namespaces", errno.EPERM): "`stockade doctor` says what keeps user namespaces from being made",
    ("namespaces", errno.ENOSPC): "the limit of namespaces is reached: see sysctl user.max_user_namespaces",
}


def _failure(reply: client.Reply) -> SetupError:
    what = f" {reply.text}" if reply.text else ""
    why = os.strerror(reply.error)
    if reply.error == errno.ESTALE:
        why = "it is not the same file any more"
    return SetupError(
        f"nothing was run: {reply.operation}{what}: {why}",
        stage=reply.operation,
        errno=reply.error,
        hint=HINTS.get((reply.operation, reply.error), "`stockade doctor` shows what this machine can do"),
    )
