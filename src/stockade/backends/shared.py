"""What several backends compile alike: Landlock's rights, the system's trees, limits of a process."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from functools import lru_cache

import msgspec

from stockade.errors import PolicyError
from stockade.gate import plan as ops
from stockade.policy import Limits
from stockade.policy.resolve import Grant
from stockade.policy.values import time_text

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
    """Every file right that Landlock of that ABI knows."""
    return FIRST_RIGHTS | sum(right for since, right in LATER_RIGHTS.items() if abi >= since)


class Shown(msgspec.Struct, frozen=True):
    """One system path of the host as the sandbox shall see it: a link, or the tree itself."""

    path: str
    link: str = ""
    source: str = ""
    is_dir: bool = True


@lru_cache(maxsize=8)
def system_layout(system: tuple[str, ...], etc: tuple[str, ...]) -> tuple[Shown, ...]:
    """How the host's system paths look. They belong to root and are looked at once per process."""
    shown = []
    for entry in (*system, *(f"/etc/{name}" for name in etc)):
        path = entry.removesuffix("?")
        if os.path.islink(path) and (link := os.readlink(path)) and _stays_visible(path, link, system):
            shown.append(Shown(path, link=link))
        elif os.path.exists(path):
            source = os.path.realpath(path)
            shown.append(Shown(path, source=source, is_dir=os.path.isdir(source)))
        elif not entry.endswith("?"):
            raise PolicyError(f"the profile shows {path}, which this host does not have")
    return tuple(shown)


def _stays_visible(path: str, link: str, system: tuple[str, ...]) -> bool:
    """Whether a symlink may be kept: its target is in a tree that is shown as well."""
    target = os.path.normpath(os.path.join(os.path.dirname(path), link))
    trees = [entry.removesuffix("?") for entry in system]
    return any(target == tree or target.startswith(tree + "/") for tree in trees if not os.path.islink(tree))


def by_process(memory: int, cpu_time: int) -> list[ops.Op]:
    """The weaker form of limits on the whole sandbox: bytes of address space, seconds; 0 for none."""
    found: list[ops.Op] = []
    if memory:
        found.append(ops.Limit(resource="memory", value=memory, clause=f"limits.memory = {memory}"))
    if cpu_time:
        clause = f'limits.cpu_time = "{time_text(cpu_time)}"'
        found.append(ops.Limit(resource="cpu_time", value=cpu_time, clause=clause))
    return found


def cpu_seconds(limits: Limits) -> int:
    """Whole seconds are what the kernel counts for a process."""
    return math.ceil(limits.cpu_time or 0)


def within(path: str, tree: str) -> bool:
    """Whether the path is the tree or in it."""
    return path == tree or path.startswith(tree + "/")


def refuse_hiding(grants: Iterable[Grant], denied: Iterable[str]) -> None:
    """Where nothing can be hidden in what is shown, a tree with something to hide is not shown at all."""
    shown = list(grants)
    for path in denied:
        for grant in shown:
            if within(path, grant.path) and os.path.lexists(path):
                raise PolicyError(
                    f"{grant.clause}: {path} would have to be hidden in it, and nothing can be here",
                    hint="use a backend with namespaces, or --no-toolchain",
                )


def refuse_taking_away(grants: Iterable[Grant], backend: str) -> None:
    """Where rights only add up, what lies in a writable tree is writable."""
    shown = list(grants)
    writable = [grant.path for grant in shown if grant.access == "write"]
    for grant in shown:
        for tree in writable:
            if grant.access != "write" and within(grant.path, tree):
                raise PolicyError(
                    f"{grant.clause}: {grant.path} is in {tree}, which is writable, and the {backend} "
                    "backend cannot take away below a directory what it gives above",
                    hint="grant the writable directories beside it, or use a backend with mounts of its own",
                )
