"""Which links a policy's paths may lead through.

The author of a repository, and every program that ran in it, chose the links
in it. So a path in the workspace, and a relative path, must not leave the
workspace through a link (one that is relative to a directory outside the
workspace must not leave that directory), and no path may leave a tree that
programs may write, a repository or the current directory through a link that
lies there. The target of such a link is granted only if the policy also names
it, with no less access. Links elsewhere, such as /bin or a home on another
disk, belong to the host and are followed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence

import msgspec

from stockade.errors import PolicyError, one_line
from stockade.linux.path_lookup import COUNTED, Lookup, PathLink, covers, look_up, plain
from stockade.policy.model import REPOSITORIES
from stockade.policy.values import literal, render, show
from stockade.resolve.paths.policy_paths import SYSTEM, NamedPath
from stockade.resolve.paths.programs import Programs, find

#: From least to most.
ACCESS = ("read", "overlay", "write")


class Exit(msgspec.Struct, frozen=True):
    """A link that lies in a tree and leads out of it."""

    link: PathLink
    tree: str
    why: str
    """What the tree is, for a message."""


class Bounds(msgspec.Struct, frozen=True):
    """The trees that no path may leave through a link in them."""

    workspace: str = ""
    writable: tuple[str, ...] = ()
    cwd: str = ""
    home: str = ""
    """The user's. Neither it nor a directory above counts as a repository: its links are the user's own."""

    @classmethod
    def of(cls, named: Iterable[NamedPath], workspace: str, cwd: str, home: str) -> Bounds:
        """The bounds of a policy: its workspace, what its programs can write, and the current directory."""
        return cls(
            workspace,
            tuple(one.lookup.name for one in named if one.access == "write"),
            os.path.realpath(cwd) if cwd else "",
            os.path.realpath(home or "/"),
        )

    def exit(self, lookup: Lookup) -> Exit | None:
        """The first link on the way that leads out of its tree; None if no link does."""
        if not lookup.links:
            return None
        trees: dict[str, str] = dict.fromkeys(self.writable, ", where programs may write")
        if lookup.ground and not (self.workspace and covers(self.workspace, lookup.ground)):
            trees[lookup.ground] = ", which the path is relative to"
        if self.workspace:
            trees[self.workspace] = ", the workspace"
        if self.cwd and not covers(self.cwd, self.home) and not _is_system(self.cwd):
            trees.setdefault(self.cwd, ", the current directory")
        for link in lookup.links:
            place = os.path.dirname(link.at)
            around = self._repository(place)
            for tree, why in (*trees.items(), *([(around, ", a repository")] if around else ())):
                if covers(tree, place) and not covers(tree, link.leads):
                    return Exit(link, tree, why)
        return None

    def _repository(self, directory: str) -> str:
        """The real name of the outermost repository around a directory; empty if there is none."""
        found = ""
        if _is_system(directory):
            return found
        while directory != "/" and not covers(directory, self.home):
            if any(os.path.lexists(f"{directory}/{name}") for name in REPOSITORIES):
                found = directory
            directory = os.path.dirname(directory)
        return found


def _is_system(directory: str) -> bool:
    """Whether a directory lies in a tree of the system, where no sandbox lets programs write."""
    return any(covers(tree, directory) for tree in SYSTEM)


def check(named: Sequence[NamedPath], bounds: Bounds, shown: Iterable[str] = ()) -> None:
    """Refuse a policy if a link decides what it grants. `shown` are trees that are readable anyway."""
    granted = {path.removesuffix("?"): 0 for path in shown}
    leaving: list[tuple[NamedPath, Exit]] = []
    for one in named:
        found = bounds.exit(one.lookup)
        if found is not None:
            leaving.append((one, found))
            continue
        _refuse_control(one, bounds)
        name = one.lookup.name
        granted[name] = max(ACCESS.index(one.access), granted.get(name, 0))
    for one, out in leaving:
        if _access(one.lookup.name, granted) < ACCESS.index(one.access):
            raise refusal(one.clause, one.lookup.name, out, one.key)


def refusal(clause: str, name: str, out: Exit, key: str) -> PolicyError:
    """The error for a path that leaves a tree through a link and leads to `name`."""
    import shlex

    word = literal(name)
    written = f"workspace.path = {render(word)}" if key == "workspace" else f"{key} = {render([word])}"
    if key != "exec":  # which has no option
        written = (
            f"{'-w' if key == 'workspace' else f'--{key}'} {shlex.quote(word)}, or {written} in a policy"
        )
    hint = f"remove the link; if you mean its target, name that: {written}"
    message = f"{clause}: the link {out.link.at} leads to {out.link.leads}, out of {out.tree}{out.why}"
    return PolicyError(one_line(message), hint=one_line(hint))


def _refuse_control(one: NamedPath, bounds: Bounds) -> None:
    """Refuse write access, through a link of the workspace, to files that version control obeys."""
    inner = [link for link in one.lookup.links if bounds.workspace and covers(bounds.workspace, link.at)]
    if one.access != "write" or not inner or not covers(bounds.workspace, one.lookup.name):
        return
    inside = one.lookup.name[len(bounds.workspace) :].lower().split("/")
    if not set(REPOSITORIES).isdisjoint(inside):
        message = (
            f"{one.clause}: the link {inner[0].at} leads to {one.lookup.name}, which version control obeys"
        )
        raise PolicyError(one_line(message), hint="remove the link")


def _access(name: str, granted: dict[str, int]) -> int:
    """The access of the longest granted path that covers the name; -1 if none does."""
    while name not in granted:
        above = os.path.dirname(name)
        if above == name:
            return -1
        name = above
    return granted[name]


def programs(
    patterns: Sequence[str] | None, bounds: Bounds, expand: Callable[[str, str], str]
) -> dict[str, Programs] | None:
    """Find the files that may be executed, by pattern. `expand` makes the pattern of a clause absolute."""
    if patterns is None:
        return None
    found: dict[str, Programs] = {}
    named: list[str] = []
    leaving: list[tuple[str, str, Exit]] = []
    for pattern in patterns:
        clause = f"exec = {show(pattern)}"
        wanted = expand(pattern.removesuffix("?"), clause)
        ground = plain(wanted.partition(COUNTED)[0]) if COUNTED in wanted else ""

        def follow(path: str, ground: str = ground, clause: str = clause) -> str:
            inner = ground and covers(ground, path)
            lookup = look_up(f"{ground}{COUNTED}{path[len(ground) :].lstrip('/')}" if inner else path).close()
            out = bounds.exit(lookup)
            if out is not None:
                leaving.append((clause, lookup.name, out))
            return lookup.name

        here = find(plain(wanted), clause, follow, relative=bool(ground))
        through = {name for words, name, _ in leaving if words == clause}
        named += (name for name in (*here.files, *here.trees) if name not in through)
        if here.files or here.trees:
            found[pattern] = here
        elif not pattern.endswith("?"):
            raise PolicyError(
                f"{clause}: there is no such program",
                hint=f'name files that can be executed; write "{pattern}?" if it may be missing',
            )
    for clause, name, out in leaving:
        if not any(covers(tree, name) for tree in named):
            raise refusal(clause, name, out, "exec")
    return found
