"""Attacks on the network rules run in a small internet, from one supervisor per module."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from attacks.egress.reach import Reach
from stockade.host import bubblewrap
from support import bubblewraps
from support.network import Internet
from support.warm_supervisor import WarmSupervisor, warm_supervisor


@pytest.fixture(scope="module")
def shared_supervisor(shared_internet: Internet) -> Iterator[WarmSupervisor]:
    """A supervisor for the tests of one module."""
    with warm_supervisor(shared_internet) as supervisor:
        yield supervisor


@pytest.fixture
def reach(internet: Internet, shared_supervisor: WarmSupervisor) -> Reach:
    """The same program behind the rules and without them."""
    return Reach(internet, shared_supervisor)


@pytest.fixture(params=["native", "bwrap"])
def backend(request: pytest.FixtureRequest, reach: Reach) -> dict[str, Any]:
    """What a policy says for a sandbox of each backend that has rules."""
    if request.param == "native":
        return {}
    program = str(bubblewraps.program(bubblewraps.NEW))
    reach.supervisor.do(f"import os; os.environ[{bubblewrap.NAMED!r}] = {program!r}")
    return {"backend": "bwrap", "accept": ["ipc", "deny"], "toolchain": False}
