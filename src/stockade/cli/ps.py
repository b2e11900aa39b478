"""`stockade ps`: list the living sandboxes of all the user's processes."""

from __future__ import annotations

import argparse
import shlex
from datetime import UTC, datetime

from stockade.cli.ui import output
from stockade.cli.ui.argument_parser import Parser
from stockade.linux.user import Caller
from stockade.runs.register import register
from stockade.runs.register.sandbox_record import SandboxRecord
from stockade.state import state_dir


def main(argv: list[str]) -> int:
    args = build_parser().parse_args(argv)
    caller = Caller.current()
    found, remarks = register.survey(state_dir(caller.environ, caller.home))
    for remark in remarks:
        output.say(remark)
    if args.json:
        print(output.indented_json(found))
    elif args.quiet:
        print("".join(f"{record.id}\n" for record in found), end="")
    elif found:
        print(_table(found))
        for record in found:
            if record.kept:
                output.say(f"{record.id} is kept: `stockade attach {record.id}` returns to it")
    else:
        print("no sandbox is running")
    return 0


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    parser = Parser(
        prog="stockade ps",
        description="List your living sandboxes, whichever process started them. Each user, also root, has\n"
        "a state directory, and sees only the sandboxes that are registered there.",
        epilog="example:\n  stockade ps --json",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print the whole records as JSON")
    return output.add_verbosity(parser, quiet="print only ids")


def _table(found: list[SandboxRecord]) -> str:
    now, named = datetime.now(UTC), any(record.name for record in found)
    publishes = any(record.published for record in found)
    rows = [
        [
            record.id,
            *([output.name(record.name) or "-"] if named else []),
            _age(record.started, now),
            str(record.supervisor),
            *([" ".join(record.published) or "-"] if publishes else []),
            output.name(shlex.join(record.command)) or "-",
            output.name(record.workspace) or "-",
        ]
        for record in found
    ]
    head = ["ID", *(["NAME"] if named else []), "AGE", "PID"]
    head += [*(["PUBLISHED"] if publishes else []), "COMMAND", "WORKSPACE"]
    return output.table(rows, head, cut=(len(head) - 2, len(head) - 1))


def _age(started: str, now: datetime) -> str:
    """Format how long ago a sandbox started, in the largest unit that fits twice."""
    try:
        seconds = max(0, int((now - datetime.fromisoformat(started)).total_seconds()))
    except (ValueError, TypeError):
        return "?"
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * length:
            return f"{seconds // length}{unit}"
    return f"{seconds}s"
