"""Processes that are in the register: a supervisor without walls, and a process in the place of its gate."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from stockade import state
from stockade.runs.register import sandbox_record
from stockade.runs.register.record_file import FILE, RecordFile

ID = "0123456789ab"

SUPERVISOR = """
import json, os, sys, time
from stockade.runs.register import register
from stockade.runs.register.sandbox_record import SandboxRecord
home, fields = sys.argv[1], json.loads(sys.argv[2])
for key in ("command", "groups"):
    fields[key] = tuple(fields.get(key, ()))
entry = register.enter(home, SandboxRecord(**fields))
print("entered", flush=True)
{then}
"""
STAYS = "time.sleep(100)"


@contextlib.contextmanager
def stand_in(*command: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process in the place of a gate."""
    with subprocess.Popen(command or ("sleep", "100")) as process:
        try:
            yield process
        finally:
            process.kill()


@contextlib.contextmanager
def supervisor(
    home: Path, then: str = STAYS, around: tuple[str, ...] = (), **fields: object
) -> Iterator[subprocess.Popen[str]]:
    """Another process with one sandbox in the register. Its death is by SIGKILL unless `then` says more."""
    code = SUPERVISOR.format(then=then)
    command = [*around, sys.executable, "-c", code, str(home), json.dumps(fields)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "entered\n"
            yield process
        finally:
            process.kill()


def directories(home: str) -> list[Path]:
    """Of the supervisors in the register; none if nobody has made it yet."""
    return sorted(Path(home, "run").glob("*"))


def dead(home: str, *lines: bytes, name: str = "1-aa") -> Path:
    """A directory as a dead supervisor leaves it."""
    directory = Path(state.ensure(home), "run", name)
    directory.mkdir(parents=True)
    (directory / "lock").touch()
    with open(directory / FILE, "xb") as file:
        own = RecordFile(file.fileno())
        for each in lines:
            own.add(each)
    return directory


def line(**fields: object) -> bytes:
    """A record of a supervisor that is dead, written here and under this boot."""
    here = {"where": sandbox_record.where(os.getpid()), "supervisor": 1, "supervisor_born": 1, "id": ID}
    return msgspec.json.encode(here | fields)
