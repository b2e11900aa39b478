"""Hold-backs: files that programs of the host run or obey, and files that the policy protects.

The program chose every name and every byte. Some files take effect as soon as they exist, without a command
that names them: a hook, an editor's tasks, an agent's instructions. A commit holds those back until the user
agrees. Others run at the user's next command, such as a Makefile: the commit includes them, and lists them
first with the reason. `holdback_table` names both; the policy adds to the first group with `hold_back` and
removes from it with `allow_commit`. A commit always holds back what the policy protects. It leaves out
caches of compiled code without a note for each file: their tool rebuilds them.

A pattern is a path of one or more names. It matches wherever these names are the end of a path. With a slash
at its end it matches everything in a directory; with one at its beginning it counts from the top of the
workspace. `*` stands for a part of a name, `**` for any number of names, `{a,b}` for either. Names match in
every spelling that some file system treats as the same name.
"""

from __future__ import annotations

import functools
import os
import stat
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from stockade.policy.holdback_lookup import Folds, cached, fits, obeyed, spelled, spelled_names
from stockade.workspace.holdback.protected_names import ProtectedNames
from stockade.workspace.metadata import Rules

TYPE_CHECKING = False
if TYPE_CHECKING:
    from stockade.workspace.diff.layer_walk import PathDifference

#: The layer keeps held-back files, except for caches: their tool rebuilds them.
Reason = Literal["protected", "executes", "special", "repository", "cache"]

#: Names that git reads in a directory that it treats as a repository.
GIT = frozenset({"hooks", "config", "config.worktree", "commondir", "gitdir"})
#: Directories with the data of version control systems, as the end of a pattern.
REPOSITORIES = ((".git",), (".hg",), (".sl",), (".jj",))
#: The rules of a policy without patterns.
NOTHING_SAID = Rules()


class HoldBack(msgspec.Struct, frozen=True):
    """One path that a commit held back, and why."""

    path: str
    reason: Reason
    detail: str


@functools.lru_cache(maxsize=64)
def _split_patterns(patterns: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Split a policy's patterns into names: they count from the top, and include what is below them."""
    return [(*filter(None, pattern.split("/")), "**") for pattern in patterns]


def reason_to_hold_back(
    found: PathDifference,
    rules: Rules,
    protect: ProtectedNames,
    *,
    repository: Callable[[str], bool] = lambda path: False,
    folds: Folds = lambda path: True,
    above: Sequence[str] = (),
) -> HoldBack | None:
    """Return why a change is held back, or None.

    `protect` indexes the rules' protected names; `repository` says whether a directory has a git HEAD in it,
    `folds` whether the file system at a path ignores the case of names; `above` are the names of the
    workspace itself that count.
    """
    path = found.path
    if path and (wanted := protect.touched(path, goes=found.kind == "deleted" or "type" in found.what)):
        return HoldBack(path, "protected", f"the policy protects {wanted}")
    if found.after is None:
        return None
    if what := special(found.after.st_mode):
        return HoldBack(path, "special", f"it is {what}")
    if allowed(path, rules):
        return None
    why = executes(path, found.after.st_mode, repository, rules=rules, folds=folds, above=above)
    if why:
        return None if rules.allow_exec_config else HoldBack(path, "executes", why)
    # Agreeing to files by name does not include caches, which were not named.
    entry = cached(path, found.after.st_mode, folds)
    return HoldBack(path, "cache", entry.why) if entry is not None else None


def allowed(path: str, rules: Rules) -> bool:
    """Return whether the policy or the user lets a commit include a path although tools obey it.

    A pattern that names a repository's own directory is for `may_split`: files that git obeys in there, or a
    `.git` that leads elsewhere, need a pattern of their own.
    """
    patterns = [one for one in _split_patterns(tuple(rules.allow)) if one[-2:-1] not in REPOSITORIES]
    names = path.split("/") if patterns else ()
    return any(fits(pattern, names) for pattern in patterns)


def may_split(repository: str, rules: Rules) -> bool:
    """Return whether the policy or the user agrees to commit a repository without files that it names."""
    names = repository.split("/")
    return any(fits(pattern, names) for pattern in _split_patterns(tuple(rules.allow)))


def executes(
    path: str,
    mode: int,
    repository: Callable[[str], bool],
    *,
    rules: Rules = NOTHING_SAID,
    folds: Folds = lambda path: True,
    above: Sequence[str] = (),
) -> str:
    """Return why the host would run or obey a file, or "". It never runs a directory as such."""
    if stat.S_ISDIR(mode):
        return ""
    names = spelled_names(path)
    for pattern in _split_patterns(tuple(map(spelled, rules.hold_back))):
        if fits(pattern, names):
            return f"the policy holds it back: {'/'.join(pattern[:-1])}"
    if (entry := obeyed(path, mode, folds, above)) is not None:
        return entry.why
    if ".git" in names:
        return ""
    for place, name in enumerate(names):
        if name in GIT and repository("/".join(path.split("/")[:place])):
            return "git treats the directory as a repository, and obeys this file"
    if names[-1] == "head" and (path.endswith("HEAD") or folds(path)):
        # The configuration may have been committed earlier, when git ignored it.
        return "it makes git treat the directory as a repository, and obey the files in it"
    return ""


def special(mode: int) -> str:
    """Describe a file that is neither a regular file nor a directory nor a link; "" for those."""
    kinds = {
        stat.S_IFSOCK: "a socket",
        stat.S_IFIFO: "a pipe",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
    }
    return kinds.get(stat.S_IFMT(mode), "")


def leads_out(path: str, target: str) -> bool:
    """Return whether a link at a path of the workspace leads out of it, judging by its text alone."""
    if target.startswith("/"):
        return True
    return os.path.normpath(os.path.join(os.path.dirname(path), target)).split("/")[0] == ".."


def covers(tree: str, path: str) -> bool:
    """Return whether the path is the tree or in it; both are relative to the workspace, itself "" or "."."""
    return tree in ("", ".") or path == tree or path.startswith(tree + "/")
