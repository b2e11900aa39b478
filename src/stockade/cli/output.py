"""What Stockade itself says on a terminal or into a pipe.

Our own lines go to stderr behind `stockade:`. Whatever came from a program
or a file name is stripped of control characters before it is shown, so that
untrusted text cannot drive the reader's terminal.
"""

from __future__ import annotations

import errno
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
    return "".join(c if c.isprintable() or c in "\n\t" else f"\\x{ord(c):02x}" for c in text)


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


def reason(error: OSError) -> str:
    """What the system said, and about which file."""
    said = error.strerror or str(error)
    return f"{error.filename}: {said}" if error.filename else said


def advice(error: OSError) -> str:
    """What to do about it, where that is certain."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "free some space where the output goes and in Stockade's state (STOCKADE_HOME)"
    if error.errno in (errno.EACCES, errno.EPERM) and error.filename:
        return f"`ls -ld {error.filename}` shows who may"
    return ""


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
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    lines = []
    for number, row in enumerate([head, *rows]):
        text = "  ".join(clean(cell).ljust(width) for cell, width in zip(row, widths, strict=True))
        lines.append(paint(text.rstrip(), "bold") if number == 0 else text.rstrip())
    return "\n".join(lines)
