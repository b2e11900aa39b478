"""One sandbox for all tests of a suite, so what they leave is looked for when the module has ended."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support import leaks


@pytest.fixture(scope="module", autouse=True)
def module_state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The state directory of the sandbox that the module's tests share."""
    home = tmp_path_factory.mktemp("frameworks") / "state"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STOCKADE_HOME", str(home))
        before = leaks.snapshot()
        yield home
    leaks.let_go_of_register()

    def left() -> list[str]:
        # The library stays connected to its resident gates.
        return [one for one in sorted(leaks.snapshot() - before) if not leaks.is_connection(one)]

    if remaining := leaks.settled(left):
        pytest.fail("the module left behind:\n  " + "\n  ".join(remaining), pytrace=False)


@pytest.fixture(autouse=True)
def nothing_left_behind() -> None:
    """Leave the check to the module's end."""
