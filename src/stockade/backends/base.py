"""What every backend must be able to say and do. Nothing else in Stockade asks which one it is.

A backend answers for every control there is: by which mechanism it enforces
it and what the host must be able to do for that. A table with a hole is a
TypeError when the class is made, so a new control cannot be forgotten. And it
turns a policy that was met with this host into a plan, which the gate
executes. All the rest follows from the plan: what must be seen before
anything starts, how commands are started and ended, which files can be
looked at from outside, what changed.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from stockade.controls import Control
from stockade.host.model import Host, called

if TYPE_CHECKING:
    from stockade.backends.select import Selected, Selection
    from stockade.gate.plan import Plan
    from stockade.policy import Policy, Resolved


class Offer(msgspec.Struct, frozen=True):
    """What one backend on one host makes of one control: a mechanism, or a reason and a fix."""

    mechanism: str = ""
    #: The probes whose success the mechanism rests on, besides the backend's foundation.
    means: tuple[str, ...] = ()
    reason: str = ""
    fix: str = ""
    #: Whether the backend can run without it, so that a policy may accept to.
    waivable: bool = False
    #: What is done then, in words; empty where nothing is.
    weaker: str = ""

    @property
    def available(self) -> bool:
        return not self.reason


class Mechanism(msgspec.Struct, frozen=True):
    """How a control is enforced, and the probes that must succeed for it.

    The words may depend on the host. `otherwise` is another way, as good, for
    hosts where the first fails. A control that a backend never enforces has
    `never`: the reason. Without an `optional` one it can still run, if the
    policy accepts that; `weaker` says what is done instead.
    """

    words: str | Callable[[Host], str] = ""
    needs: tuple[str, ...] = ()
    never: str = ""
    optional: bool = False
    otherwise: Mechanism | None = None
    weaker: str = ""


class Given(msgspec.Struct, frozen=True, kw_only=True):
    """What a policy has come to on this host: everything that a plan is made from."""

    resolved: Resolved
    selection: Selection
    #: Landlock's ABI.
    landlock: int
    #: Open files of each process.
    files: int
    #: Where an overlay keeps its changes.
    layer: str
    #: The version of each cgroup that the gate enters, and in words what they limit.
    groups: tuple[tuple[int, ...], str] = ((), "")
    #: Where compiled filters are kept; empty: nowhere.
    state: str


class Walls(abc.ABC):
    """One way to raise walls: what it enforces, by what, and what that needs of the host."""

    name: ClassVar[str]
    system: ClassVar[str]
    #: Probes without which the backend cannot start anything.
    foundation: ClassVar[tuple[str, ...]] = ()
    mechanisms: ClassVar[Mapping[Control, Mechanism]]
    #: Whether a program that need not be there makes its sandboxes.
    helped: ClassVar[bool] = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if Walls in cls.__bases__:
            return  # a kind of them, not yet one
        if absent := [word for word in ("name", "system", "mechanisms") if not hasattr(cls, word)]:
            raise TypeError(f"backend {cls.__qualname__} does not set {', '.join(absent)}")
        if missing := [control.value for control in Control if control not in cls.mechanisms]:
            raise TypeError(f"backend {cls.__qualname__} does not answer for: {', '.join(missing)}")

    @classmethod
    def offers(cls, host: Host) -> dict[Control, Offer]:
        """Every control, with what this backend makes of it on that host."""
        return {control: cls._offer(cls.mechanisms[control], host) for control in Control}

    @classmethod
    def planned(cls, host: Host) -> dict[Control, Offer]:
        """What a plan that is only read may count on."""
        return cls.offers(host)

    @classmethod
    def _offer(cls, mechanism: Mechanism, host: Host) -> Offer:
        if host.system != cls.system:
            return Offer(
                reason=f"the {cls.name} backend needs {called(cls.system)}, this is {called(host.system)}",
                fix=f"use a {called(cls.system)} machine",
            )
        if mechanism.never and not mechanism.optional:
            return Offer(reason=mechanism.never)
        if lacking := [name for name in cls.foundation if not host.has(name)]:
            return Offer(reason=_reason(lacking[0], host), fix=_fix(lacking[0], host))
        if mechanism.never:
            return Offer(reason=mechanism.never, waivable=True, weaker=mechanism.weaker)
        failed: list[str] = []
        way: Mechanism | None = mechanism
        while way is not None:
            lacking = [name for name in way.needs if not host.has(name)]
            if not lacking:
                words = way.words if isinstance(way.words, str) else way.words(host)
                return Offer(mechanism=words, means=way.needs)
            failed.append(lacking[0])
            way = way.otherwise
        return Offer(
            reason="; ".join(_reason(name, host) for name in failed),
            fix="; or ".join(_fix(name, host) for name in failed),
            waivable=mechanism.optional,
            weaker=mechanism.weaker,
        )


class Backend(Walls):
    """Walls that a plan for the gate raises. Concrete ones set the attributes and compile plans."""

    #: How a control is seen to be in force, where that is not as in `evidence.OBSERVED`.
    observed: ClassVar[Mapping[Control, str]] = {}
    #: Whether it needs a private directory of the host, as the home and for temporary files.
    scratch: ClassVar[bool] = False
    #: Whether its sandboxes begin as copies of a resident gate, and so can begin as copies of a template.
    copies: ClassVar[bool] = False

    @classmethod
    @abc.abstractmethod
    def plan(cls, given: Given) -> Plan:
        """The operations that enforce the policy. What it looks at on the host, it looks at here."""

    @classmethod
    @abc.abstractmethod
    def resident(cls, policy: Policy) -> str:
        """Which kind of resident gate starts its sandboxes: see `gate.client`."""

    @classmethod
    @abc.abstractmethod
    def home(cls, resolved: Resolved, scratch: str) -> str:
        """Where commands have their home; `scratch` is the private directory, if there is one."""

    @classmethod
    def adjusted(cls, policy: Policy, controls: Mapping[Control, Selected]) -> Mapping[Control, Selected]:
        """What is enforced, with what the policy's own clauses change about it."""
        return controls


def _reason(probe: str, host: Host) -> str:
    return host.probes[probe].reason if probe in host.probes else f"{probe} was not probed"


def _fix(probe: str, host: Host) -> str:
    return host.probes[probe].fix if probe in host.probes else "run `stockade doctor`"
