"""The search for what stays read-only where a program can write for real.

Only a policy that lets a program write needs it: it finds every repository in the writable directories, and
the files there that the host's configuration makes version control run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from stockade.controls import Control
from stockade.errors import PolicyError
from stockade.linux.path_lookup import covers
from stockade.policy.model import REPOSITORIES, Policy, in_repository, is_repository
from stockade.resolve.paths.protected_paths import Repositories, unprotect_flags
from stockade.workspace.version_control.repositories import (
    BARE,
    GIT_OWN,
    RepositorySearch,
    leads,
    outermost,
    search,
)

if TYPE_CHECKING:
    from stockade.linux.user import Caller
    from stockade.resolve.paths.hidden_paths import HiddenPaths
    from stockade.resolve.resolved import Grant
    from stockade.workspace.version_control.hook_paths import HookPaths


#: Each costs a mount.
MOST_REPOSITORIES = 1_000


class WritablePath(NamedTuple):
    """A path that a program can write to for real."""

    path: str
    is_dir: bool
    clause: str
    is_workspace: bool = False


class Survey(NamedTuple):
    """The repositories in and around some writable paths."""

    searched: RepositorySearch
    hook_paths: HookPaths
    wanted: tuple[str, ...]
    """The paths that stay read-only, existing or not, sorted."""


def find(
    policy: Policy, grants: Iterable[Grant], workspace: Grant | None, hidden: HiddenPaths, caller: Caller
) -> Repositories:
    """Search the writable directories, and the files there that the host's configuration names."""
    writable = [
        WritablePath(one.path, one.is_dir, one.clause, one is workspace)
        for one in (*grants, workspace)
        if one is not None and one.access == "write"
    ]
    if not writable:
        return Repositories()
    root = "" if workspace is None else workspace.path
    searched, followed, wanted = _survey(writable, root, policy, caller.environ, caller.home, hidden.covers)
    _refuse_inside(writable, wanted, root)
    if Control.PROTECT not in policy.accept:
        _refuse_cut(searched)
        _refuse_unread(searched, followed)
    inner = [path for path in wanted if _lies_in(path, searched.trees) and not hidden.covers(path)]
    kept = outermost(filter(os.path.lexists, inner))
    _refuse_many(len(kept), searched)
    guessed = {lead.path for lead in followed.leads if not lead.sure}
    guessed -= {lead.path for lead in followed.leads if lead.sure}
    unprotected = _unprotected_paths(policy, root)
    absent = [
        path
        for path in inner
        if path not in guessed
        and not os.path.lexists(path)
        and not any(covers(tree, path) for tree in (*kept, *unprotected))
        # A repository that is not kept is unprotected as a whole, or does not exist itself.
        and not in_repository(path)
    ]
    from stockade.resolve.project_files import note

    return Repositories(searched, followed, kept, tuple(absent), note(searched))


def _survey(
    writable: list[WritablePath],
    root: str,
    policy: Policy,
    environ: Mapping[str, str],
    home: str,
    hides: Callable[[str], bool] = lambda _: False,
) -> Survey:
    from stockade.workspace.version_control.hook_paths import hook_paths

    unprotected = _unprotected_paths(policy, root)
    unprotected |= {one.path for one in writable if not one.is_workspace and in_repository(one.path)}
    # If the policy accepts a weaker wall, changes in repositories are listed, which needs their state before.
    into = None if Control.PROTECT in policy.accept else unprotected
    searched = search((one.path for one in writable if one.is_dir), into, root)
    # Checked before each is read and compared: an earlier run may have made very many.
    _refuse_many(sum(path not in unprotected and not hides(path) for path in searched.found), searched)
    above = {path for one in writable for path in _repositories_above(one)}
    # Directories around a writable path count too, so search all that leads into the same top directories.
    tops = outermost("/" + one.path.split("/")[1] for one in writable)
    around = (*searched.found, *sorted(above, reverse=True))
    followed = hook_paths(msgspec.structs.replace(searched, trees=tops, found=around), environ, home)
    # A .git file may lead to a directory of any name, also in another writable grant.
    led = {other for path in (*around, *_names(root)) for other in leads(path)}
    for lead in followed.leads:
        # A word of a command need not be a path: if it leads through a link, its changes are only listed.
        if lead.sure or os.path.realpath(lead.path) == lead.path:
            led.add(lead.path)
    led.update(path for path in above if not is_repository(os.path.basename(path)))
    led.update(_own_repository(one.path) for one in writable if one.is_workspace and in_repository(one.path))
    # A repository that is itself a grant is not among those found in it.
    given_up = {path for path in unprotected if path in searched.found or path in led}
    given_up |= {path for path in unprotected if is_repository(os.path.basename(path))}
    wanted = {path for path in searched.found if path not in unprotected}
    wanted |= {path for path in led - unprotected if not any(covers(tree, path) for tree in given_up)}
    return Survey(searched, followed, tuple(sorted(wanted)))


def _unprotected_paths(policy: Policy, root: str) -> set[str]:
    """The paths that `unprotect` names; without a workspace only absolute ones."""
    return {os.path.join(root, name) for name in policy.unprotected() if root or name.startswith("/")}


def _names(root: str) -> list[str]:
    return [f"{root}/{name}" for name in REPOSITORIES] if root else []


def _own_repository(path: str) -> str:
    """The repository that a path is, or lies in, by its name."""
    parts = path.split("/")
    last = max(number for number, part in enumerate(parts) if is_repository(part))
    return "/".join(parts[: last + 1])


def _repositories_above(one: WritablePath) -> Iterator[str]:
    """The repositories that tools find above a path, and bare ones around it, known by their content."""
    place = one.path if one.is_dir else os.path.dirname(one.path)
    while True:
        own = [path for path in _names(place) if os.path.lexists(path)]
        if place != one.path:
            yield from own
        if not own and _is_bare(place) and not in_repository(place):
            yield place
        if place == "/":
            return
        place = os.path.dirname(place)


def _is_bare(directory: str) -> bool:
    return all(os.path.lexists(f"{directory}/{name}") for name in BARE)


def _decides(path: str, inner: str) -> bool:
    """Whether version control obeys what is at `inner` because it obeys `path`."""
    if not covers(path, inner):
        return False
    if path == inner or in_repository(path) or not _is_bare(path):
        return True
    return inner[len(path) + 1 :].split("/", 1)[0] in GIT_OWN


def _refuse_cut(searched: RepositorySearch) -> None:
    if searched.cut:
        raise PolicyError(
            f"the search for repositories in writable directories is incomplete: {searched.cut}",
            hint='use workspace.mode = "overlay", or let the program write to a smaller directory, or, if it '
            'may change the repositories there, write accept = ["protect"]',
        )


def _refuse_inside(writable: Iterable[WritablePath], wanted: Iterable[str], root: str) -> None:
    """Refuse a writable path that is, or lies in, a path that must stay read-only."""
    for one in writable:
        named = in_repository(one.path) and not one.is_workspace
        for path in wanted:
            if not _decides(path, one.path) or (named and in_repository(path)):
                continue
            instead = 'use workspace.mode = "overlay"' if one.is_workspace else "grant the paths beside it"
            raise PolicyError(
                f"{one.clause}: version control runs or obeys files in {path}",
                hint=f"{instead}, or, if the program may change it, add {unprotect_flags([path], root)}",
            )


def beyond(asked: Policy, allowed: Policy, environ: Mapping[str, str], home: str) -> list[str]:
    """Describe what stays read-only under `allowed` and would be writable under `asked`.

    Both have real names. A policy that grants fewer directories is searched less, so it could grant a file
    that the configuration of a repository elsewhere makes version control run.
    """
    mine, theirs = _writable_by(asked), _writable_by(allowed)
    if {one.path for one in mine} == {one.path for one in theirs} and _root(asked) == _root(allowed):
        return []
    found = []
    had = _survey(theirs, _root(allowed), allowed, environ, home) if mine and theirs else None
    if had is not None:
        own = _survey(mine, _root(asked), asked, environ, home).wanted
        _refuse_cut(had.searched)
        for path in had.wanted:
            if any(
                _decides(path, one.path)
                or (covers(one.path, path) and not any(covers(other, path) for other in own))
                for one in mine
            ):
                found.append(f"write {path}, which version control runs or obeys")
    return found


def _root(policy: Policy) -> str:
    return "" if policy.workspace is None else policy.workspace.path.replace("$$", "$")


def _writable_by(policy: Policy) -> list[WritablePath]:
    paths = [path.removesuffix("?").replace("$$", "$") for path in policy.write]
    found = [WritablePath(path, os.path.isdir(path), "") for path in paths if os.path.lexists(path)]
    if policy.workspace is not None and policy.workspace.mode == "rw":
        found.append(WritablePath(_root(policy), True, "", True))
    return found


def _refuse_unread(searched: RepositorySearch, followed: HookPaths) -> None:
    if followed.unread:
        raise PolicyError(
            f"cannot keep read-only what version control runs in {', '.join(searched.trees)}: "
            f"{followed.unread[0]}",
            hint='use `--mode overlay` (workspace.mode = "overlay"), or a directory with less in it',
        )


def _refuse_many(count: int, searched: RepositorySearch) -> None:
    if count > MOST_REPOSITORIES:
        raise PolicyError(
            f"{', '.join(searched.trees)} contains {count} repositories, more than {MOST_REPOSITORIES}",
            hint='use `--mode overlay` (workspace.mode = "overlay"), or a directory with fewer of them',
        )


def _lies_in(path: str, trees: Iterable[str]) -> bool:
    return any(path.startswith(tree + "/") for tree in trees)
