"""Which projects' policy files the user has agreed to, by their exact bytes.

One file in the state directory: a record per policy file, its SHA-256 and the
path it was found at (not where a link there leads, or a project could borrow
another one's trust by linking to its file).
"""

from __future__ import annotations

import os

from stockade import state as places
from stockade.errors import SetupError
from stockade.policy.load import Project

FILE = "trust"


def trusted(project: Project, state: str) -> bool:
    """Whether exactly these bytes at exactly this path were agreed to."""
    return recorded(state).get(project.path) == project.hash


def recorded(state: str) -> dict[str, str]:
    """Every path that was agreed to, with the hash of what was agreed to."""
    import re

    path = os.path.join(state, FILE)
    try:
        places.check(state)
        with open(path, "rb") as file:
            data = file.read()
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise places.unusable(path, error) from None
    if not re.fullmatch(rb"([0-9a-f]{64} /[^\0]*\0)*", data):
        raise SetupError(
            f"{path} is damaged", stage="state", hint="remove it, and `stockade trust` again what you trust"
        )
    return {os.fsdecode(record[65:]): record[:64].decode() for record in data.split(b"\0")[:-1]}


def record(project: Project, state: str) -> None:
    """Agree to a project's policy as it is now."""
    _change(state, project.path, project.hash)


def revoke(path: str, state: str) -> bool:
    """Take the agreement back; False if there was none."""
    if path not in recorded(state):
        return False
    _change(state, path, None)
    return True


def _change(state: str, path: str, digest: str | None) -> None:
    import fcntl

    lock = os.open(places.ensure(state), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        records = recorded(state)
        if digest is None:
            records.pop(path, None)
        else:
            records[path] = digest
        target = os.path.join(state, FILE)
        with open(f"{target}.new", "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            for name, value in sorted(records.items()):
                # A NUL ends a record: the one byte that no path contains.
                file.write(value.encode() + b" " + os.fsencode(name) + b"\0")
            file.flush()
            os.fsync(file.fileno())
        os.replace(f"{target}.new", target)
        os.fsync(lock)
    finally:
        os.close(lock)
