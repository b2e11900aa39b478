"""The walls that a living process can raise around itself: see `sandbox.confine`.

They are those of the landlock backend, but without a supervisor outside that could enforce the time, the
output or the end; and the process keeps what it has in its memory, has opened or has started before. Each
of these is a reason that selection gives. A policy cannot name this backend: it starts nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import msgspec

from stockade.backends import landlock
from stockade.backends.backend import Backend, Mechanism, PlanInputs
from stockade.backends.landlock import MECHANISMS as LANDLOCK
from stockade.backends.landlock import LandlockInputs
from stockade.backends.plan_parts import by_process
from stockade.controls import Control
from stockade.gate import operations as ops
from stockade.policy import Policy
from stockade.resolve.resolved import ResolvedPolicy

NAME = "confine"
_UNSUPERVISED = "a process that confines itself has no supervisor outside"

MECHANISMS: Mapping[Control, Mechanism] = {
    **LANDLOCK,
    Control.PROTECT: Mechanism(never="Landlock cannot make a part of a writable directory read-only"),
    Control.WORKSPACE_OVERLAY: Mechanism(never="nothing can be mounted under a living process"),
    Control.ENVIRONMENT: Mechanism(
        never="a living process has its variables in its memory already",
        optional=True,
        weaker="what the process has in its memory stays",
    ),
    Control.DEVICES: Mechanism(
        never="without mounts of its own, a device file in a granted directory can be opened",
        optional=True,
        weaker="of /dev only null, zero, full, random and urandom; none can be made, terminals neither",
    ),
    Control.TERMINAL: Mechanism(
        never="a living process has its terminal already",
        optional=True,
        weaker="it keeps the one it has, cannot type into it, and can open none",
    ),
    Control.LIMITS_MEMORY: Mechanism(
        never=f"{_UNSUPERVISED} to count for all that it starts",
        optional=True,
        weaker="RLIMIT_AS for each process only",
    ),
    Control.LIMITS_TASKS: Mechanism(never=f"{_UNSUPERVISED} to count its processes", optional=True),
    Control.LIMITS_CPU: Mechanism(never=f"{_UNSUPERVISED} to share out processors"),
    Control.LIMITS_CPU_TIME: Mechanism(
        never=f"{_UNSUPERVISED} to count for all that it starts",
        optional=True,
        weaker="RLIMIT_CPU for each process only",
    ),
    Control.LIMITS_WALL: Mechanism(never=f"{_UNSUPERVISED} to end it"),
    Control.LIMITS_OUTPUT: Mechanism(never=f"{_UNSUPERVISED} to count what it prints", optional=True),
    Control.CLEANUP: Mechanism(
        never=f"{_UNSUPERVISED} to end what it leaves",
        optional=True,
        weaker="whatever it starts stays behind the same walls",
    ),
}


class ConfinementBackend(Backend):
    """Landlock, seccomp and rlimits on the calling process."""

    name: ClassVar[str] = NAME
    system: ClassVar[str] = "linux"
    foundation = ("landlock", "scopes", "seccomp")
    mechanisms = MECHANISMS
    observed: ClassVar[Mapping[Control, str]] = {
        Control.NETWORK_NONE: "filter as for syscalls",
        Control.IPC: "filter as for syscalls, a signal that Landlock refuses tried",
        Control.SYSCALLS: "filter count read from the kernel, its bytes, and a refused call tried",
        Control.PRIVILEGES: "capability sets and no_new_privs read from the kernel",
        Control.LIMITS_FILES: "limit of the process read from the kernel",
    }

    @classmethod
    def plan(cls, given: PlanInputs) -> ops.Plan:
        return compile_plan(landlock.inputs(given))

    @classmethod
    def resident(cls, policy: Policy) -> str:
        raise TypeError("a process that confines itself needs no gate")

    @classmethod
    def home(cls, resolved: ResolvedPolicy, scratch: str) -> str:
        return resolved.caller.home


def compile_plan(given: LandlockInputs) -> ops.Plan:
    """Return the operations of the landlock backend that a process can do to itself."""
    # Its terminal is the host's.
    devices = tuple(path for path in given.devices if path != "/dev/tty")
    given = msgspec.structs.replace(given, devices=devices)
    return ops.Plan(
        NAME,
        0,
        (
            ops.Namespaces(names=(), every_id=False),
            ops.Limit(resource="core", value=0),
            ops.Limit(resource="files", value=given.files, clause=f"limits.files = {given.files}"),
            *by_process(given.memory, given.cpu_time),
            ops.Privileges(),
            *landlock.of_system(given),
            *landlock.of_policy(given),
            ops.Seccomp(program=given.program, clause="syscalls"),
        ),
    )
