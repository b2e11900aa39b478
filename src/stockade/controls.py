"""The controls: one name for each thing that Stockade can enforce.

A policy needs a set of controls, a backend on this host offers a set, and
selection is set inclusion. Nothing else in Stockade decides what is enforced.
"""

from __future__ import annotations

import enum


class Control(enum.StrEnum):
    """One thing that can be enforced. Compares equal to its name."""

    FILES = "files"
    DENY = "deny"
    PROTECT = "protect"
    EXEC = "exec"
    WORKSPACE_OVERLAY = "workspace.overlay"
    NETWORK_NONE = "network.none"
    NETWORK_RULES = "network.rules"
    NETWORK_HTTP = "network.http"
    SECRETS = "secrets"
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
    LIMITS_NETWORK = "limits.network"
    CLEANUP = "cleanup"


class Grade(enum.StrEnum):
    """The evidence that a control is enforced, the strongest first. Compares equal to its text."""

    KERNEL = "read from the kernel by the parent"
    NAMESPACES = "namespace descriptors compared"
    GATE = "confirmed by the gate before untrusted code"
    #: By the supervisor or the gate during the run: before the run there is nothing to observe.
    KEPT = "kept by Stockade itself"
    WEAKER = "accepted weaker"
    ABSENT = "absent"

    @property
    def enforced(self) -> bool:
        """Whether the control is enforced in full."""
        return self not in (Grade.WEAKER, Grade.ABSENT)
