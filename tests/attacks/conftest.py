"""What the attacks stand on."""

from __future__ import annotations

from pathlib import Path

import pytest

from attacks import arena
from support.ground import Ground


@pytest.fixture(scope="session", autouse=True)
def attack_builds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where attacks that are written in C are built."""
    arena.build_directory = tmp_path_factory.mktemp("attacks")
    return arena.build_directory


@pytest.fixture
def granted(tmp_path: Path) -> Path:
    """A directory of the host with one file in it, for a policy to grant."""
    directory = tmp_path / "granted"
    directory.mkdir()
    (directory / "file").write_text("original\n")
    return directory


@pytest.fixture
def hidden(tmp_path: Path) -> Path:
    """A directory of the host that no policy grants, with a secret in it."""
    directory = tmp_path / "hidden"
    directory.mkdir()
    (directory / "secret").write_text("the secret\n")
    return directory


@pytest.fixture
def ground(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ground:
    """A repository that the caller is in, below a home of its own."""
    found = Ground(tmp_path)
    monkeypatch.chdir(found.repository)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    return found
