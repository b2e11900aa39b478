"""Find the files that the patterns of an `exec` clause name.

`*` and `?` stand for characters of one name, `**` for directories at any
depth. The results are real names, because the kernel checks the file that a
link leads to. A directory whose files are all named stands for them: fewer
rules make a cheaper start.
"""

from __future__ import annotations

import functools
import os
import stat
from collections.abc import Callable, Iterable, Iterator

import msgspec

from stockade.errors import PolicyError
from stockade.policy.patterns import compile_pattern, has_wildcard

#: Programs are started through them, so a policy that allows a program allows these too.
LOADERS = tuple(
    f"{place}/{name}"
    for name in ("ld-linux*.so*", "ld-musl-*.so*")
    for place in ("/lib", "/lib/*", "/lib32", "/lib64", "/libx32", "/usr/lib", "/usr/lib/*", "/usr/lib64")
)


#: Trees that belong to root.
SYSTEM = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32")


class Programs(msgspec.Struct, frozen=True):
    """Real names of files, and of directories of which every file is named."""

    files: tuple[str, ...] = ()
    trees: tuple[str, ...] = ()


def find(
    pattern: str, clause: str, follow: Callable[[str], str] = os.path.realpath, *, relative: bool = False
) -> Programs:
    """Find what an absolute pattern names now. `follow` returns the real name of a path.

    It is not called for patterns of the system's trees, unless they were written `relative`.
    """
    parts = [part for part in pattern.split("/") if part]
    if not parts or "**" in parts[0]:
        raise PolicyError(
            f"{clause}: allows the whole file system", hint="name the directories of the programs"
        )
    return _find_in_system(pattern) if parts[0] in SYSTEM and not relative else _find(parts, follow)


@functools.lru_cache(maxsize=64)
def loaders() -> tuple[str, ...]:
    """The dynamic loaders of this system."""
    return tuple(sorted({name for pattern in LOADERS for name in _find_in_system(pattern).files}))


@functools.lru_cache(maxsize=64)
def _find_in_system(pattern: str) -> Programs:
    """Find programs in the system's trees: once per process, because these belong to root."""
    return _find([part for part in pattern.split("/") if part], os.path.realpath)


def _find(parts: list[str], follow: Callable[[str], str]) -> Programs:
    files: set[str] = set()
    trees: set[str] = set()
    for directory in _directories("/", parts[:-1]):
        if parts[-1] == "**" or (parts[-1] == "*" and not any(_entries(directory, dirs=True))):
            trees.add(follow(directory))
            links = [directory] if parts[-1] == "*" else _below(directory)
            files.update(map(follow, _executables(path for place in links for path in _links(place))))
        else:
            files.update(map(follow, _executables(_named(directory, parts[-1]))))
    return Programs(
        tuple(sorted(name for name in files if os.path.dirname(name) not in trees)), tuple(sorted(trees))
    )


def _directories(start: str, parts: list[str]) -> Iterator[str]:
    """Find the directories that the leading parts of a pattern name."""
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
    """The directory and every one below it; links are not followed, so this ends."""
    yield directory
    for path in _entries(directory, dirs=True):
        yield from _below(path)


def _named(directory: str, name: str) -> Iterator[str]:
    if not has_wildcard(name):
        yield os.path.join(directory, name)
        return
    matches = compile_pattern(name).fullmatch
    for path in _entries(directory):
        if matches(os.path.basename(path)):
            yield path


def _links(directory: str) -> Iterator[str]:
    return (path for path in _entries(directory) if os.path.islink(path))


def _entries(directory: str, *, dirs: bool = False) -> list[str]:
    """The paths in a directory, none if it is unreadable; with `dirs` only real directories."""
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
            yield path
