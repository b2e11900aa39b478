"""A private directory on the host for one sandbox, for backends that cannot mount a private file system.

Its `home` is the home inside, where the program can write and keep temporary files. Its `policy` holds
the files in which the program reads its own policy, and the program can only read them. Both lie in the state
directory, which other users cannot enter, and are removed with the sandbox. If the supervisor is killed, the
next sweep removes them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping

from stockade import state
from stockade.errors import SetupError
from stockade.linux import dirwalk

SCRATCH = "scratch"
_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class ScratchDirectory:
    """One such directory, made by the constructor with the files of the policy, and held open."""

    def __init__(self, home: str, id: str, files: Mapping[str, bytes]) -> None:
        self._home, self._id = home, id
        self._place = f"{home}/{SCRATCH}/{id}"
        self.path, self.policy = f"{self._place}/home", f"{self._place}/policy"
        #: Of the home, and of the directory with the policy.
        self.descriptors: tuple[int, ...] = ()
        try:
            os.makedirs(f"{state.ensure(home)}/{SCRATCH}", mode=0o700, exist_ok=True)
            os.mkdir(self._place, 0o700)
            for path in (self.path, self.policy):
                os.mkdir(path, 0o700)
                self.descriptors += (os.open(path, _DIRECTORY),)
            for name, content in files.items():
                with open(f"{self.policy}/{name}", "xb", buffering=0) as file:
                    file.write(content)
        except OSError as error:
            with contextlib.suppress(OSError):
                self.close(ours=True)
            raise SetupError(
                f"cannot make {self._place}: {error.strerror}", stage="scratch", errno=error.errno or 0
            ) from None

    def close(self, *, ours: bool) -> None:
        """Close it and, if it is `ours` and not a parent process's, remove it."""
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors = ()
        if ours:
            remove(self._home, self._id)

    @property
    def left(self) -> bool:
        """Whether it could not be removed."""
        return os.path.lexists(self._place)


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
