"""Drafts: backends that compile plans for other systems, and start nothing.

What a draft compiles is checked as a value, on every system. Nobody has run it
on its own: whether the walls stand there, and how they would be seen to, is
not known. So a draft offers no control to a run, which is refused with that
reason, and `stockade plan` shows what it would do.
"""

from __future__ import annotations

import abc
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import msgspec

from stockade.backends.base import Offer, Walls
from stockade.controls import Control
from stockade.errors import PolicyError
from stockade.host.model import Host, called

if TYPE_CHECKING:
    from stockade.backends.select import Selection
    from stockade.policy import Policy, Resolved
    from stockade.policy.resolve import Grant

FIX = (
    "use a Linux machine, or a Linux virtual machine on this one; "
    "`stockade plan` shows what would be done here"
)
#: A grant as plans have it: path, access, is_dir, clause.
Granted = tuple[str, str, bool, str]
#: What may mark a run in another program's arguments and texts, where nothing is quoted.
TAG = re.compile("[A-Za-z0-9]([A-Za-z0-9-]{0,38}[A-Za-z0-9])?")


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that would be done: in words, and what the system would be given."""

    words: str
    clause: str = "always"
    given: tuple[str, ...] = ()

    def describe(self) -> str:
        return self.words


class Drawn(msgspec.Struct, frozen=True, dict=True):
    """A plan that is only read. `texts` are those of its parts that a reader wants whole, by their name."""

    backend: str
    ops: tuple[Step, ...]
    texts: tuple[tuple[str, str], ...] = ()
    #: The command line that would be executed, where there is one.
    argv: tuple[str, ...] = ()
    #: Where the policy accepts less than it asks for, and gets less.
    warnings: tuple[str, ...] = ()

    @cached_property
    def hash(self) -> str:
        """The same for the same steps, whatever they are called in words."""
        from stockade.digest import sha256

        parts = [self.backend, *(part for op in self.ops for part in (op.clause, *op.given))]
        encoded = [part.encode("utf-8", "surrogateescape") for part in parts]
        return sha256(b"".join(len(part).to_bytes(8) + part for part in encoded)).hexdigest()


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What a policy and a command have come to: everything that a draft is compiled from."""

    resolved: Resolved
    selection: Selection
    command: tuple[str, ...]
    #: What marks the run, and the private directory that it has.
    tag: str
    scratch: str


class Draft(Walls):
    """Walls of another system, as far as they can be known without having been run there."""

    @classmethod
    @abc.abstractmethod
    def draw(cls, asked: Asked) -> Drawn:
        """What would be done."""

    @classmethod
    def planned(cls, host: Host) -> dict[Control, Offer]:
        return super().offers(host)

    @classmethod
    def offers(cls, host: Host) -> dict[Control, Offer]:
        """Nothing to rely on: each control with what would enforce it, and why it does not."""
        why = f"the {cls.name} backend has never been run on {called(cls.system)}: it starts nothing"
        lacking = [
            probe.reason for name, probe in host.probes.items() if name in cls.foundation and not probe.ok
        ]
        known = {"reason": "; besides, ".join((why, *lacking)), "fix": FIX}
        found = {}
        for control, offer in cls.planned(host).items():
            way = cls.mechanisms[control]
            said = known if way.weaker or not way.never else {"reason": way.never, "fix": ""}
            here = said if host.system == cls.system else {}
            found[control] = msgspec.structs.replace(offer, **here, waivable=False)
        return found


def draw(policy: Policy, *, pinned: bool = False, command: Sequence[str] = ()) -> Drawn | None:
    """What would be done on this system; None where nothing is drawn for it, or sandboxes can be started."""
    from stockade import backends, state
    from stockade.backends.select import select
    from stockade.host import host
    from stockade.policy import Caller, resolve

    known = host()
    if known.system not in backends.DRAFTS:
        return None
    selection = select(policy, known, reading=True)
    draft = backends.table(selection.backend)
    assert issubclass(draft, Draft)  # what is for another system offers nothing here
    caller = Caller.current()
    home = state.state_dir(caller.environ, caller.home)
    with resolve(policy, caller, home, pinned=pinned, command=command[0] if command else "") as resolved:
        return draft.draw(
            Asked(
                resolved=resolved,
                selection=selection,
                command=tuple(command),
                tag="plan",
                scratch=f"{home}/scratch/plan",
            )
        )


def granted(resolved: Resolved) -> list[Grant]:
    """Every grant, the workspace last."""
    return [*resolved.grants, *((resolved.workspace,) if resolved.workspace is not None else ())]


def plain(grants: Iterable[Grant]) -> tuple[Granted, ...]:
    return tuple((grant.path, grant.access, grant.is_dir, grant.clause) for grant in grants)


def environment(resolved: Resolved, scratch: str) -> tuple[tuple[str, str], ...]:
    """What the command would find in its environment."""
    return tuple({**resolved.environ, "HOME": scratch, "TMPDIR": scratch}.items())


def checked_tag(tag: str) -> str:
    """The mark of a run, if it needs no quotes anywhere."""
    if not TAG.fullmatch(tag):
        raise PolicyError(f"{tag!r} cannot mark a run", hint="letters, digits and lines, forty at most")
    return tag
