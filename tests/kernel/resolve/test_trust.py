"""Trust: the exact bytes of one file at one path, and how the command line tells it."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from stockade.resolve import trust
from stockade.resolve.discovery import find_project


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "home"
    path.mkdir()
    monkeypatch.setenv("HOME", str(path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    return path


@pytest.fixture
def project(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = home / "project"
    path.mkdir()
    (path / "stockade.toml").write_text('net = "open"\n')
    monkeypatch.chdir(path)
    return path


def agree(project: Path, state: Path) -> None:
    policy = find_project(str(project), str(project.parent))
    assert policy is not None
    trust.record(policy, policy.lookups(str(project.parent), str(project), {}), str(state))


def _agree_often(directory: Path, state: Path) -> None:
    for _ in range(5):
        agree(directory, state)


def test_two_at_once_lose_no_record(home: Path, stockade_home: Path) -> None:
    context = multiprocessing.get_context("fork")
    processes = []
    for name in ("a", "b", "c"):
        (home / name).mkdir()
        (home / name / "stockade.toml").write_text('net = "open"')
        processes.append(context.Process(target=_agree_often, args=(home / name, stockade_home)))
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
        process.close()
    assert len(trust.recorded(str(stockade_home))) == 3
