"""Ages, sizes and counts for people; JSON for programs."""

from __future__ import annotations

import sys

from stockade.cli.ui import output
from stockade.errors import PolicyError

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def seconds(text: str) -> float:
    """Parse a duration with its unit into seconds."""
    number, unit = text[:-1], text[-1:]
    if unit not in UNITS or not number.isascii() or not number.replace(".", "", 1).isdigit():
        raise PolicyError(f"{text!r} is not a time", hint="write 30m, 12h, 7d or 4w")
    return float(number) * UNITS[unit]


def age(passed: float) -> str:
    """Format seconds in the largest unit that fits."""
    for unit in ("d", "h", "m"):
        if passed >= UNITS[unit]:
            return f"{int(passed // UNITS[unit])}{unit}"
    return f"{int(passed)}s"


def size(count: float) -> str:
    """Format a number of bytes, such as 1.5K."""
    units = iter("BKMGTPE")
    unit = next(units)
    while count >= 1024:
        count, unit = count / 1024, next(units)
    return f"{count:.0f}{unit}" if unit == "B" or count >= 10 else f"{count:.1f}{unit}"


def many(count: int, what: str) -> str:
    """Format a count with its noun, in the plural if needed."""
    return f"{count} {what}{'s' if count != 1 else ''}"


def print_json(value: object) -> None:
    """Print one object on one line; names in it may not be UTF-8."""
    import msgspec

    sys.stdout.flush()
    if isinstance(value, dict):
        sys.stdout.buffer.writelines(output.json_pieces(value))
    else:
        sys.stdout.buffer.write(output.as_json(msgspec.to_builtins(value)))
    sys.stdout.buffer.flush()
