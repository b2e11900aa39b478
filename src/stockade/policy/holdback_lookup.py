"""Look up in the hold-back table which files tools of the host run or obey.

A pattern is a path of one or more names. It matches a path that ends with these names; with a slash at the
end it matches everything in a directory, with one at the beginning it is relative to the top of the
workspace. `*` stands for a part of a name, `**` for any number of names, `{a,b}` for either. A name matches
in every spelling that some file system treats as the same.
"""

from __future__ import annotations

import fnmatch
import functools
import itertools
import re
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from stockade.policy.holdback_table import ToolFile

#: Whether the file system at a path ignores the case of names.
Folds = Callable[[str], bool]
#: Directories of packages that a project uses: no tool treats one of them as the project itself.
PACKAGES = frozenset({"node_modules", "site-packages", "dist-packages", "vendor"})
#: Characters that Unicode ignores when names are compared.
_UNSEEN = re.compile(
    "[\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\u3164"
    "\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufff8\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)
_STREAM = re.compile(r"::\$[^/]*")
_BRACES = re.compile(r"\{([^{}]*)\}")


class Pattern:
    """One pattern, ready for matching."""

    def __init__(self, words: str, entry: ToolFile) -> None:
        self.entry = entry
        self.words = words
        #: Name by name, with `**` before it unless it begins with a slash, and after it if it ends with one.
        names = words.strip("/").split("/")
        self.names = (
            *(() if words.startswith("/") else ("**",)),
            *names,
            *(("**",) if words[-1] == "/" else ()),
        )

    def matches(self, names: Sequence[str]) -> bool:
        """Whether the pattern matches the names of a path."""
        last = self.names[-1]
        return (last == "**" or _fits(last, names[-1])) and fits(self.names, names)


def fits(wanted: Sequence[str], names: Sequence[str]) -> bool:
    """Whether the names of a path match those of a pattern, in time of at most their product."""
    at = place = 0
    star, mark = -1, 0
    while at < len(names):
        if place < len(wanted) and wanted[place] == "**":
            star, mark = place, at
            place += 1
        elif place < len(wanted) and _fits(wanted[place], names[at]):
            at, place = at + 1, place + 1
        elif star >= 0:
            mark += 1
            at, place = mark, star + 1
        else:
            return False
    return all(name == "**" for name in wanted[place:])


def _fits(wanted: str, name: str) -> bool:
    return wanted == name if "*" not in wanted else _expression(wanted).match(name) is not None


@functools.lru_cache(maxsize=4096)
def _expression(wanted: str) -> re.Pattern[str]:
    # The expressions of fnmatch do not backtrack between stars, however many there are.
    return re.compile(fnmatch.translate(wanted.replace("[", "[[]").replace("?", "[?]")))


class Index(NamedTuple):
    """The patterns of one class, by a name that every matching path contains."""

    names: dict[str, list[Pattern]]
    #: Patterns without a whole name, by the first letter and the extension of the last name, empty if any.
    endings: dict[tuple[str, str], list[Pattern]]
    #: The beginnings of patterns: a link with such a name leads the tool to a file elsewhere.
    links: dict[str, list[Pattern]]


def obeyed(
    path: str, mode: int, folds: Folds = lambda path: True, above: Sequence[str] = ()
) -> ToolFile | None:
    """The entry for a file that a program of the host obeys unasked, or None; None for a directory.

    `folds` says whether the file system at a path ignores case. Where it does not, a name such as AGENTS.md
    matches in capitals only. `above` are names of the workspace: the path is looked up by itself, and below
    each of them.
    """
    if stat.S_ISDIR(mode):
        return None
    tables = _tables()
    entry = _first_below(path, above, tables.obeyed, mode, folds)
    if entry is not None and stat.S_ISREG(mode) and _first_below(path, above, tables.passed, mode, folds):
        return None
    if stat.S_ISLNK(mode):  # no tool makes a link in its cache
        return entry or _first(path, tables.caches, mode, folds)
    return entry


def cached(path: str, mode: int, folds: Folds = lambda path: True) -> ToolFile | None:
    """The entry for a file in a cache of compiled code, or None."""
    return _first(path, _tables().caches, mode, folds) if stat.S_ISREG(mode) else None


def restricts(
    path: str, mode: int, folds: Folds = lambda path: True, above: Sequence[str] = ()
) -> ToolFile | None:
    """The entry for a file or a whole directory whose removal may lift a restriction on a tool, or None."""
    tables = _tables()
    if stat.S_ISREG(mode) and _first_below(path, above, tables.passed, mode, folds):
        return None
    for name in (path, *(f"{outer}/{path}" for outer in above)):
        for entry in _matching(name, tables.obeyed, mode, lambda _: folds(path)):
            if not entry.removable:
                return entry
    return None


def begins(path: str) -> bool:
    """Whether a directory of this name, such as .github, may hold files whose removal `restricts` reports."""
    names = spelled_names(path)
    known = _tables().obeyed.links.get(names[-1], ())
    return any(not pattern.entry.removable and pattern.matches(names) for pattern in known)


def runs(
    path: str, mode: int, folds: Folds = lambda path: True, above: Sequence[str] = ()
) -> ToolFile | None:
    """The entry for a file that runs at the user's next command, or None."""
    if stat.S_ISDIR(mode) or not PACKAGES.isdisjoint(path.split("/")[:-1]):
        return None
    return _shadows(path) or _first_below(path, above, _tables().runs, mode, folds)


def begins_pattern(name: str) -> bool:
    """Whether the table has a pattern of several names that begins with this one."""
    low = spelled(name)
    return any(_fits(first, low) for first in _tables().firsts)


def _shadows(path: str) -> ToolFile | None:
    """The entry for a module that Python would import in place of one of its own, or None."""
    directory, _, name = path.rpartition("/")
    module, _, ending = name.partition(".")
    if module == "__init__":  # of a package
        directory, _, module = directory.rpartition("/")
    tables = _tables()
    if module not in tables.modules or directory not in tables.beside:
        return None
    # Such as random.cpython-311-x86_64-linux-gnu.so
    return tables.shadow if ending in ("py", "pyc") or f".{ending}".endswith(".so") else None


class Tables(NamedTuple):
    """The hold-back table, indexed."""

    obeyed: Index
    passed: Index
    runs: Index
    caches: Index
    shadow: ToolFile
    beside: frozenset[str]
    modules: frozenset[str]
    #: The first names of patterns of several names.
    firsts: frozenset[str]


@functools.cache
def _tables() -> Tables:
    from stockade.policy import holdback_table as table

    # Modules built into the interpreter are found before any file.
    own = sys.stdlib_module_names.difference(sys.builtin_module_names, table.NOT_SHADOWED)
    return Tables(
        _build_index(table.OBEYED),
        _build_index(table.PASSED),
        _build_index(table.RUNS),
        _build_index(table.CACHES),
        table.SHADOW,
        frozenset(table.BESIDE_SCRIPTS),
        frozenset(name for name in own if not name.startswith("_")).union(table.INSTALLERS),
        frozenset(
            words.partition("/")[0].lower()
            for entry in (*table.OBEYED, *table.RUNS)
            for words in expanded(entry.patterns.split())
            if "/" in words
        ),
    )


def _build_index(entries: Sequence[ToolFile]) -> Index:
    index = Index({}, {}, {})
    for entry in entries:
        for words in expanded(entry.patterns.split()):
            pattern = Pattern(words.lower(), entry)
            if key := _rarest_name(pattern.names):
                index.names.setdefault(key, []).append(pattern)
            else:
                last = pattern.names[-1]
                ending = last.rpartition(".")[2] if "." in last else ""
                where = last[0].strip("*"), ending if "*" not in ending else ""
                index.endings.setdefault(where, []).append(pattern)
            start = pattern.words.strip("/").split("/")[:-1]
            while start:
                if not any("*" in name for name in start):
                    index.links.setdefault(start[-1], []).append(Pattern("/".join(start), entry))
                start.pop()
    return index


def _rarest_name(names: Sequence[str]) -> str:
    """The whole name of a pattern that the fewest paths contain; empty if the pattern has none."""
    whole = [name for name in names if "*" not in name]
    if not whole or "**" in names[1:-1]:  # such as .git/**/config: the last name is the rarest
        return whole[-1] if whole else ""
    return max(whole, key=lambda name: (name.startswith("."), len(name)))


def _first_below(path: str, above: Sequence[str], index: Index, mode: int, folds: Folds) -> ToolFile | None:
    """The first entry for a path by itself, or below one of the names of the workspace."""
    entry = _first(path, index, mode, folds)
    for name in above if entry is None else ():
        entry = entry or _first(f"{name}/{path}", index, mode, lambda _: folds(path))
    return entry


def _first(path: str, index: Index, mode: int, folds: Folds) -> ToolFile | None:
    return next(_matching(path, index, mode, folds), None)


def _matching(path: str, index: Index, mode: int, folds: Folds) -> Iterator[ToolFile]:
    names = spelled_names(path)
    ending = names[-1].rpartition(".")[2]
    candidates = [index.names[name] for name in names if name in index.names]
    if len(candidates) > 1:  # the patterns of a repeated name are tried once
        candidates = [index.names[name] for name in index.names.keys() & names]
    for key in ((names[-1][:1], ending), ("", ending), (names[-1][:1], ""), ("", "")):
        if key in index.endings:
            candidates.append(index.endings[key])
    if stat.S_ISLNK(mode) and names[-1] in index.links:
        candidates.append(index.links[names[-1]])
    if not candidates:
        return
    packaged = not PACKAGES.isdisjoint(names[:-1])
    for pattern in itertools.chain.from_iterable(candidates):
        entry = pattern.entry
        if (entry.own and packaged) or not pattern.matches(names):
            continue
        if not entry.exact or _exactly(path, entry) or folds(path):
            yield entry


def _exactly(path: str, entry: ToolFile) -> bool:
    names = path.split("/")
    return any(Pattern(words, entry).matches(names) for words in expanded(entry.patterns.split()))


@functools.lru_cache(maxsize=4)
def spelled_names(path: str) -> tuple[str, ...]:
    return tuple(spelled(path).split("/"))


def spelled(path: str) -> str:
    """The path in the one spelling that patterns are compared in.

    Some file systems ignore case, drop dots and spaces at the end of a name (FAT), ignore invisible
    characters (ext4 with case folding, HFS+; CVE-2014-9390), or treat the name of a file's default stream as
    the file (NTFS; CVE-2019-1352).
    """
    if "::$" in path:
        path = _STREAM.sub("", path)
    if not path.isascii():
        import unicodedata

        path = _UNSEEN.sub("", unicodedata.normalize("NFKC", path).casefold())
    path = path.lower()
    if path.endswith((" ", ".")) or " /" in path or "./" in path:
        path = "/".join(name.rstrip(" .") for name in path.split("/"))
    return path


def expanded(patterns: Iterable[str]) -> list[str]:
    """Expand the braces of patterns."""
    done: list[str] = []
    for pattern in patterns:
        if (found := _BRACES.search(pattern)) is None:
            done.append(pattern)
            continue
        head, tail = pattern[: found.start()], pattern[found.end() :]
        done += expanded(head + word + tail for word in found[1].split(","))
    return done
