"""What every backend must be able to say.

A backend answers for every control there is: by which mechanism it enforces
it and what the host must be able to do for that. A table with a hole is a
TypeError when the class is made, so a new control cannot be forgotten.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import msgspec

from stockade.controls import Control
from stockade.host.model import Host


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


class Backend(abc.ABC):
    """One way to raise walls. Concrete ones set the four attributes below."""

    name: ClassVar[str]
    system: ClassVar[str]
    #: Probes without which the backend cannot start anything.
    foundation: ClassVar[tuple[str, ...]] = ()
    mechanisms: ClassVar[Mapping[Control, Mechanism]]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if absent := [word for word in ("name", "system", "mechanisms") if not hasattr(cls, word)]:
            raise TypeError(f"backend {cls.__qualname__} does not set {', '.join(absent)}")
        if missing := [control.value for control in Control if control not in cls.mechanisms]:
            raise TypeError(f"backend {cls.__qualname__} does not answer for: {', '.join(missing)}")

    @classmethod
    def offers(cls, host: Host) -> dict[Control, Offer]:
        """Every control, with what this backend makes of it on that host."""
        return {control: cls._offer(cls.mechanisms[control], host) for control in Control}

    @classmethod
    def _offer(cls, mechanism: Mechanism, host: Host) -> Offer:
        if host.system != cls.system:
            return Offer(
                reason=f"the {cls.name} backend works on {cls.system}, this is {host.system}",
                fix=f"use a {cls.system} machine",
            )
        if mechanism.never:
            return Offer(reason=mechanism.never, waivable=mechanism.optional)
        if lacking := [name for name in cls.foundation if not host.has(name)]:
            return Offer(reason=_reason(lacking[0], host), fix=_fix(lacking[0], host))
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


def _reason(probe: str, host: Host) -> str:
    return host.probes[probe].reason if probe in host.probes else f"{probe} was not probed"


def _fix(probe: str, host: Host) -> str:
    return host.probes[probe].fix if probe in host.probes else "run `stockade doctor`"
