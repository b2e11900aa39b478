"""`stockade diff`: what a run changed, to be read before it is committed.

Names and contents are a program's. On a terminal nothing of them is sent that
the terminal would obey; a patch in a pipe or a file is exact.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

from stockade.cli import output
from stockade.cli.options import Parser
from stockade.cli.workspaces import chosen, many, print_json, size
from stockade.workspace.patch import quoted

if TYPE_CHECKING:
    from stockade.workspace.diff import Diff, FileDiff

STYLES = {"+": "green", "-": "red", "@": "cyan"}


def main(argv: list[str]) -> int:
    """Print the differences in the form that was asked for."""
    args = parser().parse_intermixed_args(argv)
    workspace = chosen(args.id)
    found = workspace.diff(args.paths or None, patch=args.patch)
    if args.json:
        print_json({"workspace": workspace.id, "path": workspace.path, **_plain(found)})
    elif args.patch:
        for path in found.left_out:
            output.say(f"not in the patch, which has no word for it: {output.name(path)}")
        _patch(found.patch, args)
    elif args.null and not sys.stdout.isatty():
        _raw(b"".join(os.fsencode(path) + b"\0" for path in _names(found)))
    elif args.name_only or args.null:
        _show("".join(quoted(path).decode() + "\n" for path in _names(found)), args)
    elif args.stat:
        _show(_stat(found), args)
    else:
        _show("".join(map(file_text, found.files)) or "no changes\n", args)
    return 0


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    made = Parser(
        prog="stockade diff",
        description="Show what a run changed in its workspace, compared with your files as they are now.",
        epilog="examples:\n"
        "  stockade diff                          the last workspace of this directory\n"
        "  stockade diff --stat 443c22c193c6\n"
        "  stockade diff --patch 443c22c193c6 src | git apply",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("id", nargs="?", help="the workspace, or the beginning of its id; without it, the last")
    made.add_argument("paths", nargs="*", metavar="PATH", help="only at and below these")
    form = made.add_mutually_exclusive_group()
    form.add_argument("--stat", action="store_true", help="count lines instead of showing them")
    form.add_argument(
        "--name-only", action="store_true", help="print names, those that need it quoted as by git"
    )
    form.add_argument("-z", "--null", action="store_true", help="print names as they are, a NUL after each")
    form.add_argument("--patch", "--git", action="store_true", help="print a patch for `git apply`")
    form.add_argument("--json", action="store_true", help="print JSON")
    made.add_argument("--no-pager", action="store_true", help="print without a pager")
    return output.with_manners(made)


def _plain(found: Diff) -> dict[str, object]:
    import msgspec

    files = []
    for one in found.files:
        plain = msgspec.to_builtins(one)
        plain["text"] = one.text.decode("utf-8", "replace")
        files.append(plain)
    return {"files": files, "added": found.added, "removed": found.removed}


def _names(found: Diff) -> list[str]:
    return list(dict.fromkeys(one.path for one in found.files))


def file_text(one: FileDiff) -> str:
    """One file in words, and its lines."""
    name = output.name(one.path) + ("/" if one.type == "directory" else "")
    if one.kind == "renamed":
        name = f"{output.name(one.was)} → {name}"
    head = output.paint(f"{one.kind:<8}  {name}", "bold")
    return f"{head}{''.join('  ' + word for word in _words(one))}\n{_text(one.text)}"


def _words(one: FileDiff) -> list[str]:
    found = []
    if "type" in one.what:
        found.append(f"as a {one.type}: its type changed")
    elif one.type not in ("file", "directory"):
        found.append(f"({one.type})")
    if one.old_mode is not None and one.new_mode is not None and one.old_mode != one.new_mode:
        found.append(f"mode {one.old_mode:04o} → {one.new_mode:04o}")
    elif one.kind == "added" and one.type == "file" and (one.new_mode or 0) & 0o7111:
        found.append(f"mode {one.new_mode:04o}")
    if "attributes" in one.what:
        found.append("its attributes changed")
    if one.type == "link":
        found.append(f"leads to {output.name(one.target)}")
    if one.binary or one.cut:
        what = "binary" if one.binary else "too large to show, or unreadable"
        found.append(f"{what}: {size(one.old_size)} → {size(one.new_size)}")
    return found


def _text(hunks: bytes) -> str:
    if not hunks:
        return ""
    lines = output.clean(hunks.decode("utf-8", "surrogateescape")).split("\n")[:-1]
    return "".join(_painted(line) + "\n" for line in lines) + "\n"


def _painted(line: str) -> str:
    style = STYLES.get(line[:1])
    return output.paint(line, style) if style else line


def _stat(found: Diff) -> str:
    rows = [(_label(one), _amount(one), one) for one in found.files]
    if not rows:
        return "no changes\n"
    width = max(len(label) for label, _, _ in rows)
    most = max(one.added + one.removed for _, _, one in rows) or 1
    room = max(10, min(50, _columns() - width - 12))
    lines = []
    for label, amount, one in rows:
        scale = min(1.0, room / most)
        plus = output.paint("+" * -int(-one.added * scale), "green") if one.added else ""
        minus = output.paint("-" * -int(-one.removed * scale), "red") if one.removed else ""
        lines.append(f" {label:<{width}} | {amount} {plus}{minus}".rstrip())
    total = f" {many(len(_names(found)), 'path')} changed, {found.added} added(+), {found.removed} removed(-)"
    return "\n".join([*lines, total]) + "\n"


def _label(one: FileDiff) -> str:
    name = output.name(one.path) + ("/" if one.type == "directory" else "")
    return f"{output.name(one.was)} → {name}" if one.kind == "renamed" else name


def _amount(one: FileDiff) -> str:
    if one.binary or one.cut:
        return f"{'binary' if one.binary else 'large'} {size(one.old_size)} → {size(one.new_size)}"
    if one.type != "file" or not one.added + one.removed:
        return one.kind
    return f"{one.added + one.removed:>4}"


def _columns() -> int:
    import shutil

    return shutil.get_terminal_size().columns


def _patch(patch: bytes, args: argparse.Namespace) -> None:
    if sys.stdout.isatty():
        _show(_text(patch), args)
    else:
        _raw(patch)


def _raw(data: bytes) -> None:
    sys.stdout.flush()
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def _show(text: str, args: argparse.Namespace) -> None:
    """Print text of ours, on a terminal through the user's pager."""
    pager = os.environ.get("STOCKADE_PAGER", os.environ.get("PAGER", "less"))
    if args.no_pager or not sys.stdout.isatty() or pager in ("", "cat"):
        print(text, end="")
        return
    import subprocess

    # The text is clean, so that colours may pass; a short one stays on the screen.
    environ = {"LESS": "FRX", **os.environ}
    try:
        done = subprocess.run(
            pager, shell=True, input=text.encode("utf-8", "replace"), env=environ, check=False
        )
    except BrokenPipeError:
        return
    if done.returncode == 127:  # there is none
        print(text, end="")
