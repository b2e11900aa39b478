"""The log of a command in the background: the newest bytes of its output, at their places in the whole.

The log is a file without a name, so that the kernel frees it with the supervisor, and it never grows beyond
`MOST_KEPT`: what is written later takes the place of the oldest bytes.
"""

from __future__ import annotations

import os
import tempfile
from typing import NamedTuple

from stockade.runs.io.streams import StreamConsumer

#: How many bytes of output a log keeps, and how many one call returns at most.
MOST_KEPT = 16 << 20


class LogPage(NamedTuple):
    """A piece of a log, and the cursor for the next call."""

    data: bytes
    cursor: int


class OutputLog(StreamConsumer):
    """Standard output and standard error together, in the order in which they came.

    As `on_stdout` and `on_stderr` of a run it takes both streams over, and is never full.
    """

    def __init__(self, directory: str | None = None) -> None:
        """Make an empty log, as a nameless file in a directory or among the temporary files."""
        with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
            self._file = os.dup(file.fileno())
        #: How many bytes were written, kept or not.
        self.written = 0
        #: How many could not be kept because the disk is full.
        self.lost = 0

    def __call__(self, data: bytes) -> None:
        self.write(data)

    def write(self, data: bytes) -> None:
        """Append output; a full disk loses it, but never fails the command."""
        view = memoryview(data)[-MOST_KEPT:]
        self.written += len(data) - len(view)
        while view:
            place = self.written % MOST_KEPT
            part = view[: MOST_KEPT - place]
            try:
                done = os.pwrite(self._file, part, place)
            except OSError:
                self.lost += len(view)
                os.ftruncate(self._file, 0)  # what is there no longer fits together
                self.written += len(view)
                return
            self.written += done
            view = view[done:]

    @property
    def kept(self) -> int:
        """How many bytes the log has now."""
        return min(self.written, MOST_KEPT)

    def read(self, cursor: int, *, ended: bool) -> LogPage:
        """Return the output from a byte on; a cursor before the oldest kept byte means that one.

        While more can come, a character of which only a part is there is left for the next page.
        """
        start = min(max(cursor, self.written - self.kept), self.written)
        data = b""
        while start + len(data) < self.written:
            at = start + len(data)
            place = at % MOST_KEPT
            piece = os.pread(self._file, min(self.written - at, MOST_KEPT - place), place)
            if not piece:  # lost to a full disk
                start, data = self.written, b""
                break
            data += piece
        if not ended:
            data = data[: len(data) - unfinished(data)]
        return LogPage(data, start + len(data))

    def close(self) -> None:
        """Free the log; may be called again."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def unfinished(data: bytes) -> int:
    """Return how many bytes at the end are the beginning of a character of UTF-8.

    >>> unfinished("é".encode()), unfinished("é".encode()[:1]), unfinished(b"plain")
    (0, 1, 0)
    """
    for back in range(1, min(4, len(data) + 1)):
        byte = data[-back]
        if byte & 0xC0 != 0x80:
            length = 4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1
            return back if length > back else 0
    return 0
