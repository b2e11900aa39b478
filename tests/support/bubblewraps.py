"""The versions of bubblewrap that are tested: Debian 12's, and the newest as a package of Python's."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from stockade import host as hosts
from stockade.host import bubblewrap
from support.means import need

OLD, NEW = "0.8", "0.11"


def program(version: str) -> str:
    """Where that version is."""
    for path in bubblewrap.candidates({}):
        said = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
        if said.startswith(f"bubblewrap {version}."):
            return path
    need(False, f"bubblewrap {version} is not installed")
    raise AssertionError


def use(path: str | Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process, and those it starts, take that program and look at it anew."""
    monkeypatch.setenv(bubblewrap.NAMED, str(path))
    monkeypatch.setattr(hosts, "_known", {})
