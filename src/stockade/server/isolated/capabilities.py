"""What `GET /v1/isolated/capabilities` answers: states from the evidence of a real run, never from hopes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from stockade.controls import Control
from stockade.result import Enforcement

State = Literal["active", "disabled", "degraded", "unsupported"]


class HardeningLayer(msgspec.Struct, frozen=True, omit_defaults=True):
    """Whether one layer is enforced; `message` says why not, or what observed it."""

    state: State
    message: str = ""


class HardeningReport(msgspec.Struct, frozen=True):
    """The layers around the programs of a sandbox."""

    init_mode: Literal["pid1", "subreaper", "none"]
    signal_shield: bool
    cap_drop: HardeningLayer
    seccomp: HardeningLayer
    landlock: HardeningLayer
    ebpf: HardeningLayer


class IsolationCapabilities(msgspec.Struct, frozen=True, omit_defaults=True):
    """What isolated sessions can do here."""

    #: Required fields first, so that they are sent whatever their value is.
    available: bool
    setpriv_available: bool
    userns_available: bool
    commit_supported: bool
    diff_supported: bool
    isolator: str = ""
    version: str = ""
    message: str = ""
    hardening: HardeningReport | None = None


def capabilities(
    controls: Mapping[str, Enforcement], version: str, *, identities: bool
) -> IsolationCapabilities:
    """Return the capabilities by the controls of a run; `identities` says whether other ids are mapped."""
    return IsolationCapabilities(
        available=True,
        isolator="stockade",
        version=version,
        setpriv_available=identities,
        userns_available=True,
        commit_supported=True,
        diff_supported=True,
        message="" if identities else "only uid 0 and gid 0 are mapped: sessions cannot have another user",
        hardening=hardening(controls),
    )


def unavailable(reason: str, version: str) -> IsolationCapabilities:
    """Return the capabilities of a machine that cannot isolate, and why."""
    return IsolationCapabilities(
        available=False,
        isolator="stockade",
        version=version,
        setpriv_available=False,
        userns_available=False,
        commit_supported=False,
        diff_supported=False,
        message=reason,
    )


def hardening(controls: Mapping[str, Enforcement]) -> HardeningReport:
    """Return the layers by the controls of a run."""
    processes = controls.get(Control.PROCESSES)
    alone = processes is not None and processes.grade.enforced
    return HardeningReport(
        init_mode="pid1" if alone else "none",
        signal_shield=alone,
        cap_drop=_layer(controls.get(Control.PRIVILEGES), "cap"),
        seccomp=_layer(controls.get(Control.SYSCALLS), "seccomp"),
        landlock=_layer(controls.get(Control.FILES), "Landlock"),
        ebpf=HardeningLayer("disabled", "Stockade does not use eBPF"),
    )


def _layer(found: Enforcement | None, mechanism: str) -> HardeningLayer:
    """Return one layer: active if its mechanism is in force and was observed."""
    if found is None or mechanism not in found.mechanism:
        return HardeningLayer(
            "unsupported", "the kernel does not have it" if found is None else found.mechanism
        )
    if not found.grade.enforced:
        return HardeningLayer("degraded", found.observed)
    return HardeningLayer("active", found.observed)
