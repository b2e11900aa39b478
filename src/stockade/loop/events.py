"""What a loop tells while it works: frozen values, one class for each kind.

`Loop` calls its listener with them, in the order in which they happen. Every text in them that an agent or a
judge wrote is one line without control characters, so it can go to a terminal. In JSON each has its kind as
`event`.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from stockade.result import Decision

#: What a loop does with an item: `waiting` before its first attempt or between two, `held` if it has landed
#: and files of it wait for a person.
Phase = Literal["waiting", "running", "judging", "landing", "landed", "held", "failed", "skipped"]
#: Phases in which a loop has nothing more to do for an item.
FINAL: frozenset[Phase] = frozenset({"landed", "held", "failed", "skipped"})

#: How an attempt ended. `passed`: its judge was satisfied. `conflict`: it passed, but another change landed
#: first. `rate-limited`, `cancelled` and `conflict` do not count against the item's attempts.
AttemptOutcome = Literal[
    "passed",
    "no-change",
    "rejected",
    "crashed",
    "out-of-time",
    "idle",
    "over-budget",
    "rate-limited",
    "conflict",
    "surpassed",
    "cancelled",
]
#: How a loop ended; each is an exit code of `stockade loop`.
LoopOutcome = Literal["done", "incomplete", "held", "over-budget", "paused", "sandbox-error"]


class Spending(msgspec.Struct, frozen=True):
    """What attempts have used: time as the supervisor measured it, the rest as the agent said it."""

    seconds: float = 0.0
    input_tokens: int = 0
    output_tokens: int = 0
    cost_usd: float = 0.0

    @property
    def tokens(self) -> int:
        """The tokens of both directions."""
        return self.input_tokens + self.output_tokens

    def __add__(self, other: Spending) -> Spending:
        return Spending(
            self.seconds + other.seconds,
            self.input_tokens + other.input_tokens,
            self.output_tokens + other.output_tokens,
            self.cost_usd + other.cost_usd,
        )


class DiffStat(msgspec.Struct, frozen=True):
    """The size of a change: files, and lines added and removed in those that are text."""

    files: int = 0
    added: int = 0
    removed: int = 0


class HeldFile(msgspec.Struct, frozen=True):
    """A file that the commit held back for a person, and why."""

    path: str
    why: str


class ItemSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One item as a list shows it."""

    item: str
    title: str
    phase: Phase
    attempts: int = 0
    reason: str = ""
    spending: Spending = Spending()
    diff: DiffStat = DiffStat()
    held: tuple[HeldFile, ...] = ()
    #: The workspace of the attempt that landed with files held back, or of the last one.
    workspace: str = ""
    receipts: tuple[str, ...] = ()
    git_commit: str = ""


def _kebab(name: str) -> str:
    """Return a class's name as JSON has it: `attempt-end` for AttemptEnd."""
    return "".join(f"-{letter.lower()}" if letter.isupper() else letter for letter in name).removeprefix("-")


class LoopEvent(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag=_kebab):
    """Something that happened in a loop, and when: seconds since 1970."""

    time: float


class LoopStart(LoopEvent, frozen=True, kw_only=True):
    """The machine can enforce the policy, the agent was found inside, and work begins."""

    loop: str
    project: str
    #: The recipe's name, the program found inside, and its version.
    agent: str
    program: str
    version: str
    #: What raises the walls, and the mechanism behind each control that the policy asks for.
    backend: str
    mechanisms: dict[str, str]
    items: tuple[ItemSummary, ...]
    resumed: bool

    @property
    def shown_agent(self) -> str:
        """The agent for a person: its name and version, or the program of a plain command."""
        return f"{self.agent} {self.version}" if self.version else self.program.rpartition("/")[2]


class BaselineStart(LoopEvent, frozen=True, kw_only=True):
    """The verify command runs on the project as it is."""

    command: str


class BaselineEnd(LoopEvent, frozen=True, kw_only=True):
    """What the verify command says about the project as it is; `reported` if the runner wrote a report."""

    command: str
    exit_code: int
    reported: bool
    passed: int
    failed: int


class ItemStart(LoopEvent, frozen=True, kw_only=True):
    """Work on an item begins, or goes on after a pause."""

    item: str
    title: str


class AttemptStart(LoopEvent, frozen=True, kw_only=True):
    """An agent starts in a sandbox of its own. `log` is the directory of the attempt's logs."""

    item: str
    attempt: int
    log: str
    of: int


class AgentLine(LoopEvent, frozen=True, kw_only=True):
    """A readable line of an agent's output."""

    item: str
    attempt: int
    text: str


class NetworkEvent(LoopEvent, frozen=True, kw_only=True):
    """The egress decided about a connection or a name of an attempt."""

    item: str
    attempt: int
    decision: Decision


class BudgetReport(LoopEvent, frozen=True, kw_only=True):
    """What an attempt, its item and the loop have used so far."""

    item: str
    attempt: int
    used: Spending
    item_used: Spending
    loop_used: Spending


class RateLimitWait(LoopEvent, frozen=True, kw_only=True):
    """The model's server asked to wait. The attempt does not count; the next one starts after `seconds`."""

    item: str
    attempt: int
    seconds: float
    reason: str


class JudgeStart(LoopEvent, frozen=True, kw_only=True):
    """The verify command runs in a second sandbox. `restored` are the judge's files that come from the base.

    `again` if the attempt has passed before, and the project has changed since.
    """

    item: str
    attempt: int
    command: str
    restored: tuple[str, ...]
    again: bool


class JudgeLine(LoopEvent, frozen=True, kw_only=True):
    """A line of the verify command's output."""

    item: str
    attempt: int
    text: str


class JudgeEnd(LoopEvent, frozen=True, kw_only=True):
    """The judge's verdict about an attempt, and why."""

    item: str
    attempt: int
    passed: bool
    reason: str


class AttemptEnd(LoopEvent, frozen=True, kw_only=True):
    """An attempt is over. `workspace` has its changes until the loop removes it."""

    item: str
    attempt: int
    outcome: AttemptOutcome
    reason: str
    counts: bool
    spending: Spending
    diff: DiffStat
    workspace: str
    receipts: tuple[str, ...]


class Landing(LoopEvent, frozen=True, kw_only=True):
    """The changes of an item are in the project now."""

    item: str
    attempt: int
    diff: DiffStat
    paths: tuple[str, ...]
    receipts: tuple[str, ...]
    git_commit: str


class HeldBackFiles(LoopEvent, frozen=True, kw_only=True):
    """Files of a landed item wait for a person: `stockade diff WORKSPACE`, then `stockade commit`."""

    item: str
    workspace: str
    files: tuple[HeldFile, ...]


class LandingConflict(LoopEvent, frozen=True, kw_only=True):
    """An attempt passed, but the project has changed in the same places. The item gets a new attempt."""

    item: str
    attempt: int
    paths: tuple[str, ...]


class ItemEnd(LoopEvent, frozen=True, kw_only=True):
    """A loop has nothing more to do for an item."""

    item: str
    phase: Phase
    reason: str


class ItemChange(LoopEvent, frozen=True, kw_only=True):
    """A person retried, skipped or edited an item."""

    item: str
    title: str
    phase: Phase


class PauseRequest(LoopEvent, frozen=True, kw_only=True):
    """The loop stops when the attempts that run now are over."""


class SandboxFailure(LoopEvent, frozen=True, kw_only=True):
    """A sandbox could not be raised or broke. The loop stops; `log` has the traceback."""

    message: str
    hint: str
    log: str


class LoopWarning(LoopEvent, frozen=True, kw_only=True):
    """Something besides the work failed, such as the notify command or git. The loop goes on."""

    text: str


class LoopEnd(LoopEvent, frozen=True, kw_only=True):
    """The loop is over. `stockade loop resume` continues it unless its outcome is `done`."""

    loop: str
    outcome: LoopOutcome
    reason: str
    exit_code: int
    items: tuple[ItemSummary, ...]
    spending: Spending
    diff: DiffStat
