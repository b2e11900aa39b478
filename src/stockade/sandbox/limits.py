"""Limits on a whole sandbox: which of them its cgroups keep, and what those say afterwards."""

from __future__ import annotations

import os
from functools import lru_cache

import msgspec

from stockade.backends.select import Selection
from stockade.controls import Control
from stockade.host import cgroups
from stockade.policy import Limits
from stockade.policy.model import limit_text
from stockade.sandbox.cgroup import Group, GroupLimits
from stockade.sandbox.result import Usage

BY_CGROUP = {
    Control.LIMITS_MEMORY: "memory",
    Control.LIMITS_TASKS: "tasks",
    Control.LIMITS_CPU: "cpu",
    Control.LIMITS_CPU_TIME: "cpu_time",
}


class Kept(msgspec.Struct, frozen=True):
    """The limits that cgroups are to keep, and where those can be made."""

    limits: GroupLimits
    places: cgroups.Places
    #: As one would write them, for the plan.
    words: str

    @property
    def versions(self) -> tuple[int, ...]:
        """The version of each hierarchy that takes part."""
        found = (self.places.at(controller) for controller in self.limits.controllers)
        return tuple(place.version for place in dict.fromkeys(found) if place is not None)

    def paths(self, id: str) -> tuple[str, ...]:
        """The directories that a group of that id will have."""
        found = (self.places.at(controller) for controller in self.limits.controllers)
        directories = dict.fromkeys(place.directory for place in found if place is not None)
        return tuple(f"{directory}/{cgroups.GROUP}{id}" for directory in directories)


def kept_by_cgroup(selection: Selection, limits: Limits) -> Kept | None:
    """What the selection leaves to cgroups; None if that is nothing."""
    names = [name for control, name in BY_CGROUP.items() if control in selection.by_cgroup]
    if not names:
        return None
    chosen = {name: getattr(limits, name) for name in names}
    words = ", ".join(f"{name} to {limit_text(name, value)}" for name, value in chosen.items())
    counted = chosen.pop("cpu_time", None) is not None
    return Kept(GroupLimits(**chosen, cpu_time=counted), _places(cgroups.membership()), words)


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
