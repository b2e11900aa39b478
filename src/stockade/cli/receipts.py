"""`stockade receipts`: list, show, export, cosign and prune the signed records of runs."""

from __future__ import annotations

import argparse
import os
import re
import sys
import time

from stockade.cli.ui import output
from stockade.cli.ui.argument_parser import Parser
from stockade.cli.ui.formats import print_json, seconds
from stockade.errors import PolicyError
from stockade.linux.user import Caller
from stockade.receipt import chain, keys
from stockade.receipt.builder import stamp
from stockade.receipt.statement import RECORDED
from stockade.receipt.tail import ChainRow
from stockade.result import Outcome
from stockade.state import state_dir

NEWEST = 50
STAMP = re.compile(r"\d{4}-\d\d(-\d\d(T\d\d:\d\d(:\d\d(\.\d+)?)?Z?)?)?")


def main(argv: list[str]) -> int:
    args = build_parser().parse_args(argv)
    if args.action in ("show", "cosign") and not args.id:
        raise PolicyError(f"{args.action} needs an id", hint=f"stockade receipts {args.action} last")
    if args.action in ("list", "prune") and args.id:
        raise PolicyError(f"{args.id!r}: {args.action} takes no id", hint=f"stockade receipts show {args.id}")
    if (args.action == "cosign") != bool(args.key):
        raise PolicyError("cosign and --key go together", hint="stockade receipts cosign ID --key FILE")
    if (args.action == "prune") != bool(args.older_than):
        raise PolicyError(
            "prune and --older-than go together", hint="stockade receipts prune --older-than 30d"
        )
    caller = Caller.current()
    log = chain.of(state_dir(caller.environ, caller.home))
    if args.action == "list":
        return _list(log, args)
    if args.action == "prune":
        from stockade.cli.ui.receipt_pruning import prune

        return prune(log.home, seconds(args.older_than), yes=args.yes, as_json=args.json)
    if args.action == "export" and not args.id:
        return _export(log, args)
    receipt = log.find(args.id)
    if args.action == "show":
        return _show(receipt.payload, as_json=args.json)
    if args.action == "cosign":
        receipt = receipt.cosigned(keys.secret(args.key), args.key)
        log.cosign(receipt)
    sys.stdout.buffer.write(receipt.encode() + b"\n")
    return 0


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    parser = Parser(
        prog="stockade receipts",
        description="List the receipts of your runs, the last one at the end; show one; export them as\n"
        "lines of JSON; sign one with a second key; or remove the oldest ones, with what belongs to them.\n"
        "`stockade verify` checks them.",
        epilog="examples:\n  stockade receipts list --agent coder --since 2h --outcome timed-out\n"
        "  stockade receipts show last\n  stockade receipts export 42 > run.json\n"
        "  stockade receipts cosign 42 --key second.pem > run.json\n"
        "  stockade receipts prune --older-than 30d",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("action", nargs="?", choices=["list", "show", "export", "cosign", "prune"], default="list")
    add("id", nargs="?", metavar="ID", help='show, export, cosign: the receipt; "last" is the last one')
    add("--agent", metavar="NAME", help="only runs of this agent")
    add("--outcome", choices=[*map(str, Outcome), RECORDED], help="only runs with this outcome")
    add(
        "--since",
        metavar="T",
        help="only runs that began then or later: 2h, 7d, 2026-05-01, 2026-05-01T12:00Z",
    )
    add("--until", metavar="T", help="only runs that began before")
    add("-n", dest="count", type=int, metavar="N", help=f"list: at most the last N (default {NEWEST})")
    add("--key", metavar="FILE", help="cosign: the second private key, PEM")
    add("--older-than", metavar="AGE", help="prune: remove what is older: 12h, 30d, 8w")
    add("--yes", action="store_true", help="prune: do not ask")
    add("--json", action="store_true", help="list, show, prune: print JSON")
    return output.add_verbosity(parser)


def _filter(args: argparse.Namespace) -> chain.Filter:
    return chain.Filter(args.agent, args.outcome, _moment(args.since), _moment(args.until))


def _moment(text: str | None) -> str:
    """Convert a time or an age to the form that receipts use. A day means its first moment."""
    if text is None or STAMP.fullmatch(text):
        return (text or "").removesuffix("Z")
    return stamp(time.time() - seconds(text))


def _list(log: chain.Chain, args: argparse.Namespace) -> int:
    rows = log.rows(_filter(args), newest=args.count or NEWEST) if log.exists() else []
    if args.json:
        print_json([{"id": row.id, **_plain(row)} for row in rows])
    elif rows:
        shown = [
            [row.id, row.started[:19].replace("T", " "), row.outcome, output.name(row.agent) or "-",
             output.name(row.action) or "-", output.name(os.path.basename(row.program)) or "-"]
            for row in rows
        ]  # fmt: skip
        print(output.table(shown, ["ID", "STARTED (UTC)", "OUTCOME", "AGENT", "ACTION", "PROGRAM"]))
    else:
        print("no receipt matches" if log.exists() else "there are no receipts yet")
    return 0


def _plain(row: ChainRow) -> dict[str, object]:
    import msgspec

    return msgspec.structs.asdict(row)


def _export(log: chain.Chain, args: argparse.Namespace) -> int:
    """Print every matching receipt, one per line: together they form a chain, or pieces of one."""
    wanted = _filter(args)
    if not log.exists():
        return 0
    if wanted == chain.Filter():
        for entry in log.all():
            sys.stdout.buffer.write(entry.receipt.encode() + b"\n")
        return 0
    for row in log.rows(wanted):
        sys.stdout.buffer.write(log.get(row.sequence).encode() + b"\n")
    return 0


def _show(payload: bytes, *, as_json: bool) -> int:
    import msgspec

    # `export` prints the exact bytes that were signed.
    shown = output.inert_json(payload if as_json else msgspec.json.format(payload))
    sys.stdout.buffer.write(shown + b"\n")
    return 0
