"""The ids that an administrator has given an ordinary user besides its own: /etc/subuid and /etc/subgid.

Only `newuidmap` and `newgidmap`, which belong to root, may map them, and only for a process of the same user
whose user namespace has no maps yet.
"""

from __future__ import annotations

import contextlib
import os

from stockade.errors import SetupError

USERS, GROUPS = "/etc/subuid", "/etc/subgid"
PROGRAMS = {USERS: "newuidmap", GROUPS: "newgidmap"}
#: The kernel takes 340 rows of a map; users have one.
MOST_RANGES = 32
SECONDS = 10.0


def why_none(uid: int) -> str:
    """Say why this user has no subordinate ids that could be mapped; empty if it has some."""
    import pwd
    import shutil

    try:
        group = pwd.getpwuid(uid).pw_gid
    except KeyError:
        return f"the user {uid} has no name"
    if uid == os.geteuid() and group != os.getegid():
        return "this process runs with another group than that of its user"
    for path, program in PROGRAMS.items():
        if shutil.which(program) is None:
            return f"{program} is not installed"
        if not ranges(path, uid):
            return f"{path} has no range for this user"
    return ""


def ranges(path: str, uid: int) -> list[tuple[int, int]]:
    """Return the ranges of a user in one of the two files: the first id and the number of ids of each."""
    import pwd

    names = [str(uid)]
    with contextlib.suppress(KeyError):  # a user without a name can be listed by its number
        names.append(pwd.getpwuid(uid).pw_name)
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            lines = [line.strip().split(":") for line in file]
    except OSError:
        return []
    found: list[tuple[int, int]] = []
    for words in lines:
        if len(words) != 3 or words[0] not in names or not (words[1].isdecimal() and words[2].isdecimal()):
            continue
        first, count = int(words[1]), int(words[2])
        apart = all(first + count <= other or other + many <= first for other, many in found)
        # 0 is root, and the last id of all means none.
        if first and count and first + count < 1 << 32 and apart and not first <= uid < first + count:
            found.append((first, count))
    return found[:MOST_RANGES]


def write_maps(pid: int) -> None:
    """Map the caller and its subordinate ids, each as it is, in the user namespace of a process."""
    import subprocess

    for path, own in ((USERS, os.geteuid()), (GROUPS, os.getegid())):
        program = PROGRAMS[path]
        rows = [(own, 1), *ranges(path, os.geteuid())]
        words = [str(number) for first, count in rows for number in (first, first, count)]
        try:
            done = subprocess.run(
                [program, str(pid), *words],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=SECONDS,
                check=False,
            )
            why = done.stderr.decode("utf-8", "replace").strip() if done.returncode else ""
        except (OSError, subprocess.TimeoutExpired) as error:
            done, why = None, str(error)
        if done is None or done.returncode:
            raise SetupError(
                f"the ids that {path} gives this user could not be mapped: {why or program}",
                stage="namespaces",
                hint=f"`man {program}` says what it needs; its file must belong to root and be set-uid",
            )
