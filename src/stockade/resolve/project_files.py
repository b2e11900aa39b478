"""Files that decide the policy of the next run, in directories that a program can write to for real.

Stockade takes a project's policy from the nearest `stockade.toml`, or `pyproject.toml` with a
`[tool.stockade]` table, and from no directory that everybody can write to (`discovery.find_project`). A
program may have written every byte of them, and parsing hostile TOML can take hours, so nothing is parsed
here. A `pyproject.toml` counts if it contains the word, which Stockade checks before it parses one.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator

import msgspec

from stockade.policy.toml import LARGEST
from stockade.resolve.config_files import NAMES
from stockade.workspace.version_control.repositories import MOST_POLICIES, RepositorySearch, small

WORD = b"stockade"
OPEN_TO_ALL = "Stockade refuses a policy in a directory that everybody can write to"
#: How many bytes of all files named pyproject.toml are read, before a run and again after it.
MOST_READ = 16 << 20


class PolicyFileReader:
    """Tells which files may hold a policy, and reads a bounded amount for that."""

    def __init__(self) -> None:
        self._left = MOST_READ

    def holds(self, path: str) -> bool:
        """Whether a pyproject.toml may hold a policy; True also if it is unreadable or too large."""
        most = min(LARGEST, self._left)
        data = small(path, most)
        self._left -= most if data is None else len(data)
        return data is None or WORD in data


class ProjectFiles(msgspec.Struct, frozen=True):
    """The files that decided the policies of runs in some directories, before a run."""

    files: frozenset[str] = frozenset()
    """The files that may have held a policy."""
    modes: dict[str, int] = {}
    """The permission bits of their directories, and of the writable directories themselves."""
    cut: bool = False
    """Whether there were more files than this lists."""

    def gone(self) -> Iterator[tuple[str, str]]:
        """Yield the files that no longer exist, each with what that means."""
        for path in sorted(self.files):
            if not os.path.lexists(path):
                yield path, "it was removed, and Stockade took the policy of runs there from it"

    def opened(self) -> Iterator[tuple[str, str]]:
        """Yield the directories whose permission bits have changed, each with what that means."""
        for path, before in self.modes.items():
            now = _mode(path)
            if now is not None and now != before:
                yield path, f"its mode was {before:04o} and is {now:04o}; {OPEN_TO_ALL}"


def note(searched: RepositorySearch) -> ProjectFiles:
    """Record the policy files that a search found."""
    reader = PolicyFileReader()
    files = [path for path in searched.policies if os.path.basename(path) == NAMES[0] or reader.holds(path)]
    places = dict.fromkeys((*searched.trees, *map(os.path.dirname, files)))
    modes = {place: mode for place in places if (mode := _mode(place)) is not None}
    return ProjectFiles(frozenset(files), modes, len(searched.policies) >= MOST_POLICIES)


def _mode(directory: str) -> int | None:
    with contextlib.suppress(OSError):
        return stat.S_IMODE(os.lstat(directory).st_mode)
    return None
