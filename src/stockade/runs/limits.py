"""Limits on a whole sandbox: which of them cgroups enforce, and the usage that they counted."""

from __future__ import annotations

import os
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import msgspec

from stockade.backends.selection import Selection
from stockade.controls import Control
from stockade.errors import PolicyError
from stockade.gate import client, wire
from stockade.host import Host
from stockade.linux import cgroups
from stockade.policy import Limits
from stockade.policy.model import limit_text
from stockade.resolve.resolved import ResolvedPolicy
from stockade.result import Usage
from stockade.runs.cgroup import GroupLimits, SandboxCgroups, hierarchies, planned_paths

if TYPE_CHECKING:
    from stockade.runs.network.decisions import NetworkUse
    from stockade.runs.supervise import RunEnding


class CgroupLimits(msgspec.Struct, frozen=True, dict=True):
    """The limits that cgroups are to enforce, and where those cgroups can be made."""

    limits: GroupLimits
    places: cgroups.CgroupParents
    #: The limits in words, for the plan.
    words: str
    #: Whether systemd has to start the gate in a scope of its own for them.
    scoped: bool

    @cached_property
    def hierarchies(self) -> tuple[cgroups.CgroupParent, ...]:
        """The hierarchies that get a group."""
        return hierarchies(self.limits, self.places)

    @cached_property
    def reusable(self) -> cgroups.CgroupParent | None:
        """Where the group is, if `idle_cgroups` may give it to the next sandbox: it limits tasks alone."""
        tasks = self.limits == GroupLimits(tasks=self.limits.tasks)
        return self.hierarchies[0] if tasks and self.hierarchies and not self.scoped else None

    @property
    def versions(self) -> tuple[int, ...]:
        """The version of each hierarchy."""
        return tuple(place.version for place in self.hierarchies)

    def paths(self, id: str) -> tuple[str, ...]:
        """Return the directories that the group of a sandbox will have."""
        return planned_paths(id, self.hierarchies)


def cgroup_limits(
    selection: Selection, resolved: ResolvedPolicy, host: Host, gate: str
) -> CgroupLimits | None:
    """Return the limits that the selection leaves to cgroups, if any; `gate` is the kind of resident."""
    if not (controls := selection.by_cgroup):
        return None
    if any(_in_scope(host, mean) for control in controls for mean in selection.controls[control].means):
        # Below the scope in which systemd starts the resident gate.
        resident = client.resident(gate, scoped=True)
        return _limits_in(cgroups.places(resident.pid), controls, resolved.limits, scoped=True)
    return _limits_in_own_cgroup(controls, resolved.limits, cgroups.membership())


@lru_cache(maxsize=64)
def _limits_in_own_cgroup(controls: frozenset[Control], limits: Limits, membership: str) -> CgroupLimits:
    return _limits_in(cgroups.places(), controls, limits, scoped=False)


def _limits_in(
    places: cgroups.CgroupParents, controls: frozenset[Control], limits: Limits, *, scoped: bool
) -> CgroupLimits:
    names = [control.removeprefix("limits.") for control in sorted(controls)]
    words = ", ".join(f"{name} to {limit_text(name, getattr(limits, name))}" for name in names)
    return CgroupLimits(GroupLimits.of(limits, controls), places, words, scoped)


def _in_scope(host: Host, probe: str) -> bool:
    return host.probes[probe].detail.startswith(cgroups.IN_SCOPE)


def cores() -> int:
    """Return how many seconds of processor time can pass in one second."""
    return len(os.sched_getaffinity(0))


def usage_of(
    ended: RunEnding, group: SandboxCgroups | None, written: int | None, network: NetworkUse | None = None
) -> Usage:
    """Return what a run used, as the gate and its cgroups counted; `written` are bytes in the workspace.

    Cgroups count the whole sandbox. Their processor time is used only if the run was alone in it; their peaks
    are those of the sandbox while the run lasted.
    """
    reply = ended.reply
    cpu, memory, tasks, switches = (0.0, 0.0), 0, None, 0
    source = {"cpu": "rusage", "memory": "rusage"}
    if reply is not None and reply.kind == wire.REPLY_EXITED:
        cpu, memory, switches = (reply.user, reply.system), reply.peak, reply.switches
    if group is not None:
        if ended.alone and (times := group.cpu_times()) is not None:
            cpu, source["cpu"] = times, "cgroup"
        if (peak := group.peak_memory(ended.before)) is not None:
            memory, source["memory"] = peak, "cgroup"
        if (tasks := group.peak_tasks(ended.before)) is not None:
            source["tasks"] = "cgroup"
    sent, received = (None, None) if network is None else (network.sent, network.received)
    return Usage(ended.wall, *cpu, memory, tasks, written, switches, source, sent, received)


def seconds_of(timeout: float | str | None) -> float | None:
    """Validate a caller's timeout and return it in seconds."""
    if timeout is None:
        return None
    try:
        return Limits(wall=timeout).wall
    except PolicyError as error:
        problem = error.message.rpartition(": ")[2]
        raise PolicyError(f"timeout = {timeout!r}: {problem}", hint=error.hint) from None


def most_files(resolved: ResolvedPolicy) -> int:
    """Return the limit of open files, and refuse a policy that asks for more than this process may open.

    Without the clause, the default is lowered to what is allowed.
    """
    wanted = resolved.limits.files or 0
    if wanted <= os.sysconf("SC_OPEN_MAX"):
        return wanted
    import resource

    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if most == resource.RLIM_INFINITY or wanted <= most:
        return wanted
    if resolved.policy.limits.files is None:
        return most
    raise PolicyError(
        f"limits.files = {wanted}: Stockade itself may not open more than {most} files",
        hint=f"write at most {most}, or raise the hard limit: `ulimit -Hn`",
    )
