"""Room for sending descriptors, where programs have taken it all."""

from __future__ import annotations

import contextlib
import resource
import threading
from collections.abc import Iterator

_lock = threading.Lock()


@contextlib.contextmanager
def unhindered() -> Iterator[None]:
    """Let us send although programs of the same user have much under way: our limit of open files counts."""
    with _lock:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
