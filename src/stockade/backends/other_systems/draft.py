"""Drafts: backends that compile plans for other systems, and start nothing.

Tests check the plans of a draft on every system, but no draft has been run on its own system: whether its
walls hold there, and how to observe that, is not known. So a draft offers no control to a run, which is
refused for that reason, and `stockade plan` shows what it would do.
"""

from __future__ import annotations

import abc
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import msgspec

from stockade.backends.backend import Enforcer, Offer
from stockade.controls import Control
from stockade.errors import PolicyError
from stockade.host.capabilities import Host, called

if TYPE_CHECKING:
    from stockade.backends.selection import Selection
    from stockade.policy import Policy
    from stockade.resolve.resolved import Grant, ResolvedPolicy

FIX = (
    "use a Linux machine, or a Linux virtual machine on this one; "
    "`stockade plan` shows what would be done here"
)
#: A grant in the form of plans: path, access, is_dir, clause.
Granted = tuple[str, str, bool, str]
#: A tag of a run that needs no quotes in the arguments and texts of other programs.
TAG = re.compile("[A-Za-z0-9]([A-Za-z0-9-]{0,38}[A-Za-z0-9])?")


class DraftStep(msgspec.Struct, frozen=True, kw_only=True):
    """One step of a draft: its words, and what it would pass to the system."""

    words: str
    clause: str = "always"
    given: tuple[str, ...] = ()

    def describe(self) -> str:
        return self.words


class DraftPlan(msgspec.Struct, frozen=True, dict=True):
    """A plan that is only shown. `texts` are parts that a reader wants to see in full, by name."""

    backend: str
    ops: tuple[DraftStep, ...]
    texts: tuple[tuple[str, str], ...] = ()
    #: The command line that would be executed, if there is one.
    argv: tuple[str, ...] = ()
    #: Which limits of the policy are weaker than it asks, as it accepts.
    warnings: tuple[str, ...] = ()

    @cached_property
    def hash(self) -> str:
        """A hash of the steps, without their words."""
        from stockade.linux.sha256 import sha256

        parts = [self.backend, *(part for op in self.ops for part in (op.clause, *op.given))]
        encoded = [part.encode("utf-8", "surrogateescape") for part in parts]
        return sha256(b"".join(len(part).to_bytes(8) + part for part in encoded)).hexdigest()


class DraftRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A resolved policy and a command: everything that a draft is compiled from."""

    resolved: ResolvedPolicy
    selection: Selection
    command: tuple[str, ...]
    #: The tag of the run, and its private directory.
    tag: str
    scratch: str


class DraftBackend(Enforcer):
    """A backend for another system, which has never been run there."""

    @classmethod
    @abc.abstractmethod
    def draw(cls, asked: DraftRequest) -> DraftPlan:
        """Return the plan: what the backend would do."""

    @classmethod
    def planned(cls, host: Host) -> dict[Control, Offer]:
        return super().offers(host)

    @classmethod
    def offers(cls, host: Host) -> dict[Control, Offer]:
        """Return for each control why this draft does not enforce it, and what would."""
        why = f"the {cls.name} backend has never been run on {called(cls.system)}: it starts nothing"
        lacking = [
            probe.reason for name, probe in host.probes.items() if name in cls.foundation and not probe.ok
        ]
        known = {"reason": "; besides, ".join((why, *lacking)), "fix": FIX}
        found = {}
        for control, offer in cls.planned(host).items():
            way = cls.mechanisms[control]
            why_not = known if way.weaker or not way.never else {"reason": way.never, "fix": ""}
            here = why_not if host.system == cls.system else {}
            found[control] = msgspec.structs.replace(offer, **here, waivable=False)
        return found


def draw(policy: Policy, *, pinned: bool = False, command: Sequence[str] = ()) -> DraftPlan | None:
    """Return the plan of a draft for this system; None if there is no draft for it."""
    from stockade import backends, state
    from stockade.backends.selection import select
    from stockade.host import host
    from stockade.linux.user import Caller
    from stockade.resolve.resolution import resolve

    known = host()
    if known.system not in backends.DRAFTS:
        return None
    selection = select(policy, known, reading=True)
    draft = backends.table(selection.backend)
    assert issubclass(draft, DraftBackend)  # a backend for another system offers nothing here
    caller = Caller.current()
    home = state.state_dir(caller.environ, caller.home)
    with resolve(policy, caller, home, pinned=pinned, command=command[0] if command else "") as resolved:
        return draft.draw(
            DraftRequest(
                resolved=resolved,
                selection=selection,
                command=tuple(command),
                tag="plan",
                scratch=f"{home}/scratch/plan",
            )
        )


def granted(resolved: ResolvedPolicy) -> list[Grant]:
    """Return every grant, the workspace last."""
    return [*resolved.grants, *((resolved.workspace,) if resolved.workspace is not None else ())]


def plain(grants: Iterable[Grant]) -> tuple[Granted, ...]:
    return tuple((grant.path, grant.access, grant.is_dir, grant.clause) for grant in grants)


def environment(resolved: ResolvedPolicy, scratch: str) -> tuple[tuple[str, str], ...]:
    """Return the environment of the command."""
    return tuple({**resolved.environ, "HOME": scratch, "TMPDIR": scratch}.items())


def checked_tag(tag: str) -> str:
    """Return the tag of a run if it needs no quotes anywhere; refuse it otherwise."""
    if not TAG.fullmatch(tag):
        raise PolicyError(
            f"{tag!r} cannot be the tag of a run", hint="use at most 40 letters, digits and hyphens"
        )
    return tag
