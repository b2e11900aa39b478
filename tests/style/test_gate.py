"""The gate's C sources: no warning, and nothing that GCC's static analyser objects to."""

from __future__ import annotations

import pytest

from stockade.gate import build
from support.means import need_program
from support.paths import GATE_SOURCES


@pytest.mark.timeout(300)
def test_the_analyser_finds_nothing() -> None:
    need_program("gcc")
    build.check(sources=GATE_SOURCES)
