"""The interface of every backend. Nothing else in Stockade asks which backend it is.

A backend answers for every control: which mechanism enforces it, and what the host must be able to do for
that. A table without a control is a TypeError when the class is made, so that a new control cannot be
forgotten. The backend also turns a resolved policy into a plan, which the gate executes. Everything else
follows from the plan: the evidence, how commands are started and ended, which files can be seen from
outside, what changed.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from stockade.controls import Control
from stockade.host.capabilities import Host, called
from stockade.resolve.resolved import ANY_TREE, ResolvedPolicy, UnnamedTrees

if TYPE_CHECKING:
    from stockade.backends.selection import ControlChoice, Selection
    from stockade.gate.operations import Plan
    from stockade.policy import Policy


class Offer(msgspec.Struct, frozen=True):
    """What one backend offers for one control on one host: a mechanism, or a reason why not and a fix."""

    mechanism: str = ""
    #: The probes that the mechanism needs, besides the backend's foundation.
    means: tuple[str, ...] = ()
    reason: str = ""
    fix: str = ""
    #: Whether the backend can run without it, so that a policy may accept that.
    waivable: bool = False
    #: What the backend does instead then, in words; empty if nothing.
    weaker: str = ""

    @property
    def available(self) -> bool:
        return not self.reason


class Mechanism(msgspec.Struct, frozen=True):
    """How a control is enforced, and the probes that must succeed for it.

    The words may depend on the host. `otherwise` is another mechanism, as good, for hosts where the first one
    fails. `never` is the reason why a backend never enforces the control. A backend can run without an
    `optional` control if the policy accepts that; `weaker` says what it does instead.
    """

    words: str | Callable[[Host], str] = ""
    needs: tuple[str, ...] = ()
    never: str = ""
    optional: bool = False
    otherwise: Mechanism | None = None
    weaker: str = ""


class PlanInputs(msgspec.Struct, frozen=True, kw_only=True):
    """A policy resolved on this host: everything that a plan is made from."""

    resolved: ResolvedPolicy
    selection: Selection
    #: Landlock's ABI.
    landlock: int
    #: The limit of open files of each process.
    files: int
    #: Where an overlay keeps its changes.
    layer: str
    #: The same for each overlay of a private environment, in the order of its mounts.
    layers: tuple[str, ...] = ()
    #: The version of each cgroup that the gate enters, and their limits in words.
    groups: tuple[tuple[int, ...], str] = ((), "")
    #: The state directory, in which compiled filters are kept; empty if they are not kept.
    state: str
    #: The directory with the certificates of the sandbox's own authority; empty for none.
    trust: str = ""


class Enforcer(abc.ABC):
    """One way to raise walls: what it enforces, by which mechanisms, and what they need of the host."""

    name: ClassVar[str]
    system: ClassVar[str]
    #: Probes without which the backend cannot start anything.
    foundation: ClassVar[tuple[str, ...]] = ()
    mechanisms: ClassVar[Mapping[Control, Mechanism]]
    #: Whether a helper, which the host may not have, makes its sandboxes.
    helped: ClassVar[bool] = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if Enforcer in cls.__bases__:
            return  # an abstract class, not a backend
        if absent := [word for word in ("name", "system", "mechanisms") if not hasattr(cls, word)]:
            raise TypeError(f"backend {cls.__qualname__} does not set {', '.join(absent)}")
        if missing := [control.value for control in Control if control not in cls.mechanisms]:
            raise TypeError(f"backend {cls.__qualname__} does not answer for: {', '.join(missing)}")

    @classmethod
    def offers(cls, host: Host) -> dict[Control, Offer]:
        """Return what this backend offers for every control on that host."""
        return {control: cls._offer(cls.mechanisms[control], host) for control in Control}

    @classmethod
    def planned(cls, host: Host) -> dict[Control, Offer]:
        """Return the offers for a plan that is only shown."""
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


class Backend(Enforcer):
    """A backend whose plans the gate executes. Subclasses set the attributes and compile plans."""

    #: How a control is observed, if it differs from `evidence.OBSERVED`.
    observed: ClassVar[Mapping[Control, str]] = {}
    #: Whether it needs a private directory on the host, as the home and for temporary files.
    scratch: ClassVar[bool] = False
    #: Whether its sandboxes begin as copies of a resident, and so can begin as copies of a template.
    copies: ClassVar[bool] = False

    @classmethod
    @abc.abstractmethod
    def plan(cls, given: PlanInputs) -> Plan:
        """Return the operations that enforce the policy. Only this method looks at the host."""

    @classmethod
    @abc.abstractmethod
    def resident(cls, policy: Policy) -> str:
        """Return the kind of resident that starts its sandboxes: see `gate.client`."""

    @classmethod
    @abc.abstractmethod
    def home(cls, resolved: ResolvedPolicy, scratch: str) -> str:
        """Return the home of commands inside; `scratch` is the private directory, if there is one."""

    @classmethod
    def unnamed_trees(cls, policy: Policy) -> UnnamedTrees:
        """Return what it can do with trees that no clause of the policy names."""
        return ANY_TREE

    @classmethod
    def adjusted(
        cls, policy: Policy, controls: Mapping[Control, ControlChoice]
    ) -> Mapping[Control, ControlChoice]:
        """Return the controls with what clauses of the policy change about their mechanisms."""
        return controls


def _reason(probe: str, host: Host) -> str:
    return host.probes[probe].reason if probe in host.probes else f"{probe} was not probed"


def _fix(probe: str, host: Host) -> str:
    return host.probes[probe].fix if probe in host.probes else "run `stockade doctor`"
