"""Git on the host, as whoever made a repository and as the user who works in it afterwards."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from support.means import need_program


def git(*words: str, at: Path) -> None:
    """Run git; it must succeed."""
    subprocess.run([need_program("git"), *words], cwd=at, check=True, capture_output=True, timeout=60)


def types(command: str, at: Path) -> None:
    """Run what a user would type there."""
    subprocess.run(["sh", "-c", command], cwd=at, check=False, capture_output=True, timeout=60)


def somebody(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Be a user with a name and an empty home: no configuration of whoever runs the tests counts."""
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("GIT_CONFIG_SYSTEM", "/dev/null")
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{name}_NAME", "somebody")
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "somebody@example.org")
