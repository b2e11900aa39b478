"""Devices: a handful that are harmless, and no way to come by another."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from attacks import arena
from attacks.arena import inside, outside
from support.means import applies, need


@pytest.mark.parametrize("place", ["overlay", "rw", "write", "/tmp", "/dev/shm"])
def test_a_device_cannot_be_made(workspace: Path, tmp_path: Path, place: str) -> None:
    policies: dict[str, dict[str, Any]] = {
        "overlay": {"workspace": str(workspace)},
        "rw": {"workspace": {"path": str(workspace), "mode": "rw"}, "protect": []},
        "write": {"write": [str(workspace)]},
    }
    where = place if place.startswith("/") else str(workspace)
    verdict = inside("devices", where, **policies.get(place, {}))
    assert set(verdict.values()) <= {"EPERM", "EACCES"}, verdict
    # Anybody may make the node 0:0; an overlay would take it for a deleted file.
    control = outside("devices", tmp_path)
    assert control["whiteout"] == "ok"
    if arena.IS_ROOT:
        assert set(control.values()) == {"ok"}


@pytest.mark.parametrize("mode", ["overlay", "rw", "ro"])
def test_a_device_that_lies_in_the_workspace_cannot_be_opened(workspace: Path, mode: str) -> None:
    applies(arena.IS_ROOT, "only root can plant a device")
    node = workspace / "zero"
    os.mknod(node, stat.S_IFCHR | 0o666, os.makedev(1, 5))
    rule = {"path": str(workspace), "mode": mode}
    assert inside("files", "open,write", node, workspace=rule, protect=[])["open"] == "EACCES"
    need(
        outside("files", "open", node) == {"open": "ok"},
        "devices cannot be opened in the temporary directory",
    )


@pytest.mark.parametrize(
    "name", ["mem", "kmem", "port", "kmsg", "sda", "vda", "loop0", "kvm", "fuse", "console", "tty0"]
)
def test_a_device_that_leads_to_the_host_does_not_exist(name: str) -> None:
    assert inside("files", "stat,open", f"/dev/{name}") == {"stat": "ENOENT", "open": "ENOENT"}
    assert outside("files", "open", "/dev/zero") == {"open": "ok"}


def test_the_devices_are_exactly_the_promised_ones() -> None:
    listed = set(inside("listing", "/dev"))
    assert listed == {
        "null", "zero", "full", "random", "urandom", "tty", "ptmx", "pts", "shm",
        "fd", "stdin", "stdout", "stderr",
    }  # fmt: skip
    assert "null" in outside("listing", "/dev")
