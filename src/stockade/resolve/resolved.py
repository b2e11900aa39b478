"""A policy resolved on this machine: descriptors of every path that it names."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Literal

import msgspec

from stockade.linux.user import Caller
from stockade.policy.model import Limits, Policy
from stockade.policy.profile import Profile
from stockade.resolve.paths import protected_paths
from stockade.resolve.paths.hidden_paths import HiddenPaths

TYPE_CHECKING = False
if TYPE_CHECKING:
    from stockade.resolve.environment import Environment
    from stockade.resolve.host_network import HostNetwork
    from stockade.resolve.paths.programs import Programs


class Grant(msgspec.Struct, frozen=True):
    """One path that is visible inside, held open by a descriptor."""

    path: str
    access: Literal["read", "write", "overlay"]
    is_dir: bool
    clause: str
    """The clause of the policy that grants it, such as `read = "./data"`."""
    fd: int
    alone: bool = False
    """Whether the directory is shown without the file systems mounted in it."""


class UnnamedTrees(msgspec.Struct, frozen=True):
    """What a backend can do with trees that no clause of the policy names.

    Stockade shows them for convenience: the caller's Python, the repository of a worktree. Where the backend
    cannot show one, or not without the secrets in it, the run goes on without it.
    """

    shown: bool = True
    #: Whether it can hide files in them.
    hiding: bool = True

    def take(self, hidden: Collection[str]) -> bool:
        """Whether the backend can show a tree in which these paths stay hidden."""
        return self.shown and (self.hiding or not hidden)


ANY_TREE = UnnamedTrees()


class ResolvedPolicy(msgspec.Struct, frozen=True):
    """A policy with the files of this machine and the caller. Owns the descriptors of its grants."""

    policy: Policy
    profile: Profile
    caller: Caller
    grants: tuple[Grant, ...]
    workspace: Grant | None
    protected: tuple[tuple[str, bool], ...]
    """Paths of the workspace that must not change, and whether each exists."""
    repositories: protected_paths.Repositories
    """The repositories where a program can write for real."""
    hidden: HiddenPaths
    """What `deny` hides."""
    programs: dict[str, Programs] | None
    """By pattern, the files that may be executed; None if every executable file may be."""
    environ: dict[str, str]
    limits: Limits
    links: dict[str, str]
    """Links of the host that lead to grants, and are made again inside."""
    gitconfig: bytes
    """The system's configuration of git inside: the user's name and e-mail; empty for none."""
    notes: tuple[str, ...]
    """What the result should say about what is shown."""
    places: tuple[tuple[str, str], ...]
    """The paths of the workspace that the policy names, existing or not, and the clause of each."""
    _open: list[int]
    network: HostNetwork | None = None
    """What programs with a network need; None for a policy without a network."""
    environment: Environment | None = None
    """The private environment, which the server's sandboxes have."""

    @property
    def denied(self) -> tuple[str, ...]:
        """The real names that are hidden, sorted, none of them inside another."""
        return self.hidden.names

    @property
    def needs_image(self) -> bool:
        """Whether changes are limited by `limits.disk` and must still outlive the supervisor."""
        rule = self.policy.workspace
        limited = self.limits.disk is not None
        return limited and rule is not None and rule.mode == "overlay" and rule.durable

    @property
    def start(self) -> str:
        """The directory in which commands start; empty if that is their home."""
        if self.workspace is not None:
            return self.workspace.path
        return "" if self.environment is None else self.environment.start

    def close(self) -> None:
        """Close every descriptor; harmless when repeated."""
        while self._open:
            os.close(self._open.pop())

    def __enter__(self) -> ResolvedPolicy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
