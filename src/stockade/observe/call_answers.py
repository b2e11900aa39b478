"""Answers about system calls: what the filter allows, bounds, refuses and does not know."""

from __future__ import annotations

import errno

from stockade.backends.seccomp import bpf, syscalls
from stockade.controls import Control
from stockade.observe import dangers
from stockade.observe.access import Access, Action
from stockade.observe.answer_values import Answer, PolicyChange
from stockade.observe.view import Walls
from stockade.policy import socket_options
from stockade.policy.socket_options import MULTICAST
from stockade.policy.values import show

#: What refused calls are for, by the name of one of them, for those that people ask about.
PURPOSES = {
    "ptrace": "it looks into other processes",
    "mount": "it changes the file tree that the other walls stand on",
    "bpf": "it loads programs into the kernel",
    "io_uring_setup": "its requests pass the filter unseen",
    "unshare": "it makes namespaces, in which a program has rights of root over the kernel",
    "setns": "it enters other namespaces",
    "keyctl": "it reaches the keys of the user",
    "userfaultfd": "it stops the kernel in the middle of its work",
    "perf_event_open": "it observes the whole machine",
    "chroot": "it changes the root that the other walls stand on",
    "open_by_handle_at": "it opens files past every path",
}
#: Errors that the filter gives.
REFUSALS = (errno.EPERM, errno.ENOSYS, errno.EACCES, errno.EOPNOTSUPP, errno.EAFNOSUPPORT, errno.ENOPROTOOPT)


def answer_call(access: Access, walls: Walls) -> Answer:
    """Answer whether a program may make a system call."""
    name = "mount" if access.action is Action.MOUNT else access.target
    policy = walls.resolved.policy
    if socket_options.is_option(name):
        return _answer_option(access, walls)
    answers = _answers(walls)
    decided = answers.get(name, "absent")
    wall = Control.SYSCALLS.value
    if access.error and access.error not in REFUSALS:
        return Answer(
            access=access,
            allowed=True,
            wall=wall,
            clause="default",
            reason=f"the kernel answered {name} itself",
        )
    if decided == "allow":
        clause = f"syscalls.allow = {show(name)}" if name in policy.syscalls.allow else "default"
        return Answer(
            access=access, allowed=True, wall=wall, clause=clause, reason=f"the filter allows {name}"
        )
    if name in policy.syscalls.deny:
        clause = f"syscalls.deny = {show(name)}"
        change = PolicyChange(remove=clause) if name not in syscalls.REFUSED else None
        return _refused(access, clause, f"the policy's own syscalls.deny names {name}", change)
    if name in syscalls.REFUSED:
        why = PURPOSES.get(name, "it reaches past the walls")
        return _refused(access, "default", f"no policy can allow {name}: {why}")
    if name in syscalls.ABSENT:
        why = (
            "C libraries use another call instead" if name == "clone3" else "it slows the whole machine down"
        )
        return _refused(access, "default", f"{name} is absent in every sandbox: {why}")
    if walls.alone and decided in ("refuse", "not offered", "unsupported", "absent") and name in _ALONE:
        return _refused(access, "default", f"without namespaces no policy can allow {name}")
    if decided != "absent":
        if not access.error:
            reason = f"the filter allows {name} within bounds that no policy can lift ({decided})"
            return Answer(access=access, allowed=True, wall=wall, clause="default", reason=reason)
        return _refused(access, "default", f"the filter allows {name} only within bounds ({decided})")
    change = PolicyChange(toml=f"syscalls.allow = [{show(name)}]", danger=dangers.MORE_CALLS)
    return _refused(access, "syscalls.allow", f"{name} is not on the built-in list of system calls", change)


def _answer_option(access: Access, walls: Walls) -> Answer:
    """Answer whether a program may set an option of a socket."""
    policy = walls.resolved.policy
    name, clause = access.target, socket_options.clause_for(access.target)
    if socket_options.is_open(name) or clause in policy.syscalls.allow:
        by = f"syscalls.allow = {show(clause)}" if clause else "default"
        reason = f"the filter allows setsockopt with {name}"
        return Answer(access=access, allowed=True, wall=Control.SYSCALLS.value, clause=by, reason=reason)
    if not clause:
        return _refused(access, "default", f"no policy can open the socket option {name}")
    joins = clause == MULTICAST
    if joins and (walls.alone or policy.net == "open"):
        return _refused(access, "default", f"no policy can open {name} in the network of the host")
    why = "joining groups takes the kernel's lock of all networks" if joins else "few programs need it"
    danger = dangers.MULTICAST if joins else dangers.MORE_CALLS
    change = PolicyChange(toml=f"syscalls.allow = [{show(clause)}]", danger=danger)
    return _refused(access, "syscalls.allow", f"the socket option {name} is closed: {why}", change)


_ALONE = frozenset((*syscalls.ALONE, *syscalls.SOCKETS_ALONE[False]))


def _answers(walls: Walls) -> dict[str, str]:
    """Return the filter's answer by name; other names are absent."""
    policy = walls.resolved.policy
    found = dict.fromkeys(syscalls.ALLOWED | set(policy.syscalls.allow), "allow")
    found |= bpf.BOUNDED | (bpf.BOUNDED_BY_EXEC if policy.exec is not None else {})
    if walls.alone:
        found |= syscalls.ALONE | syscalls.SOCKETS_ALONE[policy.net == "open"]
    return found | dict.fromkeys(syscalls.REFUSED | set(policy.syscalls.deny), "refuse")


def _refused(access: Access, clause: str, reason: str, change: PolicyChange | None = None) -> Answer:
    return Answer(
        access=access,
        allowed=False,
        wall=Control.SYSCALLS.value,
        clause=clause,
        reason=reason,
        change=change,
    )
