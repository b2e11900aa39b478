"""Which backend enforces the whole policy on this host: set inclusion, nothing else.

Refuse, never degrade: a control is given up only where the policy says by
itself that it may be weaker, and then the selection says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Protocol

import msgspec

from stockade import backends as registry
from stockade.backends.base import Offer, Walls
from stockade.controls import Control
from stockade.errors import PolicyError, UnsupportedError
from stockade.host.model import Host


class Asks(Protocol):
    """The part of a Policy that selection reads."""

    @property
    def backend(self) -> str | tuple[str, ...]:
        """A name, several in the order of preference, or "auto"."""

    def controls(self) -> Mapping[Control, str]:
        """Each control that is asked for, with the clause that asks."""

    def required(self, control: Control) -> bool:
        """False where the policy lets the control be weaker."""


class Selected(msgspec.Struct, frozen=True):
    """One requested control and what becomes of it; `reason` says why it is weaker.

    A weaker one may still have a mechanism, or none at all. `means` are the
    probes that the full mechanism rests on.
    """

    requested: str
    mechanism: str
    weaker: bool = False
    reason: str = ""
    means: tuple[str, ...] = ()


class Selection(msgspec.Struct, frozen=True, dict=True):
    """The backend and what it enforces of the policy."""

    backend: str
    controls: dict[Control, Selected]

    @property
    def weaker(self) -> dict[Control, Selected]:
        """The controls that the policy accepts to be weaker, and that are."""
        return {control: selected for control, selected in self.controls.items() if selected.weaker}

    @cached_property
    def by_cgroup(self) -> frozenset[Control]:
        """The controls that a cgroup enforces."""
        return frozenset(
            control
            for control, selected in self.controls.items()
            if any(name.startswith("cgroup.") for name in selected.means)
        )

    @cached_property
    def by_process(self) -> frozenset[Control]:
        """The controls that are accepted to be weaker and that a limit for each process stands in for."""
        weaker = self.weaker.items()
        return frozenset(control for control, by in weaker if by.mechanism and control.startswith("limits."))


def select(
    policy: Asks, host: Host, backends: Mapping[str, type[Walls]] | None = None, *, reading: bool = False
) -> Selection:
    """The backend that meets every requirement: the one with the fewest weaker controls, then the first.

    `backends` is for tests; otherwise the registry's are considered. `reading` is for a plan that
    nothing will be started from.
    """
    if backends is None:
        considered = _considered(policy.backend, registry.names(), registry.considered(host.system))
    else:
        considered = _considered(policy.backend, backends, backends)
    asked = policy.controls()
    missing: dict[str, dict[Control, Offer]] = {}
    fitting: list[Selection] = []
    for name in considered:
        walls = registry.table(name) if backends is None else backends[name]
        offers = walls.planned(host) if reading else walls.offers(host)
        lacking = {control: offers[control] for control in asked if not offers[control].available}
        refused = {c: offer for c, offer in lacking.items() if policy.required(c) or not offer.waivable}
        if refused:
            missing[name] = refused
            continue
        fits = Selection(backend=name, controls={c: _selected(asked[c], offers[c]) for c in asked})
        if not fits.weaker:
            return fits  # none that comes after it can be better
        fitting.append(fits)
    if not fitting:
        raise _unsupported(missing, asked)
    return min(fitting, key=lambda selection: len(selection.weaker))


def chosen(policy: Asks, host: Callable[..., Host]) -> Selection:
    """The backend for a policy on the machine that `host` finds.

    Programs that help are looked for only where no backend serves without them, or one is asked for.
    """
    known = host()
    if policy.backend == "auto":
        try:
            found = select(policy, known)
        except UnsupportedError:
            pass
        else:
            if not found.weaker:
                return found
    considered = _considered(policy.backend, registry.names(), registry.considered(known.system))
    if any(registry.table(name).helped for name in considered):
        known = host(helpers=True)
    return select(policy, known)


def _considered(wanted: str | tuple[str, ...], known: Iterable[str], auto: Iterable[str]) -> list[str]:
    """The backends that may be used, the preferred first."""
    names = list(known)
    if wanted == "auto":
        return list(auto)
    chosen = [wanted] if isinstance(wanted, str) else list(wanted)
    for name in chosen:
        if name not in names:
            import difflib

            near = difflib.get_close_matches(name, ["auto", *names], n=1)
            raise PolicyError(
                f"backend = {_toml(name)}: there is no such backend",
                hint=f"did you mean {_toml(near[0])}?"
                if near
                else f"the backends are: auto, {', '.join(names)}",
            )
    return chosen


def _selected(requested: str, offer: Offer) -> Selected:
    return Selected(
        requested=requested,
        mechanism=offer.mechanism if offer.available else offer.weaker,
        weaker=not offer.available,
        reason=offer.reason,
        means=offer.means,
    )


def by_reason(offers: Mapping[Control, Offer]) -> dict[tuple[str, str], list[Control]]:
    """Reason and fix, with every control they explain: one cause often takes many away."""
    groups: dict[tuple[str, str], list[Control]] = {}
    for control, offer in offers.items():
        groups.setdefault((offer.reason, offer.fix), []).append(control)
    return groups


def _unsupported(
    missing: Mapping[str, Mapping[Control, Offer]], asked: Mapping[Control, str]
) -> UnsupportedError:
    lines = ["no backend on this host enforces the whole policy"]
    fixes: list[str] = []
    for name, offers in missing.items():
        for (reason, fix), controls in by_reason(offers).items():
            wanted = ", ".join(_with_clause(control, asked[control]) for control in controls)
            lines.append(f"{name} misses {wanted}: {reason}")
            fixes.append(fix)
    # One backend is enough: the line that waives least.
    waivers = [
        list(offers) for offers in missing.values() if all(offer.waivable for offer in offers.values())
    ]
    hints = _unique(fix for fix in fixes if fix)
    if waivers:
        hints.append(
            f"{'or ' if hints else ''}waive it in the policy: accept = {_toml(min(waivers, key=len))}"
        )
    return UnsupportedError(
        "\n".join(lines),
        missing={
            name: {control.value: offer.reason for control, offer in offers.items()}
            for name, offers in missing.items()
        },
        hint="\n".join(hints),
    )


def _with_clause(control: Control, clause: str) -> str:
    return control.value if clause == "default" else f"{control} ({clause})"


def _toml(value: str | list[Control]) -> str:
    # Strings and lists of them are written alike in TOML and JSON; importing json costs 8 ms.
    return msgspec.json.encode(value).decode().replace('","', '", "')


def _unique(texts: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(texts))
