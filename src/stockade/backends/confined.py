"""What a living process can be held to by walls that it raises on itself: see `live.confine`.

As the landlock backend, but nobody stands outside: there is no supervisor who
keeps the time, the output or the end, and what the process has in its memory,
opened or started before is there already. Each of these is a reason that
selection gives. It is not a backend that a policy can name: it starts nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import msgspec

from stockade.backends import landlock
from stockade.backends.base import Backend, Given, Mechanism
from stockade.backends.landlock import MECHANISMS as LANDLOCK
from stockade.backends.landlock import Inputs
from stockade.backends.shared import by_process
from stockade.controls import Control
from stockade.gate import plan as ops
from stockade.policy import Policy, Resolved

NAME = "confine"
_NOBODY = "nobody is outside a process that confines itself"

MECHANISMS: Mapping[Control, Mechanism] = {
    **LANDLOCK,
    Control.PROTECT: Mechanism(never="Landlock cannot take away below a directory what it gives above"),
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
        never=f"{_NOBODY} to count for all that it starts",
        optional=True,
        weaker="RLIMIT_AS for each process only",
    ),
    Control.LIMITS_TASKS: Mechanism(never=f"{_NOBODY} to count its processes", optional=True),
    Control.LIMITS_CPU: Mechanism(never=f"{_NOBODY} to share out processors"),
    Control.LIMITS_CPU_TIME: Mechanism(
        never=f"{_NOBODY} to count for all that it starts",
        optional=True,
        weaker="RLIMIT_CPU for each process only",
    ),
    Control.LIMITS_WALL: Mechanism(never=f"{_NOBODY} to end it"),
    Control.LIMITS_OUTPUT: Mechanism(never=f"{_NOBODY} to count what it prints", optional=True),
    Control.CLEANUP: Mechanism(
        never=f"{_NOBODY} to end what it leaves",
        optional=True,
        weaker="whatever it starts stays behind the same walls",
    ),
}


class Confined(Backend):
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
    def plan(cls, given: Given) -> ops.Plan:
        return compile_plan(landlock.inputs(given))

    @classmethod
    def resident(cls, policy: Policy) -> str:
        raise TypeError("a process that confines itself needs no gate")

    @classmethod
    def home(cls, resolved: Resolved, scratch: str) -> str:
        return resolved.caller.home


def compile_plan(given: Inputs) -> ops.Plan:
    """The operations of the landlock backend that a process can do to itself."""
    # The terminal that it has is the host's.
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
