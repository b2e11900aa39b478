"""Two texts that began as the same one, put together line by line.

Where only one side changed something, that is taken; where both made the same
change, once. Changes of both sides to the same lines, or to lines with none
between them that both left alone, are a conflict: nobody guesses which comes
first.
"""

from __future__ import annotations

import msgspec

from stockade.workspace.lines import Edit, edits, split_lines


class Merged(msgspec.Struct, frozen=True):
    """The text, or where the sides contradict each other: lines of the second one, from 1, first and last."""

    text: bytes = b""
    conflicts: tuple[tuple[int, int], ...] = ()


class _Side:
    """One text as edits of the base, read from the beginning to the end."""

    def __init__(self, base: list[bytes], text: bytes) -> None:
        self.lines = split_lines(text)
        self.edits = edits(base, self.lines)
        #: How much further on its lines are than the base's, behind the edits that were taken.
        self.ahead = 0

    def first(self) -> int | None:
        """The base's line at which its next edit begins."""
        return self.edits[0][0] if self.edits else None

    def take(self, end: int) -> list[Edit]:
        """The next edits that begin at or before a line of the base."""
        count = next((at for at, edit in enumerate(self.edits) if edit[0] > end), len(self.edits))
        taken, self.edits = self.edits[:count], self.edits[count:]
        return taken

    def span(self, start: int, end: int, taken: list[Edit]) -> tuple[int, int]:
        """Its own lines in place of some of the base's, in which the edits taken are."""
        begin = start + self.ahead
        self.ahead += sum(d - c - (b - a) for a, b, c, d in taken)
        return begin, end + self.ahead


def merge3(base: bytes, ours: bytes, theirs: bytes) -> Merged:
    """Both sides' changes to the base, which are texts."""
    lines = split_lines(base)
    one, other = _Side(lines, ours), _Side(lines, theirs)
    text: list[bytes] = []
    conflicts = []
    at = 0
    while begins := [first for side in (one, other) if (first := side.first()) is not None]:
        start = end = min(begins)
        mine: list[Edit] = []
        yours: list[Edit] = []
        # Edits that touch belong together, and with what those touch.
        while (found := (one.take(end), other.take(end))) != ([], []):
            mine += found[0]
            yours += found[1]
            end = max(end, *(edit[1] for side in found for edit in side))
        text += lines[at:start]
        a, b = one.span(start, end, mine)
        c, d = other.span(start, end, yours)
        left, right = one.lines[a:b], other.lines[c:d]
        if mine and yours and left != right:
            conflicts.append((c + 1, max(d, c + 1)))
        text += left if mine else right
        at = end
    text += lines[at:]
    return Merged(conflicts=tuple(conflicts)) if conflicts else Merged(b"".join(text))
