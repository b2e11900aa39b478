"""Show an entry for another program's settings, ask, and write it."""

from __future__ import annotations

import sys

from stockade.cli.ui import output
from stockade.cli.ui.workspace_choice import confirm
from stockade.integrations import settings_files


def offer(path: str, entry: str, text: str | None, *, write: bool, option: str = "--write") -> int:
    """Print the entry and write it if the user agrees; `text` is the file with it, None if it is there."""
    print(output.clean(entry), end="")
    shown = output.name(path)
    if text is None:
        output.say(f"{shown} has this already")
        return 0
    if not write and not sys.stdin.isatty():
        output.say(f"this belongs into {shown}; {option} writes it")
        return 0
    if not write and not confirm(f"Add this to {shown}?"):
        output.say("nothing was written")
        return 1
    settings_files.write(path, text)
    output.announce(f"wrote {shown}")
    return 0
