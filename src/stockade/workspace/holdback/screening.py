"""Decide which changes of a workspace a commit holds back, and which run at the user's next command.

There may be very many changes, so verdicts are stored like the changes: one for each, in the same order.
"""

from __future__ import annotations

import contextlib
import itertools
import stat
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from stockade.linux import casefold, dirwalk
from stockade.policy import holdback_lookup
from stockade.state.spool import Spool, spool
from stockade.workspace.diff.layer_walk import LayerWalk, PathDifference
from stockade.workspace.holdback import aliases, holdback, project_policy, removals, tracked_repositories
from stockade.workspace.holdback.holdback import HoldBack
from stockade.workspace.holdback.protected_names import ProtectedNames
from stockade.workspace.metadata import Rules
from stockade.workspace.version_control.hook_paths import HookPaths

Value = TypeVar("Value")
#: Why a change is held back: the reason and its detail; empty if it is not.
Verdict = tuple[str, ...]


class Screening(msgspec.Struct):
    """Judges the changes of one walk."""

    root: int
    tree: str
    upper: int
    walk: LayerWalk
    #: Paths of the workspace that the host's version control runs or reads; None until they are searched for.
    _hook_paths: HookPaths | None = None
    #: Paths that the host's files for agents and shells lead to.
    _references: HookPaths = HookPaths()
    #: Whether to search only the repositories above a change.
    _nearby: bool = False
    #: The names that tools have for the workspace itself; None until they are searched for.
    _above: tuple[str, ...] | None = None
    #: By directory: whether git would treat it as a repository.
    _repositories: dict[str, bool] = {}
    #: By directory of the host: whether it ignores the case of names.
    _folding: dict[str, bool | None] = {}

    def refused(self, rules: Rules, *, nearby: bool = False) -> Sequence[Verdict]:
        """Return a verdict for each change, in the order of the changes.

        With `nearby`, only the configuration of repositories above a change counts, so that the cost of a
        diff does not grow with the tree. A commit checks all repositories: it holds back no less.
        """
        self._nearby = nearby
        verdicts: Spool[Verdict] = spool(tuple)
        links = aliases.aliases(self.root, self.tree, self._directories(), self._outer())
        directories: dict[str, Verdict] = {}
        above: dict[str, Verdict | None] = {}
        protect = ProtectedNames(rules.protect)
        for one in self.walk.found:
            verdict = find_upwards(one.directory, above, directories.get)
            if verdict is None:
                reason = holdback.reason_to_hold_back(
                    one, rules, protect, repository=self._repository, folds=self._folds, above=self._outer()
                )
                reason = (
                    reason
                    or self._reached_by_link(one, rules, links)
                    or self._reached_by_configuration(one, rules)
                )
                reason = reason or removals.reason_to_hold_back(
                    self.root, one, rules, links, self._folds, self._outer()
                )
                reason = reason or self._writes_policy(one, rules)
                verdict = (reason.reason, reason.detail) if reason is not None else ()
                if verdict and one.after is not None and stat.S_ISDIR(one.after.st_mode):
                    directories[one.path] = verdict
            verdicts.append(verdict)
        whole = tracked_repositories.repositories_to_hold(
            self.root, self.upper, self.walk.found, verdicts, rules
        )
        return self._with_repositories(whole, verdicts) if whole else verdicts

    def _with_repositories(self, whole: dict[str, str], verdicts: Sequence[Verdict]) -> Sequence[Verdict]:
        """Return the verdicts, with one for every change in repositories that are held back as a whole."""
        found: Spool[Verdict] = spool(tuple)
        for one, verdict in zip(self.walk.found, verdicts, strict=True):
            why = "" if verdict else whole.get(tracked_repositories.repository(one.path), "")
            found.append(("repository", why) if why else verdict)
        return found

    def _reached_by_configuration(self, one: PathDifference, rules: Rules) -> HoldBack | None:
        """Return why a change is held back because the host's own configuration leads to it."""
        goes = removals.removes(one)
        if (one.after is None or stat.S_ISDIR(one.after.st_mode)) and not goes:
            return None
        if rules.allow_exec_config or holdback.allowed(one.path, rules):
            return None
        if self._hook_paths is None:
            self._hook_paths = self._find_hook_paths()
        link = goes or (one.after is not None and stat.S_ISLNK(one.after.st_mode))
        path = f"{self.tree}/{one.path}"
        why = self._hook_paths.why(path, link=link) or self._references.why(path, link=link)
        # Configuration that was not read may lead to any path.
        if not why and self._hook_paths.unread:
            why = f"version control may run it: {self._hook_paths.unread[0]}"
        return HoldBack(one.path, "executes", why) if why else None

    def _writes_policy(self, one: PathDifference, rules: Rules) -> HoldBack | None:
        """Return why a change is held back because it changes the policy of the next run."""
        if rules.allow_exec_config or holdback.allowed(one.path, rules):
            return None
        if not project_policy.differs(self.root, self.upper, one):
            return None
        why = "Stockade reads the policy of the next run from [tool.stockade] in it"
        return HoldBack(one.path, "executes", why)

    def _find_hook_paths(self) -> HookPaths:
        """Find the paths that the host's version control leads to, by nearby or all repositories."""
        from stockade.linux.user import Caller
        from stockade.workspace.holdback.references import references
        from stockade.workspace.version_control.hook_paths import hook_paths, repositories

        caller = Caller.current()
        found = repositories(self.tree, sorted(self._directories()), everywhere=not self._nearby)
        # Directories that the program made contain no file of the host's.
        places = (f"{self.tree}/{place}" for place in self.walk.merged if place)
        self._references = references(self.tree, itertools.chain(places, found.inodes), caller.home)
        followed = hook_paths(found, caller.environ, caller.home)
        cut = (found.cut,) if found.cut else ()
        return msgspec.structs.replace(followed, unread=(*cut, *followed.unread))

    @property
    def unread(self) -> tuple[str, ...]:
        """The host's files that could not be read for the names in them, each with the reason."""
        return self._references.unread

    def _directories(self) -> set[str]:
        """Return the directories that contain changes, and the top of the workspace."""
        places = {""}
        for one in self.walk.found:
            dirwalk.add_above(places, one.directory)
        return places

    def _outer(self) -> tuple[str, ...]:
        if self._above is None:
            self._above = aliases.outer_names(self.tree)
        return self._above

    def _reached_by_link(self, one: PathDifference, rules: Rules, links: aliases.Aliases) -> HoldBack | None:
        """Return why a change is held back because a link of the host's leads a tool to it."""
        if rules.allow_exec_config or one.after is None or holdback.allowed(one.path, rules):
            return None
        for name in links.names_of(one.path, link=stat.S_ISLNK(one.after.st_mode)):
            entry = holdback_lookup.obeyed(name, one.after.st_mode, self._folds, self._outer())
            if entry is not None and not holdback.allowed(name, rules):
                return HoldBack(one.path, "executes", f"{name} leads to it: {entry.why}")
        return None

    def runs(self, one: PathDifference) -> str:
        """Return how a change runs at the user's next command; "" if it does not."""
        mode = None if one.after is None else one.after.st_mode
        entry = None if mode is None else holdback_lookup.runs(one.path, mode, self._folds, self._outer())
        return entry.why if entry is not None else ""

    def _repository(self, path: str) -> bool:
        if path not in self._repositories:
            self._repositories[path] = self._has_head(path)
        return self._repositories[path]

    def _has_head(self, path: str) -> bool:
        for tree, own in ((self.upper, True), (self.root, False)):
            with contextlib.suppress(OSError), dirwalk.listed(tree, path, own=own) as directory:
                if dirwalk.look(directory, "HEAD") is not None:
                    return True
        return False

    def _folds(self, path: str) -> bool:
        """Return whether the host's directory that holds or would hold a path ignores the case of names."""
        found = find_upwards(dirwalk.split(path)[0], self._folding, self._detect_folding)
        return True if found is None else found

    def _detect_folding(self, directory: str) -> bool | None:
        return casefold.folds(self.root, directory) if directory in self.walk.merged else None


def find_upwards(
    directory: str, known: dict[str, Value | None], find: Callable[[str], Value | None]
) -> Value | None:
    """Return what `find` returns for the directory, or else for the nearest one above; cache the answers."""
    asked = []
    while directory not in known and (found := find(directory)) is None and directory:
        asked.append(directory)
        directory = dirwalk.split(directory)[0]
    if directory not in known:
        known[directory] = found
    known |= dict.fromkeys(asked, known[directory])
    return known[directory]
