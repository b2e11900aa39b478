"""`stockade trust`: let a project's own policy widen the user's."""

from __future__ import annotations

import argparse
import os

from stockade.cli import output
from stockade.cli.options import Parser
from stockade.errors import NotFoundError
from stockade.policy import Caller, trust
from stockade.policy.load import NAMES, Project, find_project, read_project
from stockade.state import state_dir


def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    caller = Caller.current()
    state = state_dir(caller.environ, caller.home)
    if args.list:
        rows = [[_standing(path, digest), path] for path, digest in trust.recorded(state).items()]
        print(output.table(rows, ["STATE", "FILE"], cut=(1,)) if rows else "nothing is trusted")
    elif args.revoke:
        path = _recorded(args.path, caller, state)
        trust.revoke(path, state)
        print(f"{output.name(path)} is no longer trusted")
    else:
        project = _project(args.path, caller)
        print(output.clean(project.data.decode()).rstrip() + "\n")
        trust.record(project, state)
        print(f"{output.name(project.path)} is trusted as it is now (sha256 {project.hash})")
    return 0


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    made = Parser(
        prog="stockade trust",
        description="Agree to a project's policy file as it is now: it may then ask for more than your own\n"
        "policy allows. Any change to the file ends the agreement.",
        epilog="example:\n  stockade trust ./stockade.toml",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("path", nargs="?", help="the file or its project; without it, the project you are in")
    what = made.add_mutually_exclusive_group()
    what.add_argument("--list", action="store_true", help="list what you have agreed to")
    what.add_argument("--revoke", action="store_true", help="take the agreement back")
    return output.with_manners(made)


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
            f"there is no policy in {path or caller.cwd}",
            hint=f"a project's policy is {NAMES[0]}, or [tool.stockade] in {NAMES[1]}",
        )
    return found


def _location(path: str) -> tuple[str, list[str]]:
    """The project directory that a path means, by its real name, and the files it may mean there."""
    if os.path.isdir(path):
        directory, names = path, list(NAMES)
    else:
        directory, name = os.path.split(path)
        names = [name]
    real = os.path.realpath(directory or ".")
    return real, [os.path.join(real, name) for name in names]


def _recorded(path: str | None, caller: Caller, state: str) -> str:
    # By name only: the file may have changed, become unreadable or gone since.
    known = trust.recorded(state)
    for name in _location(path or caller.cwd or ".")[1]:
        if name in known:
            return name
    raise NotFoundError(f"{path or caller.cwd} is not trusted", hint="`stockade trust --list` shows what is")


def _standing(path: str, digest: str) -> str:
    import hashlib

    from stockade.errors import PolicyError
    from stockade.policy.load import read_file

    try:
        same = hashlib.sha256(read_file(path)).hexdigest() == digest
    except PolicyError:
        return "gone"
    return "trusted" if same else "changed"
