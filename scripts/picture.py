"""Draws docs/demo.svg: what `stockade demo --commit` prints on a terminal, as it printed it.

    python scripts/picture.py [FILE]

The command runs in a pseudo-terminal, so that the picture has the colours a
reader will see. `tests/kernel/cli/test_picture.py` fails when the demo has
changed and the picture has not.
"""

from __future__ import annotations

import errno
import fcntl
import os
import pty
import re
import struct
import sys
import termios
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

COLUMNS, ROWS = 96, 50
COMMAND = [str(Path(sys.executable).with_name("stockade")), "demo", "--commit"]
PICTURE = Path(__file__).parents[1] / "docs" / "demo.svg"

#: The size of a character cell, and the room around the text.
CELL, LINE, MARGIN, BAR = 8.4, 17.5, 22, 34
INK, PAPER, EDGE = "#d7dae0", "#16181d", "#2b2f37"
COLOURS = {"31": "#ff7a70", "32": "#8fd18f", "33": "#e2b75c", "36": "#6fc3d8"}
DOTS = ("#ff5f57", "#febc2e", "#28c840")
_SGR = re.compile(r"\x1b\[([0-9;]*)m")


class Span(NamedTuple):
    """A run of characters in one style."""

    column: int
    text: str
    codes: frozenset[str]


def capture(command: list[str], columns: int = COLUMNS) -> str:
    """What a command prints on a terminal of its own."""
    pid, terminal = pty.fork()
    if pid == 0:
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, columns, 0, 0))
        environment = {
            name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS")
        }
        os.execve(command[0], command, environment | {"TERM": "xterm-256color"})
    found = b""
    with os.fdopen(terminal, "rb", buffering=0) as stream:
        try:
            while part := stream.read(65536):
                found += part
        except OSError as error:
            if error.errno != errno.EIO:  # the other side has ended
                raise
    if status := os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
        raise SystemExit(f"{' '.join(command)} ended with {status}:\n{found.decode(errors='replace')}")
    return found.decode().replace("\r\n", "\n")


def spans(line: str) -> list[Span]:
    """The styled parts of one line; sequences other than colours are an error."""
    found, codes, column, at = [], frozenset[str](), 0, 0
    for match in [*_SGR.finditer(line), None]:
        text = line[at : match.start() if match else len(line)]
        if "\x1b" in text:
            raise ValueError(f"not only colours: {line!r}")
        if text.strip():
            found.append(Span(column, text, codes))
        column += len(text)
        if match:
            at = match.end()
            given = match[1].split(";")
            codes = frozenset() if given in ([""], ["0"]) else codes | set(given)
    return found


def plain(text: str) -> str:
    """The text without its colours."""
    return _SGR.sub("", text)


def svg(text: str, title: str) -> str:
    """A terminal window with the text in it."""
    lines = text.strip("\n").split("\n")
    width = round(max(len(plain(line)) for line in lines) * CELL + 2 * MARGIN)
    height = round(len(lines) * LINE + BAR + 2 * MARGIN)
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width}" height="{height}" rx="10" fill="{PAPER}" stroke="{EDGE}"/>',
        *(
            f'<circle cx="{MARGIN + 18 * index}" cy="{BAR / 2 + 2:g}" r="6" fill="{colour}"/>'
            for index, colour in enumerate(DOTS)
        ),
        f"<g font-family=\"ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace\" "
        f'font-size="14" fill="{INK}" xml:space="preserve">',
    ]
    body = [
        _text(span, BAR + MARGIN + LINE * (number + 0.5))
        for number, line in enumerate(lines)
        for span in spans(line)
    ]
    return "\n".join([*head, *body, "</g>", "</svg>"]) + "\n"


def _text(span: Span, y: float) -> str:
    # Placed and stretched by cells, so that columns stay columns in whatever font the reader has.
    text = span.text.rstrip()
    indent = len(text) - len(text.lstrip())
    text = text.lstrip()
    style = "".join(f' fill="{COLOURS[code]}"' for code in span.codes if code in COLOURS)
    style += ' font-weight="bold"' if "1" in span.codes else ""
    style += ' opacity="0.6"' if "2" in span.codes else ""
    x = MARGIN + (span.column + indent) * CELL
    return f'<text x="{x:.1f}" y="{y:.1f}" textLength="{len(text) * CELL:.1f}"{style}>{escape(text)}</text>'


def main(arguments: list[str]) -> int:
    """Draw the picture again."""
    target = Path(arguments[0]) if arguments else PICTURE
    target.write_text(svg(capture(COMMAND), "stockade demo"), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
