"""What the client's calls return."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

import msgspec

from stockade.result import Change, Result


class SandboxStatus(msgspec.Struct, frozen=True, rename="camel"):
    """The state of a sandbox, such as Running or Paused, and why it is in it."""

    state: str
    reason: str = ""
    message: str = ""


class SandboxInfo(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """What the server says about a sandbox. `expires_at` is None if the sandbox never expires."""

    id: str
    status: SandboxStatus
    created_at: datetime
    expires_at: datetime | None = None
    entrypoint: list[str] = []
    metadata: dict[str, str] = {}
    extensions: dict[str, str] = {}


class Endpoint(msgspec.Struct, frozen=True):
    """Where a port of a sandbox is reached: `host:port/path`, and headers that every request there needs."""

    endpoint: str
    headers: dict[str, str] = {}


class RemoteResult(Result, frozen=True, kw_only=True):
    """How a run in a sandbox of the server ended: a `stockade.Result` with what the stream of events tells.

    The output is text on the wire: bytes that were not UTF-8 have been replaced. What the stream does not
    carry, such as `controls`, is in the run's receipt: `box.receipts()`.
    """

    #: The server's id of the run.
    id: str = ""
    #: Seconds.
    duration: float = 0.0


class CodeFailure(msgspec.Struct, frozen=True):
    """The exception that ended a piece of code."""

    type: str
    message: str
    traceback: tuple[str, ...] = ()


class RemoteCodeResult(RemoteResult, frozen=True, kw_only=True):
    """The result of code in an interpreter. The code could have forged all of it."""

    #: What the code displayed, and the value of its last line, as text by mime type.
    displays: tuple[dict[str, str], ...] = ()
    #: The exception that ended the code.
    error: CodeFailure | None = None

    @property
    def value_text(self) -> str:
        """The last display as text: the value of the last line, if that is an expression."""
        return self.displays[-1].get("text", "") if self.displays else ""


class BackgroundStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How far a command in the background is."""

    running: bool
    exit_code: int | None = None
    error: str | None = None
    started_at: datetime | None = None
    finished_at: datetime | None = None


class RemoteReceipt(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the list of receipts; `box.receipt(id)` returns the receipt itself."""

    id: str
    started: datetime
    program: str
    outcome: str


class RemoteFileInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One file of a sandbox. `mode` has the permission bits, as `os.stat` has them."""

    path: str
    kind: Literal["file", "directory", "symlink", "other"]
    size: int
    mode: int
    modified: datetime
    created: datetime
    owner: str
    group: str


class RemoteCommit(msgspec.Struct, frozen=True, kw_only=True):
    """What a commit of an isolated session did to the sandbox's own directories."""

    changes: tuple[Change, ...] = ()
    #: What was not committed exactly as it was, and why.
    notes: tuple[str, ...] = ()
