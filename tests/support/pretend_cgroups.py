"""A pretend version 2 hierarchy: plain directories with the kernel's rules for the files that are used.

For controllers that this machine has in version 1 only. A file takes what is
written to it; what the kernel would refuse is refused with its error.
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from stockade.linux import cgroupfs

ALWAYS = {
    "cgroup.procs": "", "cgroup.subtree_control": "", "cgroup.kill": "",
    "cpu.stat": "usage_usec 1500000\nuser_usec 1000000\nsystem_usec 500000\n",
}  # fmt: skip
#: Limits start empty: a plain file keeps what is behind a shorter text.
FILES = {
    "memory": {
        "memory.max": "", "memory.swap.max": "", "memory.peak": "4096\n",
        "memory.events": "low 0\noom 1\noom_kill 3\noom_group_kill 0\n",
    },
    "pids": {"pids.max": "", "pids.events": "max 7\n", "pids.peak": "5\n"},
    "cpu": {"cpu.max": ""},
}  # fmt: skip


class Tree:
    """The hierarchy at `root`, and a /proc at `proc` in which this process is in `own`."""

    def __init__(self, directory: Path, patch: pytest.MonkeyPatch, controllers: str, own: str) -> None:
        self.root, self.proc = directory / "cgroup", directory / "proc"
        self.root.mkdir()
        self._fill(self.root, controllers)
        (self.proc / "self").mkdir(parents=True)
        (self.proc / "self/mountinfo").write_text(f"33 30 0:29 / {self.root} rw - cgroup2 cgroup2 rw\n")
        patch.setattr(cgroupfs, "make", self.make)
        patch.setattr(cgroupfs, "write", self.write)
        patch.setattr(cgroupfs, "drop", self.drop)
        if own != "/":
            self.write(str(self.root / "cgroup.subtree_control"), f"+{controllers.replace(' ', ' +')}")
            self.make(str(self.root) + own)
        self.enter(os.getpid(), self.root / own.lstrip("/"))

    def enter(self, pid: int, group: Path) -> None:
        """Put a process there without asking."""
        for other in (self.root, *self.root.rglob("*/")):
            listed = (other / "cgroup.procs").read_text().split() if other.is_dir() else []
            if str(pid) in listed:
                listed.remove(str(pid))
                (other / "cgroup.procs").write_text("".join(f"{p}\n" for p in listed))
        with (group / "cgroup.procs").open("a") as file:
            file.write(f"{pid}\n")
        place = f"0::/{group.relative_to(self.root)}\n".replace("/.\n", "/\n")
        for name in (str(pid), *(["self"] if pid == os.getpid() else [])):
            (self.proc / name).mkdir(exist_ok=True)
            (self.proc / name / "cgroup").write_text(place)

    def make(self, path: str) -> None:
        os.mkdir(path)
        parent = Path(path).parent
        (Path(path) / "cgroup.type").write_text("domain\n")
        self._fill(Path(path), (parent / "cgroup.subtree_control").read_text().strip())

    def drop(self, path: str) -> None:
        if (Path(path) / "cgroup.procs").read_text() or any(e.is_dir() for e in Path(path).iterdir()):
            raise OSError(errno.EBUSY, "in use", path)
        shutil.rmtree(path)

    def write(self, name: str, text: str, directory: int | None = None) -> None:
        file = Path(name if directory is None else f"{os.readlink(f'/proc/self/fd/{directory}')}/{name}")
        if not file.exists():
            raise FileNotFoundError(errno.ENOENT, "no such file", str(file))
        group = file.parent
        if file.name == "cgroup.procs":
            if (group / "cgroup.subtree_control").read_text() and group != self.root:
                raise OSError(errno.EBUSY, "no process beside controllers")
            self.enter(int(text), group)
        elif file.name == "cgroup.subtree_control":
            self._switch(group, [word.removeprefix("+") for word in text.split()])
        else:
            file.write_text(text + "\n")

    def _switch(self, group: Path, names: list[str]) -> None:
        if (group / "cgroup.procs").read_text() and group != self.root:
            raise OSError(errno.EBUSY, "no controllers beside a process")
        if set(names) - set((group / "cgroup.controllers").read_text().split()):
            raise OSError(errno.ENOENT, "no such controller")
        on = (group / "cgroup.subtree_control").read_text().split()
        (group / "cgroup.subtree_control").write_text(" ".join([*on, *names]) + "\n")
        for child in [entry for entry in group.iterdir() if entry.is_dir()]:
            self._fill(child, " ".join([*on, *names]))

    def _fill(self, group: Path, controllers: str) -> None:
        (group / "cgroup.controllers").write_text(controllers + "\n")
        files = [ALWAYS, *(FILES[name] for name in controllers.split() if name in FILES)]
        for name, text in [item for table in files for item in table.items()]:
            if not (group / name).exists():
                (group / name).write_text(text)
