"""Parts of plans that several backends share: Landlock's rights, the system's trees, limits of a process."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from functools import lru_cache

import msgspec

from stockade.errors import PolicyError
from stockade.gate import operations as ops
from stockade.policy import Limits, Policy
from stockade.policy.socket_options import MULTICAST
from stockade.policy.values import time_text
from stockade.resolve.resolved import Grant

DEVICES = ("null", "zero", "full", "random", "urandom", "tty")

# Landlock's file rights, by bit, and the ABI that brought them.
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
MAKE_CHAR, MAKE_BLOCK = 1 << 6, 1 << 11
FIRST_RIGHTS = (1 << 13) - 1
REFER, TRUNCATE, IOCTL_DEVICE = 1 << 13, 1 << 14, 1 << 15
LATER_RIGHTS = {2: REFER, 3: TRUNCATE, 5: IOCTL_DEVICE}
OF_FILES = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEVICE
READING = EXECUTE | READ_FILE | READ_DIR
SCOPES = 0b11  # abstract sockets, signals
SCOPES_ABI = 6


def handled_rights(abi: int) -> int:
    """Return every file right that this ABI of Landlock has."""
    return FIRST_RIGHTS | sum(right for since, right in LATER_RIGHTS.items() if abi >= since)


class SystemPath(msgspec.Struct, frozen=True):
    """One system path of the host as the sandbox shows it: a link, or the tree itself."""

    path: str
    link: str = ""
    source: str = ""
    is_dir: bool = True


@lru_cache(maxsize=8)
def system_layout(system: tuple[str, ...], etc: tuple[str, ...]) -> tuple[SystemPath, ...]:
    """Return the host's system paths. They belong to root, so one look per process is enough."""
    shown = []
    for entry in (*system, *(f"/etc/{name}" for name in etc)):
        path = entry.removesuffix("?")
        if os.path.islink(path) and (link := os.readlink(path)) and _stays_visible(path, link, system):
            shown.append(SystemPath(path, link=link))
        elif os.path.exists(path):
            source = os.path.realpath(path)
            shown.append(SystemPath(path, source=source, is_dir=os.path.isdir(source)))
        elif not entry.endswith("?"):
            raise PolicyError(f"the profile shows {path}, which does not exist on this host")
    return tuple(shown)


def _stays_visible(path: str, link: str, system: tuple[str, ...]) -> bool:
    """Whether a symlink may be kept: its target is in a tree that is shown as well."""
    target = os.path.normpath(os.path.join(os.path.dirname(path), link))
    trees = [entry.removesuffix("?") for entry in system]
    return any(target == tree or target.startswith(tree + "/") for tree in trees if not os.path.islink(tree))


def by_process(memory: int, cpu_time: int) -> list[ops.Op]:
    """Return limits on each process, the weaker form of limits on the sandbox: bytes, seconds; 0 for none."""
    limits: list[ops.Op] = []
    if memory:
        limits.append(ops.Limit(resource="memory", value=memory, clause=f"limits.memory = {memory}"))
    if cpu_time:
        clause = f'limits.cpu_time = "{time_text(cpu_time)}"'
        limits.append(ops.Limit(resource="cpu_time", value=cpu_time, clause=clause))
    return limits


def cpu_seconds(limits: Limits) -> int:
    """Return the limit of processor time in whole seconds, which is what RLIMIT_CPU takes."""
    return math.ceil(limits.cpu_time or 0)


def within(path: str, tree: str) -> bool:
    """Whether the path is the tree itself or lies in it."""
    return path == tree or path.startswith(tree + "/")


def refuse_hiding(grants: Iterable[Grant], denied: Iterable[str]) -> None:
    """Refuse grants that contain a denied path, for backends that cannot hide anything in a grant."""
    shown = list(grants)
    for path in denied:
        for grant in shown:
            if within(path, grant.path) and os.path.lexists(path):
                raise PolicyError(
                    f"{grant.clause}: this backend cannot hide {path} in it",
                    hint="use a backend with namespaces, or --no-toolchain",
                )


def refuse_multicast(policy: Policy, why: str) -> None:
    """Refuse a policy that opens multicast where no limit of memberships can be set, and say why."""
    if MULTICAST in policy.syscalls.allow:
        raise PolicyError(
            f"syscalls.allow: {MULTICAST!r} needs a network of the sandbox's own with few memberships: {why}",
            hint='use the native backend without net = "open", or remove it',
        )


def refuse_taking_away(grants: Iterable[Grant], backend: str) -> None:
    """Refuse read-only grants in a writable tree, for backends whose rights can only add up."""
    shown = list(grants)
    writable = [grant.path for grant in shown if grant.access == "write"]
    for grant in shown:
        for tree in writable:
            if grant.access != "write" and within(grant.path, tree):
                raise PolicyError(
                    f"{grant.clause}: {grant.path} is in {tree}, which is writable, and the {backend} "
                    "backend cannot make a part of a writable directory read-only",
                    hint="grant the writable directories beside it, or use a backend with mounts of its own",
                )
