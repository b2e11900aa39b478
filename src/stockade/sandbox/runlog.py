"""What earlier runs did: a line for each run that came to an end, for `stockade logs`.

It is for people who look back, not a proof: the file is its owner's alone and
nothing signs it. Of the command only the program's name is kept and how many
arguments it had, because arguments hold passwords, tokens and addresses, and
a file that stays is no place for them. `STOCKADE_LOG=full` keeps them all the
same, `STOCKADE_LOG=off` keeps nothing.

One write to a file opened for appending adds a line, so processes do not meet
in the middle of one. When the file has grown enough it takes the place of the
one before: there are never more than two.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence

import msgspec

from stockade import state
from stockade.sandbox.records import bounded, text
from stockade.sandbox.result import Result
from stockade.sandbox.streams import Spilled

FILE = "runs.log"
EARLIER = "runs.log.1"
MOST_BYTES = 1 << 20
#: No line is longer, so that a log of that size has a few thousand runs at least.
MOST_WORDS = 1024
VARIABLE = "STOCKADE_LOG"

_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


class Ran(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One run that came to an end."""

    #: When it began, in seconds since 1970.
    at: float
    #: The sandbox it ran in, as `stockade ps` showed it.
    sandbox: str = ""
    program: str
    arguments: int = 0
    #: All of it, where the user wants that.
    command: tuple[str, ...] = ()
    outcome: str
    exit_code: int
    seconds: float
    #: The workspace: its directory, and if it had changes, its id and how many they were.
    directory: str = ""
    workspace: str = ""
    changes: int = 0
    spilled: tuple[Spilled, ...] = ()


def note(home: str, command: Sequence[str], result: Result, *, sandbox: str, directory: str) -> None:
    """Add a run to the log. Where that cannot be written the run is none the worse."""
    wanted = os.environ.get(VARIABLE, "")
    if wanted == "off":
        return
    ran = Ran(
        at=time.time() - result.usage.wall,
        sandbox=sandbox,
        program=text(command[0].rpartition("/")[2])[:MOST_WORDS],
        arguments=len(command) - 1,
        command=bounded(command, MOST_WORDS) if wanted == "full" else (),
        outcome=result.outcome,
        exit_code=result.exit_code,
        seconds=round(result.usage.wall, 3),
        directory=text(directory),
        workspace=result.workspace,
        changes=len(result.changes),
        spilled=result.spilled,
    )
    with contextlib.suppress(OSError):
        _append(home, msgspec.json.encode(ran) + b"\n")


def _append(home: str, line: bytes) -> None:
    path = f"{home}/{FILE}"
    file = os.open(path, _FLAGS, 0o600)
    try:
        os.write(file, line)
        # What is appended ends where the file does.
        if os.lseek(file, 0, os.SEEK_CUR) >= MOST_BYTES:
            _turn(home, file)
    finally:
        os.close(file)


def _turn(home: str, file: int) -> None:
    """Let the full log take the place of the earlier one, unless another process has done so."""
    import fcntl

    fcntl.flock(file, fcntl.LOCK_EX)
    path = f"{home}/{FILE}"
    if os.stat(path).st_ino == os.fstat(file).st_ino:
        os.rename(path, f"{home}/{EARLIER}")


def read(home: str) -> tuple[list[Ran], int]:
    """The runs that are known, the earliest first, and how many lines cannot be read."""
    found: list[Ran] = []
    damaged = 0
    for line in _lines(home):
        try:
            found.append(msgspec.json.decode(line, type=Ran))
        except (msgspec.MsgspecError, UnicodeDecodeError):
            damaged += 1
    # A run is noted when it ends, and a longer one may have begun before.
    return sorted(found, key=lambda ran: ran.at), damaged


def _lines(home: str) -> Iterator[bytes]:
    try:
        state.check(home)
    except FileNotFoundError:
        return
    for name in (EARLIER, FILE):
        try:
            with open(f"{home}/{name}", "rb", opener=_plain) as file:
                yield from file.read().splitlines()
        except FileNotFoundError:
            continue
        except OSError as error:
            raise state.unusable(f"{home}/{name}", error) from None


def _plain(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
