"""Limits for a user whose systemd gives out delegated cgroups, with a stand-in for systemd-run.

The stand-in moves itself into cgroups that root has given to the user, as a
scope with Delegate=yes is, and becomes the command that follows the options.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

import stockade
from kernel.linux.test_cgroup_places import OURS, as_user
from stockade import Policy
from stockade.gate import client
from stockade.host import host
from stockade.runs.register import register
from support.means import applies, need

CONTROLLERS = ("memory", "pids", "cpu", "cpuacct")
BOMB = ["/usr/bin/python3", "-c", "kept = [bytearray(1 << 20) for _ in range(200)]"]
STAND_IN = """#!/bin/sh
while [ "$1" != -- ]; do shift; done; shift
for place in {places}; do echo $$ > $place/tasks || exit 1; done
exec "$@"
"""


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[Path]:
    """A directory with `systemd-run` and what says that a user's systemd is there."""
    applies(os.geteuid() == 0, "for root only: it plays the system's part")
    need(os.path.isdir("/sys/fs/cgroup/pids"), "version 1 is not mounted")
    places = [f"/sys/fs/cgroup/{name}/stockade-scope-{uuid4().hex}" for name in CONTROLLERS]
    os.chmod(tmp_path, 0o755)
    for path in map(str, (tmp_path, *tmp_path.parents)):
        if path.startswith(("/tmp/", "/var/tmp/")):
            os.chmod(path, os.stat(path).st_mode | 0o055)
    (tmp_path / "systemd").mkdir()
    (tmp_path / "systemd/private").touch()
    (tmp_path / "systemd-run").write_text(STAND_IN.format(places=" ".join(places)))
    (tmp_path / "systemd-run").chmod(0o755)
    (tmp_path / "home").mkdir(mode=0o700)
    os.chown(tmp_path / "home", OURS, OURS)
    for place in places:
        os.mkdir(place)
        subprocess.run(
            ["chown", str(OURS), place, *(f"{place}/{f}" for f in ("tasks", "cgroup.procs"))], check=True
        )
    yield tmp_path
    for place in places:
        os.rmdir(place)


def test_pretend_systemd_gives_a_user_limits_on_the_whole_sandbox(systemd: Path) -> None:
    def work() -> str:
        os.environ.update(
            PATH=f"{systemd}:/usr/bin:/bin", XDG_RUNTIME_DIR=str(systemd), STOCKADE_HOME=str(systemd / "home")
        )
        assert host(fresh=True).probes["cgroup.memory"].detail == "systemd scope, version 1"
        result = stockade.run(BOMB, Policy(limits={"memory": "64M", "cpu_time": "20s"}), timeout=60)
        plain = stockade.run(["echo", "plain"])
        client.shutdown()
        register.shutdown()
        return f"{result.outcome} {result.exit_code} {result.reason}; {plain.text}"

    assert (
        as_user(OURS, work) == 'out-of-memory 137 memory ran out: limits.memory = "64M" (64M used); plain\n'
    )
