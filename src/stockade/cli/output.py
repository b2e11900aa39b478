"""What Stockade itself says on a terminal or into a pipe.

Our own lines go to stderr behind `stockade:`. Whatever came from a program
or a file name is stripped of control characters before it is shown, so that
untrusted text cannot drive the reader's terminal.
"""

from __future__ import annotations

import errno
import os
import sys

from stockade.cli.light import Light

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence
    from typing import Any, TypeVar

    Parser = TypeVar("Parser", bound=argparse.ArgumentParser | Light)

_SGR = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}


def coloured(stream: object = None) -> bool:
    """Whether colour is welcome on the stream (stdout unless given)."""
    return steered(stream or sys.stdout) and not os.environ.get("NO_COLOR")


def steered(stream: object) -> bool:
    """Whether the stream is a terminal that obeys more than line ends."""
    isatty = getattr(stream, "isatty", lambda: False)
    return isatty() and os.environ.get("TERM") != "dumb"


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


class Manner:
    """How much this process says: `-q` leaves errors only, `-v` adds what the library logs."""

    quiet = False
    verbose = False


def heed(*, quiet: bool, verbose: bool) -> None:
    """Speak as the command line wishes."""
    Manner.quiet |= quiet
    Manner.verbose |= verbose
    if verbose:
        show_log()


def with_manners(parser: Parser, verbose: str = "say more", quiet: str = "say nothing but errors") -> Parser:
    """The parser with `-v` and `-q`, which every command has."""
    action: Any = "store_true"
    if not isinstance(parser, Light):
        action = _heeding()
    for short, word, effect in (("-v", "verbose", verbose), ("-q", "quiet", quiet)):
        parser.add_argument(short, f"--{word}", action=action, help=effect)
    return parser


def _heeding() -> type[argparse.Action]:
    import argparse

    class Heeding(argparse.Action):
        def __init__(self, option_strings: Sequence[str], dest: str, help: str | None = None) -> None:
            super().__init__(option_strings, dest, nargs=0, default=False, help=help)

        def __call__(self, _: object, chosen: argparse.Namespace, *__: object) -> None:
            setattr(chosen, self.dest, True)
            heed(quiet=self.dest == "quiet", verbose=self.dest == "verbose")

    return Heeding


def show_log() -> None:
    """Let what the library logs be seen among our own lines."""
    import logging

    class Ours(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            say(record.getMessage())

    logger = logging.getLogger("stockade")
    if not any(type(handler).__name__ == Ours.__name__ for handler in logger.handlers):
        logger.addHandler(Ours())


def say(text: str) -> None:
    """One line of Stockade's own, on stderr, unless `-q` forbids it."""
    if Manner.quiet:
        return
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


def table(
    rows: Sequence[Sequence[str]], head: Sequence[str], *, cut: Sequence[int] = (), wrap: Sequence[int] = ()
) -> str:
    """Columns padded to their widest cell; cells hold no colour.

    On a terminal that is too narrow the columns in `cut` are shortened and those in `wrap` continued on
    the next line, in that order. In a pipe every row is a line, and nothing is missing from it.
    """
    cells = [[name(cell) for cell in row] for row in [head, *rows]]
    if sys.stdout.isatty():
        _narrow(cells, _columns(), cut, wrap)
    widths = _widths(cells)
    lines = []
    for number, row in enumerate(cells):
        for parts in _lines(row):
            text = "  ".join(part.ljust(width) for part, width in zip(parts, widths, strict=True)).rstrip()
            lines.append(paint(text, "bold") if number == 0 else text)
    return "\n".join(lines)


def _columns() -> int:
    import shutil

    return shutil.get_terminal_size().columns


def _narrow(cells: list[list[str]], columns: int, cut: Sequence[int], wrap: Sequence[int]) -> None:
    """Make the columns that give way as narrow as is needed, and sensible."""
    for column in (*cut, *wrap):
        widths = _widths(cells)
        over = sum(widths) + 2 * (len(widths) - 1) - columns
        room = max(len(cells[0][column]), 12, widths[column] - max(0, over))
        for row in cells:
            if len(row[column]) > room:
                row[column] = f"{row[column][: room - 1]}…" if column in cut else _wrapped(row[column], room)


def _widths(cells: list[list[str]]) -> list[int]:
    return [
        max(len(line) for cell in column for line in cell.split("\n")) for column in zip(*cells, strict=True)
    ]


def _wrapped(text: str, room: int) -> str:
    import textwrap

    return "\n".join(textwrap.wrap(text, room))


def _lines(row: list[str]) -> list[list[str]]:
    """The lines that a row takes, each with a part of every cell."""
    parts = [cell.split("\n") for cell in row]
    most = max(map(len, parts))
    return [[part[n] if n < len(part) else "" for part in parts] for n in range(most)]
