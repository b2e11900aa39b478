"""`stockade trust`: let a project's policy widen the user's."""

from __future__ import annotations

import argparse
import os
import sys

from stockade.cli.ui import output
from stockade.cli.ui.argument_parser import Parser
from stockade.cli.ui.workspace_choice import confirm
from stockade.errors import NotFoundError, PolicyError
from stockade.linux.user import Caller
from stockade.policy.values import render
from stockade.resolve import trust
from stockade.resolve.config_files import NAMES
from stockade.resolve.discovery import Project, find_project, read_project
from stockade.state import state_dir


def main(argv: list[str]) -> int:
    args = build_parser().parse_args(argv)
    caller = Caller.current()
    state = state_dir(caller.environ, caller.home)
    if args.list:
        rows = [[_standing(path, agreed, caller), path] for path, agreed in trust.recorded(state).items()]
        print(output.table(rows, ["STATE", "FILE"], cut=(1,)) if rows else "nothing is trusted")
    elif args.revoke:
        path = _recorded_path(args.path, caller, state)
        trust.revoke(path, state)
        output.announce(f"{output.name(path)} is no longer trusted")
    else:
        project = _project(args.path, caller)
        print(output.clean(project.data.decode()).rstrip() + "\n")
        found = project.lookups(caller.home, caller.cwd, caller.environ)
        for one in trust.trusted_paths(project, found):
            print(f"{one.key} = {output.name(render(os.fsdecode(one.path)))} is {output.name(str(one))}")
        sys.stdout.flush()
        if not args.yes and sys.stdin.isatty() and not confirm("Trust this policy as it is now?"):
            output.say("nothing was changed")
            return 1
        trust.record(project, found, state)
        print(f"{output.name(project.path)} is trusted as it is now (sha256 {project.hash})")
    return 0


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    parser = Parser(
        prog="stockade trust",
        description="Trust a project's policy file as it is now: it may then ask for more than your own\n"
        "policy allows, and it applies in the directories below it. The trust ends when the file changes,\n"
        "or when a path in it comes to lead elsewhere because a link was added or changed. If the file\n"
        "names its directory as the workspace, that stays agreed when it changes.",
        epilog="example:\n  stockade trust ./stockade.toml",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("path", nargs="?", help="the file or its project; default: the project you are in")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--list", action="store_true", help="list what you trust")
    what.add_argument("--revoke", action="store_true", help="end the trust")
    parser.add_argument(
        "--yes", action="store_true", help="do not ask; without a terminal there is no question"
    )
    return output.add_verbosity(parser)


def _project(path: str | None, caller: Caller) -> Project:
    if path is None:
        found = find_project(caller.cwd, caller.home)
    else:
        found = read_project(_location(path)[0])
        wanted = os.path.basename(path)
        if found is not None and wanted in NAMES and os.path.basename(found.path) != wanted:
            found = None
    if found is None:
        raise NotFoundError(
            f"{path or caller.cwd} has no policy",
            hint=f"write one to {NAMES[0]}, or to [tool.stockade] in {NAMES[1]}; `stockade init` drafts it",
        )
    return found


def _location(path: str) -> tuple[str, list[str]]:
    """Return the real path of the project directory that a path means, and the files it may mean there."""
    if os.path.isdir(path):
        directory, names = path, list(NAMES)
    else:
        directory, name = os.path.split(path)
        names = [name]
    real = os.path.realpath(directory or ".")
    return real, [os.path.join(real, name) for name in names]


def _recorded_path(path: str | None, caller: Caller, state: str) -> str:
    # Compare names only: the file may have been changed, made unreadable or deleted since.
    known = trust.recorded(state)
    for name in _location(path or caller.cwd or ".")[1]:
        if name in known:
            return name
    raise NotFoundError(f"{path or caller.cwd} is not trusted", hint="`stockade trust --list` shows what is")


def _standing(path: str, agreed: trust.TrustRecord, caller: Caller) -> str:
    try:
        project = read_project(os.path.dirname(path))
        if project is None or project.path != path:
            return "gone"
        if project.hash != agreed.hash:
            return "changed"
        if agreed.paths is None:
            return "must be trusted again"
        now = trust.trusted_paths(project, project.lookups(caller.home, caller.cwd, caller.environ))
    except PolicyError:
        return "gone" if not os.path.exists(path) else "changed"
    return "paths changed" if trust.differences(agreed.paths, now) else "trusted"
