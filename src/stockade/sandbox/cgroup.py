"""The cgroups of one sandbox: what all of it together may use, and what it has used.

A group is a directory `stockade-run-ID` in each hierarchy that a limit, or
ending it all, needs and in no other. The supervisor makes it, the gate's first process
enters it before it has started anything, and the supervisor removes it when the sandbox has ended.
Whatever the program starts is born inside and cannot leave: it sees the
cgroup file system nowhere.

A sandbox in which several commands run must be able to start another while a
program holds every task there is. So there the limit of tasks lies on a child,
`programs`, and the gate stays outside of it.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Collection, Iterable

import msgspec

from stockade.controls import Control
from stockade.errors import SetupError
from stockade.host.cgroupfs import Cgroup, read
from stockade.host.cgroups import GROUP, Place, Places
from stockade.policy import Limits

PROGRAMS, GATE = "programs", "gate"


class GroupLimits(msgspec.Struct, frozen=True):
    """What a group limits: bytes, tasks, cores. With `cpu_time` the time is only counted."""

    memory: int | None = None
    tasks: int | None = None
    cpu: float | None = None
    cpu_time: bool = False

    @classmethod
    def of(cls, limits: Limits, controls: Collection[Control]) -> GroupLimits:
        """Those of a policy's limits that a cgroup is to enforce."""
        return cls(
            memory=limits.memory if Control.LIMITS_MEMORY in controls else None,
            tasks=limits.tasks if Control.LIMITS_TASKS in controls else None,
            cpu=limits.cpu if Control.LIMITS_CPU in controls else None,
            cpu_time=Control.LIMITS_CPU_TIME in controls,
        )

    @property
    def controllers(self) -> tuple[str, ...]:
        """The controllers that it takes."""
        asked = {
            "memory": self.memory is not None,
            "pids": self.tasks is not None,
            "cpu": self.cpu is not None,
            "cpuacct": self.cpu_time,
        }
        return tuple(name for name, wanted in asked.items() if wanted)


class Group:
    """The cgroups of one sandbox. Made whole or not at all."""

    def __init__(self, id: str, limits: GroupLimits, places: Places, *, living: bool = False) -> None:
        if not id or "/" in id:
            raise ValueError(f"not a name: {id!r}")
        self.limits = limits
        self._name = f"{GROUP}{id}"
        self._owner = os.getpid()
        self._proc = places.proc
        #: By controller; several may be one. Those with tasks of their own come after what they are in.
        self._by: dict[str, Cgroup] = {}
        self._made: list[Cgroup] = []
        self._gate: Cgroup | None = None
        self._programs: Cgroup | None = None
        self._oom = -1
        step = self._name
        try:
            for controller in _needed(limits, places):
                place = places.at(controller)
                if place is None:
                    raise OSError(errno.ENOENT, f"there is no place for the {controller} controller")
                step = f"{place.directory}/{self._name}"
                self._by[controller] = self._in(place)
            if living and limits.tasks is not None:
                self._divide(self._by["pids"])
            self._set()
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise _failed(step, error) from error
            raise

    @property
    def paths(self) -> tuple[str, ...]:
        """The directories that there are, one in each hierarchy; `remove` finds what is in them."""
        return tuple(group.path for group in self._made if group.path.endswith(self._name))

    @property
    def kept(self) -> dict[str, str]:
        """The files that hold its limits, as they were read back."""
        return {name: text for group in self._made for name, text in group.kept.items()}

    def _in(self, place: Place) -> Cgroup:
        path = f"{place.directory}/{self._name}"
        for group in self._made:
            if group.path == path:
                return group
        return self._make(path, place.version)

    def _make(self, path: str, version: int) -> Cgroup:
        group = Cgroup(path, version)
        self._made.append(group)
        return group

    def _divide(self, group: Cgroup) -> None:
        """Make a child for the programs, and in version 2 one for the gate: only leaves hold processes."""
        if group.version == 2:
            group.write("cgroup.subtree_control", "+pids")
            self._gate = self._make(f"{group.path}/{GATE}", 2)
        self._programs = self._make(f"{group.path}/{PROGRAMS}", group.version)

    def _set(self) -> None:
        limits = self.limits
        if limits.memory is not None:
            self._by["memory"].limit_memory(limits.memory)
        if limits.cpu is not None:
            self._by["cpu"].limit_cpu(limits.cpu)
        if limits.tasks is not None:
            if self._programs is not None:
                self._programs.limit_tasks(limits.tasks)
            else:
                self._by["pids"].limit_tasks(limits.tasks + 1)  # the gate is one

    def entrances(self) -> tuple[tuple[int, int], ...]:
        """For the gate's first process: version and descriptor, as `Cgroup.entrance` says.

        The descriptors are the caller's to close.
        """
        return tuple((group.version, group.entrance()) for group in self._for_gate)

    def program_entrance(self) -> int | None:
        """The file to which a program writes "0" to enter; None where it is born in the right place.

        The descriptor is the caller's to close.
        """
        group = self._programs
        return (
            None
            if group is None
            else group.open("tasks" if group.version == 1 else "cgroup.procs", os.O_WRONLY)
        )

    def confirm(self, pid: int) -> None:
        """Read from the kernel that a gate is in every group that it is to be in."""
        self._confirm(pid, self._for_gate)

    @property
    def _for_gate(self) -> list[Cgroup]:
        groups = list(dict.fromkeys(self._by.values()))
        return [self._gate if group.version == 2 and self._gate else group for group in groups]

    def _confirm(self, pid: int, groups: list[Cgroup]) -> None:
        try:
            lines = read(f"{self._proc}/{pid}/cgroup").splitlines()
        except OSError as error:
            raise _failed(f"process {pid}", error) from error
        for group in groups:
            where = group.path[group.path.rindex(f"/{self._name}") :]
            if not any(self._is_of(group, line) and line.endswith(where) for line in lines):
                raise SetupError(f"nothing was run: process {pid} is not in {group.path}", stage="cgroup")

    def _is_of(self, group: Cgroup, line: str) -> bool:
        """Whether a line of /proc/PID/cgroup is about the hierarchy that a group is in."""
        names = line.split(":", 2)[1]
        if group.version == 2:
            return not names
        controllers = [name for name, found in self._by.items() if found.path in (group.path, _above(group))]
        return any(name in names.split(",") for name in controllers)

    def oom_descriptor(self) -> int | None:
        """To be polled: POLLIN in version 1 and POLLPRI in version 2 when memory has run out.

        It belongs to the group. `oom_kills` then says whether somebody was killed.
        """
        group = self._by.get("memory")
        if group is None or self._oom >= 0:
            return None if group is None else self._oom
        if group.version == 2:
            self._oom = group.open("memory.events")
            return self._oom
        control = group.open("memory.oom_control")
        event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        try:
            group.write("cgroup.event_control", f"{event} {control}")
        except BaseException:
            os.close(event)
            raise
        finally:
            os.close(control)
        self._oom = event
        return event

    @property
    def counts_oom(self) -> bool:
        """Whether `oom_descriptor` is a file of counts and not an event."""
        return "memory" in self._by and self._by["memory"].version == 2

    def usage_descriptor(self) -> int:
        """A file that tells the processor time: nanoseconds, or `usage_usec` on its first line.

        The descriptor is the caller's to close.
        """
        group = self._accounting
        if group is None:
            raise ValueError("this group does not count processor time")
        return group.open("cpu.stat" if group.version == 2 else "cpuacct.usage")

    def oom_kills(self) -> int:
        """How many processes were killed for want of memory."""
        group = self._by.get("memory")
        if group is None:
            return 0
        return group.count("memory.events" if group.version == 2 else "memory.oom_control", "oom_kill")

    def cpu_used(self) -> float:
        """Seconds of processor time, of everything that was ever inside."""
        group = self._accounting
        if group is None:
            raise ValueError("this group does not count processor time")
        if group.version == 2:
            return group.count("cpu.stat", "usage_usec") / 1e6
        return int(group.read("cpuacct.usage")) / 1e9

    def cpu_times(self) -> tuple[float, float] | None:
        """The same in two parts: in the programs, and in the kernel for them."""
        group = self._accounting
        if group is None:
            return None
        if group.version == 2:
            return group.count("cpu.stat", "user_usec") / 1e6, group.count("cpu.stat", "system_usec") / 1e6
        # Version 1 tells the parts by what went on when a clock ticked, and only the sum for sure.
        user, system = int(group.read("cpuacct.usage_user")), int(group.read("cpuacct.usage_sys"))
        used = self.cpu_used()
        in_programs = used * user / (user + system) if user + system else used
        return in_programs, used - in_programs

    @property
    def _accounting(self) -> Cgroup | None:
        # Every cgroup of version 2 counts.
        unified = next((group for group in self._by.values() if group.version == 2), None)
        return self._by.get("cpuacct", unified)

    def peak_memory(self) -> int | None:
        """The most bytes at once, where the kernel remembers."""
        group = self._by.get("memory")
        if group is None:
            return None
        return _number(group, "memory.peak" if group.version == 2 else "memory.max_usage_in_bytes")

    def peak_tasks(self) -> int | None:
        """The most tasks at once besides the gate, where the kernel remembers (Linux 6.11)."""
        if self._programs is not None:
            return _number(self._programs, "pids.peak")
        peak = _number(self._by["pids"], "pids.peak") if "pids" in self._by else None
        return None if peak is None else max(0, peak - 1)

    def task_refusals(self) -> int:
        """How often a task was refused because of the limit."""
        group = self._programs or self._by.get("pids")
        return group.count("pids.events", "max") if group is not None and group.has("pids.events") else 0

    def close(self) -> None:
        """Remove it. What could not be removed, because something in it does not end, stays in `paths`.

        It is not a forked child's to remove.
        """
        if self._oom >= 0:
            os.close(self._oom)
            self._oom = -1
        if self._owner != os.getpid():
            while self._made:
                self._made.pop().forget()
            return
        self._made = [group for group in reversed(self._made) if not group.close()][::-1]


def hierarchies(limits: GroupLimits, places: Places) -> tuple[Place, ...]:
    """Where such a group will have a directory; the gate enters them in this order."""
    found = [place for name in _needed(limits, places) if (place := places.at(name)) is not None]
    return tuple(dict.fromkeys(found))


def planned(id: str, limits: GroupLimits, places: Places) -> tuple[str, ...]:
    """The directories that such a group will be, to be written down before there is anything to forget."""
    return tuple(f"{place.directory}/{GROUP}{id}" for place in hierarchies(limits, places))


def remove(paths: Iterable[str]) -> None:
    """Remove groups that a supervisor left when it was killed, and whatever still runs in them.

    Only what has the name of a group of ours is touched.
    """
    groups = []
    for path in paths:
        if not os.path.basename(path).startswith(GROUP) or os.path.normpath(path) != path:
            continue
        for directory in (f"{path}/{PROGRAMS}", f"{path}/{GATE}", path):
            with contextlib.suppress(OSError):
                groups.append(Cgroup(directory, 0, existing=True))
    # Where tasks are counted first: nobody is born there any more.
    for group in sorted(groups, key=lambda group: not group.has("pids.max")):
        if group.has("cgroup.procs"):
            group.end()
    for group in groups:
        group.close()


def _needed(limits: GroupLimits, places: Places) -> tuple[str, ...]:
    """The controllers of the limits; in version 1 also that of tasks, without which a bomb outruns `kill`."""
    asked = limits.controllers
    legacy = any((place := places.at(name)) is not None and place.version == 1 for name in asked)
    brake = places.at("pids")
    if "pids" in asked or not legacy or brake is None:
        return asked
    return (*asked, "pids") if os.access(brake.directory, os.W_OK, effective_ids=True) else asked


def _above(group: Cgroup) -> str:
    return os.path.dirname(group.path)


def _number(group: Cgroup, name: str) -> int | None:
    return int(group.read(name)) if group.has(name) else None


def _failed(what: str, error: OSError) -> SetupError:
    return SetupError(
        f"nothing was run: {what}: {error.strerror}",
        stage="cgroup",
        errno=error.errno or errno.EIO,
        hint="`stockade doctor` shows which limits can be set here",
    )
