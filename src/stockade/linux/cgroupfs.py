"""One cgroup that we made: a directory with the kernel's files in it.

Each file is opened relative to the cgroup's own descriptor, which is opened
once, and written with one system call, because a buffered file hides the
kernel's refusal. Every limit is read back: the kernel may accept a value and
keep another.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import time

PAGE = os.sysconf("SC_PAGE_SIZE")
#: The scheduler's period in µs, in which processor time is shared out.
PERIOD = 100_000
#: How long the kernel may take to let go of processes that have ended.
PATIENCE = 2.0


def read(name: str, directory: int | None = None, *, size: int = 1 << 16) -> str:
    """Read a whole file of the kernel, `size` bytes at a time."""
    file = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=directory)
    try:
        text = b""
        while part := os.read(file, size):
            text += part
        return text.decode()
    finally:
        os.close(file)


def write(name: str, text: str, directory: int | None = None) -> None:
    """Write one value to a file of the kernel."""
    file = os.open(name, os.O_WRONLY | os.O_CLOEXEC, dir_fd=directory)
    try:
        os.write(file, text.encode())
    finally:
        os.close(file)


def make(path: str) -> None:
    """Make a cgroup."""
    os.mkdir(path, 0o755)


def drop(path: str) -> None:
    """Remove an empty cgroup."""
    os.rmdir(path)


class Cgroup:
    """A cgroup, held by a descriptor. `version` is that of its hierarchy, 1 or 2."""

    def __init__(self, path: str, version: int, *, existing: bool = False) -> None:
        self.path = path
        self.version = version
        #: The limits that were set, as the kernel reports them.
        self.kept: dict[str, str] = {}
        #: The files that `hold` has opened.
        self._held: dict[str, int] = {}
        if not existing:
            make(path)
        try:
            self._directory = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            if not existing:
                drop(path)
            raise

    def has(self, name: str) -> bool:
        return os.access(name, os.F_OK, dir_fd=self._directory)

    def hold(self, name: str, flags: int = os.O_RDONLY) -> None:
        """Keep one of its files open: to open it takes several times as long as to read it."""
        if name not in self._held:
            self._held[name] = self.open(name, flags)

    def read(self, name: str) -> str:
        # Few have more than a page. The end of a run reads some, also if this process has no memory left.
        held = self._held.get(name)
        return read(name, self._directory, size=PAGE) if held is None else os.pread(held, PAGE, 0).decode()

    def write(self, name: str, text: str) -> None:
        write(name, text, self._directory)

    def count(self, name: str, key: str) -> int:
        """Return the number beside `key` in a file of names and numbers; 0 if the file has no such name."""
        for line in self.read(name).splitlines():
            word, _, number = line.partition(" ")
            if word == key:
                return int(number)
        return 0

    def open(self, name: str, flags: int = os.O_RDONLY) -> int:
        """Open one of its files, for a caller that waits on it or writes to it later."""
        return os.open(name, flags | os.O_CLOEXEC, dir_fd=self._directory)

    def entrance(self) -> int:
        """Return a descriptor with which a process enters the cgroup by itself.

        In version 1 the process writes "0" to it; in version 2 it is cloned with CLONE_INTO_CGROUP.
        Moving another process makes the kernel wait 5 ms for every processor; these ways do not.
        """
        if self.version == 2:
            return os.dup(self._directory)
        held = self._held.get("tasks")
        return self.open("tasks", os.O_WRONLY) if held is None else os.dup(held)

    def keep(self, name: str, text: str, kept: str = "") -> None:
        """Write a limit, read it back, and raise OSError unless it is `kept` or, without that, `text`."""
        held = self._held.get(name)
        file = self.open(name, os.O_RDWR) if held is None else held
        try:
            os.pwrite(file, text.encode(), 0)
            value = os.pread(file, 64, 0).decode().strip()
        finally:
            if held is None:
                os.close(file)
        if value != (kept or text):
            raise OSError(errno.ERANGE, f"the kernel set {value} instead of {kept or text}", name)
        self.kept[name] = value

    def limit_memory(self, size: int) -> None:
        """Limit memory to `size` bytes, with no swap beyond it."""
        kept = str(size - size % PAGE)
        if self.version == 2:
            self.keep("memory.max", str(size), kept)
            if self.has("memory.swap.max"):
                self.keep("memory.swap.max", "0")
            return
        # In this order: the limit of memory and swap may never be below the limit of memory alone.
        self.keep("memory.limit_in_bytes", str(size), kept)
        # The last limits socket buffers, which version 1 counts apart, and only where they are limited.
        for name in ("memory.memsw.limit_in_bytes", "memory.kmem.tcp.limit_in_bytes"):
            if self.has(name):
                self.keep(name, str(size), kept)

    def limit_tasks(self, count: int) -> None:
        """Limit how many processes and threads exist at once."""
        self.keep("pids.max", str(count))

    def limit_cpu(self, cores: float) -> None:
        """Limit processor time in each period to that of `cores` cores."""
        quota = str(round(cores * PERIOD))
        if self.version == 2:
            self.keep("cpu.max", f"{quota} {PERIOD}")
            return
        self.keep("cpu.cfs_period_us", str(PERIOD))
        self.keep("cpu.cfs_quota_us", quota)

    def lift_cpu(self) -> None:
        """Lift the limit of `limit_cpu`: what is being killed must not wait for its share to end."""
        if self.version == 2:
            self.write("cpu.max", f"max {PERIOD}")
        else:
            self.write("cpu.cfs_quota_us", "-1")

    def add(self, pid: int) -> None:
        self.write("cgroup.procs", str(pid))

    def processes(self) -> list[int]:
        """The pids in it, without cgroups below it. A process that has no pid in our namespace is 0."""
        return [int(pid) for pid in self.read("cgroup.procs").split()]

    def end(self) -> None:
        """Kill every process in it, not in cgroups below it, and wait up to `PATIENCE` until it is empty.

        No process may fork itself out of it meanwhile: version 2 kills all at once, and a task limit of
        0 refuses every fork. With neither, all processes are stopped first, until no new one appears.
        """
        if self._directory < 0:
            return
        tasks = self.read("pids.max").strip() if self.has("pids.max") else ""
        for name, text in (("pids.max", "0"), ("cgroup.kill", "1")):
            if self.has(name):
                self.write(name, text)
        settled = bool(tasks) or self.has("cgroup.kill")
        seen: set[int] = set()
        deadline = time.monotonic() + PATIENCE
        while there := self._send(signal.SIGKILL if settled else signal.SIGSTOP):
            settled = settled or there <= seen
            seen |= there
            if time.monotonic() > deadline:
                break
            time.sleep(0.001)
        if tasks:
            self.write("pids.max", tasks)

    def _send(self, number: signal.Signals) -> set[int]:
        """Signal every process in it that has a pid here, and return their pids."""
        pidfds = {pid: file for pid in self.processes() if (file := _open_pidfd(pid)) is not None}
        try:
            # A pid that is still listed belongs to the process of its pidfd: a pid in use is not reused.
            there = pidfds.keys() & self.processes()
            for pid in there:
                with contextlib.suppress(OSError):
                    signal.pidfd_send_signal(pidfds[pid], number)
        finally:
            for file in pidfds.values():
                os.close(file)
        return there

    def forget(self) -> None:
        """Close the descriptors and leave the cgroup in place."""
        while self._held:
            os.close(self._held.popitem()[1])
        if self._directory >= 0:
            os.close(self._directory)
            self._directory = -1

    def close(self) -> bool:
        """Remove it, waiting for processes that still end, and return whether it is gone. Repeatable."""
        self.forget()
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                drop(self.path)
            except FileNotFoundError:
                return True
            except OSError as error:
                if error.errno != errno.EBUSY or time.monotonic() > deadline:
                    return False
                time.sleep(0.001)
            else:
                return True


def _open_pidfd(pid: int) -> int | None:
    if pid in (0, os.getpid()):
        return None
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None
