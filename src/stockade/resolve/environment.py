"""Private environments: a system of its own for a sandbox, with directories that only this sandbox has.

The server gives each of its sandboxes one. Programs inside are root of a user namespace: uid 0 there is the
caller, and every other id belongs to a range that no user of the machine has. They see the system read-only,
the host's or that of an image, and on top of it the mounts that the environment names. Nothing here comes
from a policy: code that holds descriptors of its own directories makes the value.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Literal

import msgspec

from stockade.errors import SetupError
from stockade.linux.id_maps import IdMaps

if TYPE_CHECKING:
    from stockade.linux.cgroups import CgroupParents
    from stockade.workspace.overlay import OverlayLayer

__all__ = ["CAPABILITIES", "KEPT", "MOST_OVERLAYS", "Environment", "EnvironmentMount", "IdMaps"]

#: What programs keep over mapped ids: CHOWN, DAC_OVERRIDE, FOWNER, FSETID, KILL, SETGID, SETUID.
CAPABILITIES = {"CHOWN": 0, "DAC_OVERRIDE": 1, "FOWNER": 3, "FSETID": 4, "KILL": 5, "SETGID": 6, "SETUID": 7}
KEPT = sum(1 << number for number in CAPABILITIES.values())
#: The most copy-on-write mounts that one environment can have.
MOST_OVERLAYS = 16
#: Where commands start if it is mounted.
WORKSPACE = "/workspace"


class EnvironmentMount(msgspec.Struct, frozen=True):
    """One directory or file of an environment, held open by a descriptor that its maker owns."""

    #: Where it is inside.
    path: str
    fd: int
    access: Literal["read", "write", "overlay"]
    #: What plans and receipts call it.
    clause: str
    #: Where an overlay keeps its changes; None makes a layer in the state directory.
    layer: OverlayLayer | None = None

    @property
    def source(self) -> str:
        """The name of the directory on the host, by which the gate opens it; it compares the two."""
        return os.readlink(f"/proc/self/fd/{self.fd}")


class Environment(msgspec.Struct, frozen=True):
    """What a private environment consists of."""

    mounts: tuple[EnvironmentMount, ...]
    ids: IdMaps
    #: The root directory of a registered image; empty for the host's system.
    image: str = ""
    home: str = "/root"
    #: The descriptor of a network namespace to join; -1 for one of its own.
    network: int = -1
    #: The cgroups of a sandbox whose limits hold for this one too; None for limits of its own only.
    within: CgroupParents | None = None

    @property
    def overlays(self) -> tuple[EnvironmentMount, ...]:
        """The mounts that are copy-on-write."""
        return tuple(mount for mount in self.mounts if mount.access == "overlay")

    @property
    def taken(self) -> tuple[str, ...]:
        """The paths at which it has something of its own."""
        return (self.home, *(mount.path for mount in self.mounts))

    @property
    def start(self) -> str:
        """Where commands start."""
        mounted = any(mount.path == WORKSPACE for mount in self.mounts)
        return WORKSPACE if mounted else self.home

    def describe(self) -> str:
        """Say what is mounted."""
        words = {"read": "read-only", "write": "writable", "overlay": "copy-on-write"}
        system = "an image" if self.image else "the host's system"
        return "; ".join(
            [
                f"a private environment on {system}",
                *(f"{one.path} {words[one.access]}" for one in self.mounts),
            ]
        )

    def check(self) -> None:
        """Raise SetupError if it names a path twice, a path that is not plain, or too many overlays."""
        paths = [mount.path for mount in self.mounts]
        for path in (*paths, self.home):
            if not path.startswith("/") or path == "/" or os.path.normpath(path) != path:
                raise _wrong(f"{path!r} is not an absolute path")
            if any(path == own or path.startswith(f"{own}/") for own in ("/dev", "/proc", "/sys", "/etc")):
                raise _wrong(f"{path} is a directory that every sandbox has of its own")
        if len(set(paths)) != len(paths):
            raise _wrong("one path is mounted twice")
        if len(self.overlays) > MOST_OVERLAYS:
            raise _wrong(f"{len(self.overlays)} overlays, more than {MOST_OVERLAYS}")


def _wrong(what: str) -> SetupError:
    return SetupError(f"the private environment cannot be made: {what}", stage="environment")
