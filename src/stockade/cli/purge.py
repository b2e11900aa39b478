"""`stockade purge`: remove everything that Stockade keeps."""

from __future__ import annotations

import argparse
import contextlib
import os
from typing import NamedTuple

from stockade import state
from stockade.cli import output
from stockade.cli.options import Parser
from stockade.cli.workspaces import agreed, print_json, size, weight
from stockade.errors import NotFoundError, SetupError, StockadeError
from stockade.policy import Caller
from stockade.policy.load import config_dir
from stockade.sandbox import records, register
from stockade.workspace import descend, layers, record
from stockade.workspace.workspace import Workspace


class Kept(NamedTuple):
    """Something in the state directory."""

    name: str
    what: str
    bytes: int


def main(argv: list[str]) -> int:
    """Say what would go, ask, and remove it."""
    args = parser().parse_args(argv)
    caller = Caller.current()
    home = state.state_dir(caller.environ, caller.home)
    if not os.path.lexists(home):
        print_json({"state": home, "removed": [], "left": []}) if args.json else print(f"there is no {home}")
        return 0
    state.check(home)
    if not os.path.lexists(f"{home}/schema"):
        raise SetupError(
            f"{output.name(home)} is no state of Stockade's: there is no `schema` in it",
            stage="purge",
            hint="remove it yourself if it is to go",
        )
    state.ensure(home)  # one of an older version is brought up to date: what is in it has other names
    _refuse_living(home)
    found, foreign = _contents(home)
    for one in found:
        output.say(f"{size(one.bytes):>6}  {one.name:<12}  {one.what}")
    for name in foreign:
        output.say(f"not Stockade's, and left as it is: {output.name(os.path.join(home, name))}")
    if not args.yes and not agreed(f"Remove all of this from {output.name(home)}?", "everything"):
        output.say("nothing was removed")
        return 1
    left = _remove(home, [one.name for one in found])
    if args.json:
        print_json({"state": home, "removed": [one.name for one in found], "left": [*left, *foreign]})
    elif not left:
        print(f"Stockade's state is gone from {output.name(home)}")
    config = config_dir(caller.environ, caller.home)
    if os.path.isdir(config):
        output.say(f"your own policy stays: {output.name(config)}")
    return 1 if left else 0


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    made = Parser(
        prog="stockade purge",
        description="Remove everything that Stockade keeps for you, also changes that were not committed:\n"
        "workspaces with their snapshots, receipts and the keys that signed them, the log of runs,\n"
        "output, trust and caches. Your own policy file and your projects are not touched. It is refused\n"
        "while a sandbox of yours runs.",
        epilog="example:\n  stockade purge --yes && pip uninstall stockade",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--yes", action="store_true", help="do not ask")
    made.add_argument("--json", action="store_true", help="print JSON")
    return output.with_manners(made)


def _refuse_living(home: str) -> None:
    register.sweep(home)
    if living := register.living(home):
        ids = ", ".join(one.id for one in living[:5]) + (" …" if len(living) > 5 else "")
        raise SetupError(
            f"{len(living)} sandbox{'es' if len(living) > 1 else ''} still running: {ids}",
            stage="purge",
            hint="wait, or end them: stockade kill --all",
        )
    for workspace in Workspace.list(home):
        if workspace.in_use():
            raise SetupError(
                f"workspace {workspace.id} of {output.name(workspace.path)} is in use",
                stage="purge",
                hint="wait until it is not",
            )


def _contents(home: str) -> tuple[list[Kept], list[str]]:
    """What is Stockade's in the state directory, in the order in which it goes, and what is not."""
    names = sorted(os.listdir(home))
    found = [
        Kept(name, what, os.lstat(f"{home}/{name}").st_blocks * 512 + weight(f"{home}/{name}"))
        for entry, what in state.ENTRIES.items()
        for name in names
        if name == entry or (name.startswith(f"{entry}.") and name not in state.ENTRIES)
    ]
    known = {one.name for one in found}
    return found, [name for name in names if name not in known]


def _remove(home: str, names: list[str]) -> list[str]:
    """Remove these; what had to stay, and why, is said."""
    left: list[str] = []
    place = os.open(home, descend.DIRECTORY)
    try:
        for name in names:
            if name == "workspaces":
                _remove_workspaces(home)
            elif name == records.RUN:
                _remove_register(place)
            else:
                descend.remove(place, name)
                continue
            try:
                os.rmdir(name, dir_fd=place)
            except OSError:
                left.append(name)
                output.error(f"{name} is in use since a moment ago, and stays", hint="run it again")
    finally:
        os.close(place)
    with contextlib.suppress(OSError):  # what is not ours is in it
        os.rmdir(home)
    return left


def _remove_workspaces(home: str) -> None:
    """Each is taken before it goes: a sandbox that has begun meanwhile keeps its own."""
    for name in os.listdir(f"{home}/workspaces"):
        path = f"{home}/workspaces/{name}"
        try:
            Workspace(path).discard()
        except NotFoundError:
            continue
        except (StockadeError, OSError) as error:
            if isinstance(error, record.InUseError):
                continue
            # Its record is damaged: nothing can be brought to an end, and nothing is kept.
            with contextlib.suppress(StockadeError), record.held(path, name):
                layers.remove(path)


def _remove_register(place: int) -> None:
    """What is left of processes that have no sandbox."""
    run = os.open(records.RUN, descend.DIRECTORY, dir_fd=place)
    try:
        for name, directory in records.directories(run):
            if not any(file.endswith(".json") for file in os.listdir(directory)):
                descend.remove(run, name)
    finally:
        os.close(run)
