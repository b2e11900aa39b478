"""The TLS sessions of servers, so that a further connection to one takes a shorter handshake.

A session that is resumed has its keys from a handshake in which the server's certificate was verified for the
name that it is kept under; the certificate is not verified again. So sessions are kept by name and port, for
a bounded time, in memory alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from OpenSSL import SSL

#: How many servers have one, and for how many seconds after their certificate was verified.
SESSIONS, SECONDS = 64, 3600.0


class TlsSession(NamedTuple):
    """The session of a server, and when its certificate was verified."""

    session: SSL.Session
    verified: float


class TlsSessions:
    """The last session of each server."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._kept: dict[tuple[str, int], TlsSession] = {}

    def find(self, name: str, port: int) -> TlsSession | None:
        """Return the session of a server, if it is not too old."""
        found = self._kept.get((name, port))
        return found if found is not None and self.clock() < found.verified + SECONDS else None

    def keep(self, name: str, port: int, verified: float, session: SSL.Session) -> None:
        """Keep the session of a server instead of its last one."""
        self._kept.pop((name, port), None)
        if len(self._kept) >= SESSIONS:
            del self._kept[next(iter(self._kept))]
        self._kept[name, port] = TlsSession(session, verified)
