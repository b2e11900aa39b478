"""Names of a package that load their module on first use, so that importing the package stays cheap."""

from __future__ import annotations

TYPE_CHECKING = False  # importing it from typing takes longer than all of this
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def loader(package: str, modules: Mapping[str, str]) -> Callable[[str], object]:
    """Return a `__getattr__` for the package. `modules` has the module of each name."""

    def load(name: str) -> object:
        import importlib
        import sys

        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name)
        value = getattr(importlib.import_module(modules[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return load
