"""Limits on a whole sandbox: which of them its cgroups keep, and what those say afterwards."""

from __future__ import annotations

import os
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import msgspec

from stockade.backends.select import Selection
from stockade.controls import Control
from stockade.errors import PolicyError
from stockade.gate import client
from stockade.host import Host, cgroups
from stockade.policy import Limits, Resolved
from stockade.policy.model import limit_text
from stockade.sandbox.cgroup import Group, GroupLimits, hierarchies, planned
from stockade.sandbox.result import Usage

if TYPE_CHECKING:
    from stockade.sandbox.supervise import Ended


class Kept(msgspec.Struct, frozen=True, dict=True):
    """The limits that cgroups are to keep, and where those can be made."""

    limits: GroupLimits
    places: cgroups.Places
    #: As one would write them, for the plan.
    words: str
    #: Whether they can be had only where systemd starts the gate in a scope of its own.
    scoped: bool

    @cached_property
    def hierarchies(self) -> tuple[cgroups.Place, ...]:
        """Those that take part."""
        return hierarchies(self.limits, self.places)

    @property
    def versions(self) -> tuple[int, ...]:
        """The version of each hierarchy."""
        return tuple(place.version for place in self.hierarchies)

    def paths(self, id: str) -> tuple[str, ...]:
        """The directories that a group of that id will have."""
        return planned(id, self.hierarchies)


def kept_by_cgroup(selection: Selection, resolved: Resolved, host: Host, gate: str) -> Kept | None:
    """What the selection leaves to cgroups; None if that is nothing. `gate` is the kind of resident gate."""
    if not (controls := selection.by_cgroup):
        return None
    if any(_in_scope(host, mean) for control in controls for mean in selection.controls[control].means):
        # Below the scope in which systemd starts the resident gate.
        resident = client.resident(gate, scoped=True)
        return _kept(controls, resolved.limits, cgroups.places(resident.pid), scoped=True)
    return _kept_here(controls, resolved.limits, cgroups.membership())


@lru_cache(maxsize=64)
def _kept_here(controls: frozenset[Control], limits: Limits, membership: str) -> Kept:
    return _kept(controls, limits, cgroups.places(), scoped=False)


def _kept(controls: frozenset[Control], limits: Limits, places: cgroups.Places, *, scoped: bool) -> Kept:
    names = [control.removeprefix("limits.") for control in sorted(controls)]
    words = ", ".join(f"{name} to {limit_text(name, getattr(limits, name))}" for name in names)
    return Kept(GroupLimits.of(limits, controls), places, words, scoped)


def _in_scope(host: Host, probe: str) -> bool:
    return host.probes[probe].detail.startswith(cgroups.IN_SCOPE)


def cores() -> int:
    """How fast processor time can pass."""
    return len(os.sched_getaffinity(0))


def measured(ended: Ended, group: Group | None, written: int | None) -> Usage:
    """What a run has used, as the gate and its cgroups say; `written` are bytes in the workspace.

    The cgroups count the whole sandbox, so the processor time is that of a run that was alone in it.
    """
    reply = ended.reply
    cpu, memory, tasks, switches = (0.0, 0.0), 0, None, 0
    source = {"cpu": "rusage", "memory": "rusage"}
    if reply is not None and reply.kind == client.EXITED:
        cpu, memory, switches = (reply.user, reply.system), reply.peak, reply.switches
    if group is not None:
        if ended.alone and (times := group.cpu_times()) is not None:
            cpu, source["cpu"] = times, "cgroup"
        if (peak := group.peak_memory()) is not None:
            memory, source["memory"] = peak, "cgroup"
        if (tasks := group.peak_tasks()) is not None:
            source["tasks"] = "cgroup"
    return Usage(ended.wall, *cpu, memory, tasks, written, switches, source)


def seconds_of(timeout: float | None) -> float | None:
    """The time that a caller gives a run; what is none is refused by its own name."""
    if timeout is None:
        return None
    try:
        return Limits(wall=timeout).wall
    except PolicyError as error:
        said = error.message.rpartition(": ")[2]
        raise PolicyError(f"timeout = {timeout!r}: {said}", hint=error.hint) from None


def most_files(resolved: Resolved) -> int:
    """The limit of open files: what the policy writes or is refused, or the default as far as it goes."""
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
        f"limits.files = {wanted}: this process may not open more than {most} files itself",
        hint=f"write at most {most}, or raise the hard limit: `ulimit -Hn`",
    )
