"""`stockade workspaces`: list the kept workspaces, remove old ones, check a directory for an overlay."""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

from stockade.cli.ui import output
from stockade.cli.ui.argument_parser import Parser
from stockade.cli.ui.formats import age, many, print_json, seconds, size
from stockade.cli.ui.workspace_choice import confirm_removal
from stockade.errors import NotFoundError, PolicyError, SetupError, StockadeError
from stockade.sandbox.workspace import Workspace
from stockade.workspace.usage import disk_usage

#: How many paths `check` prints at most; it counts all of them.
SHOWN = 1000


def main(argv: list[str]) -> int:
    """List the workspaces, remove old ones, or check a directory."""
    args = build_parser().parse_args(argv)
    if args.path is not None and args.action != "check":
        raise PolicyError(f"{args.path!r}: only check takes a path", hint="stockade workspaces check PATH")
    if args.action == "prune":
        return _prune(args)
    if args.older_than or args.yes:
        raise PolicyError(
            "--older-than and --yes apply only to prune", hint="stockade workspaces prune --older-than 7d"
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
                f"{'> ' if one['size_cut'] else ''}{size(one['size'])}",
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


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    parser = Parser(
        prog="stockade workspaces",
        description="List the kept workspaces, the last one first, or remove old ones.\n"
        "Or check a directory for files that you may write but an overlay cannot change, because they\n"
        "belong to other owners.",
        epilog="examples:\n  stockade workspaces\n  stockade workspaces prune --older-than 7d\n"
        "  stockade workspaces check ~/project        exit code 1 if there are such files",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = ["list", "prune", "check"]
    parser.add_argument("action", nargs="?", choices=actions, default="list", help="default: list")
    parser.add_argument("path", nargs="?", metavar="PATH", help="check: the directory; default: this one")
    parser.add_argument("--older-than", metavar="T", help="prune: those last changed longer ago: 12h, 7d, 4w")
    parser.add_argument("--yes", action="store_true", help="prune: do not ask")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return output.add_verbosity(parser, quiet="print only errors; list: print only ids")


def _about(workspace: Workspace) -> dict[str, Any]:
    try:
        workspace.recover()
    except StockadeError as error:
        reason = error.message
    else:
        reason = ""
    used = disk_usage(f"{workspace.layer}/upper") + disk_usage(f"{workspace.layer}/snapshots")
    about: dict[str, Any] = {
        "id": workspace.id,
        "path": workspace.path,
        "age": max(0.0, time.time() - workspace.changed),
        "size": used.bytes,
        "size_cut": used.cut,
        "snapshots": [one.name for one in workspace.snapshots()],
        "changes": None,
        "changes_cut": "",
        "in_use": False,
    }
    try:
        if not reason:
            about["changes"], about["changes_cut"] = workspace.count_changes()
    except StockadeError as error:
        reason = error.message
    if reason:
        about["reason"] = reason
    about["in_use"] = workspace.in_use()
    return about


def _count(one: dict[str, Any]) -> str:
    if one["changes"] is None:
        return "tree is gone" if not os.path.isdir(one["path"]) else "unreadable"
    count = f"{'> ' if one['changes_cut'] else ''}{one['changes']}"
    return f"{count}, in use" if one["in_use"] else count


def _check(args: argparse.Namespace) -> int:
    """Print every path that a program could write in the directory, but not in an overlay of it."""
    from stockade.linux import dirwalk
    from stockade.resolve.owners import foreign

    top = os.path.realpath(args.path or ".")
    try:
        root = os.open(top, dirwalk.NODE | os.O_DIRECTORY)
    except OSError as error:
        raise NotFoundError(f"{top} cannot be opened: {error.strerror}") from None
    shown, count = [], 0
    try:
        # Overlays that root makes support every owner.
        for one in foreign(root, os.getuid(), os.getgid()) if os.getuid() else ():
            count += 1
            if count <= SHOWN:
                shown.append({"path": one.path, "owner": one.owner, "uid": one.uid, "gid": one.gid})
    finally:
        os.close(root)
    if args.json:
        print_json({"path": top, "count": count, "found": shown})
    elif not count:
        print(f"an overlay of {output.name(top)} can change every file that you can")
    else:
        rows = [[str(one["owner"]), output.name(str(one["path"]))] for one in shown]
        print(output.table(rows, ["OWNER", "PATH"]))
        if count > SHOWN:
            print(f"and {count - SHOWN} more")
        whose = f"{os.getuid()}:{os.getgid()}"
        output.say(f"{many(count, 'path')} of other owners that you may write, but an overlay cannot change")
        output.say(f"run `sudo chown {whose} PATH`, use mode ro or rw, or run as root")
    return 1 if count else 0


def _prune(args: argparse.Namespace) -> int:
    if not args.older_than:
        raise PolicyError("prune needs --older-than", hint="stockade workspaces prune --older-than 7d")
    limit = time.time() - seconds(args.older_than)
    old = [workspace for workspace in Workspace.list() if workspace.changed < limit]
    for workspace in old:
        output.say(f"{workspace.id}  {age(time.time() - workspace.changed)}  {output.name(workspace.path)}")
    count = many(len(old), "workspace")
    if old and not args.yes and not confirm_removal(f"Remove {count} with all changes in them?", count):
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
        output.announce(f"{many(len(removed), 'workspace')} removed")
    return 1 if kept else 0
