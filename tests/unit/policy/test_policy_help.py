"""What `help(stockade.Policy)` says about every clause."""

from __future__ import annotations

import inspect
import pydoc

import msgspec
import pytest

from stockade.policy import Limits, Policy, Reuse, Syscalls, WorkspaceRule

MODELS: list[type[msgspec.Struct]] = [Policy, WorkspaceRule, Limits, Syscalls, Reuse]


@pytest.mark.parametrize("model", MODELS)
def test_the_docstring_explains_every_clause(model: type[msgspec.Struct]) -> None:
    lines = (inspect.getdoc(model) or "").splitlines()
    begun = [line.strip().partition(": ")[0] for line in lines[lines.index("Attributes:") :] if ": " in line]
    assert set(begun) >= set(model.__struct_fields__), "run python scripts/policy_reference.py"


@pytest.mark.parametrize("model", MODELS)
def test_help_shows_it(model: type[msgspec.Struct]) -> None:
    text = pydoc.render_doc(model, renderer=pydoc.plaintext)
    for name in model.__struct_fields__:
        assert f"|      {name}: " in text
