"""The table of backends, which are loaded when they are needed.

Loading a name checks that its class is a `Backend` of that name; the class itself checks that it answers for
every control. Drafts answer for every control too and compile plans, but start nothing: they have never been
run on their systems.
"""

from __future__ import annotations

import importlib

from stockade.backends.backend import Backend, Enforcer, Mechanism, Offer

__all__ = [
    "BACKENDS",
    "DRAFTS",
    "Backend",
    "Enforcer",
    "Mechanism",
    "Offer",
    "considered",
    "load",
    "names",
    "table",
]

#: name → module:Class, best first.
BACKENDS = {
    "native": "stockade.backends.native:Native",
    "bwrap": "stockade.backends.bwrap:Bwrap",
    "landlock": "stockade.backends.landlock:LandlockBackend",
}
#: The same for drafts, by the system that each is for.
DRAFTS = {
    "darwin": {
        "seatbelt": "stockade.backends.other_systems.seatbelt:Seatbelt",
        "apple-container": "stockade.backends.other_systems.apple_container:AppleContainer",
    },
    "openbsd": {"pledge": "stockade.backends.other_systems.pledge:Pledge"},
    "win32": {"jobobject": "stockade.backends.other_systems.job_object:JobObject"},
}


def load(name: str) -> type[Backend]:
    """Return the class of a backend that can start sandboxes."""
    backend = _loaded(name, BACKENDS[name])
    if not issubclass(backend, Backend):
        raise TypeError(f"{BACKENDS[name]} is not a backend that can start sandboxes")
    return backend


def table(name: str) -> type[Enforcer]:
    """Return the class of a backend or draft, which says what it enforces."""
    for drafts in DRAFTS.values():
        if name in drafts:
            return _loaded(name, drafts[name])
    return load(name)


def considered(system: str) -> list[str]:
    """Return the names to consider if a policy names none: the drafts for the system, or the backends."""
    return list(DRAFTS.get(system, BACKENDS))


def names() -> list[str]:
    """Return every name that a policy may use."""
    return [*BACKENDS, *(name for drafts in DRAFTS.values() for name in drafts)]


def _loaded(name: str, place: str) -> type[Enforcer]:
    module, _, attribute = place.partition(":")
    backend = getattr(importlib.import_module(module), attribute)
    if not (isinstance(backend, type) and issubclass(backend, Enforcer) and backend.name == name):
        raise TypeError(f"{place} is not the backend {name!r}")
    return backend
