"""The log of earlier runs for `stockade logs`: a line for each run that ended.

It helps people to look back and proves nothing: only its owner can read it, and nothing signs it. Of the
command it keeps only the program's name and the number of arguments, because arguments hold passwords, tokens
and addresses that do not belong in a file that stays. `STOCKADE_LOG=full` keeps them anyway, and
`STOCKADE_LOG=off` keeps no log.

Each line is one write to a file opened for appending, so lines of several processes do not mix. A full file
replaces the earlier one: there are never more than two.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from stockade import state
from stockade.errors import StockadeError
from stockade.linux.plain_text import bounded, text
from stockade.result import Decision, Handoff, Result, SpillFile

FILE = "runs.log"
EARLIER = "runs.log.1"
MOST_BYTES = 1 << 20
#: The most characters of a command, so that a full log has a few thousand runs at least.
MOST_WORDS = 1024
VARIABLE = "STOCKADE_LOG"

#: How many handoffs of a run are named, and the most characters of each line and path.
MOST_LEFT, MOST_LINE, MOST_PATH = 20, 400, 250
#: How a `HandoffLine` begins.
_LEFT = b'{"type":"left"'


class RunLogLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One run that ended."""

    #: When it began, in seconds since 1970.
    at: float
    #: The sandbox it ran in, as `stockade ps` showed it.
    sandbox: str = ""
    #: The name that the user gave the sandbox.
    name: str = ""
    program: str
    arguments: int = 0
    #: The whole command, with STOCKADE_LOG=full.
    command: tuple[str, ...] = ()
    outcome: str
    exit_code: int
    seconds: float
    #: The workspace: its directory, and if it had changes, its id and how many they were.
    directory: str = ""
    workspace: str = ""
    changes: int = 0
    spilled: tuple[SpillFile, ...] = ()
    #: The handoffs: how many there are, the first of them, and warnings about what was not searched.
    left: int = 0
    left_first: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    #: With network rules: how many connections and names were allowed and refused, and the first of them.
    reached: int = 0
    refused: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    network_first: tuple[str, ...] = ()


class HandoffLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="left"):
    """The handoffs of all runs of one sandbox, which are known when the sandbox has ended."""

    of: str
    left: int = 0
    left_first: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def line(command: Sequence[str], result: Result, *, sandbox: str, directory: str, name: str = "") -> bytes:
    """Return the line of a run; empty if the user wants no log."""
    wanted = os.environ.get(VARIABLE, "")
    if wanted == "off":
        return b""
    ran = RunLogLine(
        at=time.time() - result.usage.wall,
        sandbox=sandbox,
        name=name,
        program=text(command[0].rpartition("/")[2])[:MOST_WORDS],
        arguments=len(command) - 1,
        command=bounded(command, MOST_WORDS) if wanted == "full" else (),
        outcome=result.outcome,
        exit_code=result.exit_code,
        seconds=round(result.usage.wall, 3),
        directory=text(directory),
        workspace=result.workspace_id,
        changes=len(result.changes),
        spilled=result.spilled,
        left=len(result.handoffs),
        left_first=_first(map(_handoff_text, result.handoffs)),
        warnings=_first(result.warnings),
        bytes_sent=result.usage.bytes_sent or 0,
        bytes_received=result.usage.bytes_received or 0,
    )
    if result.network:
        ran = msgspec.structs.replace(
            ran,
            reached=_count(result, "allowed"),
            refused=_count(result, "denied"),
            network_first=_first(map(_decision_text, result.network)),
        )
    return msgspec.json.encode(ran) + b"\n"


def add(home: str, line: bytes, repeated: bool = False) -> None:
    """Add the line of a run to the log; if `repeated`, only if an earlier attempt has not added it.

    A failure to write the log does not fail the run.
    """
    with contextlib.suppress(OSError, StockadeError):
        if line and not (repeated and line.rstrip() in _lines(home)):
            _append(home, line)


def note_left(home: str, sandbox: str, left: Sequence[Handoff], warnings: Sequence[str]) -> None:
    """Add the handoffs of a sandbox of several runs to the log."""
    if not (left or warnings) or os.environ.get(VARIABLE, "") == "off":
        return
    line = HandoffLine(
        of=sandbox,
        left=len(left),
        left_first=_first(map(_handoff_text, left)),
        warnings=_first(warnings),
    )
    with contextlib.suppress(OSError):
        _append(home, msgspec.json.encode(line) + b"\n")


def _first(lines: Iterable[str]) -> tuple[str, ...]:
    """Return the first lines, cut: a program must not push other runs out of the log with long names."""
    return tuple(text(line)[:MOST_LINE] for line in itertools.islice(lines, MOST_LEFT))


def _handoff_text(one: Handoff) -> str:
    path = one.path if len(one.path) <= MOST_PATH else f"{one.path[:MOST_PATH]}..."
    return f"{path}: {one.reason}"


def _count(result: Result, verdict: str) -> int:
    """Return how many decisions of a run have a verdict; with `network_cut` there were more."""
    kinds = ("connect", "name", "udp")
    return sum(one.count for one in result.network if one.verdict == verdict and one.kind in kinds)


def _decision_text(one: Decision) -> str:
    moved = f", {one.sent} bytes out, {one.received} in" if one.sent or one.received else ""
    why = f" ({one.reason})" if one.reason else ""
    times = f", {one.count} times" if one.count > 1 else ""
    what = f"{one.kind} " if one.kind in ("name", "rule") else ""
    by = f" by {one.process}" if one.process else ""
    return f"{one.verdict}: {what}{one.target}{by}{why}{moved}{times}"


def _append(home: str, line: bytes) -> None:
    # A file object, which closes itself if an interruption comes before its `with`; unbuffered: one write.
    with open(f"{home}/{FILE}", "ab", buffering=0, opener=_private) as file:
        file.write(line)
        # After an append the offset is the size of the file.
        if file.tell() >= MOST_BYTES:
            _rotate(home, file.fileno())


def _rotate(home: str, file: int) -> None:
    """Replace the earlier log by the full one, unless another process has done so."""
    import fcntl

    fcntl.flock(file, fcntl.LOCK_EX)
    path = f"{home}/{FILE}"
    if os.stat(path).st_ino == os.fstat(file).st_ino:
        os.rename(path, f"{home}/{EARLIER}")


def read(home: str) -> tuple[list[RunLogLine], int]:
    """Return the runs in the log, the earliest first, and how many lines cannot be read."""
    found: list[RunLogLine] = []
    left: dict[str, HandoffLine] = {}
    damaged = 0
    for line in _lines(home):
        one = _parse(line)
        if isinstance(one, HandoffLine):
            left[one.of] = one
        elif one is not None:
            found.append(one)
        else:
            damaged += 1
    last = {ran.sandbox: number for number, ran in enumerate(found)}
    for sandbox, line_left in left.items():
        if sandbox in last:  # otherwise its runs were in a log that has been replaced
            ran = found[last[sandbox]]
            found[last[sandbox]] = msgspec.structs.replace(
                ran,
                left=line_left.left,
                left_first=line_left.left_first,
                warnings=(*ran.warnings, *line_left.warnings),
            )
    # Lines are in the order in which runs ended.
    return sorted(found, key=lambda ran: ran.at), damaged


def prune(home: str, goes: Callable[[RunLogLine], bool]) -> list[RunLogLine]:
    """Remove the runs that `goes` names from the log, and return them. Lines that cannot be read stay."""
    gone: list[RunLogLine] = []
    for name in (EARLIER, FILE):
        with contextlib.suppress(FileNotFoundError):
            gone += _prune_file(f"{home}/{name}", goes)
    return gone


def _prune_file(path: str, goes: Callable[[RunLogLine], bool]) -> list[RunLogLine]:
    with open(path, "rb", opener=_plain) as file:
        lines = [(line, _parse(line)) for line in file.read().splitlines(keepends=True)]
        gone = [ran for _, ran in lines if isinstance(ran, RunLogLine) and goes(ran)]
        if not gone:
            return []
        stays = {ran.sandbox for _, ran in lines if isinstance(ran, RunLogLine) and not goes(ran)}
        left = {ran.sandbox for ran in gone} - stays
        part = f"{path}.{os.urandom(6).hex()}"
        with open(part, "xb", opener=_private) as new:
            for line, ran in lines:
                if not (ran.of in left if isinstance(ran, HandoffLine) else ran is not None and goes(ran)):
                    new.write(line)
            new.flush()
            os.rename(part, path)
            new.write(file.read())  # what another process has added meanwhile
    return gone


def _parse(line: bytes) -> RunLogLine | HandoffLine | None:
    """Return the content of a line; None if it cannot be read."""
    try:
        if line.startswith(_LEFT):
            return msgspec.json.decode(line, type=HandoffLine)
        return msgspec.json.decode(line, type=RunLogLine)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def last_of(home: str, id: str) -> RunLogLine | None:
    """Return the last run of the sandbox that an id, or the beginning of one, names."""
    from stockade.state.ids import matching

    ran = {one.sandbox: one for one in read(home)[0] if one.sandbox}
    named = [ran[name] for name in matching(id, ran)]
    return max(named, key=lambda one: one.at, default=None)


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


def _private(path: str, flags: int) -> int:
    # O_APPEND: as soon as it has the log's name, other processes append to it too.
    return os.open(path, flags | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
