"""Where the checkout's parts are. The tests may run against an installed copy of the package."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "stockade"
GATE_SOURCES = PACKAGE / "gate" / "src"
