"""A bounded part of what a run prints, in memory, and nothing of it on the disk."""

from __future__ import annotations

from collections.abc import Callable

from stockade.runs.io.streams import StreamConsumer


class CapturedOutput(StreamConsumer):
    """Takes one or both streams of a run and keeps at most `limit` bytes of them, the first or the last."""

    def __init__(self, limit: int, *, keep: str = "start") -> None:
        self._limit = limit
        self._keeps_end = keep == "end"
        self._kept = bytearray()
        #: How many bytes came in all.
        self.size = 0

    def __call__(self, data: bytes) -> None:
        """Take the next piece of a stream."""
        self.size += len(data)
        if self._keeps_end:
            self._kept += data
            # Cut only now and then: each cut moves what stays.
            if len(self._kept) > 2 * self._limit:
                self._cut()
        else:
            self._kept += data[: max(0, self._limit - len(self._kept))]

    def when_room(self, resume: Callable[[], None]) -> None:
        """Go on at once: there is always room."""
        resume()

    @property
    def truncated(self) -> bool:
        """Whether something came that is not kept."""
        return self.size > self._limit

    @property
    def content(self) -> bytes:
        """What is kept."""
        self._cut()
        return bytes(self._kept)

    @property
    def text(self) -> str:
        """What is kept, as text; bytes that are not UTF-8 are replaced."""
        return self.content.decode("utf-8", "replace")

    def _cut(self) -> None:
        if len(self._kept) > self._limit:
            del self._kept[: len(self._kept) - self._limit]
