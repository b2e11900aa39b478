"""The latest output of a terminal, kept for clients that attach later.

It is bytes and not a screen: nothing here renders. Of output older than the
oldest byte only the modes that it left switched on are kept. Queries to the
terminal are not replayed, nor are things that concerned only the moment or the
terminal that was attached then: bells, the clipboard, erasing its history.
"""

from __future__ import annotations

import re

from stockade.sessions.attach.terminal_modes import ABORT, EVERYTHING, Modes, ReplyFilter

#: How many bytes are kept; a quarter more may pile up before the oldest are dropped.
MOST = 256 << 10
#: How far a cut looks for the end of a line.
REACH = 4096
#: Resets and clears a terminal that shows something else, or only a part.
AFRESH = ABORT + EVERYTHING + b"\x1b[H\x1b[2J"
_MOMENTARY = re.compile(
    rb"(?P<text>\x1b\][^\x07\x18\x1a\x1b]*\x07)|\x07|\x1b\[(?P<erased>[0-9;]*)J|(?P<reset>\x1bc)"
)
_HISTORY = re.compile(rb"(?<![0-9])0*3(?![0-9])")


def _for_replay(found: re.Match[bytes]) -> bytes:
    if found["reset"]:
        return AFRESH
    lasts = found["text"] or (found["erased"] is not None and not _HISTORY.search(found["erased"]))
    return found[0] if lasts else b""


class Scrollback:
    """The bounded latest output of one terminal."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._kept = bytearray()
        self._before = Modes()
        #: The modes after everything shown so far.
        self.modes = Modes()

    def add(self, data: bytes) -> None:
        """Add output that the terminal has shown."""
        self.modes.see(data)
        self._kept += data
        if len(self._kept) > self._most + self._most // 4:
            cut = self._cut(len(self._kept) - self._most)
            self._before.see(bytes(self._kept[:cut]))
            del self._kept[:cut]

    def _cut(self, least: int) -> int:
        """Return where a cut splits nothing: after a line, else before a sequence or a character."""
        if (line := self._kept.find(b"\n", least, least + REACH)) >= 0:
            return line + 1
        if (sequence := self._kept.find(b"\x1b", least, least + REACH)) >= 0:
            return sequence
        while least < len(self._kept) and self._kept[least] & 0xC0 == 0x80:
            least += 1
        return least

    def shown(self, *, afresh: bool, unasked: ReplyFilter | None = None) -> bytes:
        """Return the bytes that bring a new terminal up to date; `afresh` for one that shows other things.

        `unasked` is the client's own new filter: it then knows which sequence has begun and not ended.
        """
        again = _MOMENTARY.sub(_for_replay, (unasked or ReplyFilter()).feed(bytes(self._kept)))
        # Modes that terminals report on come last: they were on and off before, and only the current state
        # matters.
        return (AFRESH if afresh else b"") + self._before.on() + again + self.modes.reporting_on()
