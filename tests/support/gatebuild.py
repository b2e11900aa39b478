"""Builds of the gate that are for tests only."""

from __future__ import annotations

from pathlib import Path

from stockade.gate import build
from support.paths import GATE_SOURCES


def sanitized(directory: Path) -> Path:
    """A gate with the address and undefined-behaviour sanitizers in it, dynamically linked."""
    return build.sanitized(directory / "sanitized" / build.EXECUTABLE, sources=GATE_SOURCES)


def sabotaged(directory: Path) -> Path:
    """A gate that leaves walls out on request, to show that the checks notice."""
    output = directory / "sabotaged" / build.EXECUTABLE
    return build.executable(output, sources=GATE_SOURCES, defines=["GATE_SABOTAGE"])
