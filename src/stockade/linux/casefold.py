"""Whether a directory of the host ignores the case of names, as FAT and some ext4 do."""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct

from stockade.linux import dirwalk

GETFLAGS = 0x80086601
CASEFOLD = 0x40000000
#: How many names are tried in one directory.
TRIED = 8


def folds(root: int, path: str) -> bool | None:
    """Whether a directory below `root` ignores case; None if neither names nor file system show it."""
    with contextlib.suppress(OSError), dirwalk.listed(root, path) as directory:
        return _folds_by_trial(directory)
    return None


def _folds_by_trial(directory: int) -> bool | None:
    """Look up a name of the directory in the other case; else ask the file system for its flags."""
    with os.scandir(directory) as entries:
        names = [entry.name for _, entry in zip(range(TRIED), entries, strict=False)]
    for name in names:
        other, here = name.swapcase(), dirwalk.look(directory, name)
        if other.isascii() and other != name and here is not None:
            there = dirwalk.look(directory, other)
            return there is not None and os.path.samestat(here, there)
    try:
        flags = fcntl.ioctl(directory, GETFLAGS, struct.pack("l", 0))
    except OSError:
        return None
    return bool(struct.unpack("l", flags)[0] & CASEFOLD)
