"""Find which of a process's descendants hold a socket.

Each look at a process, a thread or a descriptor is a step, and the number of steps is bounded: programs of a
sandbox choose how many of them there are.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Collection, Iterator

#: How much of a list of children is read: more than two thousand of them.
_CHILDREN_SIZE = 16 * 1024
_STATUS_SIZE = 8192
#: The kernel keeps fifteen letters of a name.
_NAME_SIZE = 15


class StepBudget:
    """How many steps a search may still take."""

    def __init__(self, steps: int) -> None:
        self.left = steps

    def spend(self) -> bool:
        """Take one step, if there is one left."""
        if self.left <= 0:
            return False
        self.left -= 1
        return True


def find_holders(pid: int, inodes: Collection[int], steps: StepBudget) -> dict[int, str]:
    """Return the process that holds each of these sockets, among the descendants of a process.

    A process is `NAME (PID)` with its PID in the PID namespace of `pid`. A program chooses its name itself,
    and can take that of another one; letters that a terminal could obey are replaced. If several processes
    hold a socket, it is the one closest to `pid`, which usually has opened it.
    """
    wanted = {f"socket:[{inode}]": inode for inode in inodes}
    found: dict[int, str] = {}
    depth = len(_numbers(f"/proc/{pid}/status", None))
    for child in _descendants(pid, steps):
        if not wanted or not depth or not steps.spend():
            break
        # What is read through it is about this process, even if another one gets its number.
        try:
            directory = os.open(f"/proc/{child}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            held = [link for link in _links(directory, steps) if link in wanted]
            name = _describe(directory, depth) if held else ""
        except OSError:  # it has ended, or is not ours to look at
            continue
        finally:
            os.close(directory)
        for link in held:
            if name and link in wanted:
                found[wanted.pop(link)] = name
    return found


def _descendants(pid: int, steps: StepBudget) -> Iterator[int]:
    """Yield the processes below one, the closest first."""
    pending = deque([pid])
    while pending:
        parent = pending.popleft()
        children: list[int] = []
        try:
            with os.scandir(f"/proc/{parent}/task") as threads:
                for thread in threads:
                    if not steps.spend():
                        return
                    text = _read(f"{thread.path}/children", None, _CHILDREN_SIZE)
                    # The last number may be cut.
                    words = text.split() if len(text) < _CHILDREN_SIZE else text.split()[:-1]
                    children += map(int, words)
        except (OSError, ValueError):
            continue
        yield from children
        pending += children


def _links(directory: int, steps: StepBudget) -> Iterator[str]:
    """Yield what the descriptors of a process refer to."""
    descriptors = os.open("fd", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=directory)
    try:
        with os.scandir(descriptors) as entries:
            for entry in entries:
                if not steps.spend():
                    return
                try:
                    yield os.readlink(entry.name, dir_fd=descriptors)
                except FileNotFoundError:  # it was closed meanwhile
                    continue
    finally:
        os.close(descriptors)


def _describe(directory: int, depth: int) -> str:
    numbers = _numbers("status", directory)
    if len(numbers) < depth:
        return ""
    name = _read("comm", directory, _NAME_SIZE + 1).removesuffix(b"\n")[:_NAME_SIZE]
    letters = "".join(chr(byte) if 0x20 <= byte <= 0x7E else "?" for byte in name)
    return f"{letters} ({numbers[depth - 1]})"


def _numbers(path: str, directory: int | None) -> list[int]:
    """Return the PIDs of a process, one for each PID namespace from ours inwards; none if it has gone."""
    try:
        # The program's name comes first, and cannot have a line of its own: the kernel escapes line ends.
        for line in _read(path, directory, _STATUS_SIZE).split(b"\n"):
            if line.startswith(b"NSpid:"):
                return [int(word) for word in line.split()[1:]]
    except OSError:
        pass
    return []


def _read(path: str, directory: int | None, size: int) -> bytes:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=directory)
    try:
        return os.read(file, size)
    finally:
        os.close(file)
