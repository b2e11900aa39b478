"""Find what must be shown for a command that is not a program of the system.

For most commands that is nothing, and finding that out costs one call for each
directory of the PATH. `search` does the rest; it is imported only when it is
needed.
"""

from __future__ import annotations

import functools
import os
import stat
from collections.abc import Callable, Mapping

import msgspec

from stockade.errors import PolicyError
from stockade.linux.user import Caller
from stockade.policy.model import Policy
from stockade.policy.profile import Profile
from stockade.policy.values import show
from stockade.resolve.resolved import UnnamedTrees

#: Trees of the system, whose scripts name interpreters of the system.
SYSTEM_PROGRAMS = ("/usr/bin/", "/bin/", "/usr/sbin/", "/sbin/", "/usr/lib/")
#: Programs that start others by name. Other programs of the system are shown no environment of Python,
#: because that would cost every run of one a mount or two.
STARTERS = frozenset(
    (
        "sh", "bash", "dash", "zsh", "ksh", "fish", "busybox", "env", "xargs", "find", "parallel", "nohup",
        "nice", "setsid", "stdbuf", "time", "timeout", "watch", "script", "tmux", "screen", "make", "gmake",
        "ninja", "cmake", "ctest", "meson", "just", "git", "node", "npm", "npx", "perl", "ruby",
    )
)  # fmt: skip
PYTHON = "python3"
PLAIN_PYTHON = "python"
#: A directory of the sandbox's own, with links to programs of the system under names that people expect.
LINKS = "/run/stockade/bin"
#: Where a project keeps its own environment of Python.
PROJECT = ".venv"


class Toolchain(msgspec.Struct, frozen=True):
    """What must be shown for some commands, by real names."""

    #: Directories and single files, with the command that needs each.
    trees: dict[str, str] = {}
    #: Links of the host that lead there, with their targets.
    links: dict[str, str] = {}
    #: Directories to search before those of the profile, and after them.
    path: tuple[str, ...] = ()
    path_after: tuple[str, ...] = ()
    #: Paths of those installs to hide, such as files with passwords of package indexes.
    hidden: tuple[str, ...] = ()


class Surroundings(msgspec.Struct, frozen=True):
    """What the search depends on, besides the file system."""

    home: str
    environ: Mapping[str, str]
    #: The user's PATH, with the directory of their Python before it.
    search: str
    #: Where the command starts, and where the user is: relative entries of PATH are relative to the latter.
    cwd: str
    caller_cwd: str
    #: The workspace; empty if there is none.
    project: str
    uid: int
    #: Real names of trees that are shown anyway, by the profile and by the policy.
    shown: tuple[str, ...]
    granted: tuple[str, ...]
    #: Paths that no install may contain: Stockade's state, the user's policy, and what programs may change.
    own: tuple[str, ...]
    #: The directories of PATH inside.
    path: tuple[str, ...]


NOTHING = Toolchain()


def toolchain(
    policy: Policy,
    base: Profile,
    caller: Caller,
    command: str,
    project: str,
    unnamed: UnnamedTrees,
    around: Callable[[], Surroundings],
) -> Toolchain:
    """Find the installs that a command, and the commands that the policy names, need.

    An empty command stands for all those of a living sandbox. `project` is the workspace, `unnamed` says
    whether the backend can show a Python that the user has not asked for. A policy with
    `exec` gets none, and one that sets PATH none for a command without a slash: its author has decided what
    is found.
    """
    if policy.toolchain is False or policy.exec is not None:
        return NOTHING
    names = () if policy.toolchain is True else policy.toolchain
    inside = base.env["PATH"].split(":")
    system = bool(command) and is_system_program(command, caller, inside)
    environment = (
        "PATH" not in policy.env
        and starts_others(command, caller, system)
        and has_environment(caller, inside, project)
    )
    if "PATH" in policy.env and "/" not in command:
        command = ""
    if not (names or base.searches_path or environment or (command and not system)):
        return NOTHING
    from stockade.resolve.toolchain.search import ProgramSearch

    search = ProgramSearch(around())
    if command:
        search.command(command)
    if environment:
        search.environments(unnamed)
    for name in names:
        if not search.command(name):
            raise PolicyError(
                f"toolchain = {show(name)}: there is no such command in your PATH",
                hint="check its name, or leave it out",
            )
    if base.searches_path:
        search.search_whole_path()
    return search.result()


def with_plain_python(found: Toolchain, policy: Policy, base: Profile) -> Toolchain:
    """Add a link by which `python` starts the system's `python3`, where the system has only the latter.

    People and agents type `python`, and Debian has none. The link is in a directory of its own at the end of
    PATH: any other program of that name comes first. A policy with `exec` or a PATH of its own gets none.
    """
    if policy.exec is not None or "PATH" in policy.env or not (python := _only_python(base.env["PATH"])):
        return found
    links = {**found.links, f"{LINKS}/{PLAIN_PYTHON}": python}
    return msgspec.structs.replace(found, links=links, path_after=(*found.path_after, LINKS))


@functools.lru_cache(maxsize=8)
def _only_python(path: str) -> str:
    """Return the `python3` of a PATH that has no `python`; looked up once per process, as root owns them."""
    return "" if which(PLAIN_PYTHON, path, "/")[0] else which(PYTHON, path, "/")[0]


def search_path(caller: Caller) -> str:
    """Return the user's PATH, with the directory of their Python before it."""
    path = caller.environ.get("PATH", os.defpath)
    return f"{caller.python}:{path}" if caller.python else path


def starts_others(command: str, caller: Caller, system: bool) -> bool:
    """Whether a command may start others by name: one of a living sandbox, a shell, the user's own script."""
    if "/" not in command or command.startswith(SYSTEM_PROGRAMS):
        return not command or os.path.basename(command) in STARTERS
    return not system and bool(caller.python)


def has_environment(caller: Caller, inside: list[str], project: str) -> bool:
    """Whether the user's Python is not one of the system's, or the project has an environment of its own."""
    if project and is_file(f"{project}/{PROJECT}/pyvenv.cfg"):
        return True
    found, _ = which(PYTHON, search_path(caller), caller.cwd or "/")
    return bool(found) and os.path.dirname(found) not in inside


def is_system_program(command: str, caller: Caller, path: list[str]) -> bool:
    """Whether the user's PATH finds a plain program of the system, in a directory of the PATH inside."""
    if "/" in command:
        return command.startswith(SYSTEM_PROGRAMS) and is_plain(command)
    found, _ = which(command, search_path(caller), caller.cwd or "/")
    return os.path.dirname(found) in path and is_plain(found)


def is_plain(path: str) -> bool:
    """Whether a path is a file of the system, and not a link that may lead elsewhere."""
    try:
        return path.startswith(SYSTEM_PROGRAMS) and not stat.S_ISLNK(os.lstat(path).st_mode)
    except OSError:
        return False


def is_file(path: str) -> bool:
    """Whether a path is a regular file, or a link to one."""
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except OSError:
        return False


@functools.lru_cache(maxsize=8)
def shown_by(base: Profile) -> tuple[str, ...]:
    """Return the trees of the profile by every name; looked up once per process, since root owns them."""
    names = [path.removesuffix("?") for path in (*base.system, *(f"/etc/{name}" for name in base.etc))]
    return tuple(dict.fromkeys([*names, *map(os.path.realpath, names)]))


def which(name: str, path: str, cwd: str, *, without: str = "") -> tuple[str, bool]:
    """Find a command in a PATH, skipping the directory `without`, and say whether its entry is absolute."""
    for entry in path.split(":"):
        directory = entry if entry.startswith("/") else os.path.join(cwd, entry)
        found = f"{directory}/{name}"
        # Most entries of a PATH have no such file: one call for each.
        if os.access(found, os.X_OK) and is_file(found) and not (without and directory == without):
            return found, entry.startswith("/")
    return "", False
