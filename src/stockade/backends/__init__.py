"""The backends there are, loaded when they are asked for.

A name stands in the table only with a class behind it; loading one checks
that it is a `Backend` (whose making checked that it answers for every
control) and that it goes by its name. Drafts answer for every control too and
compile plans, but start nothing: they have never been run on their systems.
"""

from __future__ import annotations

import importlib

from stockade.backends.base import Backend, Mechanism, Offer, Walls

__all__ = [
    "BACKENDS",
    "DRAFTS",
    "Backend",
    "Mechanism",
    "Offer",
    "Walls",
    "considered",
    "load",
    "names",
    "table",
]

#: name → module:Class, best first.
BACKENDS = {
    "native": "stockade.backends.native:Native",
    "bwrap": "stockade.backends.bwrap:Bwrap",
    "landlock": "stockade.backends.landlock:Landlock",
}
#: Likewise, by the system that each is for.
DRAFTS = {
    "darwin": {
        "seatbelt": "stockade.backends.seatbelt:Seatbelt",
        "apple-container": "stockade.backends.apple:AppleContainer",
    },
    "openbsd": {"pledge": "stockade.backends.pledge:Pledge"},
    "win32": {"jobobject": "stockade.backends.jobobject:JobObject"},
}


def load(name: str) -> type[Backend]:
    """The class of the backend of that name."""
    backend = _loaded(name, BACKENDS[name])
    if not issubclass(backend, Backend):
        raise TypeError(f"{BACKENDS[name]} is not a backend that can start anything")
    return backend


def table(name: str) -> type[Walls]:
    """The class of that name, which says what it enforces; it may be a draft."""
    for drafts in DRAFTS.values():
        if name in drafts:
            return _loaded(name, drafts[name])
    return load(name)


def considered(system: str) -> list[str]:
    """The names that are looked at where a policy names none: those for the system, if there are any."""
    return list(DRAFTS.get(system, BACKENDS))


def names() -> list[str]:
    """Every name that a policy may use."""
    return [*BACKENDS, *(name for drafts in DRAFTS.values() for name in drafts)]


def _loaded(name: str, place: str) -> type[Walls]:
    module, _, attribute = place.partition(":")
    found = getattr(importlib.import_module(module), attribute)
    if not (isinstance(found, type) and issubclass(found, Walls) and found.name == name):
        raise TypeError(f"{place} is not the backend {name!r}")
    return found
