"""What a test needs from the machine, said out loud.

A test whose means are missing is skipped, and its reason is counted in the
closing summary. With `STOCKADE_REQUIRE=all` (continuous integration) it fails
instead, so that nothing goes untested there unnoticed.
"""

from __future__ import annotations

import os
import shutil
from typing import Any

import pytest


def need(condition: bool, reason: str) -> None:
    """Go on only if the machine has the means; `reason` names what is missing."""
    if condition:
        return
    if os.environ.get("STOCKADE_REQUIRE") == "all":
        pytest.fail(f"missing, and STOCKADE_REQUIRE=all: {reason}", pytrace=False)
    pytest.skip(reason, allow_module_level=True)


def need_program(name: str) -> str:
    """The path of a program that the test runs."""
    path = shutil.which(name)
    need(path is not None, f"the program {name} is not installed")
    assert path is not None
    return path


def applies(condition: bool, reason: str) -> None:
    """Go on only if the test has a meaning here (say, for root only): never a failure, always counted."""
    if not condition:
        pytest.skip(reason, allow_module_level=True)


def clauses_for(backend: str) -> dict[str, Any]:
    """Return the clauses of a policy for one backend, with what it has only in part accepted."""
    from stockade.bench.backend_costs import usable

    found = usable().get(backend)
    need(found is not None, f"the {backend} backend does not work here")
    assert found is not None
    return {"backend": backend, "accept": list(found.accept)}
