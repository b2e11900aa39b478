"""The state of a loop, in a directory of its own in the state directory, and the lock on its project.

loops/ID/loop.json          everything that `resume` needs; replaced atomically before each step
loops/ID/baseline-*.json    what each verify command said about the project
loops/ID/requests/          what `retry` and `skip` ask of a loop that runs
loops/ID/attempts/ITEM-N/   the logs of one attempt
loops/ID/errors.log         tracebacks of what stopped the loop
loops/.lock-HASH            held while a loop works on the project of that name
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import time
from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec

from stockade import state
from stockade.errors import NotFoundError, SetupError, StockadeError
from stockade.linux.plain_text import clean_line
from stockade.linux.user import Caller
from stockade.loop.events import (
    FINAL,
    AttemptOutcome,
    DiffStat,
    HeldFile,
    ItemSummary,
    LoopOutcome,
    Phase,
    Spending,
)
from stockade.loop.items.item import WorkItem
from stockade.loop.judge.judgement import JudgeBaseline
from stockade.loop.settings import LoopSettings
from stockade.policy.model import Policy
from stockade.state.ids import SHORTENED, matching

Kind = TypeVar("Kind")

PLACE = "loops"
FILE = "loop.json"
VERSION = 1
#: Attempts that say nothing about the item.
UNCOUNTED: frozenset[AttemptOutcome] = frozenset({"rate-limited", "cancelled", "conflict", "surpassed"})


class LoopError(StockadeError):
    """The loop cannot start or go on as it was asked to."""


def with_error(reason: str, error: str) -> str:
    """Return a reason for the user to read, with the words of the error behind it."""
    return f"{reason}: {error}" if error else reason


class AttemptRecord(msgspec.Struct, kw_only=True):
    """One attempt. Without an `outcome` it is under way, or was when the loop was killed."""

    number: int
    #: Attempts of one round run at the same time.
    round: int
    started: float
    #: How many items had landed when it began.
    landed: int
    outcome: AttemptOutcome | None = None
    #: Why it ended so, also for the next attempt's prompt.
    reason: str = ""
    #: The words of an error, for the user alone: they may name files of the host.
    error: str = ""
    #: The judge's output, for the next attempt's prompt.
    feedback: str = ""
    workspace: str = ""
    #: The fork of the workspace that its judge had last.
    fork: str = ""
    #: The judge's files that it changed; they wait for a person.
    withheld: tuple[str, ...] = ()
    score: float | None = None
    spending: Spending = Spending()
    diff: DiffStat = DiffStat()
    #: The state of its workspace that the judge saw: no other lands.
    digest: str = ""
    receipts: tuple[str, ...] = ()


class ItemRecord(msgspec.Struct, kw_only=True):
    """One item and everything that was done for it."""

    item: WorkItem
    phase: Phase = "waiting"
    reason: str = ""
    attempts: list[AttemptRecord] = []
    #: Attempts before this number do not count: a person asked for a retry.
    first: int = 1
    #: The number of the attempt that is landing or has landed.
    chosen: int = 0
    #: Whether the commit to the project has begun.
    committing: bool = False
    #: The paths that land or have landed.
    paths: tuple[str, ...] = ()
    held: tuple[HeldFile, ...] = ()
    git_commit: str = ""
    #: Whether the landing's git commit is still to be made.
    git_pending: bool = False

    @property
    def spending(self) -> Spending:
        return sum((one.spending for one in self.attempts), Spending())

    @property
    def failures(self) -> int:
        """How many rounds of attempts have failed since the last retry."""
        failed = [one for one in self.attempts if one.number >= self.first and one.outcome is not None]
        return len({one.round for one in failed if one.outcome not in UNCOUNTED and one.outcome != "passed"})

    def attempt(self, number: int) -> AttemptRecord:
        return next(one for one in self.attempts if one.number == number)

    def summary(self) -> ItemSummary:
        """Return the item as a list shows it."""
        shown = self.attempt(self.chosen) if self.chosen else self.attempts[-1] if self.attempts else None
        return ItemSummary(
            item=self.item.id,
            title=clean_line(self.item.title),
            phase=self.phase,
            attempts=len(self.attempts),
            reason=self.reason,
            spending=self.spending,
            diff=DiffStat() if shown is None or not self.chosen else shown.diff,
            held=tuple(HeldFile(clean_line(one.path), one.why) for one in self.held),
            workspace="" if shown is None else shown.workspace,
            receipts=() if shown is None else shown.receipts,
            git_commit=self.git_commit,
        )


class LoopRecord(msgspec.Struct, kw_only=True):
    """Everything that `stockade loop resume` needs."""

    version: int = VERSION
    id: str
    project: str
    created: float
    settings: LoopSettings
    #: The clauses of the policy.
    policy: dict[str, Any]
    items: list[ItemRecord]
    outcome: LoopOutcome | None = None
    reason: str = ""
    #: How many items have landed.
    landed: int = 0
    #: How many seconds the loop has run.
    elapsed: float = 0.0

    @property
    def spending(self) -> Spending:
        return sum((one.spending for one in self.items), Spending())

    def find(self, id: str) -> ItemRecord:
        """Return the item with that id; a unique beginning is enough."""
        known = [one.item.id for one in self.items]
        found = [id] if id in known else [one for one in known if one.startswith(id)]
        if len(found) != 1:
            raise NotFoundError(
                f"the loop has no item {id!r}" if not found else f"{id!r} begins the ids of several items",
                hint=f"its items are {', '.join(known[:20])}",
            )
        return next(one for one in self.items if one.item.id == found[0])

    def summaries(self) -> tuple[ItemSummary, ...]:
        return tuple(one.summary() for one in self.items)

    @property
    def finished(self) -> bool:
        return all(one.phase in FINAL for one in self.items)


class Store:
    """The directory of one loop."""

    def __init__(self, path: str) -> None:
        self.path = path

    @property
    def id(self) -> str:
        return os.path.basename(self.path)

    def read(self) -> LoopRecord:
        """Return the loop's state."""
        try:
            with open(f"{self.path}/{FILE}", "rb") as file:
                return decode(file.read(), LoopRecord)
        except FileNotFoundError:
            raise NotFoundError(
                f"there is no loop {self.id}", hint="`stockade loop status` shows yours"
            ) from None
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            raise SetupError(
                f"cannot read the loop's state {self.path}/{FILE}: {error}",
                stage="state",
                hint="another version of Stockade may have written it",
            ) from None

    def save(self, record: LoopRecord) -> None:
        """Replace the loop's state: after a crash it is the old one or the new one."""
        self._write(FILE, encode(record))

    def _write(self, name: str, data: bytes) -> None:
        try:
            part = f"{self.path}/{name}.new"
            with open(part, "wb", opener=_private) as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, f"{self.path}/{name}")
            directory = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)
        except OSError as error:
            raise state.unusable(self.path, error) from None

    def save_baseline(self, baseline: JudgeBaseline) -> None:
        self._write(_baseline_name(baseline.command), encode(baseline))

    def baseline(self, command: str) -> JudgeBaseline | None:
        """Return what the verify command said last about the project."""
        with (
            contextlib.suppress(OSError, ValueError, msgspec.MsgspecError),
            open(f"{self.path}/{_baseline_name(command)}", "rb") as file,
        ):
            return decode(file.read(), JudgeBaseline)
        return None

    def attempt_directory(self, item: str, number: int) -> str:
        """Return the directory of an attempt's logs, which is made if it is missing."""
        path = f"{self.path}/attempts/{file_name(item)}-{number}"
        os.makedirs(path, 0o700, exist_ok=True)
        return path

    def log_error(self, words: str) -> str:
        """Add a traceback to the loop's log of errors and return the log's path."""
        path = f"{self.path}/errors.log"
        with open(path, "a", opener=_private, encoding="utf-8", errors="backslashreplace") as file:
            file.write(f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())}\n{words}\n")
        return path

    def ask(self, request: dict[str, str]) -> None:
        """Leave a request for the loop that runs: `{"do": "skip", "item": ID}`."""
        os.makedirs(f"{self.path}/requests", 0o700, exist_ok=True)
        self._write(f"requests/{time.time_ns():020d}.json", encode(request))

    def requests(self) -> list[dict[str, str]]:
        """Take the requests that were left, the oldest first."""
        found = []
        with contextlib.suppress(FileNotFoundError):
            for name in sorted(os.listdir(f"{self.path}/requests")):
                if name.endswith(".json"):
                    path = f"{self.path}/requests/{name}"
                    with contextlib.suppress(OSError, ValueError, msgspec.MsgspecError):
                        with open(path, "rb") as file:
                            found.append(decode(file.read(), dict[str, str]))
                        os.unlink(path)
        return found


def encode(value: object) -> bytes:
    """Return a value as JSON. An agent names files as it likes, also with bytes that are not UTF-8."""
    return json.dumps(msgspec.to_builtins(value), separators=(",", ":")).encode()


def decode(data: bytes, kind: type[Kind]) -> Kind:
    """Return the value that `encode` has written."""
    return msgspec.convert(json.loads(data), kind)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def _baseline_name(command: str) -> str:
    return f"baseline-{hashlib.sha256(command.encode('utf-8', 'surrogateescape')).hexdigest()[:16]}.json"


def file_name(item: str) -> str:
    """Return a file name for an item's id, which may hold anything; different ids have different names."""
    plain = re.sub(r"[^A-Za-z0-9._-]", "_", item)[:60].lstrip(".") or "item"
    if plain == item:
        return plain
    return f"{plain}-{hashlib.sha256(item.encode('utf-8', 'surrogateescape')).hexdigest()[:8]}"


def loops_place(home: str | None = None) -> str:
    """Return the directory that has every loop, and make it if it is missing."""
    if home is None:
        caller = Caller.current()
        home = state.state_dir(caller.environ, caller.home)
    place = os.path.join(state.ensure(home), PLACE)
    with contextlib.suppress(FileExistsError):
        os.mkdir(place, 0o700)
    return place


def new_store(home: str | None = None) -> Store:
    """Make the directory of a new loop."""
    path = f"{loops_place(home)}/{os.urandom(6).hex()}"
    try:
        os.mkdir(path, 0o700)
    except OSError as error:
        raise state.unusable(path, error) from None
    return Store(path)


def find_store(word: str | None, project: str, home: str | None = None) -> Store:
    """Return the loop that the word names; without one, the last loop of the project."""
    place = loops_place(home)
    known = [name for name in os.listdir(place) if os.path.exists(f"{place}/{name}/{FILE}")]
    if word:
        found = matching(word, known)
        if len(found) != 1:
            raise NotFoundError(f"there is no loop {word!r}", hint=f"`ls {place}`; {SHORTENED}")
        return Store(f"{place}/{found[0]}")
    dated = []
    for name in known:
        with contextlib.suppress(SetupError):
            record = Store(f"{place}/{name}").read()
            if record.project == project:
                dated.append((record.created, name))
    if not dated:
        raise NotFoundError(
            f"no loop has worked in {project}", hint="start one: stockade loop --items prd.json ... -- claude"
        )
    return Store(f"{place}/{max(dated)[1]}")


def attempt_workspaces(project: str) -> frozenset[str]:
    """Return the ids of the workspaces that belong to attempts of the project's loops.

    They wait for a person, or were rejected by a judge: nothing else may go on in them by itself.
    """
    place, found = loops_place(), set[str]()
    for name in os.listdir(place):
        with contextlib.suppress(SetupError, NotFoundError):
            record = Store(f"{place}/{name}").read()
            if record.project == project:
                found |= {
                    id
                    for one in record.items
                    for tried in one.attempts
                    for id in (tried.workspace, tried.fork)
                }
    return frozenset(found - {""})


@contextlib.contextmanager
def project_lock(project: str, home: str | None = None) -> Iterator[None]:
    """Hold the lock on a project: two loops over one tree would land over each other's changes."""
    name = hashlib.sha256(os.fsencode(os.path.realpath(project))).hexdigest()[:32]
    path = f"{loops_place(home)}/.lock-{name}"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LoopError(
                f"another loop works on {project}",
                hint="`stockade loop status` shows it; wait for its end, or end its process",
            ) from None
        yield
    finally:
        os.close(descriptor)


def is_locked(project: str, home: str | None = None) -> bool:
    """Whether a loop works on the project now."""
    try:
        with project_lock(project, home):
            return False
    except LoopError:
        return True


def policy_of(record: LoopRecord) -> Policy:
    """Return the policy that the loop was started with."""
    return Policy(**record.policy)
