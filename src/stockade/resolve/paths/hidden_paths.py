"""What `deny` hides: real names, and whatever its patterns match in the visible trees.

A path is relative to the workspace, whichever file of the policy writes it. A
name without wildcards is hidden whether it exists or not; a pattern hides only
what it matches when the sandbox is made. The search for matches walks through
the visible trees by descriptor and through no link. It is bounded, because the
trees may be hostile or large; a policy that exceeds the bounds is refused.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING

import msgspec

from stockade.errors import PolicyError, typed
from stockade.linux.user import Caller
from stockade.policy.patterns import (
    LONGEST,
    Globs,
    PatternStep,
    States,
    is_pattern,
    is_relative,
    quote,
    unquote,
)
from stockade.policy.values import expand, literal, show
from stockade.resolve.paths.policy_paths import OWN

if TYPE_CHECKING:
    from stockade.resolve.resolved import Grant

_IN_OWN = tuple(f"{tree}/" for tree in OWN)
#: Each costs an operation of the plan in every tree that shows it.
MOST_NAMES = 10_000
#: The bounds of a walk for patterns: names, time, and depth, since each open directory is a descriptor.
MOST_ENTRIES = 1_000_000
MOST_SECONDS = 20.0
DEEPEST = 256
#: The parts of all patterns together: each is matched separately.
MOST_PARTS = 5000

_DIRECTORY = (
    os.O_RDONLY
    | getattr(os, "O_DIRECTORY", 0)
    | getattr(os, "O_NOFOLLOW", 0)
    | getattr(os, "O_NONBLOCK", 0)
    | getattr(os, "O_CLOEXEC", 0)
)
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
_USED_UP = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


class HiddenPaths(msgspec.Struct, frozen=True, dict=True):
    """What the `deny` of a policy hides."""

    #: Real names, sorted, none of them in another.
    names: tuple[str, ...] = ()
    #: By name, the path or pattern of the policy that hides it.
    written: dict[str, str] = {}
    #: By pattern, how many paths matched.
    matched: dict[str, int] = {}
    #: Relative paths of a policy without a workspace, which hide nothing.
    nowhere: tuple[str, ...] = ()

    @cached_property
    def above(self) -> frozenset[str]:
        """Every directory that contains something hidden."""
        return frozenset(place for name in self.names for place in directories_of(name))

    @cached_property
    def _known(self) -> frozenset[str]:
        return frozenset(self.names)

    def covers(self, path: str) -> bool:
        """Whether a path is hidden, by itself or with one of its directories."""
        return path in self._known or not self._known.isdisjoint(directories_of(path))

    @property
    def notes(self) -> list[str]:
        """What a reader of the policy should know about its `deny`, one line each."""
        found = [
            f"deny = {show(pattern)} matched {count} path{'' if count == 1 else 's'} at the start, "
            "later ones are not hidden"
            for pattern, count in self.matched.items()
        ]
        if self.nowhere:
            found.append(f"deny = {show(self.nowhere)} hides nothing, because there is no workspace")
        return found


def directories_of(name: str) -> Iterator[str]:
    """Yield the directories of an absolute path, the innermost first, without the root."""
    while (end := name.rfind("/", 1)) > 0:
        name = name[:end]
        yield name


def absolute(path: str, root: str, *, home: str, environ: Mapping[str, str]) -> str:
    """Make a `deny` absolute and drop its ?; wildcards in names that are substituted are quoted."""

    written = path.removesuffix("?") if is_pattern(path) else path
    values = {name: quote(value) for name, value in environ.items()} if "$" in path else environ
    return expand(written, f"deny = {show(path)}", home=quote(home), cwd=quote(root), environ=values)


def real_pattern(path: str) -> str:
    """Replace the beginning of an absolute pattern, up to the first wildcard, by its real name."""
    parts = path.split("/")
    first = next(number for number, part in enumerate(parts) if is_pattern(part))
    start = os.path.realpath(unquote("/".join(parts[:first])) or "/")
    return "/".join((quote(start).rstrip("/"), *parts[first:]))


def names_of(path: str) -> list[str]:
    """Return the real names of an absolute path: its own and, if it is a link, those that it leads to.

    The link's own name is among them because the host may replace the link by a file.
    """
    name = path
    found: list[str] = []
    while True:
        above, last = os.path.split(name.rstrip("/"))
        # A link may lead to a path that ends in . or ..
        plain = last not in ("", ".", "..")
        name = os.path.join(os.path.realpath(above), last) if plain else os.path.realpath(name)
        if name in found:  # a link that leads to itself
            return found
        found.append(name)
        try:
            name = os.path.join(os.path.dirname(name), os.readlink(name))
        except OSError:
            return found


def real_names(paths: Iterable[str], root: str, *, home: str, environ: Mapping[str, str]) -> Iterator[str]:
    """Replace the paths of a `deny` by real names; relative paths without a workspace stay as they are."""
    for path in paths:
        if is_relative(path) and not root:
            yield path
            continue
        place = absolute(path, root, home=home, environ=environ)
        if is_pattern(path):
            yield literal(real_pattern(place)) + ("?" if path.endswith("?") else "")
        else:
            yield from (quote(literal(name)) for name in names_of(unquote(place)))


def denied_beside(base: str, paths: Iterable[str], root: str, shown: Iterable[str]) -> list[str]:
    """Return the visible paths that a policy file denies if its `deny` is relative to its directory `base`.

    `deny` is relative to the workspace, `root`. But a run that works below the file's directory, or grants
    paths beside the file, must not show what the file denies there.
    """
    trees = [root, *shown]
    if base == root:
        return []
    found = []
    for path in paths:
        if is_relative(path) and not is_pattern(path):
            name = os.path.normpath(os.path.join(base, unquote(path.replace("$$", "$"))))
            if any(tree and name.startswith(f"{tree}/") for tree in trees):
                found.append(quote(literal(name)))
    return found


def hide(
    paths: Collection[str],
    caller: Caller,
    grants: dict[str, Grant],
    workspace: Grant | None,
    system: Iterable[str],
) -> HiddenPaths:
    """Find what `deny` hides in the visible trees, and remove the grants that are hidden.

    `system` are the trees that the profile shows.
    """
    if not paths:
        return HiddenPaths()
    shown = {path: grant.fd if grant.is_dir else None for path, grant in grants.items()}
    if workspace is not None:
        shown[workspace.path] = workspace.fd
    root = "" if workspace is None else workspace.path
    hidden = _find(paths, caller, root, shown, system)
    for name in hidden.names:
        _refuse_needed(name, f"deny = {show(hidden.written[name])}", root)
    for place in [place for place in grants if hidden.covers(place)]:
        del grants[place]
    for grant in (*grants.values(), workspace):
        if grant is None or grant.access != "write" or grant.path not in hidden.above:
            continue
        name = next(name for name in hidden.names if name.startswith(f"{grant.path}/"))
        # A mount over the file would vanish when the host replaces the file.
        raise PolicyError(
            f"deny = {show(hidden.written[name])}: {grant.path} is writable for real, so nothing in it can "
            "stay hidden",
            hint="use `--mode overlay` or `--mode ro` (workspace.mode)"
            if grant is workspace
            else "grant the paths beside it instead",
        )
    return hidden


def _refuse_needed(name: str, clause: str, root: str) -> None:
    for tree in OWN:
        if name == tree or name.startswith(f"{tree}/"):
            raise PolicyError(f"{clause}: the sandbox has a {tree} of its own", hint="leave it out")
    if name in ("/", "/etc"):
        raise PolicyError(f"{clause}: no program could run", hint="name the paths in it to hide")
    if name == root or root.startswith(f"{name}/"):
        raise PolicyError(f"{clause}: contains the workspace", hint="deny paths in the workspace")


def _find(
    paths: Iterable[str],
    caller: Caller,
    root: str,
    shown: Mapping[str, int | None],
    system: Iterable[str],
) -> HiddenPaths:
    """Find the real names to hide. `shown` is what the policy shows, with the descriptors of directories."""
    found: dict[str, str] = {}
    patterns: dict[str, str] = {}
    nowhere = []
    for path in paths:
        if is_relative(path) and not root:
            nowhere.append(path)
            continue
        place = absolute(path, root, home=caller.home, environ=caller.environ)
        if len(found) > MOST_NAMES:
            raise _too_many_error(len(found))
        if is_pattern(path):
            patterns[path] = real_pattern(place)
            continue
        name, *targets = names_of(unquote(place))
        found[name] = path
        # Targets in the host's /dev and the like are never shown.
        found.update((target, path) for target in targets if not target.startswith(_IN_OWN))
    matched: dict[str, int] = {}
    if (parts := sum(path.count("/") for path in patterns.values())) > MOST_PARTS:
        raise PolicyError(
            f"deny: its patterns have {parts} parts, more than {MOST_PARTS}", hint="write fewer patterns"
        )
    if patterns:
        walk = _Walk(patterns, found, caller.uid)
        walk.through(shown, system)
        matched = walk.counts
        for path in [path for path, count in matched.items() if not count and not path.endswith("?")]:
            raise _unmatched_error(path, root)
        for link in walk.links:
            found.update(dict.fromkeys(_targets(link, shown), walk.found[link]))
        found |= walk.found
    if len(found) > MOST_NAMES:
        raise _too_many_error(len(found))
    names = sorted(name for name in found if found.keys().isdisjoint(directories_of(name)))
    return HiddenPaths(tuple(names), {name: found[name] for name in names}, matched, tuple(nowhere))


def matches(hidden: HiddenPaths, root: str, directory: int, caller: Caller) -> dict[str, str]:
    """Find what the policy's patterns match in a layer of the workspace: the names, each with its pattern."""
    patterns = {
        path: real_pattern(absolute(path, root, home=caller.home, environ=caller.environ))
        for path in hidden.matched
    }
    walk = _Walk(patterns, hidden.written, caller.uid)
    walk.through({root: directory}, ())
    return walk.found


def _targets(link: str, shown: Container[str]) -> list[str]:
    """Return the targets of a link that a pattern matched, if the policy itself shows them.

    A link in the workspace must not hide files of the system.
    """
    return [
        name
        for name in names_of(link)[1:]
        if name not in shown and any(place in shown for place in directories_of(name))
    ]


def _unmatched_error(path: str, root: str) -> PolicyError:
    hint = f'"{path}?" if it may match nothing'
    if is_relative(path):
        hint = f"it is relative to the workspace, {root}; write {hint}"
        if "/" not in path.removeprefix("./"):
            hint += f', "**/{path}" for any depth'
    else:
        hint = f"write {hint}"
    return PolicyError(f"deny = {show(path)}: matches nothing that is visible", hint=hint)


def _too_many_error(count: int) -> PolicyError:
    return PolicyError(f"deny: {count} paths, more than {MOST_NAMES}", hint="deny their directories instead")


class _Walk:
    """One walk through the visible trees, for all patterns together."""

    def __init__(self, patterns: Mapping[str, str], hidden: Container[str], uid: int) -> None:
        self.found: dict[str, str] = {}
        self.links: list[str] = []
        self.counts = dict.fromkeys(patterns, 0)
        self._written = list(patterns)
        self._globs = Globs(patterns.values())
        self._hidden, self._uid = hidden, uid
        self._left, self._until = MOST_ENTRIES, time.monotonic() + MOST_SECONDS

    def through(self, shown: Mapping[str, int | None], system: Iterable[str]) -> None:
        """Walk through every tree once, even if one lies in another."""
        trees = {path: None for path in system if not os.path.islink(path)} | dict(shown)
        for path in sorted(trees):
            if any(above in trees for above in directories_of(path)):
                continue
            states, directory = self._states_at(path), trees[path]
            if not states:
                continue
            if directory is not None:
                self._enter(".", directory, path, states)
            elif path not in shown and os.path.isdir(path):
                self._enter(path, None, path, states)

    def _states_at(self, path: str) -> States:
        """Return the states of the patterns at a tree; none if the whole tree is matched or hidden."""
        states = self._globs.start()
        here = ""
        for name in path.strip("/").split("/"):
            here = f"{here}/{name}"
            step = self._globs.step(states)
            if step.means(name):
                self._record_match(here, name, step, link=False)
                return frozenset()
            if here in self._hidden:
                return frozenset()
            states = step.below(name)
        return states

    def _record_match(self, path: str, name: str, step: PatternStep, *, link: bool) -> None:
        if len(os.fsencode(path)) >= LONGEST:
            raise self._error(f"a path of {len(path)} characters matches, too long for a plan")
        for number in step.meant_by(name):
            self.counts[self._written[number]] += 1
            self.found.setdefault(path, self._written[number])
        if link:
            self.links.append(path)
        if len(self.found) > MOST_NAMES:
            raise _too_many_error(len(self.found))

    def _enter(self, name: str, parent: int | None, path: str, states: States, depth: int = 0) -> None:
        """Walk through one directory, `name` in `parent`."""
        if depth > DEEPEST:
            raise self._error(f"there are directories more than {DEEPEST} deep")
        self._check_time(path)
        try:
            directory = os.open(name, _DIRECTORY, dir_fd=parent)
        except PermissionError:
            self._refuse_unlistable(name, parent, path)
            return
        except OSError as error:
            if (
                error.errno in _GONE
            ):  # removed or replaced since it was listed; what comes later is not hidden
                return
            if error.errno in _USED_UP:
                raise  # not a fault of the policy
            raise self._error(f"cannot list {path}: {error.strerror}") from None
        try:
            step = self._globs.step(states)
            for inner in self._match_entries(directory, path, step):
                place, below = f"{path}/{inner}", step.below(inner)
                if below and place not in self._hidden:
                    self._enter(inner, directory, place, below, depth + 1)
        finally:
            os.close(directory)

    def _match_entries(self, directory: int, path: str, step: PatternStep) -> list[str]:
        """Record the entries of a directory that match, and return its other subdirectories."""
        found = []
        if step.names is not None:
            for name in sorted(step.names):
                self._count_entry(path)
                mode = self._mode(directory, name, path)
                if mode and step.means(name):
                    self._record_match(f"{path}/{name}", name, step, link=stat.S_ISLNK(mode))
                elif stat.S_ISDIR(mode):
                    found.append(name)
            return found
        means, count = step.means, self._count_entry
        with os.scandir(directory) as entries:
            for entry in entries:
                count(path)
                name = entry.name
                # The listing has the kinds of files, so none needs a call of its own.
                if means(name):
                    self._record_match(f"{path}/{name}", name, step, link=entry.is_symlink())
                elif entry.is_dir(follow_symlinks=False):
                    found.append(name)
        return found

    def _count_entry(self, path: str) -> None:
        self._left -= 1
        if self._left < 0:
            raise self._error(f"the search met more than {MOST_ENTRIES} names, the last ones in {path}")
        if not self._left & 1023:
            self._check_time(path)

    def _check_time(self, path: str) -> None:
        if time.monotonic() > self._until:
            raise self._error(f"the search took {MOST_SECONDS:.0f} s and came only as far as {path}")

    def _mode(self, directory: int, name: str, path: str) -> int:
        """Return the mode of what a directory has under the name; 0 if it has nothing."""
        try:
            return os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode
        except PermissionError:
            self._refuse_if_own(os.fstat(directory).st_uid, path)
        except OSError:
            pass
        return 0

    def _refuse_unlistable(self, name: str, parent: int | None, path: str) -> None:
        """Refuse a directory that cannot be listed, if the program might still open names in it."""
        try:
            owner = os.stat(name, dir_fd=parent, follow_symlinks=False).st_uid
            # A program that may enter it can guess names.
            self._refuse_if_own(self._uid if os.access(name, os.X_OK, dir_fd=parent) else owner, path)
        except PermissionError:  # the directory that it is in cannot be entered
            if parent is not None:
                self._refuse_if_own(os.fstat(parent).st_uid, os.path.dirname(path))
        except FileNotFoundError:
            pass

    def _refuse_if_own(self, owner: int, path: str) -> None:
        """Refuse a closed directory of the user, which the program could open in an overlay."""
        if owner == self._uid:
            raise self._error(
                f"you may not list {path}",
                f"run `chmod u+rx {typed(path)}`, or deny that directory by its name",
            )

    def _error(self, why: str, hint: str = "") -> PolicyError:
        return PolicyError(
            f"deny = {show(self._written)}: {why}",
            hint=hint or 'begin patterns with a directory ("certs/**/*.pem"), or deny large trees by name',
        )
