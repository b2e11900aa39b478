"""The programs that a run executed, for an `exec` clause, and the commands that it did not find."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Sequence

import msgspec

from stockade.linux.path_lookup import covers
from stockade.observe.learning.lesson import LearnedEntry
from stockade.policy.patterns import has_wildcard
from stockade.policy.values import literal
from stockade.resolve.toolchain.needs import is_file
from stockade.resolve.toolchain.shims import first_bytes

#: From how many programs of one directory on all of them may be executed.
MANY = 16
MOST_PROGRAMS = 64
#: How many further commands a learned policy shows the installs of.
MOST_COMMANDS = 16
#: What shells, env, make and Node print if there is no such command.
_NOT_FOUND = re.compile(
    rb"(?:^|[\s:'\"\xe2\x80\x98])([A-Za-z0-9_][A-Za-z0-9_.+-]{0,63})(?:'|\"|\xe2\x80\x99)?: "
    rb"(?:command not found|not found|No such file or directory)\s*$",
    re.MULTILINE,
)
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,63}")


class LearnedPrograms(msgspec.Struct, frozen=True):
    """The patterns of an `exec` clause, or why the policy has none."""

    patterns: tuple[LearnedEntry, ...] = ()
    why_not: str = ""


def learn_programs(executed: Iterable[str], system: Sequence[str]) -> LearnedPrograms:
    """Return which programs a policy must let a run execute.

    Only programs of the `system`'s trees can be listed: an `exec` clause makes everything that the program
    can write not executable, and ends the search for installs.
    """
    found: dict[str, str] = {}
    for path in executed:
        for name in (path, *_interpreters(path)):
            real = os.path.realpath(name)
            if not (_in(name, system) and _in(real, system) and is_file(real)):
                return LearnedPrograms(why_not=f"it executes {name}, which is not a program of the system")
            if has_wildcard(name):
                return LearnedPrograms(why_not=f"a pattern cannot name {name}")
            found.setdefault(real, name)  # a program has several names: the one that was executed comes first
    if len(found) > MOST_PROGRAMS:
        return LearnedPrograms(why_not=f"it executes {len(found)} programs, too many to list")
    by_directory: dict[str, list[str]] = {}
    for name in sorted(found.values()):
        by_directory.setdefault(os.path.dirname(name), []).append(name)
    patterns: list[LearnedEntry] = []
    for directory, names in by_directory.items():
        if len(names) >= MANY:
            patterns.append(LearnedEntry(f"{literal(directory)}/*", f"{len(names)} programs"))
        else:
            patterns += [LearnedEntry(literal(name)) for name in names]
    return LearnedPrograms(tuple(patterns))


def missing_commands(
    tried: Iterable[str], executed: Iterable[str], printed: bytes, search: str, shown: Sequence[str]
) -> dict[str, str]:
    """Return commands that were not found inside, and where the user's PATH has each, outside what is shown.

    `tried` are the paths that programs tried to execute in vain. What the program printed only decides which
    names are looked for in the user's PATH, and the search for installs shows no home and no secrets.
    """
    names = {os.path.basename(path) for path in tried} - {os.path.basename(path) for path in executed}
    names |= {one.decode() for one in _NOT_FOUND.findall(printed[-20_000:])}
    found: dict[str, str] = {}
    for name in sorted(name for name in names if _NAME.fullmatch(name)):
        where = shutil.which(name, path=search)
        if where is not None and where.startswith("/") and not _in(where, shown):
            found[name] = where
        if len(found) >= MOST_COMMANDS:
            break
    return found


def _in(path: str, trees: Sequence[str]) -> bool:
    return any(covers(tree, path) for tree in trees)


def _interpreters(path: str) -> list[str]:
    """Return the interpreter that the first line of a script names, which the kernel executes for it."""
    head = first_bytes(path, 256)
    if not head.startswith(b"#!"):
        return []
    words = head[2:].partition(b"\n")[0].decode("utf-8", "surrogateescape").split()
    return [words[0]] if words and words[0].startswith("/") else []
