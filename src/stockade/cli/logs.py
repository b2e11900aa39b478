"""`stockade logs`: what earlier runs did."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time

from stockade.cli import output
from stockade.cli.options import Parser
from stockade.cli.workspaces import many, print_json
from stockade.errors import NotFoundError, PolicyError
from stockade.policy import Caller
from stockade.sandbox import runlog
from stockade.sandbox.runlog import Ran
from stockade.state import state_dir

SHOWN = 20


def main(argv: list[str]) -> int:
    """List the last runs, or tell all about those of one sandbox or workspace."""
    args = parser().parse_args(argv)
    if args.count < 1:
        raise PolicyError(f"-n {args.count}: is not a number of runs", hint="write 1 or more")
    caller = Caller.current()
    home = state_dir(caller.environ, caller.home)
    found, damaged = runlog.read(home)
    if damaged:
        output.say(f"{many(damaged, 'line')} of {home}/{runlog.FILE} cannot be read")
    if args.id is not None:
        found = _named(found, args.id)
    if args.failed:
        found = [ran for ran in found if ran.outcome != "exited" or ran.exit_code]
    # Of one sandbox everything is of interest.
    if not args.all and args.id is None:
        found = found[-args.count :]
    if args.json:
        print_json([_about(ran, home) for ran in found])
    elif args.quiet:
        print("".join(f"{ran.sandbox}\n" for ran in found if ran.sandbox), end="")
    elif not found:
        print("no runs are recorded" if args.id is None else "none of its runs failed")
    elif args.id is None:
        print(_listed(found, home))
    else:
        print("\n\n".join(_told(ran, home) for ran in found))
    return 0


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    made = Parser(
        prog="stockade logs",
        description="List what earlier runs did, the last one at the end, or tell all about the runs of one\n"
        "sandbox or workspace. Of the command only the program's name is recorded, and how many arguments\n"
        "it had, because arguments may hold secrets; STOCKADE_LOG=full records them, STOCKADE_LOG=off\n"
        "records no run at all. The last few thousand runs are kept.",
        epilog="examples:\n"
        "  stockade logs --failed\n"
        "  stockade logs 443c                 the runs in one workspace, and where their output is",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add("id", nargs="?", help="a sandbox or workspace, or the beginning of its id")
    add("-n", metavar="N", dest="count", type=int, default=SHOWN, help=f"how many (default: {SHOWN})")
    add("--all", action="store_true", help="every run that is recorded")
    add("--failed", action="store_true", help="only those that did not end well")
    add("--json", action="store_true", help="print JSON")
    return output.with_manners(made, quiet="print the ids of the sandboxes only")


def _named(found: list[Ran], id: str) -> list[Ran]:
    begins = id.removeprefix("@")
    named = [ran for ran in found if begins and (ran.sandbox.startswith(begins) or _kept_by(ran, begins))]
    if not named:
        raise NotFoundError(f"no run of {id!r} is recorded", hint="`stockade logs --all` lists all there are")
    return named


def _kept_by(ran: Ran, begins: str) -> bool:
    return bool(ran.workspace) and ran.workspace.startswith(begins)


def _about(ran: Ran, home: str) -> dict[str, object]:
    import msgspec

    # What is not recorded is said, too.
    plain = {name: getattr(ran, name) for name in Ran.__struct_fields__}
    return {**msgspec.to_builtins(plain), "workspace_kept": _is_kept(ran, home)}


def _is_kept(ran: Ran, home: str) -> bool:
    return bool(ran.workspace) and os.path.isdir(f"{home}/workspaces/{ran.workspace}")


def _listed(found: list[Ran], home: str) -> str:
    when = _today if sys.stdout.isatty() else _when
    rows = [
        [
            when(ran.at),
            ran.sandbox or "-",
            _command(ran),
            # The other outcomes have exit codes of their own.
            f"exited {ran.exit_code}" if ran.outcome == "exited" else ran.outcome,
            _took(ran.seconds),
            str(ran.changes) if _is_kept(ran, home) else "-",
            output.name(ran.directory) or "-",
        ]
        for ran in found
    ]
    head = ["BEGAN", "SANDBOX", "COMMAND", "OUTCOME", "TOOK", "CHANGES", "DIRECTORY"]
    return output.table(rows, head, cut=(2, 6))


def _told(ran: Ran, home: str) -> str:
    """Everything about one run, a line each."""
    lines = [
        ("began", _when(ran.at)),
        ("command", _command(ran)),
        ("outcome", f"{ran.outcome}, exit code {ran.exit_code}, after {_took(ran.seconds)}"),
        ("sandbox", ran.sandbox),
        ("directory", output.name(ran.directory)),
        ("workspace", _changes(ran, home)),
    ]
    for one in ran.spilled:
        lost = f", {one.lost} bytes lost" if one.lost else ""
        gone = "" if not one.path or os.path.exists(one.path) else ", removed since"
        where = f" in {output.name(one.path)}" if one.path else ""
        lines.append((one.stream, f"{one.size} bytes past the limit{where}{lost}{gone}"))
    return "\n".join(f"{name:<9}  {value}" for name, value in lines if value)


def _changes(ran: Ran, home: str) -> str:
    if not ran.workspace:
        return ""
    if not _is_kept(ran, home):
        return f"{ran.workspace}, {many(ran.changes, 'change')}, not kept any more"
    return f"{ran.workspace}, {many(ran.changes, 'change')}: `stockade diff {ran.workspace}`"


def _command(ran: Ran) -> str:
    if ran.command:
        return output.name(shlex.join(ran.command))
    # Not as shlex would write it: it is no command line.
    return output.name(ran.program) + (f" (+{ran.arguments})" if ran.arguments else "")


def _when(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def _today(at: float) -> str:
    """The time of a run of today, the day of an earlier one."""
    began, now = time.localtime(at), time.localtime()
    return time.strftime("%H:%M:%S" if began[:3] == now[:3] else "%Y-%m-%d", began)


def _took(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.2f}s"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}m{rest:02d}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02d}m"
