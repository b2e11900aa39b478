"""A program names a path behind an automount point: a look at it mounts nothing and waits for nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from stockade.linux.quiet_lookup import look_quietly, remote_devices
from support.means import applies

#: Mounts autofs in a namespace of its own, looks at a path in it in both ways, and says what the kernel asked
#: the mounting program to mount.
PROGRAM = """
import ctypes, json, os, select, signal, sys
from stockade.linux.quiet_lookup import look_quietly, remote_devices
libc, point = ctypes.CDLL(None, use_errno=True), sys.argv[1]
if libc.unshare(0x20000) or libc.mount(b"none", b"/", None, 0x44000, None):
    sys.exit(f"unshare: {ctypes.get_errno()}")
read, write = os.pipe()
daemon = os.fork()
if not daemon:
    os.setpgid(0, 0); signal.pause()
try:
    os.setpgid(daemon, daemon)
except OSError:
    pass
options = f"fd={write},pgrp={daemon},minproto=5,maxproto=5,indirect".encode()
if libc.mount(b"test", point.encode(), b"autofs", 0, options):
    os.kill(daemon, signal.SIGKILL); os.waitpid(daemon, 0)
    print(json.dumps(None)); sys.exit()
found = look_quietly(f"{point}/evil.example/x", remote_devices())
asked = bool(select.select([read], [], [], 0)[0])
child = os.fork()
if not child:
    os.path.lexists(f"{point}/evil.example/x"); os._exit(0)
control = bool(select.select([read], [], [], 10)[0])
os.kill(child, signal.SIGKILL)
libc.umount2(point.encode(), 2)
os.waitpid(child, 0)
os.kill(daemon, signal.SIGKILL); os.waitpid(daemon, 0)
print(json.dumps([found.exists, asked, control]))
"""


def test_a_path_behind_an_automount_point_mounts_nothing(tmp_path: Path) -> None:
    applies(os.getuid() == 0, "only root can mount autofs")
    point = tmp_path / "net"
    point.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(point)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    applies(found is not None, "this kernel has no autofs")
    exists, asked, control = found
    assert control, "the plain look asks for a mount"
    assert not asked
    assert exists is None


def test_the_walk_stops_before_a_file_system_that_it_must_not_enter(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/proc/self")
    proc = frozenset({os.stat("/proc").st_dev})
    for path in ("/proc", "/proc/self/status", "/proc/none", f"{tmp_path}/link/status"):
        assert look_quietly(path, proc).exists is None
    assert os.stat("/").st_dev not in remote_devices()


def test_links_that_go_round_end(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    (tmp_path / "up").symlink_to("/" + "../" * 400)
    assert look_quietly(f"{tmp_path}/a", frozenset()).exists is None
    assert look_quietly(f"{tmp_path}/a", frozenset(), follow=False).exists is True
    assert look_quietly(f"{tmp_path}/up/" * 40, frozenset()).exists is not True
    assert look_quietly("/" + "x/" * 3000, frozenset()).exists is False
    assert look_quietly("/\0", frozenset()).exists is False
