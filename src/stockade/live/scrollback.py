"""The last of what a terminal has shown, for whoever comes to see it later.

It is bytes and not a screen: nothing here draws. What was shown before the
oldest byte counts only for the modes it left switched on. Questions to the
terminal are not kept: they were for whoever was there.
"""

from __future__ import annotations

from stockade.live.modes import CANCEL, EVERYTHING, Modes, Unasked

#: As much is kept; a quarter more before the oldest is let go of.
MOST = 256 << 10
#: How far a line's end is looked for where it is cut.
REACH = 4096
#: A terminal that showed something else, or only a part, begins afresh.
AFRESH = CANCEL + EVERYTHING + b"\x1b[H\x1b[2J"


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

    def shown(self, *, afresh: bool) -> bytes:
        """What makes a terminal look as if it had been there; `afresh` for one that shows other things."""
        return (AFRESH if afresh else b"") + self._before.on() + Unasked().feed(bytes(self._kept))
