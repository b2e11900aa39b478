"""`stockade diff`: show what a run changed, for the user to read before a commit.

The program chose the names and contents, so control sequences in them are
escaped on a terminal; a patch in a pipe or a file is exact.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from stockade.cli.ui import output
from stockade.cli.ui.argument_parser import Parser
from stockade.cli.ui.change_list import written_by_git
from stockade.cli.ui.formats import many, print_json, size
from stockade.cli.ui.workspace_choice import workspace_and_paths
from stockade.workspace import reviews
from stockade.workspace.diff.git_patch import quoted

if TYPE_CHECKING:
    from stockade.sandbox.workspace import Workspace
    from stockade.workspace.diff.diff import Diff, FileDiff

#: The greatest width of the column of names: a longer name sticks out.
WIDEST = 300
STYLES = {"+": "green", "-": "red", "@": "cyan"}


def main(argv: list[str]) -> int:
    """Print the changes in the chosen format."""
    args, words = build_parser().parse_words(argv)
    workspace, paths = workspace_and_paths(words, "stockade diff {}")
    found = workspace.diff(paths or None, patch=args.patch)
    whole = args.verbose or bool(paths)
    if found.cut:
        output.say(f"the list of changes is cut: {found.cut}")
        output.say(f"`stockade diff {workspace.id} PATH` shows a part of them")
    else:
        _remember(workspace, found, paths)
    if found.unsure:
        output.say(
            f"{many(found.unsure, 'file')} shown as changed without a comparison, which would take too long"
        )
    if args.json:
        print_json({"workspace": workspace.id, "path": workspace.path, **_plain(found)})
    elif args.patch:
        for path in found.left_out:
            output.say(f"not in the patch, because its format cannot express it: {output.name(path)}")
        _patch(found.patch, args)
    elif args.null and not sys.stdout.isatty():
        _raw(os.fsencode(path) + b"\0" for path in _names(found))
    elif args.name_only or args.null:
        _show(lambda: (quoted(path).decode() + "\n" for path in _names(found)), args)
    elif args.stat:
        _show(lambda: _stat(found, whole=whole), args)
    else:
        _show(lambda: _texts(found, whole=whole), args)
    return 0


def build_parser() -> Parser:
    """Return the parser of the command's options."""
    parser = Parser(
        prog="stockade diff",
        description="Show what a run changed in its workspace, compared with your files as they are now.",
        epilog="examples:\n"
        "  stockade diff                          the workspace of this directory, or of one above it\n"
        "  stockade diff --stat 443c22c193c6\n"
        "  stockade diff src                      only what changed in src, relative to where you are\n"
        "  stockade diff -v                       also what git recorded in .git\n"
        "  stockade diff --patch 443c22c193c6 src | git apply",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "id", nargs="?", help="the workspace's id or its beginning; default: that of this directory"
    )
    parser.add_argument(
        "paths", nargs="*", metavar="PATH", help="only at and below these, relative to where you are"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--stat", action="store_true", help="count lines instead of showing them")
    form.add_argument(
        "--name-only", action="store_true", help="print names only, quoted as git does where needed"
    )
    form.add_argument("-z", "--null", action="store_true", help="print names unquoted, a NUL after each")
    form.add_argument("--patch", "--git", action="store_true", help="print a patch for `git apply`")
    form.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--no-pager", action="store_true", help="print without a pager")
    return output.add_verbosity(parser, verbose="also show what git recorded in its repositories")


def _remember(workspace: Workspace, found: Diff, paths: list[str]) -> None:
    """Record what is shown, for the commit that may follow."""
    try:
        reviews.remember(workspace.layer, found.digest, workspace.relative(paths or None))
    except OSError as error:
        output.say(f"cannot record for `stockade commit` what was shown: {error.strerror}")
    if not found.digest:
        output.say(f"a sandbox is using workspace {workspace.id}: run this again when it has ended")


def _plain(found: Diff) -> dict[str, object]:
    return {
        "files": _FileList(found.files),
        "added": found.added,
        "removed": found.removed,
        "cut": found.cut,
        "unsure": found.unsure,
    }


class _FileList(Sequence[Any]):
    """The files as JSON shows them, with text decoded; converted one by one to save memory."""

    def __init__(self, files: Sequence[FileDiff]) -> None:
        self._files = files

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, at: Any) -> Any:
        return _builtins(self._files[at])

    def __iter__(self) -> Iterator[Any]:
        return map(_builtins, self._files)


def _builtins(one: FileDiff) -> dict[str, Any]:
    import msgspec

    return {**msgspec.to_builtins(one), "text": one.text.decode("utf-8", "replace")}


def _names(found: Diff) -> Iterator[str]:
    """Yield each path once: a path whose type changed comes twice in a row."""
    for path, _ in itertools.groupby(one.path for one in found.files):
        yield path


def _texts(found: Diff, *, whole: bool) -> Iterator[str]:
    if not found.files:
        yield "no changes\n"
    yield from map(file_text, _arranged(found.files, whole=whole))
    if not whole:
        yield from _records(found.files)


def _arranged(files: Sequence[FileDiff], *, whole: bool) -> Iterator[FileDiff]:
    """Yield the files of the working tree, then those of repositories, if `whole` also what git records."""
    yield from (one for one in files if not _is_in_repository(one.path))
    yield from (
        one for one in files if _is_in_repository(one.path) and (whole or not written_by_git(one.path))
    )


def _is_in_repository(path: str) -> bool:
    return "/.git/" in f"/{path}/"


def _records(files: Sequence[FileDiff]) -> Iterator[str]:
    """Yield a line for what git recorded in each repository, and why a commit holds it back."""
    found: dict[tuple[str, str, str], int] = {}
    for one in files:
        if record := written_by_git(one.path):
            key = (record, one.held, "" if one.held else one.runs)
            found[key] = found.get(key, 0) + 1
    for (record, held, runs), count in found.items():
        words = f"{output.name(record)}, where git records commits: {many(count, 'path')}"
        yield output.paint(words, "bold") + "  (-v shows them)\n" + _caution(held, runs)


def file_text(one: FileDiff) -> str:
    """Return one file's heading and its changed lines."""
    name = output.name(one.path) + ("/" if one.type == "directory" else "")
    if one.kind == "renamed":
        name = f"{output.name(one.was)} → {name}"
    head = output.paint(f"{one.kind:<8}  {name}", "bold")
    words = "".join(f"  {word}" for word in _words(one))
    return f"{head}{words}\n{_caution(one.held, one.runs)}{_text(one.text)}"


def _caution(held: str, runs: str) -> str:
    """Return why a commit holds a file back, or how it will run at the user's next command."""
    if held:
        return output.paint(f"held back: {output.name(held)}", "red") + "\n"
    return output.paint(f"runs at your next command: {output.name(runs)}", "yellow") + "\n" if runs else ""


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
    if "access" in one.what:
        found.append("with an access list" if one.kind == "added" else "its access list changed")
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
    return "".join(_lines(hunks)) + "\n"


def _lines(hunks: bytes) -> Iterator[str]:
    for line in io.BytesIO(hunks):
        yield _paint_line(output.clean(line.decode("utf-8", "surrogateescape").removesuffix("\n"))) + "\n"


def _paint_line(line: str) -> str:
    style = STYLES.get(line[:1])
    return output.paint(line, style) if style else line


def _stat(found: Diff, *, whole: bool) -> Iterator[str]:
    if not found.files:
        yield "no changes\n"
        return
    width = min(WIDEST, max(len(_label(one)) for one in found.files))
    most = max(one.added + one.removed for one in found.files) or 1
    room = max(10, min(50, _columns() - width - 12))
    scale = min(1.0, room / most)
    for one in _arranged(found.files, whole=whole):
        plus = output.paint("+" * -int(-one.added * scale), "green") if one.added else ""
        minus = output.paint("-" * -int(-one.removed * scale), "red") if one.removed else ""
        mark = "  held back" if one.held else "  runs at your next command" if one.runs else ""
        yield f" {_label(one):<{width}} | {_amount(one)} {plus}{minus}".rstrip() + f"{mark}\n"
    if not whole:
        yield from (f" {line}\n" for text in _records(found.files) for line in text.splitlines())
    count = sum(1 for _ in _names(found))
    yield f" {many(count, 'path')} changed, {found.added} added(+), {found.removed} removed(-)\n"


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
        _show(lambda: _lines(patch), args)
    else:
        _raw([patch])


def _raw(data: Iterable[bytes]) -> None:
    sys.stdout.flush()
    sys.stdout.buffer.writelines(data)
    sys.stdout.buffer.flush()


def _show(text: Callable[[], Iterable[str]], args: argparse.Namespace) -> None:
    """Print cleaned text, on a terminal through the user's pager."""
    pager = os.environ.get("STOCKADE_PAGER", os.environ.get("PAGER", "less"))
    if args.no_pager or not sys.stdout.isatty() or pager in ("", "cat"):
        sys.stdout.writelines(text())
        return
    import subprocess

    # The text is clean, so the pager may pass colours (R); a short text stays on the screen (F, X).
    environ = {"LESS": "FRX", **os.environ}
    with subprocess.Popen(pager, shell=True, stdin=subprocess.PIPE, env=environ) as shown:
        assert shown.stdin is not None
        with contextlib.suppress(BrokenPipeError), shown.stdin as end:
            end.writelines(piece.encode("utf-8", "replace") for piece in text())
    if shown.returncode == 127:  # the shell did not find the pager
        sys.stdout.writelines(text())
