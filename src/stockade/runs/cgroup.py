"""The cgroups of one sandbox: what the whole sandbox may use, and what it has used.

A group is a directory `stockade-run-ID` in each hierarchy that a limit needs, or that is needed to kill
everything inside. The supervisor makes it, the gate's first process enters it before it starts anything, and
the supervisor removes it when the sandbox has ended. Every process that the program starts is born in the
group and cannot leave it, because the cgroup file system is not mounted inside.

A living sandbox must be able to start a command while a program uses up every allowed task. There the limit
of tasks is set on a child group, `programs`, and the gate stays outside of it.
"""

from __future__ import annotations

import _thread
import contextlib
import errno
import os
from _weakref import ref  # what `weakref` has of it, which takes longer to load
from collections.abc import Collection, Iterable

import msgspec

from stockade.controls import Control
from stockade.errors import SetupError
from stockade.linux.cgroupfs import Cgroup, drop, read
from stockade.linux.cgroups import GROUP, SWITCHED, CgroupParent, CgroupParents
from stockade.policy import Limits

PROGRAMS, GATE = "programs", "gate"
#: How many times the limit of tasks a sandbox and all that are within its groups may have together.
TOGETHER = 16


class GroupLimits(msgspec.Struct, frozen=True):
    """The limits of a group: bytes, tasks, cores. `cpu_time` only makes the group count processor time."""

    memory: int | None = None
    tasks: int | None = None
    cpu: float | None = None
    cpu_time: bool = False

    @classmethod
    def of(cls, limits: Limits, controls: Collection[Control]) -> GroupLimits:
        """Return the limits of a policy that a cgroup is to enforce."""
        return cls(
            memory=limits.memory if Control.LIMITS_MEMORY in controls else None,
            tasks=limits.tasks if Control.LIMITS_TASKS in controls else None,
            cpu=limits.cpu if Control.LIMITS_CPU in controls else None,
            cpu_time=Control.LIMITS_CPU_TIME in controls,
        )

    @property
    def controllers(self) -> tuple[str, ...]:
        """The cgroup controllers that these limits need."""
        asked = {
            "memory": self.memory is not None,
            "pids": self.tasks is not None,
            "cpu": self.cpu is not None,
            "cpuacct": self.cpu_time,
        }
        return tuple(name for name, wanted in asked.items() if wanted)


class Baseline:
    """A group's counters when a run began, to subtract what earlier runs caused."""

    def __init__(self, oom_kills: int = 0, task_refusals: int = 0, peak_tasks: int = -1) -> None:
        self.oom_kills, self.task_refusals, self.peak_tasks = oom_kills, task_refusals, peak_tasks
        #: The peak of memory when the run began, where the kernel cannot reset it; -1 where it did.
        self.peak_memory = -1
        #: The run's own peak of memory before a later run reset the counter.
        self.memory_so_far = 0


class SandboxCgroups:
    """The cgroups of one sandbox. The constructor makes all of them or none."""

    def __init__(
        self,
        id: str,
        limits: GroupLimits,
        places: CgroupParents,
        *,
        living: bool = False,
        idle: Cgroup | None = None,
    ) -> None:
        """Make the groups; `idle` is one that exists and that this sandbox uses again."""
        if not id or "/" in id:
            raise ValueError(f"not a name: {id!r}")
        self.limits = limits
        self._name = f"{GROUP}{id}" if idle is None else os.path.basename(idle.path)
        self._owner = os.getpid()
        self._proc = places.proc
        #: By controller; several controllers may share one group.
        self._by: dict[str, Cgroup] = {}
        #: Parents before their children.
        self._made: list[Cgroup] = [] if idle is None else [idle]
        #: What earlier sandboxes used of the processor, by the names in version 2's `cpu.stat`.
        self._earlier: dict[str, int] = {}
        self._gate: Cgroup | None = None
        self._programs: Cgroup | None = None
        self._oom = self._peak = -1
        self._runs: list[ref[Baseline]] = []
        self._counting = _thread.allocate_lock()
        step = self._name
        try:
            for controller in _needed(limits, places):
                place = places.at(controller)
                if place is None:
                    raise OSError(
                        errno.ENOENT, f"no cgroup with the {controller} controller is writable here"
                    )
                step = f"{place.directory}/{self._name}"
                self._by[controller] = self._in(place)
            if living and limits.tasks is not None:
                self._divide(self._by["pids"])
            self._set()
            if idle is not None and idle.version == 2:
                names = ("usage_usec", "user_usec", "system_usec")
                self._earlier = {name: idle.count("cpu.stat", name) for name in names}
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise _failed(step, error) from error
            raise

    @property
    def paths(self) -> tuple[str, ...]:
        """The directories that exist, one in each hierarchy; `remove` also finds their children."""
        return tuple(group.path for group in self._made if group.path.endswith(self._name))

    @property
    def kept(self) -> dict[str, str]:
        """The files that hold the limits, with their contents as read back from the kernel."""
        return {name: text for group in self._made for name, text in group.kept.items()}

    def _in(self, place: CgroupParent) -> Cgroup:
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
        """Make a child for the programs and, in version 2, one for the gate: only leaves hold processes."""
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
                self._by["pids"].limit_tasks(limits.tasks + 1)  # one more for the gate

    def lift_cpu(self) -> None:
        """Lift limits.cpu, because everything inside is being killed: ending takes processor time too."""
        group = self._by.get("cpu")
        if group is not None and self.limits.cpu is not None:
            with contextlib.suppress(OSError):  # another process may have removed it
                group.lift_cpu()

    def parents(self) -> CgroupParents:
        """Return where other sandboxes can have groups that count against these limits too.

        Each of them has a limit of tasks of its own, because its gate and its shell need some; all of them
        together have a multiple of it.
        """
        if self.limits.tasks is not None and "pids.max" not in self._by["pids"].kept:
            self._by["pids"].limit_tasks(self.limits.tasks * TOGETHER)
        unified = next((group for group in self._made if group.version == 2), None)
        if unified is not None:
            on = unified.read("cgroup.subtree_control").split()
            wanted = [name for name in SWITCHED if name in self.limits.controllers and name not in on]
            if wanted:
                unified.write("cgroup.subtree_control", " ".join(f"+{name}" for name in wanted))
        found = {name: CgroupParent(group.path, group.version) for name, group in self._by.items()}
        return CgroupParents(found=found, proc=self._proc)

    def entrances(self) -> tuple[tuple[int, int], ...]:
        """Open the groups for the gate's first process: version and descriptor, as in `Cgroup.entrance`.

        The caller closes the descriptors.
        """
        return tuple((group.version, group.entrance()) for group in self._for_gate)

    def program_entrance(self) -> int | None:
        """Open the file to which a program writes "0" to enter its group; None if it is born there.

        The caller closes the descriptor.
        """
        group = self._programs
        return (
            None
            if group is None
            else group.open("tasks" if group.version == 1 else "cgroup.procs", os.O_WRONLY)
        )

    def confirm(self, pid: int) -> None:
        """Check in /proc that a gate is in every group that it should be in."""
        try:
            lines = read(f"{self._proc}/{pid}/cgroup").splitlines()
        except OSError as error:
            raise _failed(f"process {pid}", error) from error
        for group in self._for_gate:
            where = group.path[group.path.rindex(f"/{self._name}") :]
            if not any(line.endswith(where) and self._is_of(group, line) for line in lines):
                raise SetupError(
                    f"nothing was run: the gate (process {pid}) is not in the cgroup {group.path}",
                    stage="cgroup",
                )

    @property
    def _for_gate(self) -> list[Cgroup]:
        groups = list(dict.fromkeys(self._by.values()))
        return [self._gate if group.version == 2 and self._gate else group for group in groups]

    def _is_of(self, group: Cgroup, line: str) -> bool:
        """Whether a line of /proc/PID/cgroup is about the hierarchy of this group."""
        names = line.split(":", 2)[1]
        if group.version == 2:
            return not names
        controllers = [name for name, found in self._by.items() if found.path in (group.path, _above(group))]
        return any(name in names.split(",") for name in controllers)

    def oom_descriptor(self) -> int | None:
        """Return a descriptor to poll: POLLIN (version 1) or POLLPRI (version 2) when memory has run out.

        It stays the group's. `oom_kills` then says whether the kernel killed a process.
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
        """Whether `oom_descriptor` is a file of counters and not an eventfd."""
        return "memory" in self._by and self._by["memory"].version == 2

    def usage_descriptor(self) -> int:
        """Open the file with the processor time: in nanoseconds, or as `usage_usec` on its first line.

        The caller closes the descriptor.
        """
        group = self._accounting
        if group is None:
            raise ValueError("this group does not count processor time")
        return group.open("cpu.stat" if group.version == 2 else "cpuacct.usage")

    def oom_kills(self) -> int:
        """Return how many processes the kernel killed because memory had run out."""
        group = self._by.get("memory")
        if group is None:
            return 0
        return group.count("memory.events" if group.version == 2 else "memory.oom_control", "oom_kill")

    def cpu_used(self) -> float:
        """Return the processor time of all processes that were ever in the group, in seconds."""
        group = self._accounting
        if group is None:
            raise ValueError("this group does not count processor time")
        if group.version == 2:
            return self._seconds(group, "usage_usec")
        return int(group.read("cpuacct.usage")) / 1e9

    def cpu_times(self) -> tuple[float, float] | None:
        """Return the processor time in two parts: user and system; None if the group does not count it."""
        group = self._accounting
        if group is None:
            return None
        if group.version == 2:
            return self._seconds(group, "user_usec"), self._seconds(group, "system_usec")
        # Version 1 samples the two parts at clock ticks; only their sum is exact.
        user, system = int(group.read("cpuacct.usage_user")), int(group.read("cpuacct.usage_sys"))
        used = self.cpu_used()
        in_programs = used * user / (user + system) if user + system else used
        return in_programs, used - in_programs

    def _seconds(self, group: Cgroup, name: str) -> float:
        return (group.count("cpu.stat", name) - self._earlier.get(name, 0)) / 1e6

    @property
    def _accounting(self) -> Cgroup | None:
        # Every cgroup of version 2 counts processor time.
        unified = next((group for group in self._by.values() if group.version == 2), None)
        return self._by.get("cpuacct", unified)

    def baseline(self) -> Baseline:
        """Begin to count for one run of a living sandbox; resets the peak of memory where possible."""
        with self._counting:
            peak, reset = self._memory_peak(), False
            before = Baseline(self.oom_kills(), self.task_refusals(), self.peak_tasks() or 0)
            self._runs = [run for run in self._runs if run() is not None]
            if peak is not None:
                for run in filter(None, (known() for known in self._runs)):
                    run.memory_so_far = max(run.memory_so_far, peak)
                with contextlib.suppress(OSError):
                    # Works in version 1, and in version 2 since Linux 6.12, for this descriptor only.
                    reset = os.pwrite(self._peak, b"0", 0) > 0
                before.peak_memory = -1 if reset else peak
            self._runs.append(ref(before))
        return before

    def peak_memory(self, since: Baseline | None = None) -> int | None:
        """Return the peak of memory in bytes, of one run with `since`; None if the kernel cannot tell."""
        with self._counting:
            peak = self._memory_peak()
            if peak is None or since is None:
                return peak
            return max(peak, since.memory_so_far) if peak > since.peak_memory else None

    def memory_used(self) -> int | None:
        """Return the memory in use now, in bytes; None if the group does not count it."""
        group = self._by.get("memory")
        if group is None:
            return None
        return _number(group, "memory.current" if group.version == 2 else "memory.usage_in_bytes")

    def _memory_peak(self) -> int | None:
        group = self._by.get("memory")
        if group is None:
            return None
        if self._peak < 0:
            name = "memory.peak" if group.version == 2 else "memory.max_usage_in_bytes"
            for flags in (os.O_RDWR, os.O_RDONLY):
                with contextlib.suppress(OSError):
                    self._peak = group.open(name, flags)
                    break
            else:
                return None
        return int(os.pread(self._peak, 64, 0))

    def peak_tasks(self, since: Baseline | None = None) -> int | None:
        """Return the peak number of tasks besides the gate (Linux 6.11 and later; else None).

        The kernel cannot reset this peak: a run that stayed below the sandbox's earlier peak gets None.
        """
        if self._programs is not None:
            peak = _number(self._programs, "pids.peak")
        else:
            peak = _number(self._by["pids"], "pids.peak") if "pids" in self._by else None
            peak = None if peak is None else max(0, peak - 1)
        return None if peak is None or (since is not None and peak <= since.peak_tasks) else peak

    def task_refusals(self) -> int:
        """Return how often the kernel refused a new task because of the limit."""
        group = self._programs or self._by.get("pids")
        if group is None:
            return 0
        try:
            return group.count("pids.events", "max")
        except FileNotFoundError:
            return 0

    @property
    def only_group(self) -> Cgroup | None:
        """The group, if there is one alone."""
        return self._made[0] if len(self._made) == 1 else None

    def release(self) -> None:
        """Leave the groups to another sandbox: from now on this object counts nothing."""
        self._made, self._by = [], {}

    def close(self) -> None:
        """Remove the groups. A group with a process that does not end stays, and stays in `paths`.

        A forked child only closes its copies.
        """
        for descriptor in (self._oom, self._peak):
            if descriptor >= 0:
                os.close(descriptor)
        self._oom = self._peak = -1
        if self._owner != os.getpid():
            while self._made:
                self._made.pop().forget()
            return
        self._made = [group for group in reversed(self._made) if not group.close()][::-1]


def hierarchies(limits: GroupLimits, places: CgroupParents) -> tuple[CgroupParent, ...]:
    """Return the parents in which a group with these limits gets a directory, as the gate enters them."""
    found = [place for name in _needed(limits, places) if (place := places.at(name)) is not None]
    return tuple(dict.fromkeys(found))


def planned_paths(id: str, places: Iterable[CgroupParent]) -> tuple[str, ...]:
    """Return the directories that a sandbox's group will have, so that the register names them first."""
    return tuple(f"{place.directory}/{GROUP}{id}" for place in places)


def remove_empty(paths: Iterable[str]) -> bool:
    """Remove groups that no process is in, and return whether all of them are gone."""
    for path in paths:
        if os.path.basename(path).startswith(GROUP) and os.path.normpath(path) == path:
            try:
                drop(path)
            except FileNotFoundError:
                continue
            except OSError:
                return False
    return True


def remove(paths: Iterable[str]) -> None:
    """Kill what still runs in the groups that a killed supervisor left, and remove them.

    Paths that do not have the name of a Stockade group are ignored.
    """
    groups = []
    for path in paths:
        if not os.path.basename(path).startswith(GROUP) or os.path.normpath(path) != path:
            continue
        for top in (*_within(path), path):
            for directory in (f"{top}/{PROGRAMS}", f"{top}/{GATE}", top):
                with contextlib.suppress(OSError):
                    groups.append(Cgroup(directory, 0, existing=True))
    # Groups with a limit of tasks come first: `end` stops new tasks there.
    for group in sorted(groups, key=lambda group: not group.has("pids.max")):
        if group.has("cgroup.procs"):
            group.end()
    for group in groups:
        group.close()


def _within(directory: str) -> list[str]:
    """Return the groups of other sandboxes within a group."""
    try:
        names = os.listdir(directory)
    except OSError:
        return []
    return [f"{directory}/{name}" for name in names if name.startswith(GROUP)]


def _needed(limits: GroupLimits, places: CgroupParents) -> tuple[str, ...]:
    """Return the controllers to use: in version 1 also pids, without which a fork bomb outruns `kill`."""
    asked = limits.controllers
    legacy = any((place := places.at(name)) is not None and place.version == 1 for name in asked)
    pids = places.at("pids")
    if "pids" in asked or not legacy or pids is None:
        return asked
    return (*asked, "pids") if os.access(pids.directory, os.W_OK, effective_ids=True) else asked


def _above(group: Cgroup) -> str:
    return os.path.dirname(group.path)


def _number(group: Cgroup, name: str) -> int | None:
    try:
        return int(group.read(name))
    except OSError:
        return None


def _failed(what: str, error: OSError) -> SetupError:
    return SetupError(
        f"nothing was run: {what}: {error.strerror}",
        stage="cgroup",
        errno=error.errno or errno.EIO,
        hint="`stockade doctor` shows which limits can be set here",
    )
