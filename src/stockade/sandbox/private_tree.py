"""The directories that a private environment mounts: `tree/` of a sandbox in the state directory.

Hostile programs write there, as root of their own ids. So everything is reached by descriptor, through no
link, and removing the tree copes with closed directories and with files of ids that the caller is not.
"""

from __future__ import annotations

import contextlib
import os
from typing import Literal

from stockade.errors import SetupError, StockadeError
from stockade.linux import dirwalk, foreign_files
from stockade.linux.path_lookup import covers
from stockade.resolve.environment import EnvironmentMount
from stockade.sandbox.workspace import names
from stockade.workspace import metadata, overlay

#: The directories of a tree, where each is inside, and its mode.
DIRECTORIES = {
    "tmp": ("/tmp", 0o1777),
    "workspace": ("/workspace", 0o755),
    "data": ("/data", 0o755),
    "mnt": ("/mnt", 0o755),
    "media": ("/media", 0o755),
    "var": ("/var", 0o755),
    "home": ("/root", 0o700),
}
#: What programs expect in /var.
VAR = {
    "cache": 0o755,
    "lib": 0o755,
    "lock": 0o1777,
    "log": 0o755,
    "run": 0o755,
    "spool": 0o755,
    "tmp": 0o1777,
}


class PrivateTree:
    """The directories of one sandbox, held open."""

    def __init__(self, path: str) -> None:
        """Open an existing tree."""
        self.path = path
        #: The descriptor of each directory, by its path inside.
        self.descriptors: dict[str, int] = {}
        try:
            for name, (inside, _) in DIRECTORIES.items():
                flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
                self.descriptors[inside] = os.open(f"{path}/{name}", flags)
        except OSError as error:
            self.close()
            raise _unusable(path, error) from None

    @classmethod
    def make(cls, path: str) -> PrivateTree:
        """Make the directories of a tree and open them; the parent of `path` exists and is private."""
        try:
            _make_directory(path, 0o700)
            for name, (_, mode) in DIRECTORIES.items():
                _make_directory(f"{path}/{name}", mode)
            for name, mode in VAR.items():
                _make_directory(f"{path}/var/{name}", mode)
        except OSError as error:
            raise _unusable(path, error) from None
        return cls(path)

    def mounts(self, access: Literal["read", "write"] = "write") -> tuple[EnvironmentMount, ...]:
        """Return the mounts of all directories, for an environment."""
        return tuple(
            EnvironmentMount(inside, descriptor, access, "environment")
            for inside, descriptor in self.descriptors.items()
        )

    def close(self) -> None:
        """Close the descriptors; harmless when repeated."""
        while self.descriptors:
            os.close(self.descriptors.popitem()[1])

    def remove(self) -> None:
        """Close the tree and remove it, whatever programs did to it."""
        self.close()
        remove_tree(self.path)

    def __enter__(self) -> PrivateTree:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def remove_tree(path: str) -> None:
    """Remove a tree, whatever programs did to it; harmless if it is gone."""
    parent, name = os.path.split(path)
    try:
        place = os.open(parent, dirwalk.DIRECTORY)
    except FileNotFoundError:
        return
    try:
        foreign_files.remove(place, name)
        dirwalk.remove_doomed(place)
    except OSError as error:
        raise SetupError(
            f"cannot remove {path}: {error.strerror}", stage="environment", errno=error.errno or 0
        ) from None
    finally:
        os.close(place)


def remove_layers(state: str, tree: str) -> None:
    """Remove the changes that are kept over a tree, after a sandbox ended or its supervisor was killed.

    A layer that a living sandbox uses stays.
    """
    for name in names(state):
        path = f"{state}/workspaces/{name}"
        with contextlib.suppress(StockadeError):
            if covers(tree, metadata.read(path).tree):
                with metadata.held(path, name):
                    overlay.remove(path)


def _make_directory(path: str, mode: int) -> None:
    os.mkdir(path, 0o700)
    os.chmod(path, mode)  # whatever the umask is


def _unusable(path: str, error: OSError) -> SetupError:
    return SetupError(
        f"cannot make or open {path}: {error.strerror}",
        stage="environment",
        errno=error.errno or 0,
        hint="free some space, or set STOCKADE_HOME to a directory elsewhere",
    )
