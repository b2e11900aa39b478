"""What Stockade itself says on a terminal or into a pipe.

Our own lines go to stderr behind `stockade:`. Whatever came from a program
or a file name is stripped of control characters before it is shown, so that
untrusted text cannot drive the reader's terminal.
"""

from __future__ import annotations

import os
import sys

_SGR = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}


def coloured(stream: object = None) -> bool:
    """Whether colour is welcome on the stream (stdout unless given)."""
    stream = stream or sys.stdout
    isatty = getattr(stream, "isatty", lambda: False)
    return isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def paint(text: str, style: str, stream: object = None) -> str:
    """The text in one of the house styles, or as it is where colour is not welcome."""
    return f"\x1b[{_SGR[style]}m{text}\x1b[0m" if coloured(stream) else text


def clean(text: str) -> str:
    """The text without anything a terminal would obey."""
    return "".join(c if c.isprintable() or c in "\n\t" else _spelled(ord(c)) for c in text)


def _spelled(code: int) -> str:
    """A character in letters; a byte of a file name that is no UTF-8 as that byte."""
    byte = code - 0xDC00 if 0xDC80 <= code <= 0xDCFF else code
    return f"\\x{byte:02x}" if byte < 0x100 else f"\\u{byte:04x}"


def name(path: str) -> str:
    """A file name on one line: a newline in it must not begin a line that looks like ours."""
    return clean(path).replace("\n", "\\n").replace("\t", "\\t")


def plain(value: object) -> object:
    """A value as JSON can hold it: what is not UTF-8 in a file name is replaced."""
    if isinstance(value, str):
        return (
            value if value.isascii() else value.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        )
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    return value


def as_json(value: object) -> bytes:
    """The value as JSON on one line, in which nothing is left that a terminal would obey."""
    import msgspec

    data = msgspec.json.encode(plain(value))
    if data.isascii() and b"\x7f" not in data:
        return data + b"\n"
    text = data.decode("utf-8")
    return text.translate({ord(c): _escaped(c) for c in set(text) if not c.isprintable()}).encode() + b"\n"


def _escaped(char: str) -> str:
    """As JSON writes it: in one or two units of UTF-16."""
    units = char.encode("utf-16-be").hex()
    return "".join(f"\\u{units[i : i + 4]}" for i in range(0, len(units), 4))


def reason(error: OSError) -> str:
    """What the system said, and about which file."""
    said = error.strerror or str(error)
    return f"{error.filename}: {said}" if error.filename else said


def silence(descriptor: int) -> None:
    """Let go of a stream that cannot be written: the interpreter fails if it cannot flush it at the end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


def say(text: str) -> None:
    """One line of Stockade's own, on stderr."""
    for line in clean(text).splitlines():
        _tell(line)


def error(text: str, hint: str = "") -> None:
    """What went wrong, and what to do about it."""
    for index, line in enumerate(clean(text).splitlines()):
        mark = paint("error:", "red", sys.stderr) + " " if index == 0 else "  "
        _tell(f"{mark}{line}")
    for line in clean(hint).splitlines():
        _tell(f"{paint('hint:', 'cyan', sys.stderr)} {line}")


def _tell(line: str) -> None:
    try:
        print(f"stockade: {line}", file=sys.stderr)
    except OSError:  # nobody can be told, which changes nothing about the run
        silence(2)


def table(rows: list[list[str]], head: list[str]) -> str:
    """Columns padded to their widest cell; cells hold no colour."""
    shown = [[name(cell) for cell in row] for row in [head, *rows]]
    widths = [max(len(row[i]) for row in shown) for i in range(len(head))]
    lines = []
    for number, row in enumerate(shown):
        text = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        lines.append(paint(text.rstrip(), "bold") if number == 0 else text.rstrip())
    return "\n".join(lines)
