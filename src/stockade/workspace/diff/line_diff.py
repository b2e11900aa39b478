"""Compare two texts line by line, as unified hunks, in bounded time.

A program wrote the texts, so the search for the shortest difference has a
limit. Beyond it, everything between the first and the last differing line
counts as replaced.
"""

from __future__ import annotations

from array import array

CONTEXT = 3
#: How many added and removed lines to match one by one; the time grows with its square.
MOST = 1000
#: How many lines of a text to compare: each takes far more memory than its length.
MOST_LINES = 100_000
#: How many steps to spend on one pair of texts, and on all together: some millions take a second.
STEPS = 2_000_000
STEPS_IN_ALL = 16_000_000
NO_NEWLINE = b"\n\\ No newline at end of file\n"

#: A run of equal lines: its start in the old text, its start in the new one, its length.
Run = tuple[int, int, int]
#: Lines of the old text, from and to, and the lines of the new one that replace them.
Edit = tuple[int, int, int, int]


class Effort:
    """The steps left for finding short differences among several pairs of texts."""

    def __init__(self, steps: int = STEPS_IN_ALL) -> None:
        self._left = steps

    def share(self) -> int:
        """Return how many steps the next pair may take."""
        return min(STEPS, self._left)

    def spend(self, steps: int) -> None:
        self._left -= steps


def has_many_lines(*texts: bytes) -> bool:
    """Return whether texts have too many lines to compare. A single text is not compared."""
    return all(texts) and any(text.count(b"\n") >= MOST_LINES for text in texts)


def unified(old: bytes, new: bytes, effort: Effort | None = None) -> tuple[bytes, int, int]:
    """Return the hunks, and the numbers of added and removed lines."""
    if not (old and new):
        return _single_hunk(old, new)
    before, after = split_lines(old), split_lines(new)
    changes = edits(before, after, effort)
    text = bytearray()
    for hunk in _hunks(changes):
        lead, trail = min(CONTEXT, hunk[0][0]), min(CONTEXT, len(before) - hunk[-1][1])
        old_range = _range(hunk[0][0] - lead, hunk[-1][1] + trail)
        text += b"@@ -%s +%s @@\n" % (old_range, _range(hunk[0][2] - lead, hunk[-1][3] + trail))
        at = hunk[0][0] - lead
        for a, b, c, d in hunk:
            text += (
                _prefix_lines(b" ", before[at:a])
                + _prefix_lines(b"-", before[a:b])
                + _prefix_lines(b"+", after[c:d])
            )
            at = b
        text += _prefix_lines(b" ", before[at : at + trail])
    return bytes(text), sum(d - c for _, _, c, d in changes), sum(b - a for a, b, _, _ in changes)


def _single_hunk(old: bytes, new: bytes) -> tuple[bytes, int, int]:
    """Return one hunk for a text that is new or deleted, however many lines it has."""
    text, sign = (new, b"+") if new else (old, b"-")
    if not text:
        return b"", 0, 0
    count = text.count(b"\n") + (not text.endswith(b"\n"))
    ranges = (_range(0, count if old else 0), _range(0, count if new else 0))
    lines = sign + text.removesuffix(b"\n").replace(b"\n", b"\n" + sign)
    end = b"\n" if text.endswith(b"\n") else NO_NEWLINE
    return b"@@ -%s +%s @@\n" % ranges + lines + end, count if new else 0, count if old else 0


def _prefix_lines(sign: bytes, lines: list[bytes]) -> bytes:
    return b"".join(sign + (line if line.endswith(b"\n") else line + NO_NEWLINE) for line in lines)


def split_lines(text: bytes) -> list[bytes]:
    """Split a text into lines with their ends; the last may have none."""
    found = text.split(b"\n")
    return [line + b"\n" for line in found[:-1]] + ([found[-1]] if found[-1] else [])


def _range(start: int, end: int) -> bytes:
    count = end - start
    # An empty range is named by the line before it.
    return b"%d,%d" % (start + 1 if count else start, count) if count != 1 else b"%d" % (start + 1)


def runs(before: list[bytes], after: list[bytes], effort: Effort | None = None) -> list[Run]:
    """Return the runs of lines that are the same in both, in order, including both ends."""
    shorter = min(len(before), len(after))
    head = 0
    while head < shorter and before[head] == after[head]:
        head += 1
    tail = 0
    while tail < shorter - head and before[-1 - tail] == after[-1 - tail]:
        tail += 1
    middle = _shortest(before[head : len(before) - tail], after[head : len(after) - tail], effort or Effort())
    found = [(0, 0, head), *((a + head, b + head, n) for a, b, n in middle)]
    found += [(len(before) - tail, len(after) - tail, tail), (len(before), len(after), 0)]
    return found


def _shortest(before: list[bytes], after: list[bytes], effort: Effort) -> list[Run]:
    """Match equal single lines with Myers' greedy algorithm; return none if too much differs."""
    if not before or not after:
        return []
    # By diagonal, from -MOST - 1 to MOST + 1: the position reached in the old text.
    furthest = array("l", [0]) * (2 * MOST + 3)
    middle = MOST + 1
    trace: list[array[int]] = []
    steps, share = 0, effort.share()
    try:
        for edits in range(MOST + 1):
            trace.append(furthest[middle - edits - 1 : middle + edits + 2])
            for k in range(-edits, edits + 1, 2):
                at = middle + k
                right = k != -edits and (k == edits or furthest[at - 1] >= furthest[at + 1])
                begin = x = furthest[at - 1] + 1 if right else furthest[at + 1]
                y = x - k
                while x < len(before) and y < len(after) and before[x] == after[y]:
                    x, y = x + 1, y + 1
                furthest[at] = x
                if x >= len(before) and y >= len(after):
                    return _trace_back(trace, len(before), len(after))
                steps += 1 + x - begin
                if steps > share:
                    return []
        return []
    finally:
        effort.spend(steps)


def _trace_back(trace: list[array[int]], x: int, y: int) -> list[Run]:
    equal = []
    for edits in range(len(trace) - 1, -1, -1):
        furthest, k, middle = trace[edits], x - y, edits + 1
        at = middle + k
        right = k != -edits and (k == edits or furthest[at - 1] >= furthest[at + 1])
        previous = k - 1 if right else k + 1
        start = furthest[middle + previous]
        while x > start and y > start - previous:
            x, y = x - 1, y - 1
            equal.append((x, y, 1))
        x, y = start, start - previous
    return equal[::-1]


def edits(before: list[bytes], after: list[bytes], effort: Effort | None = None) -> list[Edit]:
    """Return the edits that turn one text into the other, in order."""
    found = []
    x = y = 0
    for a, b, count in runs(before, after, effort):
        if a > x or b > y:
            found.append((x, a, y, b))
        x, y = a + count, b + count
    return found


def _hunks(edits: list[Edit]) -> list[list[Edit]]:
    """Group edits that are so close that their contexts would overlap."""
    found: list[list[Edit]] = []
    for edit in edits:
        if found and edit[0] - found[-1][-1][1] <= 2 * CONTEXT:
            found[-1].append(edit)
        else:
            found.append([edit])
    return found
