"""What a command needs to be shown, where it is not a program of the system's.

For most commands that is nothing, and finding that out costs a call for each
directory of the PATH. `policy.lookup` does the rest; it is loaded when it is
needed.
"""

from __future__ import annotations

import errno
import functools
import os
import stat
from collections.abc import Callable, Mapping

import msgspec

from stockade.errors import PolicyError
from stockade.policy.caller import Caller
from stockade.policy.model import Policy
from stockade.policy.profile import Profile
from stockade.policy.values import show

#: Trees of the system in which scripts name interpreters of the system.
SYSTEM_PROGRAMS = ("/usr/bin/", "/bin/", "/usr/sbin/", "/sbin/", "/usr/lib/")


class Toolchain(msgspec.Struct, frozen=True):
    """What is to be shown for some commands, each by its real name."""

    #: Directories and single files, with the command that needs each.
    trees: dict[str, str] = {}
    #: Links that lead there, as they are on the host.
    links: dict[str, str] = {}
    #: Directories to be searched before the profile's.
    path: tuple[str, ...] = ()
    #: Files of those installs in which people keep the passwords of package indexes.
    hidden: tuple[str, ...] = ()


class Surroundings(msgspec.Struct, frozen=True):
    """What the search depends on besides the file system."""

    home: str
    environ: Mapping[str, str]
    #: Where the command starts, and where the caller is: relative entries of PATH count from there.
    cwd: str
    caller_cwd: str
    uid: int
    #: Real names of trees that are shown anyway: the profile's, and those of the policy.
    shown: tuple[str, ...]
    granted: tuple[str, ...]
    #: What no install may contain: Stockade's state, the user's own policy, and what a program may change.
    own: tuple[str, ...]
    #: The directories that are searched inside.
    path: tuple[str, ...]


NOTHING = Toolchain()


def toolchain(
    policy: Policy, base: Profile, caller: Caller, command: str, around: Callable[[], Surroundings]
) -> Toolchain:
    """What a command, and those that the policy names, need of the caller's installs.

    A policy that lists what may be executed has thought about it, and one that sets PATH too.
    """
    if policy.toolchain is False or policy.exec is not None:
        return NOTHING
    names = () if policy.toolchain is True else policy.toolchain
    if "PATH" in policy.env and "/" not in command:
        command = ""
    if not (command or names or base.searches_path):
        return NOTHING
    if not names and not base.searches_path and is_systems(command, caller, base.env["PATH"].split(":")):
        return NOTHING
    from stockade.policy.lookup import Search

    search = Search(around())
    if command:
        search.command(command)
    for name in names:
        if not search.command(name):
            raise PolicyError(
                f"toolchain = {show(name)}: there is no such command in your PATH",
                hint="check its name, or leave it out",
            )
    if base.searches_path:
        search.whole_path()
    return search.found()


def is_systems(command: str, caller: Caller, path: list[str]) -> bool:
    """Whether the caller's own PATH finds a plain program of the system's, in a directory searched inside."""
    if "/" in command:
        return command.startswith(SYSTEM_PROGRAMS) and is_plain(command)
    found, _ = which(command, caller.environ.get("PATH", os.defpath), caller.cwd or "/")
    return os.path.dirname(found) in path and is_plain(found)


def is_plain(path: str) -> bool:
    """Whether it is a file of the system's own and not a link that may lead elsewhere."""
    try:
        os.readlink(path)
    except OSError as error:
        return error.errno == errno.EINVAL and path.startswith(SYSTEM_PROGRAMS)
    return False


def is_file(path: str) -> bool:
    """Whether it is a regular file, perhaps by a link."""
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except OSError:
        return False


@functools.lru_cache(maxsize=8)
def shown_by(base: Profile) -> tuple[str, ...]:
    """The system's trees by every name they have. They belong to root and are looked at once per process."""
    names = [path.removesuffix("?") for path in (*base.system, *(f"/etc/{name}" for name in base.etc))]
    return tuple(dict.fromkeys([*names, *map(os.path.realpath, names)]))


def which(name: str, path: str, cwd: str, *, without: str = "") -> tuple[str, bool]:
    """Where a command is by a PATH without one directory, and whether its entry was absolute."""
    for entry in path.split(":"):
        directory = entry if entry.startswith("/") else os.path.join(cwd, entry)
        found = f"{directory}/{name}"
        # Most entries of a PATH have no such file: one call for each.
        if os.access(found, os.X_OK) and is_file(found) and not (without and directory == without):
            return found, entry.startswith("/")
    return "", False
