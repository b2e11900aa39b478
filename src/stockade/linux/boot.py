"""Which boot of the kernel this is."""

from __future__ import annotations

import os
from functools import lru_cache


@lru_cache(maxsize=1)
def boot_id() -> str:
    """Return the id of this boot; "?" if the kernel does not show it."""
    try:
        file = os.open("/proc/sys/kernel/random/boot_id", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return "?"
    try:
        return os.read(file, 64).decode().strip()
    finally:
        os.close(file)
