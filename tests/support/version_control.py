"""A user of git and Mercurial for tests: a home of their own, and what they type."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from support.means import need_program


def home_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of its own, and no other configuration."""
    place = tmp_path / "home"
    place.mkdir()
    monkeypatch.setenv("HOME", str(place))
    monkeypatch.setenv("GIT_CONFIG_SYSTEM", "/dev/null")
    monkeypatch.setenv("HGRCPATH", str(place / ".hgrc"))
    monkeypatch.setenv("HGUSER", "somebody")
    for name in ("XDG_CONFIG_HOME", "GIT_CONFIG_GLOBAL"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{name}_NAME", "somebody")
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "somebody@example.org")
    return place


def types(command: str, at: Path, **environ: str) -> None:
    """What the user types in a directory, whatever comes of it."""
    subprocess.run(
        ["sh", "-c", command],
        cwd=at,
        env={**os.environ, **environ},
        check=False,
        capture_output=True,
        timeout=60,
    )


def new_repository(place: Path) -> Path:
    """A repository of git's in a directory, with one commit and no hooks."""
    need_program("git")
    types("git init -q --template= .; echo a > a; git add a; git commit -qm first", place)
    return place
