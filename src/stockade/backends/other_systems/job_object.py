"""The jobobject draft: the limits of a Job Object of Windows, as numbers.

A Job Object limits what the processes in it use, and ends them together. It hides nothing: files, the network
and other processes are as open as before. So it cannot enforce any policy alone, and every policy is refused;
this module compiles the part that such a backend would have.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from typing import ClassVar

import msgspec

from stockade.backends.backend import Mechanism
from stockade.backends.other_systems.draft import DraftBackend, DraftPlan, DraftRequest, DraftStep
from stockade.controls import Control
from stockade.errors import PolicyError

JOB_TIME, ACTIVE_PROCESS, JOB_MEMORY = 0x4, 0x8, 0x200
DIE_ON_UNHANDLED_EXCEPTION, KILL_ON_JOB_CLOSE = 0x400, 0x2000
#: Would let processes leave the job: never set.
BREAKAWAY_OK, SILENT_BREAKAWAY_OK = 0x800, 0x1000
FLAGS = {
    JOB_TIME: "JOB_OBJECT_LIMIT_JOB_TIME",
    ACTIVE_PROCESS: "JOB_OBJECT_LIMIT_ACTIVE_PROCESS",
    JOB_MEMORY: "JOB_OBJECT_LIMIT_JOB_MEMORY",
    DIE_ON_UNHANDLED_EXCEPTION: "JOB_OBJECT_LIMIT_DIE_ON_UNHANDLED_EXCEPTION",
    KILL_ON_JOB_CLOSE: "JOB_OBJECT_LIMIT_KILL_ON_JOB_CLOSE",
}
#: Handles, clipboard, system parameters, display, atoms, desktops and the end of the session.
EVERY_UI_LIMIT = 0xFF
RATE_ENABLED, RATE_HARD_CAP = 0x1, 0x4
#: The whole machine, in the unit of a rate.
WHOLE = 10_000
#: Windows counts time in 100 ns.
TICKS = 10_000_000
#: JOBOBJECT_EXTENDED_LIMIT_INFORMATION where pointers have 64 bits: basic limits, counters, memory.
_LAYOUT = struct.Struct("<qqIxxxxQQIxxxxQII 6Q 4Q")

HIDES_NOTHING = "a Job Object bounds what a program uses; it hides and refuses nothing"
OTHERS = "what a service of Windows starts on its behalf is not in the job"

MECHANISMS: Mapping[Control, Mechanism] = {
    **dict.fromkeys(Control, Mechanism(never=HIDES_NOTHING)),
    Control.ENVIRONMENT: Mechanism("built anew by the supervisor"),
    Control.LIMITS_MEMORY: Mechanism("JobMemoryLimit: committed memory of all processes together"),
    Control.LIMITS_TASKS: Mechanism(
        never="threads are not counted", optional=True, weaker="ActiveProcessLimit: processes only"
    ),
    Control.LIMITS_CPU: Mechanism("CpuRate as a hard cap"),
    Control.LIMITS_CPU_TIME: Mechanism(
        never="time in the kernel is not counted", optional=True, weaker="PerJobUserTimeLimit: user time only"
    ),
    Control.LIMITS_WALL: Mechanism("the supervisor ends the job"),
    Control.LIMITS_OUTPUT: Mechanism("counted by the supervisor"),
    Control.LIMITS_FILES: Mechanism(never="Windows bounds the handles of no process"),
    Control.LIMITS_DISK: Mechanism(never="a Job Object bounds no space on a disk"),
    Control.LIMITS_NETWORK: Mechanism(never="no process is between the program and the network to count"),
    Control.CLEANUP: Mechanism(never=OTHERS, optional=True, weaker="KILL_ON_JOB_CLOSE, no breakaway"),
}


class JobObject(DraftBackend):
    """Limits of a Job Object."""

    name: ClassVar[str] = "jobobject"
    system: ClassVar[str] = "win32"
    foundation = ("jobobject",)
    mechanisms = MECHANISMS

    @classmethod
    def draw(cls, asked: DraftRequest) -> DraftPlan:
        limits = asked.resolved.limits
        return compile_plan(
            JobObjectInputs(
                processors=os.cpu_count() or 1,
                memory=limits.memory or 0,
                tasks=limits.tasks or 0,
                cpu=limits.cpu or 0,
                cpu_time=limits.cpu_time or 0,
            )
        )


class JobObjectInputs(msgspec.Struct, frozen=True):
    """Everything that a plan depends on. A limit of 0 is none; memory in bytes, time in seconds."""

    processors: int
    memory: int = 0
    tasks: int = 0
    cpu: float = 0
    cpu_time: float = 0


class JobObjectLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of the Windows structures that are set, by their names there."""

    LimitFlags: int
    PerJobUserTimeLimit: int = 0
    ActiveProcessLimit: int = 0
    JobMemoryLimit: int = 0
    #: JOBOBJECT_CPU_RATE_CONTROL_INFORMATION
    ControlFlags: int = 0
    CpuRate: int = 0
    #: JOBOBJECT_BASIC_UI_RESTRICTIONS
    UIRestrictionsClass: int = EVERY_UI_LIMIT

    def extended(self) -> bytes:
        """Return JOBOBJECT_EXTENDED_LIMIT_INFORMATION as SetInformationJobObject takes it."""
        basic = (0, self.PerJobUserTimeLimit, self.LimitFlags, 0, 0, self.ActiveProcessLimit, 0, 0, 0)
        return _LAYOUT.pack(*basic, *(0,) * 6, 0, self.JobMemoryLimit, 0, 0)

    def rate(self) -> bytes:
        """Return JOBOBJECT_CPU_RATE_CONTROL_INFORMATION as SetInformationJobObject takes it."""
        return struct.pack("<II", self.ControlFlags, self.CpuRate)


def limits(given: JobObjectInputs) -> JobObjectLimits:
    """Return the limits of a policy as numbers of a Job Object."""
    flags = KILL_ON_JOB_CLOSE | DIE_ON_UNHANDLED_EXCEPTION
    flags |= JOB_TIME if given.cpu_time else 0
    flags |= ACTIVE_PROCESS if given.tasks else 0
    flags |= JOB_MEMORY if given.memory else 0
    rate = 0
    if given.cpu:
        # Rounded down, so that a program never gets more than the policy says; 0 would be no cap at all.
        rate = min(WHOLE, int(given.cpu / given.processors * WHOLE))
        if not rate:
            raise PolicyError(
                f"limits.cpu = {given.cpu:g}: too little of {given.processors} processors for a Job Object",
                hint=f"write {given.processors / WHOLE:g} or more",
            )
    return JobObjectLimits(
        LimitFlags=flags,
        PerJobUserTimeLimit=max(1, int(given.cpu_time * TICKS)) if given.cpu_time else 0,
        ActiveProcessLimit=given.tasks,
        JobMemoryLimit=given.memory,
        ControlFlags=RATE_ENABLED | RATE_HARD_CAP if rate else 0,
        CpuRate=rate,
    )


def compile_plan(given: JobObjectInputs) -> DraftPlan:
    """Return the steps, in order."""
    found = limits(given)
    flags = [name for bit, name in FLAGS.items() if found.LimitFlags & bit]
    fields = {
        "PerJobUserTimeLimit": (found.PerJobUserTimeLimit, "limits.cpu_time"),
        "ActiveProcessLimit": (found.ActiveProcessLimit, "limits.tasks"),
        "JobMemoryLimit": (found.JobMemoryLimit, "limits.memory"),
        "CpuRate": (found.CpuRate, "limits.cpu"),
    }
    steps = [
        DraftStep(
            words=f"make a Job Object with {', '.join(flags)}",
            given=("LimitFlags", hex(found.LimitFlags), found.extended().hex(), found.rate().hex()),
        ),
        *(
            DraftStep(words=f"{name} = {value}", clause=clause, given=(name, str(value)))
            for name, (value, clause) in fields.items()
            if value
        ),
        DraftStep(
            words="no handles, clipboard, desktops or settings of others",
            given=("UIRestrictionsClass", hex(found.UIRestrictionsClass)),
        ),
        DraftStep(words="start the command suspended, put it into the job, let it go on"),
    ]
    return DraftPlan(JobObject.name, tuple(steps))
