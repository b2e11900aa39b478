"""Limits on a whole sandbox: which of them its cgroups keep, and what those say afterwards."""

from __future__ import annotations

import os
from functools import lru_cache

import msgspec

from stockade.backends.select import Selection
from stockade.gate import client
from stockade.host import Host, cgroups
from stockade.policy import Resolved
from stockade.policy.model import limit_text
from stockade.sandbox.cgroup import Group, GroupLimits, hierarchies, planned
from stockade.sandbox.result import Usage


class Kept(msgspec.Struct, frozen=True):
    """The limits that cgroups are to keep, and where those can be made."""

    limits: GroupLimits
    places: cgroups.Places
    #: As one would write them, for the plan.
    words: str
    #: Whether they can be had only where systemd starts the gate in a scope of its own.
    scoped: bool

    @property
    def versions(self) -> tuple[int, ...]:
        """The version of each hierarchy that takes part."""
        return tuple(place.version for place in hierarchies(self.limits, self.places))

    def paths(self, id: str) -> tuple[str, ...]:
        """The directories that a group of that id will have."""
        return planned(id, self.limits, self.places)


def kept_by_cgroup(selection: Selection, resolved: Resolved, host: Host) -> Kept | None:
    """What the selection leaves to cgroups; None if that is nothing."""
    if not selection.by_cgroup:
        return None
    limits = resolved.limits
    names = [control.removeprefix("limits.") for control in sorted(selection.by_cgroup)]
    words = ", ".join(f"{name} to {limit_text(name, getattr(limits, name))}" for name in names)
    scoped = any(_in_scope(host, mean) for c in selection.by_cgroup for mean in selection.controls[c].means)
    if scoped:
        # Below the scope in which systemd starts the resident gate.
        host_network = resolved.policy.net == "open"
        places = cgroups.places(client.resident(host_network=host_network, scoped=True).pid)
    else:
        places = _places(cgroups.membership())
    return Kept(GroupLimits.of(limits, selection.by_cgroup), places, words, scoped)


def _in_scope(host: Host, probe: str) -> bool:
    return host.probes[probe].detail.startswith(cgroups.IN_SCOPE)


@lru_cache(maxsize=4)
def _places(membership: str) -> cgroups.Places:
    return cgroups.places()


def cores() -> int:
    """How fast processor time can pass."""
    return len(os.sched_getaffinity(0))


def measured(usage: Usage, group: Group | None, *, alone: bool) -> Usage:
    """The usage of a run with what its cgroups say.

    They count the whole sandbox, so the processor time is that of a run that was `alone` in it.
    """
    if group is None:
        return usage
    changed: dict[str, object] = {}
    source = dict(usage.source)
    if (times := group.cpu_times()) is not None and alone:
        changed["cpu_user"], changed["cpu_system"] = times
        source["cpu"] = "cgroup"
    if (memory := group.peak_memory()) is not None:
        changed["peak_memory"] = memory
        source["memory"] = "cgroup"
    if (tasks := group.peak_tasks()) is not None:
        changed["peak_tasks"] = tasks
        source["tasks"] = "cgroup"
    return msgspec.structs.replace(usage, source=source, **changed)
