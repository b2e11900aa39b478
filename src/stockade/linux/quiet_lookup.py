"""Whether a path exists on the host, asked without side effects on behalf of a program that named it.

A hostile program chooses the path. To walk through an automount point would mount something, perhaps from a
server of the program's choice, and a network file system can make the supervisor wait. So the walk looks at
every step first, and stops before such a file system.
"""

from __future__ import annotations

import os
import stat
from functools import lru_cache

import msgspec

from stockade.linux.mount_table import mount_table

#: File systems that ask another machine or another program, or that mount something when they are entered.
REMOTE = (
    b"9p",
    b"afs",
    b"autofs",
    b"ceph",
    b"cifs",
    b"coda",
    b"fuse",
    b"lustre",
    b"nfs",
    b"smb",
    b"virtiofs",
)
MOST_LINKS = 40
MOST_STEPS = 512


class QuietLookup(msgspec.Struct, frozen=True):
    """What is known about a path of the host."""

    #: The real name, as far as the walk came; the rest is as it was written.
    name: str
    #: None if the walk stopped before a file system that must not be entered, or may not be.
    exists: bool | None
    mode: int = 0
    device: int = 0


def remote_devices() -> frozenset[int]:
    """Return the device numbers of mounts that are not entered: all remote ones but the root."""
    return _remote(mount_table())


@lru_cache(maxsize=1)
def _remote(table: bytes) -> frozenset[int]:
    found = set()
    for line in table.splitlines():
        fields, _, rest = line.partition(b" - ")
        words = fields.split(b" ")
        if rest.startswith(REMOTE) and len(words) > 4 and words[4] != b"/":
            major, _, minor = words[2].partition(b":")
            found.add(os.makedev(int(major), int(minor)))
    return frozenset(found)


def look_quietly(path: str, remote: frozenset[int], *, follow: bool = True) -> QuietLookup:
    """Find the real name of an absolute path; `follow` says whether its last part may be a link."""
    if "\0" in path or len(path) > 4096:
        return QuietLookup(path, False)
    left = [part for part in reversed(path.split("/")) if part not in ("", ".")]
    name, links, last = "", 0, None
    for _ in range(MOST_STEPS):
        if not left:
            return QuietLookup(
                name or "/", True, *((last.st_mode, last.st_dev) if last else (stat.S_IFDIR, 0))
            )
        part = left.pop()
        rest = "/".join(reversed(left))
        if part == "..":
            name = name.rpartition("/")[0]
            continue
        here = f"{name}/{part}"
        try:
            last = os.lstat(here)
            if last.st_dev in remote:
                return QuietLookup(_joined(here, rest), None)
            target = os.readlink(here) if stat.S_ISLNK(last.st_mode) and (left or follow) else ""
        except (FileNotFoundError, NotADirectoryError):
            return QuietLookup(_joined(here, rest), False)
        except OSError:
            return QuietLookup(_joined(here, rest), None)
        if not target:
            name = here
            continue
        links += 1
        if links > MOST_LINKS or here.startswith("/proc/"):
            return QuietLookup(_joined(here, rest), None)
        name = "" if target.startswith("/") else name
        left += [step for step in reversed(target.split("/")) if step not in ("", ".")]
    return QuietLookup(path, None)


def _joined(name: str, rest: str) -> str:
    return f"{name}/{rest}" if rest else name
