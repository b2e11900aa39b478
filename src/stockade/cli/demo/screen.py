"""The demo's layout: the agent on the left, the host on the right, a palisade between them.

Output is plain lines, never redrawn, so that a pipe gets the same text. On a
narrow terminal the two sides stand below each other.
"""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterator
from itertools import zip_longest

from stockade.cli.demo.findings import DemoFinding
from stockade.cli.ui import output

TOP, WALL = "/\\/\\", "||||"
NARROWEST, WIDEST = 40, 96
#: A narrower line has no room for two sides.
TWO_SIDES = 72

Cell = tuple[str, str]


def width() -> int:
    """Return the width of the output in columns."""
    return max(NARROWEST, min(WIDEST, shutil.get_terminal_size((88, 24)).columns))


def heading(text: str) -> str:
    """Return the title of a part."""
    return output.paint(text, "bold")


def wrapped(text: str, indent: str = "  ", hanging: str = "") -> str:
    """Return the text, cleaned and wrapped to the width."""
    return "\n".join(
        textwrap.wrap(
            output.clean(text),
            width(),
            initial_indent=indent,
            subsequent_indent=indent + hanging,
            break_long_words=False,
            break_on_hyphens=False,
        )
    )


def facts(pairs: list[tuple[str, str]]) -> Iterator[str]:
    """Yield lines with names and their values in two columns."""
    room = max(len(name) for name, _ in pairs) + 2
    for name, text in pairs:
        first, *rest = _fold(text, width() - room - 2)
        yield f"  {output.paint(name.ljust(room), 'cyan')}{first}"
        yield from (" " * (room + 2) + line for line in rest)


def wall(rows: list[DemoFinding]) -> Iterator[str]:
    """Yield every attempt at the wall, a few lines at a time."""
    last, style = _sum(rows)
    if width() < TWO_SIDES:
        for row in rows:
            yield _below_each_other(row)
        yield output.paint(last, style)
        return
    yield "\n".join([_line(("INSIDE, the agent", "bold"), ("OUTSIDE, the host", "bold"), TOP), _line()])
    for row in rows:
        yield "\n".join(_beside_each_other(row))
    yield _line(right=(last, style))


def _sum(rows: list[DemoFinding]) -> Cell:
    if not all(row.held for row in rows):
        return "NOT every wall held", "red"
    tried = " that was tried" if any(row.left_out for row in rows) else ""
    return f"every wall{tried} held", "green"


def _sides() -> tuple[int, int]:
    left = (width() - len(WALL)) // 2
    return left, width() - left - len(WALL) - 2


def _line(left: Cell = ("", ""), right: Cell = ("", ""), wall: str = WALL) -> str:
    room, _ = _sides()
    inside = _painted((f"  {left[0]}".ljust(room), left[1]))
    return f"{inside}{output.paint(wall, 'yellow')}  {_painted(right)}".rstrip()


def _beside_each_other(row: DemoFinding) -> Iterator[str]:
    room, beyond = _sides()
    style = _style(row)
    shaft, point = ("─", "▶") if _has_arrows() else ("-", ">")
    arrow = shaft * (room - len(row.title) - 4) + point
    yield (
        f"  {output.paint(row.title, 'bold')} {output.paint(arrow, style)}"
        f"{output.paint(WALL, 'yellow')}  {output.paint(row.control, style)}"
    )
    left = [(f"  {line}", "") for said in row.met for line in _fold(said, room - 5)]
    right = [(line, "dim") for line in _fold(row.means, beyond) if line]
    right += [(line, "" if row.held else "red") for line in _fold(_outside(row), beyond)]
    for inside, outside in zip_longest(left, right, fillvalue=("", "")):
        yield _line(inside, outside)
    yield _line()


def _below_each_other(row: DemoFinding) -> str:
    lines = [f"{output.paint(row.title, 'bold')} | {output.paint(row.control, _style(row))}"]
    lines += [wrapped(f"inside: {said}", hanging="  ") for said in row.met]
    lines += [wrapped(f"by: {row.means}", hanging="  ")] if row.means else []
    lines.append(wrapped(f"outside: {_outside(row)}", hanging="  "))
    return "\n".join(lines) + "\n"


def _outside(row: DemoFinding) -> str:
    return row.outside if row.held else f"NOT HELD: {row.outside}"


def _style(row: DemoFinding) -> str:
    if row.left_out:
        return "dim"
    return "green" if row.wanted else "red"


def _painted(cell: Cell) -> str:
    text, style = cell
    return output.paint(text, style) if style and text.strip() else text


def _fold(text: str, room: int) -> list[str]:
    return textwrap.wrap(output.clean(text), max(10, room), break_on_hyphens=False) or [""]


def _has_arrows() -> bool:
    try:
        "─▶".encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
