"""Frames of HTTP/2 before the library sees them: bounded in size and number.

The library answers pings and settings at once and keeps what is needed for each stream. So a peer may send
only as many frames as its requests and data earn. A server that wants to end a connection gracefully says so
with a frame (GOAWAY) on which the library would drop the streams that are under way; it does not get it.
"""

from __future__ import annotations

from typing import NamedTuple

_HEADER = 9
#: The largest frame that peers may send unless they are told otherwise.
_MOST = 16384
_DATA, _HEADERS, _RESET, _PUSH, _GOAWAY, _WINDOW, _CONTINUATION = 0, 1, 3, 5, 7, 8, 9
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
#: What a peer may send beyond what it has earned; and what it earns with a head, and with data.
SPARE_FRAMES, SPARE_RESETS = 1000, 100
FRAMES_FOR_HEAD, BYTES_FOR_FRAME = 20, 512


class FrameRefusedError(ValueError):
    """Frames that no peer needs to send; the message is a short fixed reason."""


class PassedFrames(NamedTuple):
    """What the library may see."""

    data: bytes
    #: The peer wants no new streams.
    goes_away: bool


class FrameGate:
    """Looks at the frames of one peer."""

    def __init__(self, *, preface: bool) -> None:
        self._pending = bytearray()
        #: What the peer sends before the first frame, and has not sent yet.
        self._preface = PREFACE if preface else b""
        self._is_client = preface
        self._frames, self._resets = SPARE_FRAMES, SPARE_RESETS
        self._earned = 0

    def earn(self, amount: int) -> None:
        """Let the peer send frames for data that it got."""
        self._earned += amount
        frames, self._earned = divmod(self._earned, BYTES_FOR_FRAME)
        self._frames = min(self._frames + frames, 1 << 30)

    def feed(self, data: bytes) -> PassedFrames:
        """Return the frames that are complete; raises FrameRefusedError."""
        self._pending += data
        pending, passed, goes_away = self._pending, bytearray(), False
        if self._preface:
            wanted = min(len(self._preface), len(pending))
            if pending[:wanted] != self._preface[:wanted]:
                raise FrameRefusedError("no preface")
            passed += pending[:wanted]
            del pending[:wanted]
            self._preface = self._preface[wanted:]
        at = 0
        while len(pending) - at >= _HEADER and not self._preface:
            size = int.from_bytes(pending[at : at + 3], "big")
            if size > _MOST:
                raise FrameRefusedError("frame too large")
            end = at + _HEADER + size
            if len(pending) < end:
                break
            kind = pending[at + 3]
            self._count(kind, size)
            if kind == _GOAWAY and size >= 8 and not any(pending[at + _HEADER + 4 : at + _HEADER + 8]):
                goes_away = True
            else:
                passed += pending[at:end]
            at = end
        del pending[:at]
        return PassedFrames(bytes(passed), goes_away)

    def _count(self, kind: int, size: int) -> None:
        if kind == _PUSH:
            raise FrameRefusedError("push")
        self._frames -= 1
        if kind == _HEADERS:
            self._frames += FRAMES_FOR_HEAD
            self._resets += 1
        elif kind == _DATA:
            self.earn(size)
            self._frames += 1 if size else 0
        elif kind == _RESET and self._is_client:
            # A request that is reset at once costs the server more than its program. A server resets each
            # request that it has answered without a look at the body.
            self._resets -= 2
        if self._frames < 0 or self._resets < 0:
            raise FrameRefusedError("too many frames")
