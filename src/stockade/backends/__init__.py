"""The backends there are, loaded when they are asked for.

A name stands in the table only with a class behind it; loading one checks
that it is a `Backend` (whose making checked that it answers for every
control) and that it goes by its name.
"""

from __future__ import annotations

import importlib

from stockade.backends.base import Backend, Mechanism, Offer

__all__ = ["BACKENDS", "Backend", "Mechanism", "Offer", "load"]

#: name → module:Class, best first.
BACKENDS = {
    "native": "stockade.backends.native:Native",
    "bwrap": "stockade.backends.bwrap:Bwrap",
    "landlock": "stockade.backends.landlock:Landlock",
}


def load(name: str) -> type[Backend]:
    """The class of the backend of that name."""
    module, _, attribute = BACKENDS[name].partition(":")
    backend = getattr(importlib.import_module(module), attribute)
    if not (isinstance(backend, type) and issubclass(backend, Backend) and backend.name == name):
        raise TypeError(f"{BACKENDS[name]} is not the backend {name!r}")
    return backend
