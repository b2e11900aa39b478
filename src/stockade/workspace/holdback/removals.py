"""Changes that remove a restriction on a tool of the host's.

A commit holds back a change that empties `.npmrc`. Removing the file, replacing it by a directory, or closing
its directory has the same effect: npm runs scripts again. Removing it together with everything that it
governs lifts no restriction: `rm -r app` removes app/.npmrc too, and a commit allows that.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence

from stockade.linux import dirwalk
from stockade.policy import holdback_lookup
from stockade.policy.holdback_lookup import Folds
from stockade.workspace.diff.layer_walk import PathDifference
from stockade.workspace.holdback import holdback
from stockade.workspace.holdback.aliases import Aliases
from stockade.workspace.holdback.holdback import HoldBack
from stockade.workspace.metadata import Rules

#: How many entries of a removed directory to check; a commit holds back the removal of a larger one.
MOST_ENTRIES = 10_000
#: The permissions that an owner needs to list a directory.
OPEN = stat.S_IRUSR | stat.S_IXUSR


def removes(one: PathDifference) -> bool:
    """Return whether a change removes or replaces something of the host's, or closes a directory."""
    if one.before is None:
        return False
    if one.after is None or "type" in one.what:
        return True
    return stat.S_ISDIR(one.after.st_mode) and bool(one.before.st_mode & ~one.after.st_mode & OPEN)


def reason_to_hold_back(
    root: int, one: PathDifference, rules: Rules, links: Aliases, folds: Folds, above: Sequence[str] = ()
) -> HoldBack | None:
    """Return why a removal is held back, or None. `above` are names of the workspace itself."""
    if rules.allow_exec_config or not removes(one) or holdback.allowed(one.path, rules):
        return None
    assert one.before is not None
    mode = one.before.st_mode
    for name in (one.path, *links.names_of(one.path, link=False)):
        if not holdback.allowed(name, rules) and (
            entry := holdback_lookup.restricts(name, mode, folds, above)
        ):
            return _hold_back(one, "", entry.why)
    if not stat.S_ISDIR(mode) or not holdback_lookup.begins(one.path):
        return None
    left = MOST_ENTRIES
    for inner in _inside(root, one.path):
        left -= 1
        if left < 0:
            return _hold_back(one, "more files than are checked", "tools may obey some of them")
        # A file that counts even without the directory's name governs nothing outside of the directory.
        entry = holdback_lookup.restricts(inner, stat.S_IFREG, folds, above)
        alone = holdback_lookup.restricts(inner[len(one.path) + 1 :], stat.S_IFREG, folds)
        if entry is not None and alone is None and not holdback.allowed(inner, rules):
            return _hold_back(one, inner, entry.why)
    return None


def _hold_back(one: PathDifference, along: str, why: str) -> HoldBack:
    what = "its removal" if one.after is None or "type" in one.what else "closing it"
    does = f"affects {along}" if along else "may lift a restriction"
    return HoldBack(one.path, "executes", f"{what} {does}: {why}")


def _inside(root: int, top: str) -> Iterator[str]:
    """Yield everything in a directory of the host except packages; unreadable directories are skipped."""
    pending = [top]
    while pending:
        directory = pending.pop()
        try:
            with dirwalk.listed(root, directory) as opened, os.scandir(opened) as entries:
                for entry in entries:
                    path = f"{directory}/{entry.name}"
                    if entry.is_dir(follow_symlinks=False) and entry.name not in holdback_lookup.PACKAGES:
                        pending.append(path)
                    yield path
        except OSError:
            continue
