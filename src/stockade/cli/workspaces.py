"""`stockade workspaces`: what was kept, and getting rid of what is old."""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import Any

from stockade.cli import output
from stockade.cli.options import Parser
from stockade.errors import NotFoundError, PolicyError, SetupError, StockadeError
from stockade.workspace.workspace import Workspace

#: How many paths `check` prints; it counts all.
SHOWN = 1000
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def main(argv: list[str]) -> int:
    """List the workspaces, or remove those that are old."""
    args = parser().parse_args(argv)
    if args.path is not None and args.action != "check":
        raise PolicyError(f"{args.path!r}: a path is for check", hint="stockade workspaces check PATH")
    if args.action == "prune":
        return _prune(args)
    if args.older_than or args.yes:
        raise PolicyError(
            "--older-than and --yes are for prune", hint="stockade workspaces prune --older-than 7d"
        )
    if args.action == "check":
        return _check(args)
    if args.quiet and not args.json:
        print("".join(f"{workspace.id}\n" for workspace in Workspace.list()), end="")
        return 0
    found = [_about(workspace) for workspace in Workspace.list()]
    if args.json:
        print_json(found)
    elif found:
        rows = [
            [
                one["id"],
                age(one["age"]),
                size(one["size"]),
                _count(one),
                str(len(one["snapshots"]) or "-"),
                output.name(one["path"]),
            ]
            for one in found
        ]
        print(output.table(rows, ["ID", "AGE", "SIZE", "CHANGES", "SNAPSHOTS", "OF"], cut=(5,)))
    else:
        print("no changes are kept")
    return 0


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    made = Parser(
        prog="stockade workspaces",
        description="List the workspaces that are kept aside, the last one first, or remove old ones.\n"
        "Or check a directory for files that no overlay of yours can take: those of other owners\n"
        "that you may write.",
        epilog="examples:\n  stockade workspaces\n  stockade workspaces prune --older-than 7d\n"
        "  stockade workspaces check ~/project        exit code 1 if there are such files",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = ["list", "prune", "check"]
    made.add_argument("action", nargs="?", choices=actions, default="list", help="default: list")
    made.add_argument("path", nargs="?", metavar="PATH", help="check: the directory; default: this one")
    made.add_argument("--older-than", metavar="T", help="prune: those last changed before: 12h, 7d, 4w")
    made.add_argument("--yes", action="store_true", help="prune: do not ask")
    made.add_argument("--json", action="store_true", help="print JSON")
    return output.with_manners(made, quiet="say nothing but errors; list: print ids only")


def _about(workspace: Workspace) -> dict[str, Any]:
    try:
        workspace.recover()
    except StockadeError as error:
        reason = error.message
    else:
        reason = ""
    about: dict[str, Any] = {
        "id": workspace.id,
        "path": workspace.path,
        "age": max(0.0, time.time() - workspace.changed),
        "size": weight(f"{workspace.layer}/upper") + weight(f"{workspace.layer}/snapshots"),
        "snapshots": [one.name for one in workspace.snapshots()],
        "changes": None,
        "in_use": False,
    }
    try:
        about["changes"] = None if reason else len(workspace.changes())
    except StockadeError as error:
        reason = error.message
    if reason:
        about["reason"] = reason
    about["in_use"] = workspace.in_use()
    return about


def _count(one: dict[str, Any]) -> str:
    if one["changes"] is None:
        return "tree is gone" if not os.path.isdir(one["path"]) else "unreadable"
    return f"{one['changes']}, in use" if one["in_use"] else str(one["changes"])


def weight(top: str) -> int:
    """What a layer takes on the disk; a directory that its program closed counts by itself."""
    total = 0
    for path, directories, files in os.walk(top):
        for name in (*directories, *files):
            try:
                total += os.lstat(os.path.join(path, name)).st_blocks * 512
            except OSError:
                continue  # gone since, or closed
    return total


def _check(args: argparse.Namespace) -> int:
    """Tell every path that a program may write in the directory and not in an overlay of it."""
    from stockade.workspace import descend
    from stockade.workspace.owners import foreign

    top = os.path.realpath(args.path or ".")
    try:
        root = os.open(top, descend.NODE | os.O_DIRECTORY)
    except OSError as error:
        raise NotFoundError(f"{top} cannot be opened: {error.strerror}") from None
    shown, count = [], 0
    try:
        # Root's overlays can take every owner.
        for one in foreign(root, os.getuid(), os.getgid()) if os.getuid() else ():
            count += 1
            if count <= SHOWN:
                shown.append({"path": one.path, "owner": one.owner, "uid": one.uid, "gid": one.gid})
    finally:
        os.close(root)
    if args.json:
        print_json({"path": top, "count": count, "found": shown})
    elif not count:
        print(f"an overlay of {output.name(top)} can take everything")
    else:
        rows = [[str(one["owner"]), output.name(str(one["path"]))] for one in shown]
        print(output.table(rows, ["OWNER", "PATH"]))
        if count > SHOWN:
            print(f"and {count - SHOWN} more")
        whose = f"{os.getuid()}:{os.getgid()}"
        output.say(f"{many(count, 'path')} of other owners that you may write, and an overlay cannot")
        output.say(f"`sudo chown {whose} PATH`, or use mode ro or rw, or run as root")
    return 1 if count else 0


def _prune(args: argparse.Namespace) -> int:
    if not args.older_than:
        raise PolicyError("prune needs --older-than", hint="stockade workspaces prune --older-than 7d")
    limit = time.time() - seconds(args.older_than)
    old = [workspace for workspace in Workspace.list() if workspace.changed < limit]
    for workspace in old:
        output.say(f"{workspace.id}  {age(time.time() - workspace.changed)}  {output.name(workspace.path)}")
    count = many(len(old), "workspace")
    if old and not args.yes and not agreed(f"Remove {count} with all changes in them?", count):
        output.say("nothing was removed")
        return 1
    removed, kept = [], []
    for workspace in old:
        try:
            workspace.discard()
            removed.append(workspace.id)
        except (SetupError, NotFoundError) as error:
            kept.append(workspace.id)
            output.error(error.message, hint=error.hint)
    if args.json:
        print_json({"removed": removed, "kept": kept})
    else:
        print(f"{many(len(removed), 'workspace')} removed")
    return 1 if kept else 0


def agreed(question: str, what: str) -> bool:
    """Whether whoever sits at the terminal says yes; where nobody does, nothing is removed."""
    if not sys.stdin.isatty():
        raise PolicyError(f"{what} would be removed, and there is nobody to ask", hint="add --yes")
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def chosen(id: str | None, *, quiet: bool = False) -> Workspace:
    """The workspace with that id; without one the last of the current directory, else the last of all."""
    if id not in (None, "", "@"):
        return told(Workspace.open(id.removeprefix("@")))
    known = Workspace.list()
    if not known:
        raise NotFoundError("no changes are kept", hint="a run that changes its workspace keeps them")
    try:
        here = os.getcwd()
    except FileNotFoundError:
        here = ""
    local = [one for one in known if here == one.path or here.startswith(one.path.rstrip("/") + "/")]
    workspace = (local or known)[0]
    workspace.recover()
    if not quiet:
        output.say(f"workspace {workspace.id} of {output.name(workspace.path)}")
    return told(workspace)


def told(workspace: Workspace) -> Workspace:
    """The same; if a commit of it had been interrupted, that is said."""
    if workspace.recovered:
        output.say(f"an interrupted commit of workspace {workspace.id} was {workspace.recovered}")
    return workspace


def seconds(text: str) -> float:
    """A duration with its unit."""
    number, unit = text[:-1], text[-1:]
    if unit not in UNITS or not number.isascii() or not number.replace(".", "", 1).isdigit():
        raise PolicyError(f"{text!r} is not a time", hint="write 30m, 12h, 7d or 4w")
    return float(number) * UNITS[unit]


def age(passed: float) -> str:
    """A duration in its largest unit."""
    for unit in ("d", "h", "m"):
        if passed >= UNITS[unit]:
            return f"{int(passed // UNITS[unit])}{unit}"
    return f"{int(passed)}s"


def size(count: float) -> str:
    """A number of bytes as people read it."""
    units = iter("BKMGTPE")
    unit = next(units)
    while count >= 1024:
        count, unit = count / 1024, next(units)
    return f"{count:.0f}{unit}" if unit == "B" or count >= 10 else f"{count:.1f}{unit}"


def many(count: int, what: str) -> str:
    """A count and its noun."""
    return f"{count} {what}{'s' if count != 1 else ''}"


def print_json(value: object) -> None:
    """One object on a line of its own, also with names that are not UTF-8."""
    import msgspec

    sys.stdout.flush()
    sys.stdout.buffer.write(output.as_json(msgspec.to_builtins(value)))
    sys.stdout.buffer.flush()
