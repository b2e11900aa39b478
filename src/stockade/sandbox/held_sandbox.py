"""A sandbox that a process of its own holds, and the calls into it by its id.

The holder (`call_daemon`) is the sandbox's supervisor: it lives on when the process that asked for it has
ended, and everything inside ends with it. It listens on a socket beside its record in the register, which
only its own user can reach. Each call is one connection: a request, an answer. A client that hangs up before
the answer cancels its call.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

import msgspec

from stockade.errors import SetupError, StockadeError
from stockade.linux.user import Caller
from stockade.policy.model import PolicyLike, policy_or_default
from stockade.result import Outcome
from stockade.runs.options import OnExit
from stockade.runs.register import sandbox_record
from stockade.state import state_dir

#: The end of the socket's name, after the sandbox's id.
SOCKET = "calls"
#: The longest message: a file as long as `Files.read` may return, and what is around it.
MOST_BYTES = (64 << 20) + (1 << 20)
#: What the process that asked for a sandbox sends once it knows the id: without it the sandbox ends at once.
TAKEN = b"\1"
#: Seconds that a new sandbox may take.
PATIENCE = 60.0


class SandboxGoneError(SetupError):
    """The sandbox has ended, or never was: no later call can succeed."""


class HoldRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The sandbox to hold."""

    policy: dict[str, Any]
    name: str
    on_exit: OnExit
    #: Seconds without a call after which the sandbox ends; None for never.
    idle: float | None
    who: dict[str, str]


class HeldReport(msgspec.Struct, frozen=True):
    """What the holder says once its sandbox is open."""

    id: str
    #: Where commands start.
    directory: str


class RunCall(msgspec.Struct, frozen=True, kw_only=True, tag="run"):
    """Run a command to its end."""

    argv: list[str]
    env: dict[str, str]
    timeout: float | None
    #: How many bytes of each stream to answer with.
    limit: int


class FileCall(msgspec.Struct, frozen=True, tag="file"):
    """Do something to a file."""

    what: Literal["read", "write", "stat", "list", "mkdir", "remove"]
    path: str
    data: bytes = b""


class LookCall(msgspec.Struct, frozen=True, tag="look"):
    """Ask whether the sandbox lives."""


class EndCall(msgspec.Struct, frozen=True, tag="end"):
    """End the sandbox."""


Call = RunCall | FileCall | LookCall | EndCall


class HeldRun(msgspec.Struct, frozen=True, kw_only=True):
    """How a command ended, and what it printed."""

    outcome: Outcome
    exit_code: int
    reason: str
    stdout: bytes
    stderr: bytes
    #: Whether it printed more than it was asked to answer with.
    truncated: bool


class HeldEntry(msgspec.Struct, frozen=True):
    """A file inside, as seen through links."""

    path: str
    is_dir: bool
    size: int | None


class CallRefusal(msgspec.Struct, frozen=True):
    """Why a call failed. With `errno` it is an OSError about `path`, or a ValueError for EINVAL."""

    message: str
    hint: str = ""
    errno: int = 0
    path: str = ""


class CallAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer to a call: one of these, or a refusal."""

    refusal: CallRefusal | None = None
    report: HeldReport | None = None
    run: HeldRun | None = None
    data: bytes | None = None
    files: list[HeldEntry] | None = None


class HeldSandbox:
    """The calls into one held sandbox, from any process of its user and from any event loop."""

    def __init__(self, report: HeldReport, state: str) -> None:
        self._report = report
        self._state = state

    @property
    def id(self) -> str:
        """The sandbox's id, as `stockade ps` shows it."""
        return self._report.id

    @property
    def directory(self) -> str:
        """Where commands start: the workspace, else the private home."""
        return self._report.directory

    @classmethod
    async def start(
        cls,
        policy: PolicyLike | None = None,
        *,
        name: str = "",
        on_exit: OnExit = "keep",
        idle: float | None = None,
        who: Mapping[str, str] | None = None,
    ) -> HeldSandbox:
        """Start a holder and its sandbox. If this is cancelled, neither stays."""
        request = HoldRequest(
            policy=policy_or_default(policy).table(),
            name=name,
            on_exit=on_exit,
            idle=idle,
            who=dict(who or {}),
        )
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                await asyncio.to_thread(_start_holder, theirs)
            except BaseException:
                ours.close()
                raise
        answer = await _exchange(ours, request, PATIENCE)
        if answer is None or answer.report is None:
            raise SetupError("the process that was to hold the sandbox has ended", stage="holder")
        return cls(answer.report, _state())

    @classmethod
    async def attach(cls, id: str) -> HeldSandbox:
        """Find a held sandbox by its whole id; `SandboxGoneError` if it has ended."""
        found = cls(HeldReport(id, ""), _state())
        answer = await found._call(LookCall())
        assert answer.report is not None
        return cls(answer.report, found._state)

    async def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
        limit: int = 10 << 20,
    ) -> HeldRun:
        """Run a command to its end. Cancelling this ends the command: TERM, grace, KILL."""
        call = RunCall(argv=list(argv), env=dict(env or {}), timeout=timeout, limit=limit)
        answer = (await self._call(call)).run
        assert answer is not None
        return answer

    async def read(self, path: str) -> bytes:
        """Return the content of a file."""
        return (await self._call(FileCall("read", path))).data or b""

    async def write(self, path: str, data: bytes) -> None:
        """Replace the content of a file, with the directories above it."""
        await self._call(FileCall("write", path, data))

    async def stat(self, path: str) -> HeldEntry:
        """Describe a file or directory; links are followed."""
        return ((await self._call(FileCall("stat", path))).files or [])[0]

    async def list(self, path: str) -> list[HeldEntry]:
        """List a directory."""
        return (await self._call(FileCall("list", path))).files or []

    async def mkdir(self, path: str) -> None:
        """Create a directory and those above it; an existing one is no error."""
        await self._call(FileCall("mkdir", path))

    async def remove(self, path: str) -> None:
        """Remove a file or link, or a directory with everything in it."""
        await self._call(FileCall("remove", path))

    async def end(self) -> None:
        """End the sandbox and its holder, and wait until they are gone; harmless when repeated."""
        with contextlib.suppress(SandboxGoneError):
            await self._call(EndCall())

    async def _call(self, call: Call) -> CallAnswer:
        line = await asyncio.to_thread(self._connect)
        answer = await _exchange(line, call)
        if answer is None:
            if isinstance(call, EndCall):
                return CallAnswer()
            raise _gone(self.id)
        if (refusal := answer.refusal) is not None:
            if refusal.errno == errno.EINVAL:
                raise ValueError(refusal.message)
            if refusal.errno:
                raise OSError(refusal.errno, refusal.message, refusal.path)
            raise StockadeError(refusal.message, hint=refusal.hint)
        return answer

    def _connect(self) -> socket.socket:
        with sandbox_record.opened_run(self._state) as run:
            for _, directory in sandbox_record.directories(run):
                line = socket.socket(socket.AF_UNIX)
                try:
                    line.connect(f"/proc/self/fd/{directory}/{self.id}.{SOCKET}")
                    return line
                except (FileNotFoundError, ConnectionError):
                    line.close()
                except BaseException:
                    line.close()
                    raise
        raise _gone(self.id)


Message = TypeVar("Message")


async def send(writer: asyncio.StreamWriter, message: object) -> None:
    """Send one message: its length, then its bytes. One that the other side would refuse is an OSError."""
    data = msgspec.msgpack.encode(message)
    if len(data) > MOST_BYTES:
        raise OSError(errno.EFBIG, f"{len(data)} bytes are more than one call can carry")
    writer.write(len(data).to_bytes(8, "big"))
    writer.write(data)
    await writer.drain()


async def receive(reader: asyncio.StreamReader, kind: type[Message] | Any) -> Message | None:
    """Receive one message; None if the other side has hung up."""
    try:
        size = int.from_bytes(await reader.readexactly(8), "big")
        if size > MOST_BYTES:
            raise SetupError(f"a message of {size} bytes is too long", stage="holder")
        found: Message = msgspec.msgpack.decode(await reader.readexactly(size), type=kind)
        return found
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


async def _exchange(line: socket.socket, message: object, patience: float | None = None) -> CallAnswer | None:
    reader, writer = await asyncio.open_unix_connection(sock=line)
    try:
        async with asyncio.timeout(patience):
            with contextlib.suppress(ConnectionError):  # the answer may be there all the same
                await send(writer, message)
            answer: CallAnswer | None = await receive(reader, CallAnswer)
            if answer is not None and isinstance(message, HoldRequest):
                writer.write(TAKEN)
    finally:
        writer.close()
    if answer is not None and answer.refusal is not None and isinstance(message, HoldRequest):
        raise SetupError(answer.refusal.message, stage="holder", hint=answer.refusal.hint)
    return answer


def _start_holder(end: socket.socket) -> None:
    """Start a holder in a session of its own, without this process's streams; `end` is its first line."""
    # -P: no module of the directory that this process is in, which may be an untrusted workspace.
    words = [sys.executable, "-P", "-m", "stockade.sandbox.call_daemon", str(end.fileno())]
    nowhere = subprocess.DEVNULL
    first = subprocess.Popen(
        words, stdin=nowhere, stdout=nowhere, stderr=nowhere, start_new_session=True, pass_fds=(end.fileno(),)
    )
    first.wait()  # it forks the holder, so that no caller has to wait for that one's end


def _state() -> str:
    caller = Caller.current()
    return os.path.abspath(state_dir(caller.environ, caller.home))


def _gone(id: str) -> SandboxGoneError:
    return SandboxGoneError(
        f"sandbox {id} has ended", stage="holder", hint=f"`stockade logs {id}` shows how; start another one"
    )
