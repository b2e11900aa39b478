"""What stays read-only where a program can write for real.

Three kinds: the paths that the policy protects, every repository that exists
when the run starts, and the files that the host's configuration makes version
control run. A backend puts a read-only mount over each. A path that does not
exist cannot be covered: a policy whose protected path is absent is refused,
and a repository that the program makes is listed after the run (see
`runs.handoffs`). A writable directory that lies in a protected one is refused.
`unprotect` lifts the protection, and so does a `write` with `.git` or the like
in its path; no other `write` does, because its text does not show what version
control runs there.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING

import msgspec

from stockade.controls import Control
from stockade.errors import PolicyError, typed
from stockade.linux.path_lookup import covers
from stockade.policy.model import Policy, is_repository
from stockade.policy.values import quote_protected

if TYPE_CHECKING:
    from stockade.resolve.project_files import ProjectFiles
    from stockade.resolve.resolved import Grant, ResolvedPolicy
    from stockade.workspace.version_control.hook_paths import HookPaths
    from stockade.workspace.version_control.repositories import RepositorySearch

#: The command of each version control system, which runs what it finds there.
TOOLS = {".git": "git", ".hg": "hg", ".jj": "jj", ".sl": "sl"}


class Repositories(msgspec.Struct, frozen=True):
    """The repositories in directories that a program can write to for real."""

    #: None if nothing is writable, like `hook_paths`.
    searched: RepositorySearch | None = None
    #: The files there that the host's configuration makes version control run.
    hook_paths: HookPaths | None = None
    kept: tuple[str, ...] = ()
    """The absolute paths that stay read-only, none of them inside another.

    Repositories, and what the host's configuration names, without what `unprotect` names.
    """
    absent: tuple[str, ...] = ()
    """Paths that would stay read-only but do not exist."""
    project_files: ProjectFiles | None = None
    """The files that decide the policy of the next run there."""

    @property
    def trees(self) -> tuple[str, ...]:
        """The directories that a program can write to for real."""
        return () if self.searched is None else self.searched.trees


def policy_paths(policy: Policy, workspace: Grant | None) -> tuple[tuple[str, bool], ...]:
    """Return the paths that the policy protects, and whether each exists."""
    if workspace is None:
        return ()
    return tuple((path, _exists(path, workspace.fd)) for path in policy.protected())


def _exists(path: str, directory: int) -> bool:
    try:
        os.stat(path, dir_fd=directory, follow_symlinks=False)
    except OSError:
        return False
    return True


def covered(resolved: ResolvedPolicy, *, besides: Iterable[str] = ()) -> tuple[str, ...]:
    """Return the paths that get a read-only mount; raise a PolicyError that names those that cannot.

    `besides` are base names that get one in an overlay as well, where changes would not land. Nothing can be
    mounted over a link: in an overlay its change stays in the layer, and a commit holds it back.
    """
    workspace = resolved.workspace
    kept = resolved.repositories.kept
    _refuse_links(kept, resolved)
    root = "" if workspace is None else workspace.path
    is_overlay = workspace is not None and workspace.access == "overlay"
    writable = [grant.path for grant in _shown(resolved) if grant.access == "write"]
    absent = list(resolved.repositories.absent)
    names: list[str] = []
    for name, exists in resolved.protected:
        path = f"{root}/{name}"
        if resolved.hidden.covers(path) or any(covers(tree, path) for tree in kept):
            continue
        if any(covers(tree, path) for tree in writable):
            if exists:
                names.append(path)
            elif not _in_absent_repository(root, name):
                absent.append(path)
        elif exists and is_overlay and os.path.basename(name) in besides and os.path.realpath(path) == path:
            names.append(path)
    if absent:
        raise PolicyError(
            f"a program could create these protected paths, which do not exist: {', '.join(absent)}",
            hint=f"if it may, add {unprotect_flags(absent, root)}; if not, create them, or use "
            '`--mode overlay` (workspace.mode = "overlay") without a write grant there',
        )
    _refuse_links(names, resolved)
    return (*kept, *names)


def unprotect_flags(paths: Iterable[str], root: str) -> str:
    """Return the flags that unprotect the paths; those of the workspace are relative to it."""
    return _flags_of(
        path[len(root) + 1 :] if root and path.startswith(root + "/") else path for path in paths
    )


def _flags_of(names: Iterable[str]) -> str:
    """Return the flags that unprotect the names."""
    return " ".join(f"--unprotect {typed(quote_protected(name))}" for name in names)


def refuse_repositories(resolved: ResolvedPolicy, backend: str) -> None:
    """Refuse writable repositories for a backend that cannot mount, unless the policy unprotects them."""
    found = (*resolved.repositories.kept, *resolved.repositories.absent)
    if not found:
        return
    root = "" if resolved.workspace is None else resolved.workspace.path
    raise PolicyError(
        f"{found[0]} is in a writable directory, and the {backend} backend cannot keep it read-only",
        hint='use a backend that mounts, or accept = ["protect"], or let the program write it: '
        f"{unprotect_flags(found, root)}",
    )


def _refuse_links(paths: Iterable[str], resolved: ResolvedPolicy) -> None:
    for path in paths:
        if os.path.realpath(path) == path:
            continue
        root = "" if resolved.workspace is None else resolved.workspace.path
        change = "if the program may change it"
        if path.endswith(".toml"):  # a run never gives up the policy that it comes from
            target = typed(os.path.realpath(path))
            change = f"if it is the policy of this run, name its target: -p {target}; otherwise, {change}"
        raise PolicyError(
            f"{path} cannot be protected: it is a link or lies behind one, which the program could replace",
            hint='use `--mode overlay` (workspace.mode = "overlay"); '
            f"{change}: {unprotect_flags([path], root)}",
        )


def _in_absent_repository(root: str, name: str) -> bool:
    """Whether a protected name lies in a repository that does not exist; one made later is listed."""
    parts = name.split("/")
    return any(
        is_repository(part) and not os.path.lexists(os.path.join(root, *parts[: number + 1]))
        for number, part in enumerate(parts[:-1])
    )


def guards(policy: Policy, path: str) -> bool:
    """Whether the policy protects a path of the workspace: by its name, or as a repository."""
    name = os.path.normpath(path)
    near = (covers(name, one) or covers(one, name) for one in policy.protect)
    return any(near) or any(map(is_repository, name.split("/")))


@lru_cache(maxsize=64)
def warnings(policy: Policy, uncovered_by: str = "") -> tuple[str, ...]:
    """Warnings about clauses that let the program write files that a version control system runs.

    `uncovered_by` names a backend that cannot keep anything read-only where a program may write.
    """
    wide: dict[str, str] = {}
    mode = "" if policy.workspace is None else policy.workspace.mode
    unprotected = [path for path in policy.unprotected() if mode == "rw" or path.startswith("/")]
    for key, paths in (("write", policy.write), ("unprotect", unprotected)):
        for path in paths:
            parts = os.path.normpath(path.removesuffix("?")).split("/")
            if repository := next((part for part in parts if is_repository(part)), ""):
                wide[f"{key} = {path}"] = TOOLS[repository.lower()]
    found = [
        f"{clause}: {tool} runs what the program leaves there (hooks, commands of its configuration) with "
        f"all your rights: check it before you use {tool} in that repository again"
        for clause, tool in wide.items()
    ]
    if uncovered_by and Control.PROTECT in policy.accept and (mode == "rw" or policy.write):
        found.append(
            f"accept = protect: the {uncovered_by} backend keeps nothing read-only where the program may "
            "write, not even .git: git runs what the program leaves there (hooks, commands of its "
            "configuration) with all your rights: check what is listed after the run before you use git"
        )
    return tuple(found)


def _shown(resolved: ResolvedPolicy) -> tuple[Grant, ...]:
    return (*resolved.grants, *(() if resolved.workspace is None else (resolved.workspace,)))
