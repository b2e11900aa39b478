"""Two texts line by line: the differences as unified hunks, in bounded time.

The texts are a program's: whatever it writes, the shortest difference is
looked for only so far, and what lies between the first and the last line that
differ is replaced as a whole otherwise.
"""

from __future__ import annotations

CONTEXT = 3
#: How many added and removed lines are sought out one by one; the time grows with its square.
MOST = 1000
NO_NEWLINE = b"\n\\ No newline at end of file\n"

#: Equal runs of lines: where in the old text, where in the new one, how many.
Run = tuple[int, int, int]
#: Lines of the old text, from and to, and the lines of the new one in their place.
Edit = tuple[int, int, int, int]


def unified(old: bytes, new: bytes) -> tuple[bytes, int, int]:
    """The hunks, and how many lines were added and removed."""
    before, after = split_lines(old), split_lines(new)
    changes = edits(before, after)
    text = bytearray()
    for hunk in _hunks(changes):
        lead, trail = min(CONTEXT, hunk[0][0]), min(CONTEXT, len(before) - hunk[-1][1])
        old_range = _range(hunk[0][0] - lead, hunk[-1][1] + trail)
        text += b"@@ -%s +%s @@\n" % (old_range, _range(hunk[0][2] - lead, hunk[-1][3] + trail))
        at = hunk[0][0] - lead
        for a, b, c, d in hunk:
            text += _signed(b" ", before[at:a]) + _signed(b"-", before[a:b]) + _signed(b"+", after[c:d])
            at = b
        text += _signed(b" ", before[at : at + trail])
    return bytes(text), sum(d - c for _, _, c, d in changes), sum(b - a for a, b, _, _ in changes)


def _signed(sign: bytes, lines: list[bytes]) -> bytes:
    return b"".join(sign + (line if line.endswith(b"\n") else line + NO_NEWLINE) for line in lines)


def split_lines(text: bytes) -> list[bytes]:
    """The lines with their ends, of which the last may have none."""
    found = text.split(b"\n")
    return [line + b"\n" for line in found[:-1]] + ([found[-1]] if found[-1] else [])


def _range(start: int, end: int) -> bytes:
    count = end - start
    # A range without lines is named by the line before it.
    return b"%d,%d" % (start + 1 if count else start, count) if count != 1 else b"%d" % (start + 1)


def runs(before: list[bytes], after: list[bytes]) -> list[Run]:
    """Which lines are the same in both, in order, up to both ends."""
    shorter = min(len(before), len(after))
    head = 0
    while head < shorter and before[head] == after[head]:
        head += 1
    tail = 0
    while tail < shorter - head and before[-1 - tail] == after[-1 - tail]:
        tail += 1
    middle = _shortest(before[head : len(before) - tail], after[head : len(after) - tail])
    found = [(0, 0, head), *((a + head, b + head, n) for a, b, n in middle)]
    found += [(len(before) - tail, len(after) - tail, tail), (len(before), len(after), 0)]
    return found


def _shortest(before: list[bytes], after: list[bytes]) -> list[Run]:
    """Myers' greedy algorithm: equal single lines, or none if too much differs."""
    if not before or not after:
        return []
    furthest = {1: 0}
    trace = []
    for edits in range(MOST + 1):
        trace.append(dict(furthest))
        for k in range(-edits, edits + 1, 2):
            right = k != -edits and (k == edits or furthest[k - 1] >= furthest[k + 1])
            x = furthest[k - 1] + 1 if right else furthest[k + 1]
            y = x - k
            while x < len(before) and y < len(after) and before[x] == after[y]:
                x, y = x + 1, y + 1
            furthest[k] = x
            if x >= len(before) and y >= len(after):
                return _back(trace, len(before), len(after))
    return []


def _back(trace: list[dict[int, int]], x: int, y: int) -> list[Run]:
    equal = []
    for edits in range(len(trace) - 1, -1, -1):
        furthest, k = trace[edits], x - y
        right = k != -edits and (k == edits or furthest[k - 1] >= furthest[k + 1])
        previous = k - 1 if right else k + 1
        start = furthest[previous]
        while x > start and y > start - previous:
            x, y = x - 1, y - 1
            equal.append((x, y, 1))
        x, y = start, start - previous
    return equal[::-1]


def edits(before: list[bytes], after: list[bytes]) -> list[Edit]:
    """What to replace by what, in order."""
    found = []
    x = y = 0
    for a, b, count in runs(before, after):
        if a > x or b > y:
            found.append((x, a, y, b))
        x, y = a + count, b + count
    return found


def _hunks(edits: list[Edit]) -> list[list[Edit]]:
    """Edits so near to one another that their context would meet belong together."""
    found: list[list[Edit]] = []
    for edit in edits:
        if found and edit[0] - found[-1][-1][1] <= 2 * CONTEXT:
            found[-1].append(edit)
        else:
            found.append([edit])
    return found
