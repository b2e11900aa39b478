"""Unit tests: no process, no sandbox, no resident gate. A test that starts one fails."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pyseccomp  # noqa: F401  (it runs ldconfig when it is loaded, so not in a test)
import pytest

from stockade import host
from stockade.gate import client
from stockade.host.capabilities import Host

STARTS = frozenset({"os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "subprocess.Popen"})
_watched: list[str] = []


def _note(event: str, _: object) -> None:
    # An audit hook cannot be removed: outside of a unit test it notes nothing.
    if event in STARTS and _watched:
        _watched.append(event)


sys.addaudithook(_note)


@pytest.fixture(autouse=True)
def nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail a test that starts a process or asks the gate for a sandbox."""

    def refuse(*_: object, **__: object) -> None:
        pytest.fail("a unit test asks the gate for a sandbox: it belongs to tests/kernel", pytrace=True)

    monkeypatch.setattr(client, "launch", refuse)
    monkeypatch.setattr(client, "resident", refuse)
    # What this machine can do is found out by doing it: here it can do everything.
    monkeypatch.setitem(host._known, os.geteuid(), Host.pretend())
    _watched[:] = ["a test"]
    yield
    events = _watched[1:]
    _watched.clear()
    assert events == [], "a unit test starts processes: it belongs to tests/kernel"
