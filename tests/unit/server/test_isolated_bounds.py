"""How many isolated sessions one supervisor can hold."""

from __future__ import annotations

import resource

import pytest

from stockade.server.isolated import sessions


@pytest.mark.parametrize(
    ("open_files", "most"),
    [(20_000, 1024), (4096, 224), (1024, 32), (256, 1)],
)
def test_sessions_fit_into_the_open_files(
    monkeypatch: pytest.MonkeyPatch, open_files: int, most: int
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (open_files, open_files))
    assert sessions.most_sessions() == most
