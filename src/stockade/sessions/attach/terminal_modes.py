"""Track which modes of a terminal a program has switched on, and switch them off again.

A killed program leaves the user's terminal in the modes that it used: on the
alternate screen, without a cursor, reporting each move of the mouse. Only the
modes that the program changed and did not change back are reset; if that is
uncertain, because terminals interpret the output differently, all are.

Every sequence that is not known to be harmless counts as a query, whose answer
will arrive as if it were typed: no list of queries could be complete.
"""

from __future__ import annotations

import re
from functools import lru_cache

#: Modes that are off in a fresh terminal, private and standard ones. Modes whose default is a matter of
#: taste are left alone.
SWITCHED_ON = {
    b"?": frozenset(
        {1, 5, 6, 9, 47, 66, 69, *range(1000, 1007), 1015, 1016, 1047, 1049, 2004, 2026, 2031, 2048}
    ),
    b"": frozenset({2, 4, 20}),
}
#: Modes that are on in a fresh terminal: wrapping at the margin, the cursor; no local echo.
SWITCHED_OFF = {b"?": frozenset({7, 25}), b"": frozenset({12})}
SCREENS = (47, 1047, 1049)
#: When these are switched on, some terminals report at once: their focus, their colours, their size.
REPORTING_MODES = frozenset({1004, 2031, 2048})
#: Terminals disagree about more numbers, or larger ones, in one sequence.
MOST_NUMBERS, LARGEST_NUMBER = 16, 9999

_SEQUENCE = re.compile(
    rb"\x1b(?:"
    rb"\[(?P<body>[\x00-\x17\x19\x1c-?\x7f]*)(?P<final>[@-~\x80-\xff])"
    rb"|\](?P<text>[^\x07\x18\x1a\x1b]*)(?:[\x07\x18\x1a]|(?=\x1b))"
    rb"|(?P<short>[ -/]+[^ -/\x18\x1a\x1b]|[^ -/\[\]\x18\x1a\x1b])"
    rb")|(?P<alone>[\x05\x0e\x0f]|(?<![\x80-\xc1\xc3-\xff])[\x80-\x9f])"
)
#: An eight-bit control, alone or encoded as UTF-8. Terminals that know them obey them anywhere, also in the
#: text of an OSC sequence, where 0x9c ends it.
_EIGHT_BITS = re.compile(rb"(?<![\x80-\xc1\xc3-\xff])[\x80-\x9f]")
#: What else ends a text early: in PuTTY the end of a line, on the Linux console the byte 0x9b of any
#: character.
_ENDS_EARLY = re.compile(rb"[\x00-\x1f\x9b]")
#: A sequence that has begun and not ended.
_BEGUN = re.compile(
    rb"\x1b(?:[ -/]*|\[[\x00-\x17\x19\x1c-?\x7f]*|\][^\x07\x18\x1a\x1b]*|[PX^_][^\x18\x1a\x1b]*)"
)
_ZEROS = re.compile(rb"(?<![0-9])0+(?=[0-9])")
_BODY = re.compile(rb"([<-?]?)([0-9;:]{0,80})([ -/]{0,2})")
_LONGEST = 256
_WHOLE_STRING = re.compile(rb"\x1b[PX^_][^\x18\x1a\x1b]*(?:[\x18\x1a]|(?=\x1b))")
_BROKEN_OFF = re.compile(
    rb"\x1b(?:(?:[ -/]*|\[[\x00-\x17\x19\x1c-?\x7f]*)(?=\x1b)|\][^\x07\x18\x1a\x1b]*(?=\x1b[^\\]))"
)
_UNFINISHED = re.compile(
    rb"\x1b(?:\][^\x07\x18\x1a\x1b]*\x1b?|[ -/]*|\[[\x00-\x17\x19\x1c-?\x7f]*|[PX^_][^\x18\x1a\x1b]*)\Z"
)
_ON = re.compile(rb"\x1b\[\?([0-9;]+)h")
_CLIPBOARD = re.compile(rb"\x1b\]0*52(?![0-9])")
_STRING_END, _TEXT_END = re.compile(rb"[\x18\x1a\x1b]"), re.compile(rb"[\x07\x18\x1a\x1b]")
CANCEL = b"\x18"
#: CANCEL for terminals that obey nothing in a text but its end.
ABORT = CANCEL + b"\x1b\\"
#: Stands for the number of answers to expect when they cannot be counted.
UNCOUNTED = 1 << 62
#: Sequences that terminals never answer: they move the cursor, erase, save and restore.
_SILENT = frozenset(
    {*(b"%c" % final for final in b"@ABCDEFGHIJKLMPSXZ`abdefgsu"), b"?J", b"?K", b"?W", b" q", b'"q', b"!p"}
)
_SILENT_SHORT = re.compile(rb"[78DEHMNO\\]|[)*+][0-~]|#[3-8]|%G| F")
_LETTERS = re.compile(rb"\([ -/]?[0-~]")
#: Strings that are not text: terminals answer some of them.
_STRINGS = (b"P", b"X", b"^", b"_", b"Z")
_TEXT = re.compile(rb"0*([0-9]{1,4})(?:;.*)?", re.DOTALL)
#: OSC texts that terminals do not answer: titles, directories, links, prompts; and colours and the
#: clipboard, unless the text has a question mark.
_TITLES, _SETTINGS = (0, 1, 2, 7, 8, 133), (4, *range(10, 20), 52, 104, *range(110, 120))


def _everything() -> bytes:
    """Return what resets every known mode. The screen comes last, because some modes belong to it."""
    modes = sorted(SWITCHED_ON[b"?"] - {*SCREENS})
    return b"".join(
        (
            b"\x1b[4i\x1b%G\x1b F\x0f\x1b7",
            *(b"\x1b[?%dl" % mode for mode in modes),
            b"\x1b[r\x1b8\x1b[!p\x1b(B\x1b>\x1b[0m\x1b[2l\x1b[4l\x1b[20l\x1b[12h\x1b[?7h\x1b[?25h\x1b[=0u\x1b[<99u",
            *(b"\x1b[>%dm" % keys for keys in range(5)),
            *(b"\x1b[?%dl" % screen for screen in SCREENS),
        )
    )


EVERYTHING = _everything()


@lru_cache(maxsize=1024)
def _may_be_answered(sequence: bytes) -> bool:
    """Whether a terminal may answer a sequence."""
    one = Modes()
    one.see(sequence + b"\x1b\\")  # ST ends a text, and means nothing elsewhere
    return one.asked


def _without_query(found: re.Match[bytes]) -> bytes:
    sequence = found[0]
    if len(sequence) <= _LONGEST and not _CLIPBOARD.match(sequence):
        if not _may_be_answered(sequence):
            return sequence
        if (
            (modes := _ON.fullmatch(sequence))
            and (left := _only_silent_modes(modes[1]))
            and not _may_be_answered(left)
        ):
            return left
    last = sequence[-1:]
    if found.lastgroup == "text" or last < b"\x80":
        return b""
    # A byte that begins a character stays with the rest of it. A stray continuation byte is replaced, so
    # that it cannot become part of a character.
    return last if last >= b"\xc0" else "\N{REPLACEMENT CHARACTER}".encode()


def _only_silent_modes(modes: bytes) -> bytes:
    """Return what switches on only those of the modes that no terminal reports on."""
    left = [mode for mode in modes.split(b";") if mode and int(mode) not in REPORTING_MODES]
    return b"\x1b[?%bh" % b";".join(left) if left else b""


class ReplyFilter:
    """Removes from output everything that a terminal may answer.

    A terminal that shows output again, or beside another one, must not answer a query twice. The filter also
    removes clipboard changes, which may be outdated, and long texts for the terminal itself (pictures).
    """

    def __init__(self) -> None:
        self._tail = b""
        #: The end of the text that is being removed.
        self._until: re.Pattern[bytes] | None = None

    def feed(self, data: bytes) -> bytes:
        """Return the next piece without queries, and hold back an unfinished sequence."""
        data = self._tail + data
        self._tail = b""
        if self._until is not None:
            found = self._until.search(data)
            if found is None:
                return b""
            self._until, data = None, data[found.start() if found[0] == b"\x1b" else found.end() :]
        # Remove broken-off sequences first: removing what follows them could make them whole.
        data = _BROKEN_OFF.sub(b"", _WHOLE_STRING.sub(b"", data))
        end = len(data) - _half_a_character(data)
        if begun := _UNFINISHED.search(data[:end]):
            end = begun.start()
        tail, data = data[end:], data[:end]
        if tail[1:2] in (b"P", b"X", b"^", b"_"):
            self._until = _STRING_END
        elif len(tail) <= _LONGEST:
            self._tail = tail
        elif tail.endswith(b"\x1b"):
            self._tail = b"\x1b"
        else:
            self._until = _TEXT_END
        return _SEQUENCE.sub(_without_query, data)

    @property
    def leaves_out(self) -> bool:
        """Whether it is in the middle of a text that it removes."""
        return self._until is not None

    @property
    def within(self) -> bool:
        """Whether it is in the middle of a sequence."""
        return self.leaves_out or self._tail.startswith(b"\x1b")

    def copy(self) -> ReplyFilter:
        """Return a copy in the same state."""
        twin = ReplyFilter()
        twin._tail, twin._until = self._tail, self._until
        return twin

    def release(self) -> bytes:
        """Return and forget the bytes held back, for a client that gets the queries from now on."""
        tail, self._tail = self._tail, b""
        return tail


def as_text(shown: bytes) -> bytes:
    """Return output without control sequences: words and line ends."""
    return _SEQUENCE.sub(b"", _BROKEN_OFF.sub(b"", _WHOLE_STRING.sub(b"", shown))).replace(b"\r", b"")


def _half_a_character(data: bytes) -> int:
    """Return how many bytes at the end begin an unfinished UTF-8 character."""
    for back, least in ((1, 0xC2), (2, 0xE0), (3, 0xF0)):
        if len(data) >= back and data[-back] >= 0xC0:
            return back if data[-back] >= least else 0
    return 0


class Modes:
    """Reads output and remembers which modes it switches."""

    def __init__(self) -> None:
        #: Whether the output queried the terminal; its answer arrives as if it were typed.
        self.asked = False
        #: How many status reports the terminal may send because the output asked for them.
        self.statuses = 0
        self._tail = self._before = b""
        self._forget()

    def _forget(self) -> None:
        self._changed: set[tuple[bytes, int]] = set()
        self._styled = self._keypad = self._letters = self._modified = self._set = False
        self._shifted = self._unsure = False
        self._pushed = 0
        self._region = b""

    def see(self, data: bytes) -> None:
        """Read the next piece; sequences may be split anywhere."""
        start = len(self._before)
        data = self._before + self._tail + data
        last = data.rfind(b"\x1b", start)
        end = last if last >= 0 and _BEGUN.fullmatch(data, last) else len(data)
        for found in _SEQUENCE.finditer(data, start, min(end + 1, len(data))):
            self._note(found)
        if len(data) - end > _LONGEST:  # the part that is not kept may be the query
            self.statuses, self.asked = UNCOUNTED, True
            if data[end + 1 : end + 2] not in b"]PX^_":
                self.doubt()
        if _EIGHT_BITS.search(data, end):  # a terminal may be past the text that has not ended here
            self.doubt()
        self._before, self._tail = data[max(end - 1, 0) : end], data[end : end + _LONGEST]

    def doubt(self) -> None:
        """Assume the worst: the terminal's state has become uncertain."""
        self._unsure = self.asked = True
        self.statuses = UNCOUNTED

    def _note(self, found: re.Match[bytes]) -> None:
        kind = found.lastgroup
        if kind == "final":
            self._control(found["body"], found["final"])
        elif kind == "text":
            self._text(found["text"])
        elif kind == "short":
            self._short(found["short"])
        elif found["alone"] == b"\x05":
            self.asked = True
        elif found["alone"] in b"\x0e\x0f":
            self._shifted = found["alone"] == b"\x0e"
        else:
            self.doubt()

    def _control(self, body: bytes, final: bytes) -> None:
        found = _BODY.fullmatch(_ZEROS.sub(b"", body))
        if found is None or final >= b"\x80" or (b":" in found[2] and final != b"m"):
            self.doubt()
            return
        way, words, extra = found.groups()
        kind = way + extra + final
        if kind in (b"h", b"l", b"?h", b"?l"):
            self._switch(way, words, final == b"h")
        elif kind == b"m":
            self._styled = (words.replace(b":", b";").split(b";")[-1] or b"0") != b"0"
        elif kind == b"r":
            self._region = words
        elif kind in (b">u", b"<u", b"=u") or (kind == b">m" and words.partition(b";")[0] == b"4"):
            self._keyboard(way, words, final)
        elif final in b"hlrsim" and kind not in _SILENT:
            self.doubt()
        elif final == b"n":
            # Some terminals answer each of several numbers separately.
            self.statuses += UNCOUNTED if b";" in words else words != b"6"
            self.asked = True
        elif not self._is_silent(kind, words):
            self.asked = True

    def _is_silent(self, kind: bytes, words: bytes) -> bool:
        if kind == b"t":  # 22 and 23 save and restore titles; the others are queries
            return words.partition(b";")[0] in (b"22", b"23")
        return kind in _SILENT or (kind == b"T" and b";" not in words)

    def _text(self, text: bytes) -> None:
        found = _TEXT.fullmatch(text)
        number = int(found[1]) if found else -1
        if _EIGHT_BITS.search(text):
            self.doubt()
        elif _ENDS_EARLY.search(text):
            self.statuses, self.asked = UNCOUNTED, True
        elif number not in _TITLES and (b"?" in text or number not in _SETTINGS):
            self.asked = True

    def _short(self, short: bytes) -> None:
        if short == b"c":
            self._forget()
        elif short in (b"=", b">"):
            self._keypad = short == b"="
        elif _LETTERS.fullmatch(short):
            self._letters = short != b"(B"
        elif short in (b"n", b"o"):
            self._shifted = True
        elif short in _STRINGS:
            self.asked = True
        elif not _SILENT_SHORT.fullmatch(short):
            self.doubt()

    def _switch(self, way: bytes, words: bytes, on: bool) -> None:
        numbers = words.split(b";")
        if len(numbers) > MOST_NUMBERS:
            self.doubt()
            return
        for mode in (int(number) for number in numbers if number):
            if mode > LARGEST_NUMBER:
                self.doubt()
            elif mode in (SWITCHED_ON if on else SWITCHED_OFF)[way]:
                self._changed.add((way, mode))
                if way == b"?" and on and mode in REPORTING_MODES:
                    self.asked = True
            else:
                self._changed.discard((way, mode))

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

    @property
    def alternate(self) -> bool:
        """Whether a program uses the alternate screen, as editors and pagers do."""
        return any((b"?", screen) in self._changed for screen in SCREENS)

    def on(self) -> bytes:
        """Return what brings a fresh terminal into the tracked modes, except colours.

        No terminal answers any of it.
        """
        parts = [b"\x1b="] if self._keypad else []
        if self._region:
            parts.append(b"\x1b[%br" % self._region)
        for way, mode in sorted(self._changed, key=lambda changed: (changed[1] not in SCREENS, changed[1])):
            if (way, mode) not in self._reporting_modes:
                parts.append(b"\x1b[%b%d%c" % (way, mode, b"h" if mode in SWITCHED_ON[way] else b"l"))
        return b"".join(parts)

    @property
    def _reporting_modes(self) -> set[tuple[bytes, int]]:
        return self._changed & {(b"?", mode) for mode in REPORTING_MODES}

    def reporting_on(self) -> bytes:
        """Return what switches on the remaining modes: a terminal may report on them to the program."""
        return b"".join(b"\x1b[?%dh" % mode for _, mode in sorted(self._reporting_modes))

    def off(self, lines: int) -> bytes:
        """Return what resets a terminal of so many lines; empty if the program has tidied up."""
        parts = [ABORT] if self._tail else []
        if self._unsure:
            return b"".join((*parts, EVERYTHING))
        if self._set:
            parts.append(b"\x1b[=0u")
        if self._pushed:
            parts.append(b"\x1b[<%du" % min(self._pushed, 99))
        if self._modified:
            parts.append(b"\x1b[>4m")
        if self._region not in (b"", b"1;%d" % lines, b";%d" % lines):
            parts.append(b"\x1b7\x1b[r\x1b8")  # it moves the cursor
        if self._shifted:
            parts.append(b"\x0f")
        if self._letters:
            parts.append(b"\x1b(B")
        if self._keypad:
            parts.append(b"\x1b>")
        if self._styled:
            parts.append(b"\x1b[0m")
        # The screen last, since some modes belong to it.
        for way, mode in sorted(self._changed, key=lambda changed: (changed[1] in SCREENS, changed[1])):
            parts.append(b"\x1b[%b%d%c" % (way, mode, b"l" if mode in SWITCHED_ON[way] else b"h"))
        return b"".join(parts)
