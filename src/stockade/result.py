"""How a run ended, as a value."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Literal

import msgspec

import stockade
from stockade.controls import Grade
from stockade.errors import CommandError, DeniedError, LimitError, SetupError, TimeoutError

__all__ = [
    "Change",
    "Decision",
    "Denial",
    "Enforcement",
    "Handoff",
    "LostChange",
    "Outcome",
    "Result",
    "SpillFile",
    "Usage",
]

#: What `net = "open"` means, in plans, results and receipts.
OPEN_NETWORK = "open: the host's network"
#: How many characters of a value an error or a prompt shows.
SHORT = 200
#: How many bytes at the end of stderr are searched for its last line.
LAST = 10_000


class Outcome(enum.StrEnum):
    """Why a run ended. Compares equal to its name."""

    EXITED = "exited"
    SIGNALLED = "signalled"
    TIMED_OUT = "timed-out"
    OUT_OF_MEMORY = "out-of-memory"
    LIMIT_EXCEEDED = "limit-exceeded"
    DENIED = "denied"
    SETUP_FAILED = "setup-failed"
    CANCELLED = "cancelled"


class Usage(msgspec.Struct, frozen=True):
    """What a run used, and which part of the kernel counted it.

    A cgroup counts every process of the sandbox while the run lasts. "rusage" counts only processes that were
    waited for, and its peak memory is that of the largest one. A field that was not counted is None.
    """

    wall: float = 0.0
    cpu_user: float = 0.0
    cpu_system: float = 0.0
    peak_memory: int = 0
    peak_tasks: int | None = None
    #: The size of the changed files of an overlay workspace when the run ended.
    bytes_written: int | None = None
    context_switches: int = 0
    source: dict[str, str] = msgspec.field(default_factory=lambda: {"cpu": "rusage", "memory": "rusage"})
    #: What passed between the program and the hosts that network rules allow, or the clients of published
    #: ports; None without both.
    bytes_sent: int | None = None
    bytes_received: int | None = None

    @property
    def cpu(self) -> float:
        """Total processor time, in seconds."""
        return self.cpu_user + self.cpu_system


class Enforcement(msgspec.Struct, frozen=True):
    """One control: the clause that asked for it, its mechanism, how that was observed, and how reliably."""

    requested: str
    mechanism: str
    observed: str
    grade: Grade


class Handoff(msgspec.Struct, frozen=True):
    """A file that is new or changed since the run began, and why a tool of the host obeys it."""

    path: str
    reason: str


class Decision(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What the egress decided about one connection, name that a program looked up, or HTTP request.

    The kind "udp" is about the datagrams of one socket of a program to one destination, and the answers.
    The kind "publish" is a connection from outside to a published port: `address` is the client's and `port`
    the one inside. The kind "rule" is a change of the rules: `rule` was added or taken back. The kind
    "secret" is about a value that was sent, a placeholder that stayed one, or an answer with a value in it.
    The kind "ask" is an answer to a question about a connection that no rule covers.
    """

    kind: Literal["connect", "name", "publish", "request", "rule", "secret", "ask", "udp"] = "connect"
    #: Seconds since 1970.
    time: float
    #: The program that made the connection and its PID inside, as in `curl (7)`; None if the connection was
    #: refused or over before Stockade looked. A program chooses its name itself.
    process: str | None = None
    #: The name that the program asked for; "" if it used an address that belongs to no name.
    name: str = ""
    #: The address that was dialled, or that the program wanted to reach.
    address: str = ""
    #: 0 for a name.
    port: int = 0
    verdict: Literal["allowed", "denied", "failed"]
    #: Why it was denied or failed, in a few words.
    reason: str = ""
    #: The rule of the policy that decided; "" if none did.
    rule: str = ""
    sent: int = 0
    received: int = 0
    #: Seconds until the connection was closed, or so far.
    duration: float = 0.0
    #: How many such decisions there were: repeated ones are counted and not listed.
    count: int = 1
    #: Method and URL of a request, without its query; the name of a secret; "" for the other kinds.
    request: str = ""

    @property
    def target(self) -> str:
        """What the program wanted to reach: HOST:PORT, udp://HOST:PORT, the name alone, or the request."""
        if self.kind == "rule":
            return self.rule
        if self.kind == "request":
            return self.request
        if self.kind == "publish":
            return f"port {self.port} from {self.address}"
        host = self.name or self.address
        if not self.port:
            return host
        place = f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"
        if self.kind == "secret":
            return f"{self.request or 'a secret'} at {place}"
        return f"udp://{place}" if self.kind == "udp" else place


class NetworkQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """A connection that no network rule covers and that waits for the answer of `on_ask`.

    The answer is "once" for this connection, "run" for a rule in this sandbox, "policy" for a rule in this
    sandbox and in your own policy, or "no".
    """

    name: str
    port: int
    #: The program and its PID inside, as in `curl (7)`; None if it is not known. It chose its name itself.
    process: str | None = None

    @property
    def target(self) -> str:
        """What the program wants to reach: HOST:PORT, which is also the rule that would allow it."""
        return f"{self.name}:{self.port}"


class Denial(msgspec.Struct, frozen=True, kw_only=True):
    """Something that a wall refused: what, which control refused it, and what would allow it.

    The egress reports connections, names, requests and secrets. The others come from an observed run
    (`explain=True`). The program chose the text of `target`, `other` and `programs`: clean it before it
    reaches a terminal.
    """

    what: Literal[
        "connection", "name", "request", "secret", "datagram",
        "read", "write", "create", "remove", "rename", "execute", "connect", "bind", "mount", "call",
    ]  # fmt: skip
    #: HOST:PORT, udp://HOST:PORT, a name, a method and URL, an absolute path inside, `unix:PATH` or the name
    #: of a system call.
    target: str
    #: The control.
    wall: str
    #: The clause of the policy that refused it, or that does not allow it.
    clause: str
    #: The option that would allow it; "" if none would.
    hint: str = ""
    #: Why it was refused: `no rule`, or a clause such as "its TLS hello names another host".
    reason: str = ""
    count: int = 1
    #: Of a rename or a link: the new name.
    other: str = ""
    #: The executables that tried it, as paths inside.
    programs: tuple[str, ...] = ()
    #: The file and the line of the clause; "" if no file writes it.
    place: str = ""
    #: The same change as `hint`, as a line of a policy file.
    change: str = ""
    #: Why that change is dangerous; "" if it is not.
    danger: str = ""


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """How a run ended, what it printed, used and changed, and what was enforced.

    >>> import stockade
    >>> stockade.run(["echo", "hello"]).text
    'hello\\n'
    """

    outcome: Outcome
    exit_code: int
    signal: int | None = None
    reason: str = ""
    hint: str = ""
    stdout: bytes = b""
    stderr: bytes = b""
    truncated: bool = False
    spilled: tuple[SpillFile, ...] = ()
    usage: Usage = Usage()
    controls: dict[str, Enforcement] = {}
    #: For each pattern of `deny`: how many paths it matched and hid when the sandbox was made.
    matched: dict[str, int] = {}
    changes: Sequence[Change] = ()
    #: Why `changes` is incomplete; empty if it is not. A program can make more changes than fit in memory.
    changes_cut: str = ""
    #: What the policy gave the run of the network: nothing, what its rules allow, or all of the host's.
    network_mode: Literal["none", "rules", "open"] = "none"
    #: With network rules: the connections and names that programs asked for since the run began.
    network: Sequence[Decision] = ()
    #: Why `network` is incomplete; empty if it is not. A program can ask for more than is recorded.
    network_cut: str = ""
    #: What walls refused, as far as they report it: with `explain`, everything.
    denials: tuple[Denial, ...] = ()
    #: Why `denials` is incomplete although the run was observed; empty if it is not.
    denials_cut: str = ""
    #: Whether an observer watched the programs (`explain`).
    observed: bool = False
    #: The published ports, each as HOST:PORT:PORT with the host's side first.
    published: tuple[str, ...] = ()
    #: The workspace that keeps the changes, for `Workspace.open` and `resume=`. In JSON: `workspace`.
    workspace_id: str = msgspec.field(default="", name="workspace")
    #: Changes that could not be saved: with `limits.disk` they stay in memory until the sandbox ends.
    lost: tuple[LostChange, ...] = ()
    #: With `on_exit="commit"`: what was committed, or why nothing was.
    committed: stockade.workspace.Commit | None = None
    commit_error: str = ""
    #: Files that the program left where it could write for real, and that tools of the host run or obey.
    handoffs: tuple[Handoff, ...] = ()
    #: What the policy lets the program do to the host, and what could not be checked, in words.
    warnings: tuple[str, ...] = ()
    plan: str = ""
    #: The signed record of what was enforced and how the run ended.
    receipt: stockade.Receipt | None = None

    @property
    def ok(self) -> bool:
        """Whether the command ran to its end and exited with 0."""
        return self.outcome is Outcome.EXITED and self.exit_code == 0

    @property
    def text(self) -> str:
        """Standard output as text; bytes that are not UTF-8 are replaced."""
        return self.stdout.decode("utf-8", "replace")

    @property
    def stderr_text(self) -> str:
        """Standard error as text; bytes that are not UTF-8 are replaced."""
        return self.stderr.decode("utf-8", "replace")

    def __repr__(self) -> str:
        """Show the fields that matter at a prompt; the others are attributes."""
        shown: dict[str, object] = {"outcome": str(self.outcome), "exit_code": self.exit_code}
        shown |= {"stdout": self.stdout, "stderr": self.stderr}
        if not self.ok:
            shown["reason"] = self.reason
        if self.changes:
            shown["changes"] = len(self.changes)
        if self.changes_cut:
            shown["changes_cut"] = self.changes_cut
        if self.denials:
            shown["denials"] = len(self.denials)
        return (
            f"{type(self).__name__}({', '.join(f'{name}={_short(value)}' for name, value in shown.items())})"
        )

    def check(self) -> Result:
        """Return this result if it is `ok`; otherwise raise the error that matches the outcome.

        The error carries this result as its `result` and quotes the last line of stderr.
        """
        if self.ok:
            return self
        kinds = {
            Outcome.TIMED_OUT: TimeoutError,
            Outcome.OUT_OF_MEMORY: LimitError,
            Outcome.LIMIT_EXCEEDED: LimitError,
            Outcome.DENIED: DeniedError,
            Outcome.SETUP_FAILED: SetupError,
        }
        lines = [] if self.hint else self.stderr[-LAST:].decode("utf-8", "replace").split("\n")
        last_line = next((line.strip() for line in reversed(lines) if line.strip()), "")
        quoted = f"; last line of stderr: {_short(last_line)}" if last_line else ""
        error = kinds.get(self.outcome, CommandError)(f"{self.reason}{quoted}", hint=self.hint)
        error.result, error.receipt = self, self.receipt
        raise error


def _short(value: object) -> str:
    """Return the repr of a value, which escapes control characters, cut to `SHORT`."""
    text = repr(value)
    return text if len(text) <= SHORT else f"{text[: SHORT - 1]}…"


class Verdict(msgspec.Struct, frozen=True):
    """The outcome of a run, its exit code, and what to tell the user."""

    outcome: Outcome
    exit_code: int
    reason: str = ""
    hint: str = ""
    signal: int | None = None


#: How many lost changes a message names, and how many characters of each path.
SHOWN_LOST = 10
SHOWN_PATH = 300


class Change(msgspec.Struct, frozen=True, gc=False):
    """One path that a run changed, relative to the workspace."""

    path: str
    kind: Literal["added", "modified", "deleted"]


class LostChange(msgspec.Struct, frozen=True):
    """A change that could not be saved when its sandbox ended, with everything below it; and why."""

    path: str
    why: str


def describe_lost(changes: Sequence[LostChange]) -> str:
    """Describe the changes that were lost, in one sentence."""
    named = ", ".join(f"{_brief(one.path)} ({one.why})" for one in changes[:SHOWN_LOST])
    more = f" and {len(changes) - SHOWN_LOST} more" if len(changes) > SHOWN_LOST else ""
    return f"these changes could not be saved when the sandbox ended: {named}{more}"


def _brief(path: str) -> str:
    return path if len(path) <= SHOWN_PATH else f"{path[:SHOWN_PATH]}…"


class SpillFile(msgspec.Struct, frozen=True):
    """The file that holds a stream's output past the limit, and how many bytes did not fit there either."""

    stream: str
    path: str
    size: int
    lost: int = 0
