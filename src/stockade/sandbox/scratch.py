"""A private directory of the host for one sandbox, where nothing private can be mounted.

It is the sandbox's home and where its temporary files go. It lies in the state
directory, which nobody else may enter, and goes with the sandbox; what a
killed supervisor left is swept with its record.
"""

from __future__ import annotations

import os

from stockade import state
from stockade.errors import SetupError
from stockade.workspace import descend

SCRATCH = "scratch"


class Scratch:
    """One such directory, made and held."""

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
        """Let go of it and, unless it is another process's, remove it."""
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
    """Remove a directory that no living sandbox has, whatever its programs did to it."""
    try:
        place = os.open(f"{home}/{SCRATCH}", descend.DIRECTORY)
    except FileNotFoundError:
        return
    try:
        descend.remove(place, id)
        descend.remove_doomed(place)
    finally:
        os.close(place)
