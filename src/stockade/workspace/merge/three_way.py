"""Three-way merge of texts, line by line.

Where only one side changed something, its change is applied; where both made
the same change, once. Changes of both sides to the same lines, or to adjacent
lines, are a conflict: their order would be a guess.
"""

from __future__ import annotations

import msgspec

from stockade.workspace.diff.line_diff import Edit, Effort, edits, split_lines


class MergeResult(msgspec.Struct, frozen=True):
    """The merged text, or the conflicts: first and last lines of the second side, counted from 1."""

    text: bytes = b""
    conflicts: tuple[tuple[int, int], ...] = ()


class _MergeSide:
    """One text as edits of the base, read from beginning to end."""

    def __init__(self, base: list[bytes], text: bytes, effort: Effort | None) -> None:
        self.lines = split_lines(text)
        self.edits = edits(base, self.lines, effort)
        #: The offset of its lines from the base's, after the edits applied so far.
        self.ahead = 0

    def first(self) -> int | None:
        """Return the line of the base at which its next edit begins."""
        return self.edits[0][0] if self.edits else None

    def take(self, end: int) -> list[Edit]:
        """Remove and return the next edits that begin at or before a line of the base."""
        count = next((at for at, edit in enumerate(self.edits) if edit[0] > end), len(self.edits))
        taken, self.edits = self.edits[:count], self.edits[count:]
        return taken

    def span(self, start: int, end: int, taken: list[Edit]) -> tuple[int, int]:
        """Return its own lines that replace these of the base, which contain the edits in `taken`."""
        begin = start + self.ahead
        self.ahead += sum(d - c - (b - a) for a, b, c, d in taken)
        return begin, end + self.ahead


def merge3(base: bytes, ours: bytes, theirs: bytes, effort: Effort | None = None) -> MergeResult:
    """Apply both sides' changes to the base; all three are texts."""
    lines = split_lines(base)
    one, other = _MergeSide(lines, ours, effort), _MergeSide(lines, theirs, effort)
    text: list[bytes] = []
    conflicts = []
    at = 0
    while begins := [first for side in (one, other) if (first := side.first()) is not None]:
        start = end = min(begins)
        mine: list[Edit] = []
        yours: list[Edit] = []
        # Adjacent edits belong together, transitively.
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
    return MergeResult(conflicts=tuple(conflicts)) if conflicts else MergeResult(b"".join(text))
