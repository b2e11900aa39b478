"""`typing.get_type_hints` and `help` for everything that users can reach.

Beginning with the public names, the tests follow what attributes are and what methods take and return.
"""

from __future__ import annotations

import importlib
import inspect
import pydoc
import typing
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

import pytest

import stockade

PUBLIC = [
    "stockade",
    "stockade.client",
    "stockade.controls",
    "stockade.errors",
    "stockade.functions",
    "stockade.host",
    "stockade.inside",
    "stockade.policy",
    "stockade.receipt",
    "stockade.result",
    "stockade.sandbox",
    "stockade.workspace",
]
#: Methods with two underscores that users cause to be called.
SPECIAL = ("__init__", "__call__", "__iter__", "__next__", "__aiter__", "__anext__", "__len__", "__getitem__")
SPECIAL += ("__enter__", "__exit__", "__aenter__", "__aexit__", "__or__")


def names(module: ModuleType) -> list[str]:
    """The names that a module exports, or that it defines and does not hide."""
    own = (
        name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__
    )
    return list(getattr(module, "__all__", None) or [name for name in own if not name.startswith("_")])


def functions(kind: type) -> Iterator[tuple[str, FunctionType]]:
    """The public methods and properties of a class of ours, with their names."""
    for name, value in inspect.getmembers_static(kind):
        if name.startswith("_") and name not in SPECIAL:
            continue
        plain = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        plain = inspect.unwrap(plain) if callable(plain) else plain
        if isinstance(plain, FunctionType) and plain.__module__.startswith("stockade"):
            yield f"{kind.__module__}.{kind.__qualname__}.{name}", plain


def classes(hint: Any) -> Iterator[type]:
    """The classes of ours in a type."""
    if isinstance(hint, type) and hint.__module__.startswith("stockade"):
        yield hint
    for part in typing.get_args(hint):
        yield from classes(part)


def reachable() -> dict[str, Any]:
    """Every public function, class, method and property, and the classes that these name, by their names."""
    found: dict[str, Any] = {}
    pending: list[Any] = [
        getattr(module, name) for module in map(importlib.import_module, PUBLIC) for name in names(module)
    ]
    while pending:
        one = pending.pop()
        if not isinstance(one, type | FunctionType) or not one.__module__.startswith("stockade"):
            continue
        name = f"{one.__module__}.{one.__qualname__}"
        if name in found:
            continue
        found[name] = one
        members = dict(functions(one)) if isinstance(one, type) else {}
        found |= members
        # Users do not make most objects: what a constructor takes may be private.
        for value in (one, *(found for name, found in members.items() if not name.endswith("__init__"))):
            try:
                hints = typing.get_type_hints(value)
            except NameError:
                continue  # the test of this name says so
            pending += [
                kind for part, hint in hints.items() if not part.startswith("_") for kind in classes(hint)
            ]
    return found


REACHABLE = reachable()


def test_control_the_search_goes_deep() -> None:
    assert {
        "stockade.result.Result",
        "stockade.sandbox.sandbox.Sandbox.files",
        "stockade.workspace.files.files.Files.write",
        "stockade.workspace.diff.diff.FileDiff",
        "stockade.workspace.files.async_files.AsyncFiles.write",
        "stockade.errors.ReceiptError.__init__",
        "stockade.functions.sandboxed_function.sandboxed",
    } <= set(REACHABLE)


@pytest.mark.parametrize("name", REACHABLE)
def test_the_types_of_everything_public_can_be_asked_for(name: str) -> None:
    typing.get_type_hints(REACHABLE[name])


@pytest.mark.parametrize("module", PUBLIC)
def test_help_describes_the_module(module: str) -> None:
    assert pydoc.render_doc(importlib.import_module(module), renderer=pydoc.plaintext)


@pytest.mark.parametrize("name", [name for name, one in REACHABLE.items() if isinstance(one, type)])
def test_help_describes_every_class(name: str) -> None:
    assert pydoc.render_doc(REACHABLE[name], renderer=pydoc.plaintext)


def test_a_type_that_lies_above_is_shown_by_its_public_name() -> None:
    assert "committed: stockade.workspace" in pydoc.render_doc(stockade.Result, renderer=pydoc.plaintext)
