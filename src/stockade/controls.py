"""The vocabulary of enforcement: one name per clause that can be enforced.

A policy needs a set of controls, a backend on this host offers a set, and
selection is set inclusion. Nothing else in Stockade decides what is enforced.
"""

from __future__ import annotations

import enum


class Control(enum.StrEnum):
    """One enforceable clause. Compares equal to its name."""

    FILES = "files"
    DENY = "deny"
    PROTECT = "protect"
    EXEC = "exec"
    WORKSPACE_OVERLAY = "workspace.overlay"
    NETWORK_NONE = "network.none"
    PROCESSES = "processes"
    IPC = "ipc"
    SYSCALLS = "syscalls"
    PRIVILEGES = "privileges"
    ENVIRONMENT = "environment"
    DEVICES = "devices"
    TERMINAL = "terminal"
    LIMITS_MEMORY = "limits.memory"
    LIMITS_TASKS = "limits.tasks"
    LIMITS_CPU = "limits.cpu"
    LIMITS_CPU_TIME = "limits.cpu_time"
    LIMITS_WALL = "limits.wall"
    LIMITS_OUTPUT = "limits.output"
    LIMITS_FILES = "limits.files"
    LIMITS_DISK = "limits.disk"
    CLEANUP = "cleanup"


class Grade(enum.StrEnum):
    """How well it is known that a control is enforced, the best first. Compares equal to its words."""

    KERNEL = "read from the kernel by the parent"
    NAMESPACES = "namespace descriptors compared"
    GATE = "confirmed by the gate before untrusted code"
    #: By the parent or the gate, while the run goes on: before it there is nothing to see.
    KEPT = "kept by Stockade itself"
    WEAKER = "accepted weaker"
    ABSENT = "absent"

    @property
    def enforced(self) -> bool:
        """Whether the control is there as it was asked for."""
        return self not in (Grade.WEAKER, Grade.ABSENT)
