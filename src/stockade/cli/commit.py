"""`stockade commit`: apply the changes of a workspace to the host's tree."""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING

from stockade.cli.ui import output
from stockade.cli.ui.argument_parser import Parser
from stockade.cli.ui.change_list import SHOWN, change_lines, held_lines
from stockade.cli.ui.formats import many, print_json
from stockade.cli.ui.workspace_choice import path_in, shown_workspace_and_paths
from stockade.errors import ConflictError, StockadeError
from stockade.sandbox.workspace import Workspace

if TYPE_CHECKING:
    from stockade.workspace.commit import Commit

REFUSED = 125
CANCELLED = 130


def main(argv: list[str]) -> int:
    """Commit, and report what was held back or altered."""
    args, words = build_parser().parse_words(argv)
    try:
        return _commit(args, words)
    except StockadeError as error:
        if not args.json:
            raise
        paths = error.paths if isinstance(error, ConflictError) else ()
        print_json({"ok": False, "reason": error.message, "hint": error.hint, "conflicts": paths})
        return REFUSED


def build_parser() -> Parser:
    """Return the parser of the command's options."""
    parser = Parser(
        prog="stockade commit",
        description="Apply the changes of a run to your files: all of them, or those at and below some\n"
        "paths. A commit happens as a whole or not at all. Without an id it commits what `stockade diff`\n"
        "showed in this directory, and refuses if the workspace has changed since.",
        epilog="examples:\n"
        "  stockade commit                        what `stockade diff` showed here\n"
        "  stockade commit src                    only what changed in src, from where you are\n"
        "  stockade commit 443c22c193c6 src       only what changed in src\n"
        "  stockade commit 443c22c193c6 --force notes.txt\n"
        "  stockade commit 443c22c193c6 --merge   together with your own changes to the same files\n"
        "  stockade commit 443c22c193c6 --allow .venv\n\n"
        "exit codes: 0 committed; 1 committed, but something was held back; 125 refused, nothing was done",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("id", nargs="?", help="the workspace's id or its beginning; default: the one that was shown")
    add("paths", nargs="*", metavar="PATH", help="only at and below these, relative to where you are")
    add(
        "--force",
        metavar="PATH",
        action="append",
        default=[],
        help="overwrite what has changed there on the host",
    )
    add(
        "--merge", action="store_true", help="where you changed other lines of a text file, keep both changes"
    )
    add("--allow-exec-config", action="store_true", help="also commit files that your tools run or obey")
    add(
        "--allow",
        metavar="PATTERN",
        action="append",
        default=[],
        help="of those, commit what matches, relative to the workspace: .venv, **/AGENTS.md",
    )
    add("--unseen", action="store_true", help="also commit what `stockade diff` did not show as it is now")
    add("--keep", action="store_true", help="keep the workspace when nothing is left in it")
    add("--json", action="store_true", help="print JSON and nothing else")
    return output.add_verbosity(parser)


def _commit(args: argparse.Namespace, words: list[str]) -> int:
    workspace, paths, expect = shown_workspace_and_paths(words, unseen=args.unseen)
    progress = _Progress()
    try:
        done = workspace.commit(
            paths or None,
            force=[path_in(word, workspace) for word in args.force],
            allow_exec_config=args.allow_exec_config,
            allow=args.allow,
            keep=args.keep,
            merge=args.merge,
            expect=expect,
            progress=None if args.json else progress,
        )
    except KeyboardInterrupt:
        ended = workspace.recover() or "rolled back"
        output.say(f"interrupted; the commit was {ended}")
        return CANCELLED
    finally:
        progress.end()
    if args.json:
        import msgspec

        plain = msgspec.structs.asdict(done)
        print_json({"ok": not done.held, "workspace": plain.pop("workspace_id"), **plain})
    else:
        _report(done, workspace)
    return 1 if done.held else 0


def _report(done: Commit, workspace: Workspace) -> None:
    cautions(done)
    count = many(len(done.changes), "change") if done.changes else "nothing"
    output.announce(f"{count} committed to {output.name(workspace.path)}")
    for line in change_lines(done.changes):
        output.announce(line)
    advice(done)


def remarks(done: Commit) -> None:
    """Print everything about a commit except its changes."""
    cautions(done)
    advice(done)


def cautions(done: Commit) -> None:
    """Print what was held back and why, then what will run at the user's next command and how."""
    lines, more = held_lines(done.held)
    for paths, why in lines:
        output.say(f"held back: {paths}: {output.name(why)}")
    if more:
        output.say(f"held back: and {many(more, 'more path')} for other reasons; --json lists them all")
    for one in done.runs[:SHOWN]:
        output.say(f"runs at your next command: {output.name(one.path)}: {output.name(one.what)}")
    if (rest := len(done.runs) - SHOWN) > 0:
        output.say(f"runs at your next command: and {many(rest, 'more path')}; --json lists them all")


def advice(done: Commit) -> None:
    """Print what a commit left out or altered, and what to do about it."""
    for note in done.notes:
        output.say(f"{output.name(note.path)}: {output.name(note.what)}")
    id = done.workspace_id
    if any(held.reason == "executes" for held in done.held):
        output.say(f"read those, then: stockade commit {id} --allow-exec-config, or --allow PATTERN for some")
    if any(held.reason == "repository" for held in done.held):
        output.say("a repository is committed together with those of its files that you allow")
        output.say(f"to commit the repository without those files: stockade commit {id} --allow .git")
    if any(held.reason == "protected" for held in done.held):
        output.say(
            f"protected paths are never committed; copy them by hand from {Workspace.open(id).layer}/upper"
        )
    if not done.closed:
        output.say(f"workspace {id} is kept: `stockade diff {id}` shows what is left in it")


class _Progress:
    """A progress line on a terminal, shown once a commit takes longer than a moment."""

    def __init__(self) -> None:
        self._next = time.monotonic() + 0.5
        self._shown = False

    def __call__(self, done: int, total: int) -> None:
        if time.monotonic() >= self._next and output.obeys_escapes(sys.stderr) and not output.Verbosity.quiet:
            print(f"\rstockade: copied {done} of {total} files", end="\x1b[K", file=sys.stderr, flush=True)
            self._shown, self._next = True, time.monotonic() + 0.1

    def end(self) -> None:
        if self._shown:
            print("\r", end="\x1b[K", file=sys.stderr, flush=True)
            self._shown = False
