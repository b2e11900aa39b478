"""What makes the imports of a command quicker, in a process of the command's own.

Most of the time of `stockade run -- true` is spent on imports, so it pays to look for modules where they are,
and to keep msgspec from modules that it does not need.
"""

from __future__ import annotations

import importlib
import os
import sys
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import ModuleType

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence


class PackageFinder:
    """Finds the modules of this package by their names, without listing its directories."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return where a module of ours is; None for others, and for what the usual finders have to find."""
        if path is None or not name.startswith("stockade."):
            return None
        place = f"{path[0]}/{name.rpartition('.')[2]}"
        for file, directories in ((f"{place}/__init__.py", [place]), (f"{place}.py", None)):
            try:
                os.stat(file)
            except OSError:
                continue
            spec = ModuleSpec(name, SourceFileLoader(name, file), origin=file)
            spec.has_location = True
            spec.submodule_search_locations = directories
            return spec
        return None


def find_by_name() -> None:
    """Let this process find our modules by their names."""
    sys.meta_path.insert(0, PackageFinder)


class _LaterModule(ModuleType):
    """A module that is loaded when something of it is used."""

    def __getattr__(self, name: str) -> object:
        return getattr(importlib.import_module(self.__name__), name)


def load_msgspec() -> None:
    """Import msgspec without the slowest imports of a start, which it does not need.

    It imports typing_extensions, if that is installed, for a function that Python has as well; textwrap and
    its own inspect for schemas; datetime, whose classes are those of _datetime once it has made its own; and
    Python's uuid (3.11) imports platform, with all its patterns, to learn the system's name.
    """
    if "msgspec" in sys.modules:
        return
    stand_ins: dict[str, ModuleType | None] = {
        "typing_extensions": None,
        "textwrap": _LaterModule("textwrap"),
        "msgspec.inspect": _LaterModule("msgspec.inspect"),
        "datetime": importlib.import_module("_datetime"),
    }
    if "uuid" not in sys.modules:
        stand_ins["platform"] = platform = ModuleType("platform")
        platform.system = lambda: os.uname().sysname  # type: ignore[attr-defined]
    stand_ins = {name: module for name, module in stand_ins.items() if name not in sys.modules}
    sys.modules.update(stand_ins)  # type: ignore[arg-type]
    try:
        importlib.import_module("msgspec")
    finally:
        for name in stand_ins:
            del sys.modules[name]
