"""What a machine can do, as a value."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

#: Everything the gate can try out, in the order in which it is tried.
GATE_PROBES = (
    "userns", "mountapi", "pidns", "netns", "ipcns", "utsns", "cgroupns",
    "overlay", "landlock", "seccomp", "notify", "pidfd", "nested", "nproc", "scopes",
)  # fmt: skip
#: What is tried from here, because it is the supervisor who does it.
CGROUP_PROBES = ("cgroup.memory", "cgroup.pids", "cgroup.cpu", "cgroup.cpuacct")
#: bubblewrap, by a run with the flags of a sandbox; and what of it depends on its version, or on who we are.
HELPER_PROBES = ("bwrap", "bwrap.overlay", "bwrap.nproc")
PROBES = GATE_PROBES + CGROUP_PROBES + HELPER_PROBES
#: What is looked for on other systems, by their name in `sys.platform`, without a version.
ELSEWHERE = {
    "darwin": ("sandbox-exec", "apple-container"),
    "openbsd": ("pledge", "unveil"),
    "win32": ("jobobject",),
}
SYSTEMS = {"linux": "Linux", "darwin": "macOS", "openbsd": "OpenBSD", "win32": "Windows"}


def called(system: str) -> str:
    """What people call a system."""
    return SYSTEMS.get(system, system)


class Probe(msgspec.Struct, frozen=True):
    """The result of really doing one thing.

    `errno` is the kernel's answer and `detail` the step that got it; a failed
    probe says in `reason` why, and in `fix` what to change.
    """

    ok: bool
    errno: int = 0
    detail: str = ""
    reason: str = ""
    fix: str = ""


class Host(msgspec.Struct, frozen=True):
    """This machine, as far as it decides which walls can be raised.

    >>> weak = Host.pretend(without=("overlay",))
    >>> weak.has("userns"), weak.has("overlay")
    (True, False)
    """

    system: str
    kernel: str
    machine: str
    uid: int
    #: "docker" or "podman" where their mark is found. A hint for advice, never for a decision.
    container: str = ""
    sysctls: dict[str, str] = {}
    probes: dict[str, Probe] = {}

    def has(self, name: str) -> bool:
        """Whether the probe of that name succeeded."""
        return name in self.probes and self.probes[name].ok

    @property
    def landlock(self) -> int:
        """Landlock's ABI, 0 where it does not work."""
        return int(self.probes["landlock"].detail) if self.has("landlock") else 0

    @classmethod
    def pretend(
        cls,
        without: Iterable[str] = (),
        *,
        system: str = "linux",
        kernel: str = "6.18.0",
        uid: int = 1000,
        landlock: int = 7,
    ) -> Host:
        """A made-up host on which everything works but the named probes."""
        lacking = set(without)
        probes = ELSEWHERE.get(system, PROBES)
        if unknown := lacking.difference(probes):
            raise ValueError(f"no such probe: {', '.join(sorted(unknown))}")
        details = {"landlock": str(landlock), "bwrap": "bubblewrap 0.11.0, /usr/bin/bwrap"}
        yes = {name: Probe(ok=True, detail=details.get(name, "")) for name in probes}
        no = {name: Probe(ok=False, errno=1, reason=f"no {name}", fix=f"get {name}") for name in lacking}
        return cls(system=system, kernel=kernel, machine="x86_64", uid=uid, probes=yes | no)
