"""The events between a loop and its screen: neither waits for the other."""

from __future__ import annotations

import threading
from collections import deque

from stockade.loop.events import AgentLine, JudgeLine, LoopEvent

#: The most lines of output that wait to be shown. An agent can print faster than a terminal can show.
MOST_LINES = 5000


class EventQueue:
    """Takes events from any thread; of lines of output it keeps the last ones."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: Each with its number, by which they are put in order again.
        self._events: deque[tuple[int, LoopEvent]] = deque()
        self._lines: deque[tuple[int, LoopEvent]] = deque(maxlen=MOST_LINES)
        self._count = 0

    def put(self, event: LoopEvent) -> None:
        """Add an event. Never waits, and never raises."""
        with self._lock:
            self._count += 1
            kind = self._lines if isinstance(event, AgentLine | JudgeLine) else self._events
            kind.append((self._count, event))

    def take(self) -> list[LoopEvent]:
        """Return what has come since the last call, in the order in which it happened."""
        with self._lock:
            found = sorted((*self._events, *self._lines), key=lambda numbered: numbered[0])
            self._events.clear()
            self._lines.clear()
        return [event for _, event in found]
