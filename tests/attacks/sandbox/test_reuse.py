"""Pools that use a sandbox again: what one run leaves reaches the next only where that is stated."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest

from attacks import arena
from stockade import Policy, Pool, backends
from stockade.bench.backend_costs import usable
from support.means import need

WORD = f"left-{os.getpid()}"


@pytest.fixture(params=list(backends.BACKENDS))
def pool(request: pytest.FixtureRequest) -> Any:
    found = usable().get(request.param)
    need(found is not None, f"the {request.param} backend does not work here")
    assert found is not None
    with Pool(Policy(backend=request.param, accept=found.accept, reuse={}), size=1) as made:
        until = time.monotonic() + 20
        while not made.ready:
            assert time.monotonic() < until
            time.sleep(0.01)
        yield made


def said(pool: Pool, *words: str) -> Any:
    command, _ = arena.command_of("leftovers", *words)
    result = pool.run(command, timeout=30)
    assert result.outcome == "exited" and result.exit_code == 0, result.stderr.decode()
    return arena.verdict_of(result.stdout)


def test_nothing_of_a_run_reaches_the_next_but_what_is_stated(pool: Pool) -> None:
    before = said(pool, "look", WORD)
    left = said(pool, "leave", WORD, "spoil")
    (slot,) = (slot for slot in pool._ready if slot.requests)
    assert slot.requests == 2, "it was not used again"
    after = said(pool, "look", WORD)
    # What is found of it there tells that it was the same sandbox.
    assert any(answer == "ok" for answer in left["made"].values()), left
    assert after.pop("stated") != before.pop("stated")
    assert after == before


def test_using_one_again_takes_no_time(pool: Pool) -> None:
    times = []
    for _ in range(5):
        began = time.monotonic()
        assert pool.run(["true"]).ok
        times.append(time.monotonic() - began)
    assert min(times) < 0.4, times


def test_outside_what_was_left_is_met() -> None:
    before = arena.outside("leftovers", "look", WORD)
    left = arena.outside("leftovers", "leave", WORD)
    try:
        after = arena.outside("leftovers", "look", WORD)
    finally:
        for orphan in left["orphans"]:
            os.kill(orphan, signal.SIGKILL)  # it lives on
        _remove()
    assert before["abstract"] == "ECONNREFUSED" and after["abstract"] == "ok"
    assert after["lock"] == "EAGAIN" != before["lock"]
    assert set(left["made"].values()) == {"ok"}


def _remove() -> None:
    """What outlives its makers outside."""
    import ctypes
    import subprocess

    for kind in ("-M", "-S", "-Q"):
        subprocess.run(["ipcrm", kind, "0x5743"], check=True)
    ctypes.CDLL(None).mq_unlink(f"/{WORD}".encode())
    for place in ("/tmp", "/dev/shm", os.path.expanduser("~")):
        os.rmdir(f"{place}/{WORD}")
