"""`stockade purge`: remove everything that Stockade keeps."""

from __future__ import annotations

import argparse
import contextlib
import os
from typing import NamedTuple

from stockade import state
from stockade.cli.ui import output
from stockade.cli.ui.argument_parser import Parser
from stockade.cli.ui.formats import print_json, size
from stockade.cli.ui.workspace_choice import confirm_removal
from stockade.errors import NotFoundError, SetupError, StockadeError
from stockade.linux import dirwalk, foreign_files
from stockade.linux.user import Caller
from stockade.resolve.config_files import config_dir
from stockade.runs import cgroup
from stockade.runs.register import register, sandbox_record
from stockade.sandbox.workspace import Workspace
from stockade.workspace import metadata, overlay
from stockade.workspace.usage import disk_usage


class StateItem(NamedTuple):
    """Something in the state directory."""

    name: str
    what: str
    bytes: int


def main(argv: list[str]) -> int:
    """List what would be removed, ask, and remove it."""
    args = build_parser().parse_args(argv)
    caller = Caller.current()
    home = state.state_dir(caller.environ, caller.home)
    if not os.path.lexists(home):
        print_json({"state": home, "removed": [], "left": []}) if args.json else print(
            f"nothing to remove: {output.name(home)} does not exist"
        )
        return 0
    state.check(home)
    if not os.path.lexists(f"{home}/schema"):
        raise SetupError(
            f"{output.name(home)} is not a state directory of Stockade: it has no `schema` file",
            stage="purge",
            hint="remove it yourself if you do not need it",
        )
    state.ensure(home)  # upgrades a directory of an older version, whose entries have other names
    _refuse_living(home)
    found, foreign = _contents(home)
    for one in found:
        output.say(f"{size(one.bytes):>6}  {one.name:<16}  {one.what}")
    for name in foreign:
        output.say(f"not Stockade's, stays: {output.name(os.path.join(home, name))}")
    if not args.yes and not confirm_removal(f"Remove all of this from {output.name(home)}?", "everything"):
        output.say("nothing was removed")
        return 1
    left = _remove(home, [one.name for one in found])
    if args.json:
        print_json({"state": home, "removed": [one.name for one in found], "left": [*left, *foreign]})
    elif not left:
        output.announce(f"removed Stockade's state from {output.name(home)}")
    config = config_dir(caller.environ, caller.home)
    if os.path.isdir(config):
        output.say(f"your own policy stays: {output.name(config)}")
    return 1 if left else 0


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    parser = Parser(
        prog="stockade purge",
        description="Remove everything that Stockade keeps for you, including uncommitted changes:\n"
        "workspaces with their snapshots, receipts and the keys that signed them, the log of runs,\n"
        "spill files, trust and caches. Your own policy file and your projects are not touched. Stockade\n"
        "refuses while one of your sandboxes or `stockade serve` runs.",
        epilog="example:\n  stockade purge --yes && pip uninstall stockade",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return output.add_verbosity(parser)


def _refuse_living(home: str) -> None:
    register.sweep(home)
    if living := register.living(home):
        ids = ", ".join(one.id for one in living[:5]) + (" …" if len(living) > 5 else "")
        raise SetupError(
            f"{len(living)} sandbox{'es' if len(living) > 1 else ''} still running: {ids}",
            stage="purge",
            hint="wait, or end them: stockade kill --all",
        )
    from stockade.server.directory import how_to_end, is_serving

    if is_serving(home):
        raise SetupError(
            f"a server runs with {output.name(home)}, and would lose its keys",
            stage="purge",
            hint=how_to_end(home),
        )
    for workspace in Workspace.list(home):
        if workspace.in_use():
            raise SetupError(
                f"workspace {workspace.id} of {output.name(workspace.path)} is in use",
                stage="purge",
                hint="wait until its run or command has ended",
            )


def _contents(home: str) -> tuple[list[StateItem], list[str]]:
    """Return Stockade's entries of the state directory, in the order of removal, and all other names."""
    names = sorted(os.listdir(home))
    found = [
        StateItem(name, what, os.lstat(f"{home}/{name}").st_blocks * 512 + disk_usage(f"{home}/{name}").bytes)
        for entry, what in state.ENTRIES.items()
        for name in names
        if name == entry or (name.startswith(f"{entry}.") and name not in state.ENTRIES)
    ]
    known = {one.name for one in found}
    return found, [name for name in names if name not in known]


def _remove(home: str, names: list[str]) -> list[str]:
    """Remove these entries; report and return those that had to stay."""
    left: list[str] = []
    place = os.open(home, dirwalk.DIRECTORY)
    try:
        for name in names:
            if name == "workspaces":
                _remove_workspaces(home)
            elif name == sandbox_record.RUN:
                _remove_register(place)
            else:
                foreign_files.remove(place, name)
                continue
            try:
                os.rmdir(name, dir_fd=place)
            except OSError:
                left.append(name)
                output.error(f"{name} has just come into use, and stays", hint="run `stockade purge` again")
    finally:
        os.close(place)
    with contextlib.suppress(OSError):  # it holds files that are not Stockade's
        os.rmdir(home)
    return left


def _remove_workspaces(home: str) -> None:
    """Lock and remove each workspace: a sandbox that has begun meanwhile keeps its own."""
    for name in os.listdir(f"{home}/workspaces"):
        path = f"{home}/workspaces/{name}"
        try:
            Workspace(path).discard()
        except NotFoundError:
            continue
        except (StockadeError, OSError) as error:
            if isinstance(error, metadata.InUseError):
                continue
            # Its record is damaged, so no interrupted commit can be recovered: remove it as it is.
            with contextlib.suppress(StockadeError), metadata.held(path, name):
                overlay.remove(path)


def _remove_register(place: int) -> None:
    """Remove the register's directories of processes that have no sandbox, and their idle cgroups."""
    run = os.open(sandbox_record.RUN, dirwalk.DIRECTORY, dir_fd=place)
    try:
        for name, directory in sandbox_record.directories(run):
            found, damaged = sandbox_record.read_all(directory)
            if not damaged and all(one.idle and cgroup.remove_empty(one.groups) for one in found):
                dirwalk.remove(run, name)
    finally:
        os.close(run)
