"""Select the backend that enforces the whole policy on this host: set inclusion, nothing else.

Refuse, never degrade: a control is weaker only if the policy accepts that, and then the selection says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Protocol

import msgspec

from stockade import backends as registry
from stockade.backends.backend import Enforcer, Offer
from stockade.controls import Control
from stockade.errors import PolicyError, UnsupportedError
from stockade.host.capabilities import Host


class ControlRequest(Protocol):
    """The part of a Policy that selection reads."""

    @property
    def backend(self) -> str | tuple[str, ...]:
        """A name, several names in order of preference, or "auto"."""

    def controls(self) -> Mapping[Control, str]:
        """Return each control that the policy needs, with the clause that needs it."""

    def required(self, control: Control) -> bool:
        """Return False if the policy accepts that the control is weaker."""


class ControlChoice(msgspec.Struct, frozen=True):
    """One requested control and its mechanism; `reason` says why it is weaker.

    A weaker control may still have a mechanism, or none. `means` are the probes that the full mechanism
    needs.
    """

    requested: str
    mechanism: str
    weaker: bool = False
    reason: str = ""
    means: tuple[str, ...] = ()


class Selection(msgspec.Struct, frozen=True, dict=True):
    """The backend, and how it enforces the controls of the policy."""

    backend: str
    controls: dict[Control, ControlChoice]

    @property
    def weaker(self) -> dict[Control, ControlChoice]:
        """The controls that are weaker, which the policy accepts."""
        return {control: selected for control, selected in self.controls.items() if selected.weaker}

    @cached_property
    def covers(self) -> bool:
        """Whether the backend can keep a path read-only in a directory that a program may write to."""
        return not registry.table(self.backend).mechanisms[Control.PROTECT].never

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
        """The weaker controls for which a limit on each process stands in."""
        weaker = self.weaker.items()
        return frozenset(control for control, by in weaker if by.mechanism and control.startswith("limits."))


def select(
    policy: ControlRequest,
    host: Host,
    backends: Mapping[str, type[Enforcer]] | None = None,
    *,
    reading: bool = False,
) -> Selection:
    """Return the backend that meets every requirement with the fewest weaker controls; of several, the first.

    `backends` is for tests, instead of the registry. `reading` is for a plan that is only shown.
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
            return fits  # no later one can be better
        fitting.append(fits)
    if not fitting:
        raise _unsupported(missing, asked, all_asked_for=policy.backend != "auto")
    return min(fitting, key=lambda selection: len(selection.weaker))


def enforcement(policy: ControlRequest, host: Host) -> dict[Control, ControlChoice]:
    """Return how this host enforces the controls of a policy; UnsupportedError if it cannot."""
    return select(policy, host).controls


def chosen(policy: ControlRequest, host: Callable[..., Host]) -> Selection:
    """Return the backend for a policy on this machine; `host` is called for what the machine can do.

    Helpers are probed only if no backend works without them, or if the policy names one that needs them.
    """
    known = host()
    if policy.backend == "auto":
        try:
            selection = select(policy, known)
        except UnsupportedError:
            pass
        else:
            if not selection.weaker:
                return selection
    considered = _considered(policy.backend, registry.names(), registry.considered(known.system))
    if any(registry.table(name).helped for name in considered):
        known = host(helpers=True)
    return select(policy, known)


def _considered(wanted: str | tuple[str, ...], known: Iterable[str], auto: Iterable[str]) -> list[str]:
    """Return the backends that may be used, the preferred one first."""
    names = list(known)
    if wanted == "auto":
        return list(auto)
    chosen = [wanted] if isinstance(wanted, str) else list(wanted)
    for name in chosen:
        if name not in names:
            from stockade.policy.suggestions import closest

            near = closest(name, ["auto", *names])
            raise PolicyError(
                f"backend = {_toml(name)}: there is no such backend",
                hint=f"did you mean {_toml(near)}?"
                if near
                else f"the backends are: auto, {', '.join(names)}",
            )
    return chosen


def _selected(requested: str, offer: Offer) -> ControlChoice:
    return ControlChoice(
        requested=requested,
        mechanism=offer.mechanism if offer.available else offer.weaker,
        weaker=not offer.available,
        reason=offer.reason,
        means=offer.means,
    )


def by_reason(offers: Mapping[Control, Offer]) -> dict[tuple[str, str], list[Control]]:
    """Group controls by reason and fix: one cause often explains several of them."""
    groups: dict[tuple[str, str], list[Control]] = {}
    for control, offer in offers.items():
        groups.setdefault((offer.reason, offer.fix), []).append(control)
    return groups


def _unsupported(
    missing: Mapping[str, Mapping[Control, Offer]], asked: Mapping[Control, str], *, all_asked_for: bool
) -> UnsupportedError:
    lines = ["no backend on this host enforces the whole policy"]
    best = easiest(missing)
    for name, offers in missing.items():
        if name != best and not all_asked_for:
            continue
        for (reason, _), controls in by_reason(offers).items():
            wanted = ", ".join(_with_clause(control, asked[control]) for control in controls)
            lines.append(f"{name} misses {wanted}: {reason}")
    # The user needs only one backend: suggest its fix, and the shortest waiver.
    waivers = [
        list(offers) for offers in missing.values() if all(offer.waivable for offer in offers.values())
    ]
    hints = list(dict.fromkeys(offer.fix for offer in missing[best].values() if offer.fix))
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


def easiest(missing: Mapping[str, Mapping[Control, Offer]]) -> str:
    """Return the backend to explain: the first with a fix for everything that it misses, or the first."""
    fixable = (name for name, offers in missing.items() if all(offer.fix for offer in offers.values()))
    return next(fixable, next(iter(missing)))


def _with_clause(control: Control, clause: str) -> str:
    return control.value if clause == "default" else f"{control} ({clause})"


def _toml(value: str | list[Control]) -> str:
    # Strings and lists of them are written alike in TOML and JSON; importing json costs 8 ms.
    return msgspec.json.encode(value).decode().replace('","', '", "')
