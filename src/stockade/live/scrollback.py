"""The last of what a terminal has shown, for whoever comes to see it later.

It is bytes and not a screen: nothing here draws. What was shown before the
oldest byte counts only for the modes it left switched on. Questions to the
terminal are not shown again, nor what was meant for the moment or for the
terminal that was there: bells, the clipboard, the end of its history.
"""

from __future__ import annotations

import re

from stockade.live.modes import CANCEL, EVERYTHING, Modes, Unasked

#: As much is kept; a quarter more before the oldest is let go of.
MOST = 256 << 10
#: How far a line's end is looked for where it is cut.
REACH = 4096
#: A terminal that showed something else, or only a part, begins afresh.
AFRESH = CANCEL + EVERYTHING + b"\x1b[H\x1b[2J"
_MOMENTARY = re.compile(
    rb"(?P<text>\x1b\][^\x07\x18\x1a\x1b]*\x07)|\x07|\x1b\[(?P<erased>[0-9;]*)J|(?P<reset>\x1bc)"
)
_HISTORY = re.compile(rb"(?<![0-9])0*3(?![0-9])")


def _later(found: re.Match[bytes]) -> bytes:
    if found["reset"]:
        return AFRESH
    lasts = found["text"] or (found["erased"] is not None and not _HISTORY.search(found["erased"]))
    return found[0] if lasts else b""


class Scrollback:
    """Bytes of one terminal, bounded."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._kept = bytearray()
        self._before = Modes()
        #: As of now.
        self.modes = Modes()

    def add(self, data: bytes) -> None:
        """Take note of what was shown."""
        self.modes.see(data)
        self._kept += data
        if len(self._kept) > self._most + self._most // 4:
            cut = self._cut(len(self._kept) - self._most)
            self._before.see(bytes(self._kept[:cut]))
            del self._kept[:cut]

    def _cut(self, least: int) -> int:
        """Where nothing is torn apart: behind a line, else before a sequence or a character."""
        if (line := self._kept.find(b"\n", least, least + REACH)) >= 0:
            return line + 1
        if (sequence := self._kept.find(b"\x1b", least, least + REACH)) >= 0:
            return sequence
        while least < len(self._kept) and self._kept[least] & 0xC0 == 0x80:
            least += 1
        return least

    def shown(self, *, afresh: bool, unasked: Unasked | None = None) -> bytes:
        """What makes a terminal look as if it had been there; `afresh` for one that shows other things.

        `unasked` is a new one, that knows then of what has begun and not ended.
        """
        again = _MOMENTARY.sub(_later, (unasked or Unasked()).feed(bytes(self._kept)))
        # What is spoken of comes last: it was on and off before, and only what is on now concerns anybody.
        return (AFRESH if afresh else b"") + self._before.on() + again + self.modes.spoken_of()
