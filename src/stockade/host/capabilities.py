"""What a machine can do, as a value."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

#: The probes that the gate runs, in order.
GATE_PROBES = (
    "userns", "mountapi", "pidns", "netns", "ipcns", "utsns", "cgroupns",
    "overlay", "landlock", "seccomp", "notify", "pidfd", "nested", "nproc", "scopes", "memlock",
)  # fmt: skip
#: The probes that this process runs, because the supervisor makes cgroups itself.
CGROUP_PROBES = ("cgroup.memory", "cgroup.pids", "cgroup.cpu", "cgroup.cpuacct")
#: The probes of bubblewrap: a run with the flags of a sandbox, overlays, and limits of tasks.
HELPER_PROBES = ("bwrap", "bwrap.overlay", "bwrap.nproc")
#: The step of the probe of seccomp that fails where the system lacks the library.
LIBSECCOMP = "load libseccomp"
PROBES = GATE_PROBES + CGROUP_PROBES + HELPER_PROBES
#: The probes of other systems, by their name in `sys.platform`, without a version.
ELSEWHERE = {
    "darwin": ("sandbox-exec", "apple-container"),
    "openbsd": ("pledge", "unveil"),
    "win32": ("jobobject",),
}
SYSTEMS = {"linux": "Linux", "darwin": "macOS", "openbsd": "OpenBSD", "win32": "Windows"}


def called(system: str) -> str:
    """Return the usual name of a system."""
    return SYSTEMS.get(system, system)


class Probe(msgspec.Struct, frozen=True):
    """The result of trying one feature.

    `errno` is the kernel's answer and `detail` the step that got it. If the probe failed, `reason` says why
    and `fix` what to change.
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
    #: "docker" or "podman" if their mark is found. Used for advice, never for a decision.
    container: str = ""
    sysctls: dict[str, str] = {}
    probes: dict[str, Probe] = {}

    @classmethod
    def current(cls, *, fresh: bool = False) -> Host:
        """Return this machine: what was found before, or with `fresh` what is found by trying again.

        >>> Host.current().system
        'linux'
        """
        from stockade.host import host

        return host(fresh=fresh, helpers=True)

    def __repr__(self) -> str:
        lacking = [name for name, probe in self.probes.items() if not probe.ok]
        without = f", without {', '.join(lacking)}" if lacking else ""
        return f"<Host: {self.system} {self.kernel} {self.machine}, uid {self.uid}{without}>"

    def has(self, name: str) -> bool:
        """Whether the probe of that name succeeded."""
        return name in self.probes and self.probes[name].ok

    @property
    def landlock(self) -> int:
        """The ABI of Landlock; 0 if it does not work."""
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
        """Return a made-up host on which every probe succeeds but the named ones."""
        lacking = set(without)
        probes = ELSEWHERE.get(system, PROBES)
        if unknown := lacking.difference(probes):
            raise ValueError(f"no such probe: {', '.join(sorted(unknown))}")
        details = {"landlock": str(landlock), "bwrap": "bubblewrap 0.11.0, /usr/bin/bwrap"}
        yes = {name: Probe(ok=True, detail=details.get(name, "")) for name in probes}
        no = {name: Probe(ok=False, errno=1, reason=f"no {name}", fix=f"get {name}") for name in lacking}
        return cls(system=system, kernel=kernel, machine="x86_64", uid=uid, probes=yes | no)
