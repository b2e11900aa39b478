"""Stockade's own output, to a terminal or a pipe.

Stockade's own lines go to stderr after `stockade:`. Untrusted text (output of
a program, a file name, a receipt, a policy) goes through `clean` and `name`,
and in JSON through `inert_json`: it cannot control the terminal, run backwards,
hide, or begin a line that looks like Stockade's own.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys

from stockade.cli.ui.fast_args import FastParser
from stockade.errors import typed
from stockade.linux import plain_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence
    from typing import Any, TypeVar

    Parser = TypeVar("Parser", bound=argparse.ArgumentParser | FastParser)

clean = plain_text.clean
#: A file name, cleaned, on one line.
name = plain_text.clean_line

#: How many characters of either end of a very long name are shown.
ENDS = 150

_SGR = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}


def accepts_colour(stream: object = None) -> bool:
    """Whether to use colour on the stream (default: stdout)."""
    return obeys_escapes(stream or sys.stdout) and not os.environ.get("NO_COLOR")


def obeys_escapes(stream: object) -> bool:
    """Whether the stream is a terminal that obeys escape sequences."""
    isatty = getattr(stream, "isatty", lambda: False)
    return isatty() and os.environ.get("TERM") != "dumb"


def paint(text: str, style: str, stream: object = None) -> str:
    """Return the text in a style, or unchanged if the stream takes no colour."""
    return f"\x1b[{_SGR[style]}m{text}\x1b[0m" if accepts_colour(stream) else text


def brief(path: str) -> str:
    """Return a file name as `name` does, without its middle if it is very long."""
    if len(path) <= 2 * ENDS:
        return name(path)
    return f"{name(path[:ENDS])}…{name(path[-ENDS:])}"


def plain(value: object) -> object:
    """Return the value in a form that JSON can hold: bytes of file names that are not UTF-8 are replaced."""
    if isinstance(value, str):
        return (
            value if value.isascii() else value.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        )
    if isinstance(value, dict):
        return {plain(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    return value


#: The size of the pieces that `json_pieces` yields, in bytes.
PIECE = 1 << 16


def json_pieces(value: dict[str, Any]) -> Iterator[bytes]:
    """Yield the object as `as_json` encodes it, in pieces: a program may have made a list in it very long."""
    piece = bytearray()
    for part in _json_parts(value):
        piece += part
        if len(piece) >= PIECE:
            yield bytes(piece)
            piece.clear()
    yield bytes(piece) + b"\n"


def _json_parts(value: object) -> Iterator[bytes]:
    from collections.abc import Sequence

    import msgspec

    if isinstance(value, msgspec.Struct) and value.__struct_config__.tag is None:
        value = msgspec.structs.asdict(value)
    if isinstance(value, dict):
        between = b"{"
        for key, inner in value.items():
            yield between + as_json(key)[:-1] + b":"
            between = b","
            yield from _json_parts(inner)
        yield b"{}" if between == b"{" else b"}"
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        yield b"["
        for at, item in enumerate(value):
            yield (b"," if at else b"") + as_json(msgspec.to_builtins(item))[:-1]
        yield b"]"
    else:
        yield as_json(msgspec.to_builtins(value))[:-1]


def as_json(value: object) -> bytes:
    """Encode the value as JSON on one line, without anything that a terminal would obey."""
    import msgspec

    return inert_json(msgspec.json.encode(plain(value))) + b"\n"


def indented_json(value: object) -> str:
    """Encode the value as indented JSON, without anything that a terminal would obey."""
    import msgspec

    return msgspec.json.format(as_json(msgspec.to_builtins(value))).decode().rstrip("\n")


def inert_json(data: bytes) -> bytes:
    """Escape every character in the JSON that a terminal would obey or not show."""
    if data.isascii() and b"\x7f" not in data:
        return data
    text = data.decode("utf-8")
    odd = {ord(c): _escaped(c) for c in set(text) if not c.isprintable() and c not in "\n\t\r"}
    return text.translate(odd).encode()


def _escaped(char: str) -> str:
    """Return the JSON escape of a character: one or two units of UTF-16."""
    units = char.encode("utf-16-be").hex()
    return "".join(f"\\u{units[i : i + 4]}" for i in range(0, len(units), 4))


def reason(error: OSError) -> str:
    """Return the error's message, after the name of the file if it has one."""
    message = error.strerror or str(error)
    return f"{error.filename}: {message}" if error.filename else message


def advice(error: OSError) -> str:
    """Return a hint about what to do, or "" if that is not certain."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "free some space where the output goes and in Stockade's state (STOCKADE_HOME)"
    if error.errno in (errno.EACCES, errno.EPERM) and error.filename:
        return f"`ls -ld {typed(os.fsdecode(error.filename))}` shows who has access"
    return ""


def silence(descriptor: int) -> None:
    """Point a stream that cannot be written at /dev/null, so that the interpreter's last flush succeeds."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


class Verbosity:
    """How much this process prints: `-q` only errors, `-v` also what the library logs."""

    quiet = False
    verbose = False


def set_verbosity(*, quiet: bool, verbose: bool) -> None:
    """Apply `-q` and `-v`."""
    Verbosity.quiet |= quiet
    Verbosity.verbose |= verbose
    if verbose:
        show_log()


def add_verbosity(parser: Parser, verbose: str = "print more", quiet: str = "print only errors") -> Parser:
    """Add `-v` and `-q`, which every command has, and return the parser."""
    action: Any = "store_true"
    if not isinstance(parser, FastParser):
        action = _verbosity_action()
    for short, word, effect in (("-v", "verbose", verbose), ("-q", "quiet", quiet)):
        parser.add_argument(short, f"--{word}", action=action, help=effect)
    return parser


def _verbosity_action() -> type[argparse.Action]:
    import argparse

    class VerbosityAction(argparse.Action):
        def __init__(self, option_strings: Sequence[str], dest: str, help: str | None = None) -> None:
            super().__init__(option_strings, dest, nargs=0, default=False, help=help)

        def __call__(self, _: object, chosen: argparse.Namespace, *__: object) -> None:
            setattr(chosen, self.dest, True)
            set_verbosity(quiet=self.dest == "quiet", verbose=self.dest == "verbose")

    return VerbosityAction


def show_log() -> None:
    """Print what the library logs among Stockade's own lines."""
    import logging

    class SayHandler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            say(record.getMessage())

    logger = logging.getLogger("stockade")
    if not any(type(handler).__name__ == SayHandler.__name__ for handler in logger.handlers):
        logger.addHandler(SayHandler())


def say(text: str) -> None:
    """Print a message of Stockade's own on stderr, unless `-q` is set."""
    if Verbosity.quiet:
        return
    for line in _lines_of(text):
        _print_line(line)


def say_raw(line: str) -> None:
    """Print one line as `say` does, on a terminal that a program has in raw mode."""
    with contextlib.suppress(OSError):
        os.write(2, f"\r\x1b[Kstockade: {name(line)}\r\n".encode())


def announce(text: str) -> None:
    """Print on stdout what a command has done, unless `-q` is set."""
    if not Verbosity.quiet:
        print(text)


def error(text: str, hint: str = "") -> None:
    """Print what went wrong, and what to do about it."""
    for words, mark, style in ((text, "error:", "red"), (hint, "hint:", "cyan")):
        for index, line in enumerate(_lines_of(words)):
            _print_line(line if index else f"{paint(mark, style, sys.stderr)} {line}")


def _lines_of(text: str) -> list[str]:
    """Return the cleaned lines, indented after the first, since a newline in a name may have begun them."""
    first, *rest = clean(text).splitlines() or [""]
    return [first, *(f"  {line}".rstrip() for line in rest)] if first or rest else []


def _print_line(line: str) -> None:
    try:
        print(f"stockade: {line}", file=sys.stderr)
    except OSError:  # a stderr that cannot be written must not affect the run
        silence(2)


def table(
    rows: Sequence[Sequence[str]], head: Sequence[str], *, cut: Sequence[int] = (), wrap: Sequence[int] = ()
) -> str:
    """Return a table with columns padded to their widest cell; cells contain no colour.

    On a terminal that is too narrow, the columns in `cut` are shortened and those in `wrap` continue on
    the next line, in that order. In a pipe every row is one whole line.
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
    """Narrow the columns in `cut` and `wrap` as far as needed, but not below a sensible width."""
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
    """Return the lines of a row, each with a part of every cell."""
    parts = [cell.split("\n") for cell in row]
    most = max(map(len, parts))
    return [[part[n] if n < len(part) else "" for part in parts] for n in range(most)]
