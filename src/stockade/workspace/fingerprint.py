"""The digest of a layer's state: it differs as soon as anything differs that a commit would apply.

It reads no content. A file counts by its inode, size, mode and change time,
which no program can set, and we take digests only while no program writes.
Some change times are unreliable: tmpfs does not update them when a program
writes through a mapping, and an ordinary user who inspects a file without
read permission for its owner changes its mode meanwhile. For those the
layer's epoch counts instead, which ends when a sandbox enters the layer.
"""

from __future__ import annotations

import hashlib
import os
import stat
import struct
import time

from stockade.workspace import metadata

#: File systems where a first write to a mapping sets the change time: ext2 to ext4, XFS, Btrfs, F2FS.
STAMPING = (0xEF53, 0x58465342, 0x9123683E, 0xF2F52010)
#: Before Linux 6.13 two changes within a tick of the clock get the same time; the longest tick takes 10 ms.
TICK_NS = 20_000_000

_FACTS = struct.Struct("=IIIQQq")


class Fingerprint:
    """A digest under construction, which a walk of the layer feeds in its own order."""

    def __init__(self, upper: int, epoch: str) -> None:
        from stockade.linux.openat2 import file_system

        self._hash = hashlib.blake2b(digest_size=20)
        self._epoch = epoch
        self._needs_epoch = file_system(upper) not in STAMPING
        self._newest = 0

    def directory(self, path: str, *, opaque: bool) -> None:
        """Begin a directory: the entries that follow lie in it."""
        self._hash.update(b"/" + os.fsencode(path) + b"\0" + (b"opaque" if opaque else b"merged"))

    def entry(self, name: str, info: os.stat_result) -> None:
        """Add one entry of the current directory, as the layer has it."""
        mode, number, size, changed = info.st_mode, info.st_ino, info.st_size, 0
        if stat.S_ISDIR(mode) or stat.S_ISCHR(mode):
            # A directory consists of its entries, and a whiteout of its name.
            number = size = 0
        elif stat.S_ISREG(mode) and not mode & stat.S_IRUSR and os.geteuid():
            self._needs_epoch = True
        else:
            changed = info.st_ctime_ns
            self._newest = max(self._newest, changed)
        facts = _FACTS.pack(mode, info.st_uid, info.st_gid, number, size, changed)
        self._hash.update(os.fsencode(name) + b"\0" + facts)

    def digest(self) -> str:
        """Return the digest of everything so far; empty if it needs an epoch and there is none.

        Waits until every later change of a file is certain to get a different time.
        """
        left = self._newest + TICK_NS - time.clock_gettime_ns(metadata.REALTIME_COARSE)
        if left > 0:
            time.sleep(min(left, TICK_NS) / 1e9)
        if self._needs_epoch:
            self._hash.update(b"//" + self._epoch.encode())
        return self._hash.hexdigest() if self._epoch or not self._needs_epoch else ""
