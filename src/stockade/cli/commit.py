"""`stockade commit`: take the changes of a workspace over into the host's tree."""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING

from stockade.cli import output
from stockade.cli.options import Parser
from stockade.cli.workspaces import chosen, many, print_json
from stockade.errors import ConflictError, StockadeError
from stockade.workspace.workspace import Workspace

if TYPE_CHECKING:
    from stockade.workspace.commit import Commit

SHOWN = 20
REFUSED = 125
CANCELLED = 130


def main(argv: list[str]) -> int:
    """Commit, and say what was not taken over as it was."""
    args = parser().parse_intermixed_args(argv)
    try:
        return _commit(args)
    except StockadeError as error:
        if not args.json:
            raise
        paths = error.paths if isinstance(error, ConflictError) else ()
        print_json({"ok": False, "reason": error.message, "hint": error.hint, "conflicts": paths})
        return REFUSED


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    made = Parser(
        prog="stockade commit",
        description="Take the changes of a run over into your files: all of them, or those at and below\n"
        "some paths. It happens as a whole or not at all.",
        epilog="examples:\n"
        "  stockade commit                        the last workspace of this directory\n"
        "  stockade commit 443c22c193c6 src       only what changed in src\n"
        "  stockade commit 443c22c193c6 --force notes.txt\n"
        "  stockade commit 443c22c193c6 --merge   together with your own changes to the same files\n\n"
        "exit codes: 0 committed; 1 committed, and something was held back; 125 refused, nothing was done",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add("id", nargs="?", help="the workspace, or the beginning of its id; without it, the last")
    add("paths", nargs="*", metavar="PATH", help="relative to the workspace")
    add(
        "--force",
        metavar="PATH",
        action="append",
        default=[],
        help="overwrite what the host has changed there",
    )
    add("--merge", action="store_true", help="where you changed other lines of a text, take both changes")
    add("--allow-exec-config", action="store_true", help="also files that your tools run or obey")
    add("--keep", action="store_true", help="keep the workspace when nothing is left in it")
    add("--json", action="store_true", help="print JSON and nothing else")
    return output.with_manners(made)


def _commit(args: argparse.Namespace) -> int:
    workspace = chosen(args.id)
    progress = _Progress()
    try:
        done = workspace.commit(
            args.paths or None,
            force=args.force,
            allow_exec_config=args.allow_exec_config,
            keep=args.keep,
            merge=args.merge,
            progress=None if args.json else progress,
        )
    except KeyboardInterrupt:
        ended = workspace.recover() or "rolled back"
        output.say(f"interrupted; the commit was {ended}")
        return CANCELLED
    finally:
        progress.end()
    if args.json:
        print_json({"ok": not done.held, **_plain(done)})
    else:
        _report(done, workspace)
    return 1 if done.held else 0


def _plain(done: Commit) -> dict[str, object]:
    import msgspec

    plain: dict[str, object] = msgspec.to_builtins(done)
    return plain


def _report(done: Commit, workspace: Workspace) -> None:
    changes = [[one.kind, output.name(one.path)] for one in done.changes]
    place = output.name(workspace.path)
    print(
        f"{many(len(changes), 'change')} committed to {place}" if changes else f"nothing committed to {place}"
    )
    for kind, path in changes[:SHOWN]:
        print(f"  {kind:<8}  {path}")
    if len(changes) > SHOWN:
        print(f"  and {len(changes) - SHOWN} more")
    remarks(done)


def remarks(done: Commit) -> None:
    """What a commit did not take over as it was, and what to do about it."""
    for note in done.notes:
        output.say(f"{output.name(note.path)}: {output.name(note.what)}")
    for held in done.held:
        output.say(f"held back: {output.name(held.path)}: {output.name(held.detail)}")
    id = done.workspace
    if any(held.reason == "executes" for held in done.held):
        output.say(f"read those, then: stockade commit {id} --allow-exec-config")
    if any(held.reason == "protected" for held in done.held):
        output.say(f"what is protected is only ever copied by hand, from {Workspace.open(id).layer}/upper")
    if not done.closed:
        output.say(f"workspace {id} is kept: `stockade diff {id}` shows what is left in it")


class _Progress:
    """One line on a terminal that says how far it is, once it takes longer than a moment."""

    def __init__(self) -> None:
        self._next = time.monotonic() + 0.5
        self._shown = False

    def __call__(self, done: int, total: int) -> None:
        if time.monotonic() >= self._next and output.steered(sys.stderr) and not output.Manner.quiet:
            print(f"\rstockade: copied {done} of {total} files", end="\x1b[K", file=sys.stderr, flush=True)
            self._shown, self._next = True, time.monotonic() + 0.1

    def end(self) -> None:
        if self._shown:
            print("\r", end="\x1b[K", file=sys.stderr, flush=True)
            self._shown = False
