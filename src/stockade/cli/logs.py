"""`stockade logs`: list what earlier runs did."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time

from stockade.cli.ui import output
from stockade.cli.ui.argument_parser import Parser
from stockade.cli.ui.formats import many, print_json
from stockade.errors import NotFoundError, PolicyError
from stockade.linux.user import Caller
from stockade.runs.register import runlog
from stockade.runs.register.runlog import RunLogLine
from stockade.state import state_dir
from stockade.state.ids import SHORTENED, matching

SHOWN = 20
#: How many sandboxes that left handoffs the warning names.
SHOWN_LEFT = 5


def main(argv: list[str]) -> int:
    """List the last runs, or describe those of one sandbox or workspace in full."""
    args = build_parser().parse_args(argv)
    if args.count < 1:
        raise PolicyError(f"-n {args.count}: not a number of runs", hint="write 1 or more")
    caller = Caller.current()
    home = state_dir(caller.environ, caller.home)
    found, damaged = runlog.read(home)
    if damaged:
        output.say(f"{many(damaged, 'line')} of {home}/{runlog.FILE} cannot be read")
    if args.id is not None:
        found = _named(found, args.id)
    if args.failed:
        found = [ran for ran in found if ran.outcome != "exited" or ran.exit_code]
    # A named sandbox is shown in full.
    if not args.all and args.id is None:
        found = found[-args.count :]
    if args.json:
        print_json([_about(ran, home) for ran in found])
    elif args.quiet:
        print("".join(f"{ran.sandbox}\n" for ran in found if ran.sandbox), end="")
    elif not found:
        print("no runs are recorded" if args.id is None else "none of its runs failed")
    elif args.id is None:
        print(_table(found, home))
        if left := list(dict.fromkeys(ran.sandbox for ran in found if ran.left)):
            output.say(
                "warning: these runs left files that your tools run or obey: "
                + ", ".join(f"`stockade logs {id}`" for id in left[-SHOWN_LEFT:])
            )
    else:
        print("\n\n".join(_describe(ran, home) for ran in found))
    return 0


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    parser = Parser(
        prog="stockade logs",
        description="List what earlier runs did, the last one at the end, or describe the runs of one\n"
        "sandbox or workspace in full. The log has only the program's name and the number of arguments,\n"
        "because arguments may hold secrets; STOCKADE_LOG=full records them too, STOCKADE_LOG=off records\n"
        "no run at all. The log keeps the last few thousand runs.",
        epilog="examples:\n"
        "  stockade logs --failed\n"
        "  stockade logs 443c                 the runs in one workspace, and where their spill files are",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("id", nargs="?", help="a sandbox or workspace, or the beginning of its id; or the name of a sandbox")
    add("-n", metavar="N", dest="count", type=int, default=SHOWN, help=f"how many (default: {SHOWN})")
    add("--all", action="store_true", help="every recorded run")
    add("--failed", action="store_true", help="only runs that failed")
    add("--json", action="store_true", help="print JSON")
    return output.add_verbosity(parser, quiet="print only the ids of the sandboxes")


def _named(found: list[RunLogLine], id: str) -> list[RunLogLine]:
    known = filter(None, (one for ran in found for one in (ran.sandbox, ran.workspace)))
    meant = set(matching(id.removeprefix("@"), known))
    named = [ran for ran in found if not meant.isdisjoint((ran.sandbox, ran.workspace))]
    if not named:
        meant = set(matching(id, filter(None, (ran.name for ran in found))))
        named = [ran for ran in found if ran.name in meant]
    if not named:
        raise NotFoundError(
            f"no run of {id!r} is recorded", hint=f"`stockade logs --all` lists every run; {SHORTENED}"
        )
    return named


def _about(ran: RunLogLine, home: str) -> dict[str, object]:
    import msgspec

    # Unlike the log file, JSON output includes fields with default values.
    plain = {name: getattr(ran, name) for name in RunLogLine.__struct_fields__}
    return {**msgspec.to_builtins(plain), "workspace_kept": _is_kept(ran, home)}


def _is_kept(ran: RunLogLine, home: str) -> bool:
    return bool(ran.workspace) and os.path.isdir(f"{home}/workspaces/{ran.workspace}")


def _table(found: list[RunLogLine], home: str) -> str:
    when = _today if sys.stdout.isatty() else _when
    named = any(ran.name for ran in found)
    rows = [
        [
            when(ran.at),
            ran.sandbox or "-",
            *([output.name(ran.name) or "-"] if named else []),
            _command(ran),
            # Every other outcome implies its exit code.
            f"exited {ran.exit_code}" if ran.outcome == "exited" else ran.outcome,
            _took(ran.seconds),
            str(ran.changes) if _is_kept(ran, home) else "-",
            output.name(ran.directory) or "-",
        ]
        for ran in found
    ]
    name = ["NAME"] if named else []
    head = ["BEGAN", "SANDBOX", *name, "COMMAND", "OUTCOME", "TOOK", "CHANGES", "DIRECTORY"]
    return output.table(rows, head, cut=(head.index("COMMAND"), len(head) - 1))


def _describe(ran: RunLogLine, home: str) -> str:
    """Return everything about one run, one fact per line."""
    lines = [
        ("began", _when(ran.at)),
        ("command", _command(ran)),
        ("outcome", f"{ran.outcome}, exit code {ran.exit_code}, after {_took(ran.seconds)}"),
        ("sandbox", ran.sandbox),
        ("name", output.name(ran.name)),
        ("directory", output.name(ran.directory)),
        ("workspace", _changes(ran, home)),
    ]
    for one in ran.spilled:
        lost = f", {one.lost} bytes lost" if one.lost else ""
        gone = "" if not one.path or os.path.exists(one.path) else ", removed since"
        where = f" in {output.name(one.path)}" if one.path else ""
        lines.append((one.stream, f"{one.size} bytes past the limit{where}{lost}{gone}"))
    if ran.left:
        lines.append(("left", f"{many(ran.left, 'file')} that your tools run or obey"))
    lines += [("", output.name(line)) for line in ran.left_first]
    if (more := ran.left - len(ran.left_first)) > 0:
        lines.append(("", f"and {more} more"))
    if ran.reached or ran.refused:
        moved = f"{ran.bytes_sent} bytes out, {ran.bytes_received} in"
        lines.append(("network", f"{ran.reached} allowed, {ran.refused} refused, {moved}"))
    lines += [("", output.name(line)) for line in ran.network_first]
    lines += [("warning", output.name(line)) for line in ran.warnings]
    return "\n".join(f"{name:<9}  {value}" for name, value in lines if value)


def _changes(ran: RunLogLine, home: str) -> str:
    if not ran.workspace:
        return ""
    if not _is_kept(ran, home):
        return f"{ran.workspace}, {many(ran.changes, 'change')}, no longer kept"
    return f"{ran.workspace}, {many(ran.changes, 'change')}: `stockade diff {ran.workspace}`"


def _command(ran: RunLogLine) -> str:
    if ran.command:
        return output.name(shlex.join(ran.command))
    # Unquoted: this is not a command line.
    return output.name(ran.program) + (f" (+{ran.arguments})" if ran.arguments else "")


def _when(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def _today(at: float) -> str:
    """Format a moment: the time if it is today, otherwise the date."""
    began, now = time.localtime(at), time.localtime()
    return time.strftime("%H:%M:%S" if began[:3] == now[:3] else "%Y-%m-%d", began)


def _took(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.2f}s"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}m{rest:02d}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02d}m"
