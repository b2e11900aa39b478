"""`stockade ps`: the sandboxes that live now, of all of the caller's processes."""

from __future__ import annotations

import argparse
import shlex
import sys
from datetime import UTC, datetime

from stockade.cli import output
from stockade.cli.options import Parser
from stockade.policy import Caller
from stockade.sandbox import register
from stockade.sandbox.records import Record
from stockade.state import state_dir


def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    caller = Caller.current()
    found, remarks = register.survey(state_dir(caller.environ, caller.home))
    for remark in remarks:
        output.say(remark)
    if args.json:
        import msgspec

        sys.stdout.buffer.write(msgspec.json.format(output.as_json(msgspec.to_builtins(found))) + b"\n")
    elif args.quiet:
        print("".join(f"{record.id}\n" for record in found), end="")
    elif found:
        print(_shown(found))
        for record in found:
            if record.kept:
                output.say(f"{record.id} is kept: `stockade attach {record.id}` comes back to it")
    else:
        print("no sandbox is running")
    return 0


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    made = Parser(
        prog="stockade ps",
        description="List your sandboxes that live now, whichever process started them. Root's are root's:\n"
        "each user has a state directory, and sees what is registered there.",
        epilog="example:\n  stockade ps --json",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--json", action="store_true", help="print JSON, with everything that is recorded")
    return output.with_manners(made, quiet="print ids only")


def _shown(found: list[Record]) -> str:
    now = datetime.now(UTC)
    rows = [
        [
            record.id,
            _age(record.started, now),
            str(record.supervisor),
            output.name(shlex.join(record.command)) or "-",
            output.name(record.workspace) or "-",
        ]
        for record in found
    ]
    head = ["ID", "AGE", "PID", "COMMAND", "WORKSPACE"]
    return output.table(rows, head, cut=(3, 4))


def _age(started: str, now: datetime) -> str:
    """How long ago, in the one unit that matters."""
    try:
        seconds = max(0, int((now - datetime.fromisoformat(started)).total_seconds()))
    except (ValueError, TypeError):
        return "?"
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * length:
            return f"{seconds // length}{unit}"
    return f"{seconds}s"
