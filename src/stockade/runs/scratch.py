"""A private directory on the host for one sandbox, for backends that cannot mount a private file system.

It is the sandbox's home and holds its temporary files. It lies in the state directory, which other users
cannot enter, and is removed with the sandbox. If the supervisor is killed, the next sweep removes it.
"""

from __future__ import annotations

import os

from stockade import state
from stockade.errors import SetupError
from stockade.linux import dirwalk

SCRATCH = "scratch"


class ScratchDirectory:
    """One such directory, made by the constructor and held open."""

    def __init__(self, home: str, id: str) -> None:
        self._home, self._id = home, id
        self.path = f"{home}/{SCRATCH}/{id}"
        try:
            os.makedirs(f"{state.ensure(home)}/{SCRATCH}", mode=0o700, exist_ok=True)
            os.mkdir(self.path, 0o700)
            self.descriptor = os.open(self.path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise SetupError(
                f"cannot make {self.path}: {error.strerror}", stage="scratch", errno=error.errno or 0
            ) from None

    def close(self, *, ours: bool) -> None:
        """Close it and, if it is `ours` and not a parent process's, remove it."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
        if ours:
            remove(self._home, self._id)

    @property
    def left(self) -> bool:
        """Whether it could not be removed."""
        return os.path.lexists(self.path)


def remove(home: str, id: str) -> None:
    """Remove the directory of a sandbox that has ended, whatever its programs did to it."""
    try:
        place = os.open(f"{home}/{SCRATCH}", dirwalk.DIRECTORY)
    except FileNotFoundError:
        return
    try:
        dirwalk.remove(place, id)
        dirwalk.remove_doomed(place)
    finally:
        os.close(place)
