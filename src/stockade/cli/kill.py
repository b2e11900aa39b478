"""`stockade kill`: end sandboxes, whichever of the caller's processes supervises them."""

from __future__ import annotations

import argparse
from concurrent.futures import ThreadPoolExecutor

from stockade.cli import REFUSED, output
from stockade.cli.options import Parser
from stockade.errors import NotFoundError, StockadeError
from stockade.policy import Caller
from stockade.sandbox import register
from stockade.sandbox.records import Record
from stockade.state import state_dir

#: How many are waited for at a time: a stubborn one takes seconds.
AT_ONCE = 64


def main(argv: list[str]) -> int:
    made = parser()
    args = made.parse_args(argv)
    if args.all == bool(args.ids):
        made.error("name the sandboxes, or --all")
    caller = Caller.current()
    home = state_dir(caller.environ, caller.home)
    failed: list[StockadeError] = []
    found = register.living(home) if args.all else _named(home, args.ids, failed)

    def stop(record: Record) -> StockadeError | None:
        try:
            register.stop(home, record, now=args.now)
        except StockadeError as error:
            return error
        print(f"{record.id} has ended")
        return None

    with ThreadPoolExecutor(AT_ONCE) as pool:
        failed += filter(None, pool.map(stop, found))
    for error in failed:
        output.error(error.message, hint=error.hint)
    if args.all and not found:
        print("no sandbox is running")
    return REFUSED if failed else 0


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    made = Parser(
        prog="stockade kill",
        description="End sandboxes with all that runs in them: TERM to the programs, two seconds, KILL.\n"
        "Who supervises one is told, and keeps what it changed.",
        epilog="example:\n  stockade kill 3f9a    # the beginning of an id in `stockade ps`",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("ids", nargs="*", metavar="ID", help="an id, or the beginning of one")
    made.add_argument("--all", action="store_true", help="every one of yours")
    made.add_argument("--now", action="store_true", help="KILL at once")
    return output.with_manners(made)


def _named(home: str, ids: list[str], failed: list[StockadeError]) -> list[Record]:
    """What is named is ended, also where another word names nothing."""
    found: dict[str, Record] = {}
    for word in ids:
        try:
            record = register.find(home, word)
            found[record.id] = record
        except NotFoundError as error:
            failed.append(error)
    return list(found.values())
