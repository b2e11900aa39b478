"""Which files an `exec` clause names: patterns met with the file system.

`*` and `?` stand for characters of one name, `**` for directories at any
depth. What is found are real names, because the kernel judges the file that a
link leads to. A directory that is taken in whole stands for its files: the
fewer rules, the cheaper the start.
"""

from __future__ import annotations

import functools
import os
import re
import stat
from collections.abc import Iterable, Iterator

import msgspec

from stockade.errors import PolicyError

#: Programs are started through them, so whoever may execute a program may execute these.
LOADERS = tuple(
    f"{place}/{name}"
    for name in ("ld-linux*.so*", "ld-musl-*.so*")
    for place in ("/lib", "/lib/*", "/lib32", "/lib64", "/libx32", "/usr/lib", "/usr/lib/*", "/usr/lib64")
)


#: Trees that belong to root.
SYSTEM = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32")


class Programs(msgspec.Struct, frozen=True):
    """Real names of files, and of directories whose every file is meant."""

    files: tuple[str, ...] = ()
    trees: tuple[str, ...] = ()


def taken_in(pattern: str, patterns: Iterable[str]) -> bool:
    """Whether what `pattern` names is named by one of the others as well; compared as text."""
    name = pattern.removesuffix("?")
    others = [other.removesuffix("?") for other in patterns]
    return name in others or (not _wild(name) and any(_matcher(other).fullmatch(name) for other in others))


def find(pattern: str, clause: str) -> Programs:
    """What an absolute pattern names now."""
    parts = [part for part in pattern.split("/") if part]
    if not parts or "**" in parts[0]:
        raise PolicyError(f"{clause}: the whole file system", hint="name the directories of the programs")
    return _kept(pattern) if parts[0] in SYSTEM else _find(parts)


@functools.lru_cache(maxsize=64)
def loaders() -> tuple[str, ...]:
    """The dynamic loaders of this system."""
    return tuple(sorted({name for pattern in LOADERS for name in _kept(pattern).files}))


@functools.lru_cache(maxsize=64)
def _kept(pattern: str) -> Programs:
    """What is found in the system's trees. They belong to root and are looked at once per process."""
    return _find([part for part in pattern.split("/") if part])


def _find(parts: list[str]) -> Programs:
    files: set[str] = set()
    trees: set[str] = set()
    for directory in _directories("/", parts[:-1]):
        if parts[-1] == "**" or (parts[-1] == "*" and not any(_entries(directory, dirs=True))):
            trees.add(os.path.realpath(directory))
            links = [directory] if parts[-1] == "*" else _below(directory)
            files.update(_executables(path for place in links for path in _links(place)))
        else:
            files.update(_executables(_named(directory, parts[-1])))
    return Programs(
        tuple(sorted(name for name in files if os.path.dirname(name) not in trees)), tuple(sorted(trees))
    )


def _directories(start: str, parts: list[str]) -> Iterator[str]:
    """The directories that a pattern's leading parts name."""
    if not parts:
        yield start
    elif parts[0] == "**":
        for directory in _below(start):
            yield from _directories(directory, parts[1:])
    else:
        for path in _named(start, parts[0]):
            if os.path.isdir(path):
                yield from _directories(path, parts[1:])


def _below(directory: str) -> Iterator[str]:
    """The directory and every one in it; links are not followed, so this ends."""
    yield directory
    for path in _entries(directory, dirs=True):
        yield from _below(path)


def _named(directory: str, name: str) -> Iterator[str]:
    if not _wild(name):
        yield os.path.join(directory, name)
        return
    matches = _matcher(name).fullmatch
    for path in _entries(directory):
        if matches(os.path.basename(path)):
            yield path


def _links(directory: str) -> Iterator[str]:
    return (path for path in _entries(directory) if os.path.islink(path))


def _entries(directory: str, *, dirs: bool = False) -> list[str]:
    """What is in a directory that can be read; with `dirs` the real directories only."""
    try:
        with os.scandir(directory) as entries:
            return [entry.path for entry in entries if not dirs or entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def _executables(paths: Iterable[str]) -> Iterator[str]:
    for path in paths:
        try:
            mode = os.stat(path).st_mode
        except OSError:
            continue
        if stat.S_ISREG(mode) and mode & 0o111:
            yield os.path.realpath(path)


def _wild(text: str) -> bool:
    return "*" in text or "?" in text


@functools.lru_cache(maxsize=64)
def _matcher(pattern: str) -> re.Pattern[str]:
    words = {"/**/": "/(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    parts = re.split(r"(/\*\*/|\*\*|\*|\?)", pattern)
    return re.compile("".join(words.get(part) or re.escape(part) for part in parts), re.DOTALL)
