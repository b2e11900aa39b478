"""What is at a path inside, from the resolved policy alone: shown, private, made, hidden or absent."""

from __future__ import annotations

import enum
from functools import cached_property

import msgspec

from stockade.backends.native import home_inside
from stockade.linux.path_lookup import covers
from stockade.policy.values import quote, show
from stockade.resolve import policy_text
from stockade.resolve.config_files import NAMES as PROJECT_POLICIES
from stockade.resolve.paths.hidden_paths import directories_of
from stockade.resolve.resolved import Grant, ResolvedPolicy
from stockade.resolve.toolchain.needs import shown_by

#: Entries of /etc that are made for the sandbox.
MADE = ("group", "gitconfig", "hostname", "hosts", "nsswitch.conf", "passwd", "resolv.conf")


class Kind(enum.StrEnum):
    """What a path inside is. Compares equal to its name."""

    #: Of the host, read-only.
    READ = "read"
    #: Of the host, and writable for real.
    WRITE = "write"
    #: Of the host, with changes kept aside.
    OVERLAY = "overlay"
    #: An empty directory of the sandbox itself, writable.
    PRIVATE = "private"
    #: Made by Stockade: /proc, /dev, some files of /etc.
    MADE = "made"
    #: A directory on the way to something that is shown: it can be listed and entered.
    WAY = "way"
    #: Hidden by `deny`.
    HIDDEN = "hidden"
    #: No clause shows it.
    ABSENT = "absent"


class Place(msgspec.Struct, frozen=True):
    """What is at one path inside, the tree that it belongs to, and the clause that says so."""

    kind: Kind
    tree: str = ""
    clause: str = ""


class Walls(msgspec.Struct, frozen=True, dict=True):
    """What the answers of one sandbox come from."""

    resolved: ResolvedPolicy
    backend: str = "native"
    #: The files of the policy, for the place of a clause.
    sources: tuple[str, ...] = ()

    @property
    def alone(self) -> bool:
        """Whether there are no namespaces: what is not granted can be seen, but not opened."""
        return self.backend == "landlock"

    @cached_property
    def home(self) -> str:
        """The private home; empty if a directory of the host is there."""
        caller, environment = self.resolved.caller, self.resolved.environment
        if environment is not None:
            return environment.home
        return "" if self.alone else home_inside(caller.home, self.resolved.profile.system)

    @cached_property
    def grants(self) -> tuple[Grant, ...]:
        """Everything of the host that the policy shows, the workspace last."""
        workspace = self.resolved.workspace
        return (*self.resolved.grants, *(() if workspace is None else (workspace,)))

    @cached_property
    def trees(self) -> dict[str, Place]:
        """By path, what begins there."""
        found: dict[str, Place] = {}
        if not self.alone:
            for path in ("/tmp", "/var/tmp", "/dev/shm", self.home):
                found[path] = Place(Kind.PRIVATE, path, "default")
        clause = f"profile = {show(self.resolved.profile.name)}"
        for path in shown_by(self.resolved.profile):
            found[path] = Place(Kind.READ, path, clause)
        for path in ("/proc", "/dev", *(() if self.alone else (policy_text.DIRECTORY,))):
            found[path] = Place(Kind.MADE, path, "default")
        for name in () if self.alone else MADE:
            found[f"/etc/{name}"] = Place(Kind.MADE, f"/etc/{name}", "default")
        for path in self.resolved.links:
            found[path] = Place(Kind.READ, path, "toolchain")
        for grant in self.grants:
            found[grant.path] = Place(Kind(grant.access), grant.path, grant.clause)
        return found

    @cached_property
    def _ways(self) -> frozenset[str]:
        return frozenset({"/", *(above for tree in self.trees for above in directories_of(tree))})

    def at(self, path: str) -> Place:
        """Return what is at an absolute path without `..` and without links on the way."""
        for name in (path, *directories_of(path)):
            if name in self.resolved.hidden.written:
                return Place(Kind.HIDDEN, name, f"deny = {quote(self.resolved.hidden.written[name])}")
            if (found := self.trees.get(name)) is not None:
                return found
        return Place(Kind.WAY if path in self._ways else Kind.ABSENT)

    def is_there(self, path: str) -> bool:
        """Whether Stockade itself makes or shows a directory at a path."""
        return path in self.trees or path in self._ways

    def protected_by(self, path: str) -> tuple[str, str]:
        """Return the protected path that a path is, lies in or contains, and its clause; empty if none."""
        resolved = self.resolved
        for kept in resolved.repositories.kept:
            if covers(kept, path):
                return kept, "protect"
        workspace = resolved.workspace
        if workspace is None or workspace.access == "read":
            return "", ""
        for name, exists in resolved.protected:
            kept = f"{workspace.path}/{name}"
            if not covers(kept, path) or not exists:
                continue
            # In an overlay only the project's policy is read-only: a commit holds the others back.
            if workspace.access == "write" or name.rpartition("/")[2] in PROJECT_POLICIES:
                return kept, f"protect = {show(name)}"
        return "", ""
