"""`stockade kill`: end sandboxes, whichever of the caller's processes supervises them."""

from __future__ import annotations

import argparse
from concurrent.futures import ThreadPoolExecutor

from stockade.cli import REFUSED
from stockade.cli.ui import output
from stockade.cli.ui.argument_parser import Parser
from stockade.errors import NotFoundError, StockadeError
from stockade.linux.user import Caller
from stockade.runs.register import register
from stockade.runs.register.sandbox_record import SandboxRecord
from stockade.state import state_dir

#: How many sandboxes are ended at a time: one that ignores TERM takes seconds.
AT_ONCE = 64


def main(argv: list[str]) -> int:
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.all == bool(args.ids):
        parser.error("name the sandboxes, or add --all")
    caller = Caller.current()
    home = state_dir(caller.environ, caller.home)
    found = register.living(home) if args.all else _named(home, args.ids)

    def stop(record: SandboxRecord) -> StockadeError | None:
        try:
            register.stop(home, record, now=args.now)
        except StockadeError as error:
            return error
        output.announce(f"{record.id} has ended")
        return None

    with ThreadPoolExecutor(AT_ONCE) as pool:
        failed = list(filter(None, pool.map(stop, found)))
    for error in failed:
        output.error(error.message, hint=error.hint)
    if args.all and not found:
        output.announce("no sandbox is running")
    return REFUSED if failed else 0


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    parser = Parser(
        prog="stockade kill",
        description="End sandboxes with everything that runs in them: TERM to the programs, KILL after two\n"
        "seconds. A sandbox's supervisor learns of it, and keeps the changes.",
        epilog="example:\n  stockade kill 3f9a    # the beginning of an id in `stockade ps`",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "ids", nargs="*", metavar="ID", help="an id or a name in `stockade ps`, or the beginning of one"
    )
    parser.add_argument("--all", action="store_true", help="all your sandboxes")
    parser.add_argument("--now", action="store_true", help="KILL at once")
    return output.add_verbosity(parser)


def _named(home: str, ids: list[str]) -> list[SandboxRecord]:
    """Return the named sandboxes, or refuse before any is ended if a word names none.

    The whole id of a sandbox that has just ended by itself is no error: the user wants it ended.
    """
    found: dict[str, SandboxRecord] = {}
    for word in ids:
        try:
            record = register.find(home, word)
            found[record.id] = record
        except NotFoundError as error:
            from stockade.runs.register import runlog

            last = runlog.last_of(home, word)
            if last is None or last.sandbox != word:
                raise NotFoundError(f"{error.message}; no sandbox was ended", hint=error.hint) from None
            output.announce(f"{word} had ended already")
    return list(found.values())
