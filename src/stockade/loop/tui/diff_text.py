"""The changes of an attempt as coloured text, cleaned: an agent chose every character of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from stockade.linux.plain_text import clean_line

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stockade.workspace import Diff
    from stockade.workspace.diff.diff import FileDiff

#: The most lines that are shown; `stockade diff` shows the rest.
MOST_LINES = 20_000
#: The most characters of a line.
MOST_LINE = 2000
_STYLES = {"+": "green", "-": "red", "@": "cyan"}


def render_diff(diff: Diff, id: str) -> tuple[Text, bool]:
    """Return the changes as text, files that were held back first, and whether that is all of them."""
    shown = Text(no_wrap=True)
    files = sorted(diff.files, key=lambda one: not one.held)
    for count, (line, style) in enumerate(line for one in files for line in _file(one)):
        if count >= MOST_LINES:
            shown.append(f"… there is more: stockade diff {id}\n", "yellow")
            return shown, False
        shown.append(f"{line}\n", style)
    if diff.cut:
        shown.append(f"… {clean_line(diff.cut)}: stockade diff {id}\n", "yellow")
    if not files:
        shown.append("no changes\n")
    return shown, not diff.cut


def _file(one: FileDiff) -> Iterator[tuple[str, str]]:
    name = clean_line(one.path)
    yield f"{one.kind:<8} {f'{clean_line(one.was)} → {name}' if one.was else name}", "bold"
    if one.held:
        yield f"held back: {clean_line(one.held)}", "red"
    elif one.runs:
        yield f"runs at your next command: {clean_line(one.runs)}", "yellow"
    if one.type != "file":
        yield f"{one.type} {clean_line(one.target)}".rstrip(), ""
    if one.new_mode is not None and one.old_mode != one.new_mode:
        yield f"mode {one.new_mode:04o}", ""
    if one.binary or one.cut:
        yield f"{'binary' if one.binary else 'too large to show'}: {one.new_size} bytes", ""
    for raw in one.text.splitlines():
        line = clean_line(raw[: 4 * MOST_LINE].decode("utf-8", "replace").expandtabs(8))
        yield line[:MOST_LINE], _STYLES.get(line[:1], "")
    yield "", ""
