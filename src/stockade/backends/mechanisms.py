"""The controls that the gate enforces, by which mechanisms of the kernel, and what those need."""

from __future__ import annotations

from collections.abc import Mapping

from stockade.backends.backend import Mechanism
from stockade.controls import Control
from stockade.host.capabilities import Host

#: The probes that every sandbox needs, whatever the policy says.
FOUNDATION = (
    "userns", "mountapi", "pidns", "pidfd", "ipcns", "utsns", "cgroupns", "landlock", "seccomp",
)  # fmt: skip

#: From this Landlock ABI on, signals and abstract sockets can be kept inside.
LANDLOCK_SCOPES = 6


def _files(host: Host) -> str:
    return f"mount namespace, pivot_root, Landlock ABI {host.landlock}"


def _ipc(host: Host) -> str:
    scopes = ", Landlock scopes" if host.landlock >= LANDLOCK_SCOPES else ""
    return f"ipc namespace{scopes}"


MECHANISMS: Mapping[Control, Mechanism] = {
    Control.FILES: Mechanism(_files),
    Control.PROTECT: Mechanism("read-only mounts in mode rw; otherwise nothing lands on the host"),
    Control.DENY: Mechanism("whiteouts in an overlay over the tree", ("overlay",)),
    Control.EXEC: Mechanism("Landlock, noexec on what is writable, no executable memfd"),
    Control.WORKSPACE_OVERLAY: Mechanism("overlayfs with userxattr", ("overlay",)),
    Control.NETWORK_NONE: Mechanism("own network namespace", ("netns",)),
    Control.NETWORK_RULES: Mechanism(
        "own network namespace whose only way out is a confined egress process", ("netns",)
    ),
    Control.NETWORK_HTTP: Mechanism(
        "TLS ends in the egress process, which judges every request and encodes it anew", ("netns",)
    ),
    Control.SECRETS: Mechanism(
        "placeholders inside; values in locked memory of the egress process", ("netns", "memlock")
    ),
    Control.PROCESSES: Mechanism("pid namespace"),
    Control.IPC: Mechanism(_ipc),
    Control.SYSCALLS: Mechanism("seccomp filter"),
    Control.PRIVILEGES: Mechanism("user namespace, no capabilities, no_new_privs"),
    Control.ENVIRONMENT: Mechanism("built anew by the supervisor"),
    Control.DEVICES: Mechanism("private /dev"),
    Control.TERMINAL: Mechanism("no terminal of the host, TIOCSTI filtered"),
    Control.LIMITS_MEMORY: Mechanism(
        "memory cgroup", ("cgroup.memory",), optional=True, weaker="RLIMIT_AS for each process only"
    ),
    Control.LIMITS_TASKS: Mechanism(
        "RLIMIT_NPROC in the user namespace",
        ("nproc",),
        optional=True,
        # For root: RLIMIT_NPROC does not count its tasks.
        otherwise=Mechanism("pids cgroup", ("cgroup.pids",)),
    ),
    Control.LIMITS_CPU: Mechanism("cpu cgroup", ("cgroup.cpu",), optional=True),
    Control.LIMITS_CPU_TIME: Mechanism(
        "cgroup, watched by the gate",
        ("cgroup.cpuacct",),
        optional=True,
        weaker="RLIMIT_CPU for each process only",
    ),
    Control.LIMITS_WALL: Mechanism("kept by the gate, which the supervisor watches"),
    Control.LIMITS_OUTPUT: Mechanism("counted by the supervisor"),
    Control.LIMITS_FILES: Mechanism("RLIMIT_NOFILE"),
    Control.LIMITS_DISK: Mechanism("size and inodes of the private tmpfs"),
    Control.LIMITS_NETWORK: Mechanism("counted by the egress process"),
    Control.CLEANUP: Mechanism("pid namespace, pidfd of the supervisor"),
}
