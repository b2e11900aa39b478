"""Pruning the run log while other processes write to it."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from stockade.runs.register import runlog
from stockade.runs.register.runlog import RunLogLine


def line(at: float) -> bytes:
    return (
        msgspec.json.encode(RunLogLine(at=at, program="p", outcome="exited", exit_code=0, seconds=0)) + b"\n"
    )


def test_no_line_is_lost_that_others_add_around_the_replacement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, rename = tmp_path / runlog.FILE, os.rename
    log.write_bytes(line(1) + line(100))

    def rename_amid_writers(source: str, target: str) -> None:
        with log.open("ab") as file:
            file.write(line(101))
        rename(source, target)
        with log.open("ab") as file:
            file.write(line(102))

    monkeypatch.setattr(os, "rename", rename_amid_writers)
    assert [one.at for one in runlog.prune(str(tmp_path), lambda one: one.at < 100)] == [1]
    kept = [msgspec.json.decode(one, type=RunLogLine).at for one in log.read_bytes().splitlines()]
    assert sorted(kept) == [100, 101, 102]
