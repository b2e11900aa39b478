"""One cgroup that we made: a directory with the kernel's files in it.

Files are written with one system call on a descriptor, because a buffered
file hides the kernel's refusal, and found relative to the directory's own
descriptor, which is opened once. Every limit is read back: a file that took a
value need not have kept it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import time

PAGE = os.sysconf("SC_PAGE_SIZE")
#: The scheduler's window in µs: what a second's share is counted in.
PERIOD = 100_000
#: How long the kernel may take to let go of processes that have ended.
PATIENCE = 2.0


def read(name: str, directory: int | None = None) -> str:
    """A file of the kernel's, whole."""
    file = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=directory)
    try:
        text = b""
        while part := os.read(file, 65536):
            text += part
        return text.decode()
    finally:
        os.close(file)


def write(name: str, text: str, directory: int | None = None) -> None:
    """Hand the kernel one value."""
    file = os.open(name, os.O_WRONLY | os.O_CLOEXEC, dir_fd=directory)
    try:
        os.write(file, text.encode())
    finally:
        os.close(file)


def make(path: str) -> None:
    """Make a cgroup."""
    os.mkdir(path, 0o755)


def drop(path: str) -> None:
    """Remove a cgroup in which nothing lives any more."""
    os.rmdir(path)


class Cgroup:
    """A cgroup by its descriptor. `version` is that of its hierarchy, 1 or 2."""

    def __init__(self, path: str, version: int, *, existing: bool = False) -> None:
        self.path = path
        self.version = version
        #: The limits that were set, as they were read back.
        self.kept: dict[str, str] = {}
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

    def read(self, name: str) -> str:
        return read(name, self._directory)

    def write(self, name: str, text: str) -> None:
        write(name, text, self._directory)

    def count(self, name: str, key: str) -> int:
        """One number of a file that has a name and a number on each line; 0 where it has no such name."""
        for line in self.read(name).splitlines():
            word, _, number = line.partition(" ")
            if word == key:
                return int(number)
        return 0

    def open(self, name: str, flags: int = os.O_RDONLY) -> int:
        """A descriptor of one of its files, for those who wait on it or write to it later."""
        return os.open(name, flags | os.O_CLOEXEC, dir_fd=self._directory)

    def entrance(self) -> int:
        """A descriptor by which a process gets in by itself.

        In version 1 it writes "0" there; in version 2 it is cloned with CLONE_INTO_CGROUP. Moving
        another process makes the kernel wait 5 ms for every processor; these do not.
        """
        if self.version == 2:
            return os.dup(self._directory)
        return self.open("tasks", os.O_WRONLY)

    def keep(self, name: str, text: str, kept: str = "") -> None:
        """Write a limit and read it back: it must be `kept`, or else what was written."""
        file = os.open(name, os.O_RDWR | os.O_CLOEXEC, dir_fd=self._directory)
        try:
            os.write(file, text.encode())
            found = os.pread(file, 64, 0).decode().strip()
        finally:
            os.close(file)
        if found != (kept or text):
            raise OSError(errno.ERANGE, f"it is {found} instead of {kept or text}", name)
        self.kept[name] = found

    def limit_memory(self, size: int) -> None:
        """Memory in bytes, with nothing more in swap."""
        kept = str(size - size % PAGE)
        if self.version == 2:
            self.keep("memory.max", str(size), kept)
            if self.has("memory.swap.max"):
                self.keep("memory.swap.max", "0")
            return
        # In this order: memory and swap together may never be less than memory alone.
        self.keep("memory.limit_in_bytes", str(size), kept)
        # The last are the buffers of sockets, which version 1 counts apart, and only where they are limited.
        for name in ("memory.memsw.limit_in_bytes", "memory.kmem.tcp.limit_in_bytes"):
            if self.has(name):
                self.keep(name, str(size), kept)

    def limit_tasks(self, count: int) -> None:
        """Processes and threads at once."""
        self.keep("pids.max", str(count))

    def limit_cpu(self, cores: float) -> None:
        """Processor time for each period, as so many cores."""
        quota = str(round(cores * PERIOD))
        if self.version == 2:
            self.keep("cpu.max", f"{quota} {PERIOD}")
            return
        self.keep("cpu.cfs_period_us", str(PERIOD))
        self.keep("cpu.cfs_quota_us", quota)

    def add(self, pid: int) -> None:
        self.write("cgroup.procs", str(pid))

    def processes(self) -> list[int]:
        """Who is in it, without what is in cgroups below. A process that we cannot name is 0."""
        return [int(pid) for pid in self.read("cgroup.procs").split()]

    def end(self) -> None:
        """Kill everything in it and wait, for a while, until it is empty. Cgroups below are not looked at.

        Nobody may be born meanwhile: version 2 kills all as one, and where tasks are counted there are
        none left to have. Else everybody is stopped first, until no one is new.
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
        """Signal whoever is there and can be named; who that was."""
        held = {pid: file for pid in self.processes() if (file := _hold(pid)) is not None}
        try:
            # Whoever is there now is who was held: a number is not given away while it is in use.
            there = held.keys() & self.processes()
            for pid in there:
                with contextlib.suppress(OSError):
                    signal.pidfd_send_signal(held[pid], number)
        finally:
            for file in held.values():
                os.close(file)
        return there

    def forget(self) -> None:
        """Close the descriptor only."""
        if self._directory >= 0:
            os.close(self._directory)
            self._directory = -1

    def close(self) -> bool:
        """Remove it, patient with what is still ending; whether it is gone. Harmless when repeated."""
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


def _hold(pid: int) -> int | None:
    if pid in (0, os.getpid()):
        return None
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None
