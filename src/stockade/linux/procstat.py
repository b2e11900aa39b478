"""The one reader of /proc/PID/stat."""

from __future__ import annotations

import os

#: Where the fields are that we use, counted from the state.
STATE, PARENT, SESSION, BORN = 0, 1, 3, 19
#: User and system time of the process, then of the children that it has waited for.
TIMES = slice(11, 15)


def stat_fields(directory: str) -> list[bytes]:
    """Return the fields after the name, from the state on; none if the process has gone.

    `directory` is /proc/PID, or that of a thread. A name may have spaces and brackets in it, so the fields
    are those after the last bracket.
    """
    try:
        file = os.open(f"{directory}/stat", os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.read(file, 4096).rpartition(b")")[2].split()
        finally:
            os.close(file)
    except (FileNotFoundError, ProcessLookupError):
        return []
