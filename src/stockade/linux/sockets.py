"""Sending descriptors although programs of the same user have used up the kernel's allowance."""

from __future__ import annotations

import contextlib
import resource
import threading
from collections.abc import Iterator

_lock = threading.Lock()


@contextlib.contextmanager
def unhindered() -> Iterator[None]:
    """Raise our limit of open files meanwhile: it also bounds the descriptors that the user has in flight."""
    with _lock:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
