"""The pipes between the stages of a pipeline, and the start of all stages together.

The supervisor makes the pipes and hands both ends of each to stages. It closes its own copies as soon as the
gate has been asked to start the program, and never reads from them. The programs start when the walls of all
stages are up; if one stage cannot be set up, none of them starts.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Mapping

from stockade import state
from stockade.linux import os_errors
from stockade.runs.io.eventloop import Events, Steps

#: The ends that this process may have open, and the inodes of their pipes, so that a forked child can close
#: its copies: with a copy of a writing end, it would keep the next stage waiting for the end of its input.
_open: dict[int, int] = {}


def _after_fork() -> None:
    while _open:
        end, inode = _open.popitem()
        with contextlib.suppress(OSError):
            if os.fstat(end).st_ino == inode:  # not another file that has got the number since
                os.close(end)


os.register_at_fork(after_in_child=_after_fork)


#: Stages wait for each other less with a pipe of this size, the most that an ordinary user may have; and how
#: many pipes of a pipeline are so large: all of them together count against the user's share of the kernel's.
_LARGE_PIPE = 1 << 20
_LARGE_PIPES = 8


class Links:
    """The pipes between stages: each leads from the output of one to a descriptor of another."""

    def __init__(self, home: str) -> None:
        """Make none yet; `home` is the state directory."""
        self._home = home
        self._ends: dict[int, dict[int, int]] = {}
        self._made: dict[int, int] = {}

    def connect(self, writer: int, reader: int, number: int) -> None:
        """Make a pipe from the stdout of one stage to the descriptor `number` of another."""
        with os_errors.setup_errors():
            reading, writing = _one_way_pipe(self._home)
        made = dict.fromkeys((reading, writing), os.fstat(reading).st_ino)
        self._made |= made
        _open.update(made)
        self._ends.setdefault(reader, {})[number] = reading
        self._ends.setdefault(writer, {})[1] = writing
        if len(self._made) <= 2 * _LARGE_PIPES:
            # The kernel bounds what all pipes of a user hold: then this one stays as it is.
            with contextlib.suppress(OSError):
                fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, _LARGE_PIPE)

    def numbers(self, stage: int) -> frozenset[int]:
        """Return the numbers of a stage's descriptors that lead to other stages."""
        return frozenset(self._ends.get(stage, ()))

    def take(self, stage: int) -> dict[int, int]:
        """Hand over the ends of one stage; the caller closes them."""
        return self._ends.pop(stage, {})

    def close(self) -> None:
        """Close what no stage has taken. Those that took theirs must have closed them."""
        for stage in tuple(self._ends):
            for end in self.take(stage).values():
                os.close(end)
        for end, inode in self._made.items():
            if _open.get(end) == inode:
                del _open[end]


def _one_way_pipe(home: str) -> tuple[int, int]:
    """Make a pipe and return its reading and its writing end.

    A program can open an end of a pipe again through /proc, also in the other direction, and so pass data
    back to the stage before it. Landlock, which every backend has, refuses that, but only for a pipe that has
    a name in a file system. This one has had a name in the state directory, which no policy grants. The name
    goes at once; one that a killed process left is removed here.
    """
    directory = f"{state.ensure(home)}/{state.CACHE}"
    os.makedirs(directory, mode=0o700, exist_ok=True)
    name = f"{directory}/pipe"
    lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        os.mkfifo(name, 0o600)
        try:
            # Without waiting for a writer; afterwards there is one.
            reading = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOATIME | os.O_CLOEXEC)
            try:
                writing = os.open(name, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            except BaseException:
                os.close(reading)
                raise
        finally:
            os.unlink(name)
    finally:
        os.close(lock)
    os.set_blocking(reading, True)
    return reading, writing


class StartBarrier:
    """Keeps every stage from starting its program until the walls of all are up."""

    def __init__(self, stages: int) -> None:
        self._missing = stages
        with os_errors.setup_errors():
            self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    @property
    def is_open(self) -> bool:
        """Whether the walls of all stages are up."""
        return self._missing == 0

    def wait(self, events: Events) -> Steps[None]:
        """Note that the walls of one stage are up, and wait for the others."""
        self._missing -= 1
        if self.is_open:
            os.eventfd_write(self._bell, 1)
            return
        events.watch(self._bell)
        try:
            while not self.is_open:
                yield None
        finally:
            events.forget(self._bell)

    def close(self) -> None:
        os.close(self._bell)


class Ties:
    """What ties one stage to the others (`runs.supervise.StageTies`)."""

    def __init__(self, number: int, links: Links, barrier: StartBarrier) -> None:
        self._number, self._links, self._barrier = number, links, barrier
        #: The program's descriptors that lead to other stages.
        self.numbers = links.numbers(number)

    def take_ends(self) -> Mapping[int, int]:
        """Hand over the ends of pipes that the program gets, by number; the caller closes them."""
        return self._links.take(self._number)

    def walls_up(self, events: Events) -> Steps[None]:
        """Note that the walls of this stage are up, and wait until those of all others are."""
        yield from self._barrier.wait(events)
