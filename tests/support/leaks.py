"""The host is as it was: what a test left behind.

A snapshot is a set of sentences, one for each thing that exists now and
could be left over: processes, mounts, cgroups, namespaces, files and
descriptors. What is in the snapshot after a test and was not in the one
before has leaked.

The machine may be shared with other sessions, so only what is certainly ours
is looked at. `watch()` makes pytest the reaper of its orphans: whatever a test
starts stays a descendant of this process, however often it forks, and a
namespace can outlive its processes only in a descriptor or a mount, which are
looked at too.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stockade.linux import cgroupfs
from stockade.runs.register import record_file

GRACE = 2.0
CGROUPS = Path("/sys/fs/cgroup")
SHARED_MEMORY = Path("/dev/shm")
GATE = "stockade-gate"
RESOLVER = "stockade-resolv"
SPARE = "stockade-spare"
NAMESPACES = ("mnt", "net", "user", "pid")
#: More descriptors than a resident gate has any use for while no sandbox lives.
RESIDENT_DESCRIPTORS = 48

_PR_SET_CHILD_SUBREAPER = 36
#: The children this process started itself, and when they were born: numbers are used again.
_started: dict[int, int] = {}
#: The cgroups that this process has made.
_groups: set[str] = set()
#: Servers that the tests of a module share: what they have started is looked at when the session ends.
_shared: set[int] = set()

Snapshot = frozenset[str]


@dataclass(frozen=True)
class Process:
    pid: int
    parent: int
    name: str
    zombie: bool
    born: int

    @functools.cached_property
    def nested(self) -> bool:
        """Whether it lives in a pid namespace below ours (readable also where it is not dumpable)."""
        line = _read(f"/proc/{self.pid}/status").partition(b"\nNSpid:")[2].partition(b"\n")[0]
        return len(line.split()) > 1

    @property
    def resident(self) -> bool:
        """Whether the library keeps it for its next sandbox, and it is not a sandbox's own gate."""
        return self.name in (GATE, RESOLVER) and not self.zombie and not self.nested

    @property
    def spare(self) -> bool:
        """Whether it is what a resident gate has made ahead for its next sandbox."""
        return self.name == SPARE and not self.zombie

    def __str__(self) -> str:
        state = "never waited for, " if self.zombie else ""
        return f"process {self.pid} ({self.name}), {state}born at tick {self.born}"


class Strangers:
    """Processes that do not descend from this one, and so never will: they are read once."""

    def __init__(self) -> None:
        self.pids: set[int] = set()
        self._last_pid = 0

    def refresh(self) -> None:
        """Forget them all when the kernel has begun with the low numbers anew: one may be another process."""
        last = int(_read("/proc/loadavg").split()[-1])
        if last < self._last_pid:
            self.pids.clear()
        self._last_pid = last


_strangers = Strangers()


def watch() -> None:
    """Keep every orphan a descendant, and remember the children and the cgroups that this process makes."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def remembering(function: Callable[..., int]) -> Callable[..., int]:
        def start(*args: Any, **options: Any) -> int:
            pid = function(*args, **options)
            if pid:
                _remember(pid)
            return pid

        return start

    os.fork = remembering(os.fork)
    os.posix_spawn = remembering(os.posix_spawn)
    os.posix_spawnp = remembering(os.posix_spawnp)
    popen = subprocess.Popen.__init__

    def initialize(self: subprocess.Popen[Any], *args: Any, **options: Any) -> None:
        popen(self, *args, **options)
        _remember(self.pid)

    subprocess.Popen.__init__ = initialize  # type: ignore[method-assign]
    make = cgroupfs.make

    def make_group(path: str) -> None:
        make(path)
        _groups.add(path)

    cgroupfs.make = make_group


def family() -> list[Process]:
    """Every living descendant of this process, and the dead ones that somebody still has to wait for.

    Orphans that died are waited for here: they became our children only through `watch`, and anywhere
    else init would wait for them.
    """
    own = os.getpid()
    _strangers.refresh()
    seen = {int(name) for name in os.listdir("/proc") if name.isdigit()}
    children: dict[int, list[tuple[int, list[bytes]]]] = {}
    for pid in sorted(seen - _strangers.pids):
        if fields := _stat(pid):
            parent = int(fields[2])
            if pid != own and (parent == 0 or (parent in _strangers.pids and parent in seen)):
                _strangers.pids.add(pid)
            else:
                children.setdefault(parent, []).append((pid, fields))
    found, parents = [], [own]
    for parent in parents:
        for pid, fields in children.get(parent, ()):
            parents.append(pid)
            process = _process(pid, fields)
            adopted = parent == own and _started.get(pid) != process.born
            if not (process.zombie and adopted and _reap(pid)):
                found.append(process)
    return found


@contextlib.contextmanager
def shared(pid: int) -> Iterator[None]:
    """Let a process that several tests use have children that outlive one of them."""
    _shared.add(pid)
    try:
        yield
    finally:
        _shared.discard(pid)


def _unshared(members: list[Process]) -> list[Process]:
    """Those that are neither a shared process nor below one."""
    apart = set(_shared)
    for member in members:  # parents come before their children
        if member.parent in apart:
            apart.add(member.pid)
    return [member for member in members if member.pid not in apart]


def quiesce() -> None:
    """Let the library end what it keeps running on purpose."""
    for name in ("stockade.gate.client", "stockade.runs.network.resolver_process"):
        shutdown = getattr(sys.modules.get(name), "shutdown", None)
        if shutdown is not None:
            shutdown()


def let_go_of_register() -> None:
    """Let the library remove its idle cgroups and its directory in the register, and close its log."""
    for name in ("stockade.runs.idle_cgroups", "stockade.runs.register.register", "stockade.receipt.chain"):
        shutdown = getattr(sys.modules.get(name), "shutdown", None)
        if shutdown is not None:
            shutdown()


def end_strays() -> None:
    """Kill whatever the session has left running."""
    for process in family():
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)


def snapshot(
    state: Path | None = None, members: list[Process] | None = None, *, final: bool = False
) -> Snapshot:
    """What exists now. The resident gate and its shared cgroup count only in the `final` snapshot."""
    members = family() if members is None else members
    members = members if final else _unshared(members)
    strays = members if final else [member for member in members if not (member.resident or member.spare)]
    return frozenset(
        [
            *map(str, strays),
            *_mounts(),
            *_cgroups({member.pid for member in members}, state, final=final),
            *_namespaces([process.pid for process in strays if not process.zombie]),
            *_files(state, final=final),
            *_descriptors(),
        ]
    )


def residents(members: list[Process]) -> frozenset[str]:
    """The gates among them that the library keeps running on purpose."""
    return frozenset(str(process) for process in members if process.resident)


def overgrown() -> list[str]:
    """Resident gates that have kept descriptors of sandboxes that are gone (where they may be looked at).

    And what is made ahead, beyond the one that each of them may have.
    """
    members = family()
    gates = [process for process in members if process.resident and process.name == GATE]
    found = [f"made ahead, {process}" for process in members if process.spare][len(gates) :]
    for process in gates:
        try:
            count = len(os.listdir(f"/proc/{process.pid}/fd"))
        except OSError:
            continue
        if count > RESIDENT_DESCRIPTORS:
            found.append(f"{count} descriptors in the resident gate, {process}")
    return found


def settled(look: Callable[[], list[str]], seconds: float = GRACE) -> list[str]:
    """What `look` still finds after a while: the kernel tears down asynchronously."""
    found = look()
    if found:
        gc.collect()
    end = time.monotonic() + seconds
    while found and time.monotonic() < end:
        time.sleep(0.01)
        found = look()
    return found


def is_connection(sentence: str) -> bool:
    """Whether a leftover is a descriptor of the kind that the library's connection to its gate needs."""
    target = sentence.partition(" -> ")[2]
    return sentence.startswith("descriptor") and target.startswith(("socket:", "pipe:", "anon_inode:"))


def _read(path: str, size: int = 4096) -> bytes:
    """A short file of the kernel's, or nothing. In the cheapest way: a test ends with hundreds of these."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.read(descriptor, size)
        finally:
            os.close(descriptor)
    except OSError:
        return b""


def _stat(pid: int) -> list[bytes]:
    """A process' name, state, parent and so on; nothing where there is none."""
    head, _, tail = _read(f"/proc/{pid}/stat").rpartition(b")")
    return [head.partition(b"(")[2], *tail.split()] if tail else []


def _process(pid: int, fields: list[bytes]) -> Process:
    name, state, parent = fields[:3]
    return Process(pid, int(parent), name.decode(errors="replace"), state in (b"Z", b"X"), int(fields[20]))


def _remember(pid: int) -> None:
    if fields := _stat(pid):
        _started[pid] = _process(pid, fields).born


def _reap(pid: int) -> bool:
    """Wait for a child that has died; False if it has not: its first thread has, but others live."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True


def _mounts() -> Iterator[str]:
    own = os.path.dirname(tempfile.gettempdir())
    for line in Path("/proc/self/mountinfo").read_text(errors="replace").splitlines():
        fields = line.split()
        # Another session's tests mount in their own directories.
        if fields[4].startswith(("/tmp/", "/var/tmp/")) and not fields[4].startswith(f"{own}/"):
            continue
        yield f"mount {fields[0]} on {fields[4]} ({' '.join(fields[fields.index('-') + 1 :][:2])})"


def _cgroups(members: set[int], state: Path | None, *, final: bool) -> Iterator[str]:
    ours = tuple(_groups | (_recorded(state) if state else set()))
    below = tuple(f"{group}/" for group in ours)
    for directory in _below(str(CGROUPS)):
        if "stockade" not in directory or (directory.endswith("/stockade") and not final):
            continue
        inside = {int(pid) for pid in _read(f"{directory}/cgroup.procs", 1 << 20).split()}
        # Others on this machine make groups too, and may leave them.
        if inside & members or (inside <= members and (directory in ours or directory.startswith(below))):
            yield f"cgroup {directory}"


def _below(directory: str) -> Iterator[str]:
    """The directories below one. Most have none, which the count of their links says."""
    with contextlib.suppress(OSError):
        if os.lstat(directory).st_nlink == 2:
            return
        with os.scandir(directory) as entries:
            inner = [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
        for each in inner:
            yield each
            yield from _below(each)


def _recorded(state: Path) -> set[str]:
    """The groups of supervisors that ended without removing them."""
    found = set()
    # A supervisor may take its directory away meanwhile, which makes glob fail.
    with contextlib.suppress(FileNotFoundError):
        for file in state.glob(f"run/*/{record_file.FILE}"):
            with contextlib.suppress(OSError, ValueError), open(file, "rb") as opened:
                for stored in record_file.read(opened.fileno())[0]:
                    found.update(json.loads(stored.record).get("groups", ()))
    return found


def _namespaces(pids: list[int]) -> Iterator[str]:
    for pid in pids:
        for kind in NAMESPACES:
            try:
                own = os.readlink(f"/proc/self/ns/{kind}")
                theirs = os.readlink(f"/proc/{pid}/ns/{kind}")
            except OSError:
                continue  # It has just ended, or is not dumpable; then the process itself is in the snapshot.
            if theirs != own:
                yield f"namespace {theirs} of process {pid}"


def _files(state: Path | None, *, final: bool) -> Iterator[str]:
    for directory in [Path(tempfile.gettempdir()), *([state / "run"] if state else [])]:
        if directory.is_dir():
            yield from (f"file {entry.path}" for entry in os.scandir(directory))
    for directory in [SHARED_MEMORY, *([Path("/tmp")] if final else [])]:
        if directory.is_dir():
            yield from (f"file {entry.path}" for entry in os.scandir(directory) if _is_own(entry))


def _is_own(entry: os.DirEntry[str]) -> bool:
    """Whether a file, where other programs work too, has the number of one of our processes in its name."""
    numbers = {int(number) for number in re.findall(r"(?:leak|stockade-\w+)-(\d+)", entry.name)}
    if numbers.isdisjoint([os.getpid(), *_started]):
        return False
    try:
        return entry.stat(follow_symlinks=False).st_uid == os.geteuid()
    except OSError:
        return False


def _descriptors() -> Iterator[str]:
    for number in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            continue
        if target not in ("/dev/null", "/dev/urandom", "/dev/random"):
            yield f"descriptor {number} -> {target}"
