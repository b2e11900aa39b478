"""What probes of cgroups leave if they are killed."""

from __future__ import annotations

import os
from pathlib import Path

from stockade.host.cgroup_probe import LEFT_BEHIND, PROBE, remove_left_behind

#: A number that no process has: the kernel's highest is 2^22.
DEAD = 1 << 23


def _made(directory: Path, name: str, age: float = 2 * LEFT_BEHIND) -> Path:
    path = directory / name
    path.mkdir()
    made = path.stat().st_mtime - age
    os.utime(path, (made, made))
    return path


def test_cgroups_of_dead_probes_are_removed_and_no_others(tmp_path: Path) -> None:
    left = _made(tmp_path, f"{PROBE}{DEAD}-pids")
    others = [
        _made(tmp_path, f"{PROBE}{os.getpid()}-pids"),
        _made(tmp_path, f"{PROBE}{DEAD}-memory", age=0),
        _made(tmp_path, f"{PROBE}text"),
        _made(tmp_path, f"other-{DEAD}"),
    ]
    remove_left_behind(str(tmp_path))
    assert not left.exists() and all(one.exists() for one in others)
