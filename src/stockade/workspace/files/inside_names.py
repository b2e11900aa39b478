"""The users and groups of a sandbox, by name: from its own /etc/passwd and /etc/group.

A program may have written these files, so they are read like any other file
of the sandbox: below its root, up to a limit, and again when they change.
"""

from __future__ import annotations

import os

from stockade.errors import PolicyError
from stockade.linux.openat2 import AS_INSIDE, held, node, opened

#: How much of such a file is read; a usual one has 3 KB.
MOST_BYTES = 1 << 20
#: The highest id; the next one means "unchanged" to chown(2).
HIGHEST_ID = 0xFFFFFFFE


class InsideNames:
    """Names and numbers of the users and groups of the sandbox below a root."""

    def __init__(self, root: int) -> None:
        self._users = _IdFile(root, "/etc/passwd")
        self._groups = _IdFile(root, "/etc/group")

    def refresh(self) -> None:
        """Read the files again if they have changed."""
        self._users.refresh()
        self._groups.refresh()

    def user(self, uid: int) -> str:
        """Return the name of a user, or the number as text."""
        return self._users.by_number.get(uid, str(uid))

    def group(self, gid: int) -> str:
        """Return the name of a group, or the number as text."""
        return self._groups.by_number.get(gid, str(gid))

    def ids(self, owner: str, group: str) -> tuple[int, int]:
        """Return the uid and gid to hand to chown(2): -1 for an empty name. A name may be a number."""
        return self._users.number("owner", owner), self._groups.number("group", group)


class _IdFile:
    """One of the two files: lines of a name, a password and a number, separated by colons."""

    def __init__(self, root: int, path: str) -> None:
        self._root, self._path = root, path
        self._seen: tuple[int, ...] | None = None
        self.by_number: dict[int, str] = {}
        self._by_name: dict[str, int] = {}

    def number(self, kind: str, name: str) -> int:
        if not name:
            return -1
        found = self._by_name.get(name)
        if found is None:
            found = _id(name)
        if found is None:
            raise PolicyError(
                f"{kind} = {name[:100]!r}: there is no such name in {self._path} of the sandbox",
                hint="write a name from there, or a number",
            )
        return found

    def refresh(self) -> None:
        try:
            with held(node(self._root, self._path, AS_INSIDE)) as found:
                now = os.fstat(found)
                seen = now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns
                if seen == self._seen:
                    return
                with held(opened(found)) as file:
                    content = os.read(file, MOST_BYTES)
        except OSError:
            seen, content = None, b""  # missing or unreadable: there are only numbers
        self._seen = seen
        self.by_number, self._by_name = {}, {}
        for line in content.decode("utf-8", "replace").split("\n"):
            name, _, rest = line.partition(":")
            number = _id(rest.partition(":")[2].partition(":")[0])
            if name and number is not None:
                self.by_number.setdefault(number, name)
                self._by_name.setdefault(name, number)


def _id(text: str) -> int | None:
    """Return an id that is written in digits; None if it is none."""
    digits = text.isascii() and text.isdigit() and len(text) <= 10
    return int(text) if digits and int(text) <= HIGHEST_ID else None
