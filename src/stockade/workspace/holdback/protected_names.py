"""The names that a commit must not touch: those that a policy protects or hides.

There may be thousands of names and of changes, so each change is looked up in
an index instead of being compared with every name.
"""

from __future__ import annotations

from collections.abc import Iterable

from stockade.linux.dirwalk import beginnings


class ProtectedNames:
    """The names, indexed for lookups."""

    def __init__(self, names: Iterable[str]) -> None:
        # Some file systems ignore case. A dot is the whole workspace.
        self._names = {"" if name == "." else name.lower(): name or "." for name in names}
        self._above = {
            place: name for low, name in self._names.items() for place in beginnings(low, len(low) - 1)
        }
        self._longest = max(map(len, self._names), default=-1)

    def touched(self, path: str, *, goes: bool) -> str | None:
        """Return the name that a change at `path` touches; `goes` says that the old file does not stay.

        A change touches more than its own path: removing or replacing a directory removes all names below it.
        """
        low = path.lower()
        for place in (*beginnings(low, self._longest), ""):
            if place in self._names:
                return self._names[place]
        return self._above.get(low) if goes else None
