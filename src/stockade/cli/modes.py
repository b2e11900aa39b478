"""Which modes of a terminal a program has switched on, and what switches them off again.

A program that is killed leaves the user's terminal as it had it: on the
alternate screen, without a cursor, reporting each move of the mouse. Only
what it has changed itself and not changed back is reset.
"""

from __future__ import annotations

import re
import time

#: Private modes that are off in a fresh terminal. Those whose default is a matter of taste are left alone.
SWITCHED_ON = frozenset(
    {1, 5, 6, 9, 47, 66, *range(1000, 1007), 1015, 1016, 1047, 1049, 2004, 2026, 2031, 2048}
)
#: And those that are on: wrapping at the margin, the cursor.
SWITCHED_OFF = frozenset({7, 25})
SCREENS = (47, 1047, 1049)

_SEQUENCE = re.compile(
    rb"\x1b(?:"
    rb"(?P<reset>c|\[!p)"
    rb"|\[\?(?P<modes>[0-9;]{1,80})(?P<switch>[hl])"
    rb"|\[(?P<style>[0-9;:]{0,80})m"
    rb"|\[(?P<region>[0-9;]{0,20})r"
    rb"|\[(?P<way>[<>=])(?P<keys>[0-9;]{0,20})(?P<kind>[um])"
    rb"|(?P<keypad>[=>])"
    rb"|\((?P<letters>[0-9A-Za-z])"
    rb"|(?P<asks>\[[?>=]?[0-9;]{0,20}(?:[cnxt]|\$p)|\[>[0-9;]{0,20}q|\[\?u|\][0-9;]{1,20}\?|P[+$]q|_G|Z)"
    rb")|(?P<answerback>\x05)"
)
#: A sequence that has begun and not ended.
_BEGUN = re.compile(rb"\x1b(?:[ -/]*|\[[0-?]*[ -/]*|[]PX^_][^\x07\x18\x1a\x1b]*)", re.DOTALL)
_LONGEST = 256
CANCEL = b"\x18"


class Modes:
    """Reads what is shown and remembers what it switches."""

    def __init__(self) -> None:
        #: When the terminal was last asked something; its answer comes as if it were typed.
        self.asked: float | None = None
        self._tail = b""
        self._forget()

    def _forget(self) -> None:
        self._changed: set[int] = set()
        self._styled = self._keypad = self._letters = self._modified = self._set = False
        self._pushed = 0
        self._region = b""

    def see(self, data: bytes) -> None:
        """Take note of the next piece; sequences may be cut anywhere."""
        data = self._tail + data
        for found in _SEQUENCE.finditer(data):
            self._note(found)
        last = data.rfind(b"\x1b")
        begun = _BEGUN.fullmatch(data, last) if last >= 0 else None
        self._tail = data[last : last + _LONGEST] if begun else b""

    def _note(self, found: re.Match[bytes]) -> None:
        kind = found.lastgroup
        if found["reset"]:
            self._forget()
        elif found["switch"]:
            self._switch(found["modes"], found["switch"] == b"h")
        elif kind == "style":
            self._styled = (found["style"].replace(b":", b";").split(b";")[-1] or b"0").strip(b"0") != b""
        elif kind == "region":
            self._region = found["region"]
        elif kind == "kind":
            self._keyboard(found["way"], found["keys"], found["kind"])
        elif kind == "keypad":
            self._keypad = found["keypad"] == b"="
        elif kind == "letters":
            self._letters = found["letters"] != b"B"
        else:
            self.asked = time.monotonic()

    def _switch(self, modes: bytes, on: bool) -> None:
        for mode in (int(word) for word in modes.split(b";") if word):
            if mode in (SWITCHED_ON if on else SWITCHED_OFF):
                self._changed.add(mode)
            else:
                self._changed.discard(mode)

    def _keyboard(self, way: bytes, keys: bytes, kind: bytes) -> None:
        words = keys.split(b";")
        if kind == b"m":
            if way == b">" and words[0] == b"4":
                self._modified = len(words) > 1 and words[1].strip(b"0") != b""
        elif way == b">":
            self._pushed += 1
        elif way == b"<":
            self._pushed = max(0, self._pushed - int(words[0] or 1))
        else:
            self._set = words[0].strip(b"0") != b""

    def off(self, lines: int) -> bytes:
        """What puts a terminal of so many lines back; empty if the program has tidied up."""
        parts = [CANCEL] if self._tail else []
        if self._set:
            parts.append(b"\x1b[=0u")
        if self._pushed:
            parts.append(b"\x1b[<%du" % min(self._pushed, 99))
        if self._modified:
            parts.append(b"\x1b[>4m")
        if self._region not in (b"", b"1;%d" % lines, b";%d" % lines):
            parts.append(b"\x1b7\x1b[r\x1b8")  # it moves the cursor
        if self._letters:
            parts.append(b"\x1b(B")
        if self._keypad:
            parts.append(b"\x1b>")
        if self._styled:
            parts.append(b"\x1b[0m")
        # The screen last, since some modes belong to it.
        for mode in sorted(self._changed, key=lambda mode: (mode in SCREENS, mode)):
            parts.append(b"\x1b[?%d%c" % (mode, b"l" if mode in SWITCHED_ON else b"h"))
        return b"".join(parts)
