"""Sandboxes that a program inside one asks for: its supervisor makes them, outside, beside its own.

    program ──► descriptor 3: requests ──► a thread of the supervisor ──► a child sandbox
            ◄── descriptor 4: answers  ◄──

Each is a length (four bytes, the lowest first) and so many bytes of JSON. They
go through pipes and not through a socket: to whoever has the other end of a
socket, the kernel hands out a pidfd of us.

The program is given nothing that it did not have. What it asks for is met
with what it really has (`policy.child`), and the child's walls are compared
with its own when they are known. One child lives at a time, and none longer
than the run that asked for it. What the children use is counted against what
is left of the processor time and the time of that run.
"""

from __future__ import annotations

import contextlib
import os
import select
import struct
import threading
import time
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from stockade.controls import Control
from stockade.errors import SetupError, StockadeError
from stockade.policy import Policy
from stockade.policy.child import Child, RefusedError, child, confirm
from stockade.receipt.account import Account
from stockade.receipt.statement import Parent
from stockade.sandbox import scarce
from stockade.sandbox.launch import Prepared, prepare
from stockade.sandbox.steps import Events, Steps

if TYPE_CHECKING:
    from stockade.sandbox.result import Result
    from stockade.sandbox.supervise import Run

T = TypeVar("T")

#: What tells the program where to ask, and the descriptors.
VARIABLE, PLACE = "STOCKADE_DELEGATE", "3,4"
#: The largest request, the most of each stream in an answer, the most requests of one run, and how deep.
LARGEST, MOST_OUTPUT, MOST_REQUESTS, DEEPEST = 1 << 20, 1 << 20, 256, 3
LENGTH = struct.Struct("<I")
#: Controls of a workspace, which no child has.
OF_WORKSPACES = (Control.WORKSPACE_OVERLAY, Control.PROTECT)


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a program may ask for. Who it is, nobody asks: its pipe is its own."""

    command: list[str]
    policy: dict[str, Any] = {}
    input: bytes = b""
    cwd: str = ""
    timeout: float | None = None


class Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the program is told: why it was refused, or how its child ended."""

    refused: str = ""
    outcome: str = ""
    exit_code: int | None = None
    signal: int | None = None
    stdout: bytes = b""
    stderr: bytes = b""
    truncated: bool = False
    receipt: str = ""


class StoppedError(Exception):
    """The run that asks has ended."""


def offered(run: Run, prepared: Prepared, account: Account | None) -> Run:
    """The run, with the right to ask for sandboxes where its policy has that."""
    if account is None or not prepared.resolved.policy.delegate:
        return run
    if prepared.made.entry is None:
        raise SetupError(
            "delegate: the sandbox is not in the register, so that its children could not name it",
            stage="delegate",
        )
    program = msgspec.structs.replace(run.program, env={**run.program.env, VARIABLE: PLACE})
    wall = run.program.wall
    return msgspec.structs.replace(
        run, program=program, delegates=lambda: Delegation(prepared, account, wall)
    )


class Delegation:
    """Answers the requests of one run, in a thread of its own."""

    def __init__(self, prepared: Prepared, account: Account, wall: float | None) -> None:
        self._prepared, self._account = prepared, account
        self._until = None if wall is None else time.monotonic() + wall
        self._cpu_left = prepared.resolved.limits.cpu_time
        self._thread: threading.Thread | None = None
        self._open: list[int] = []
        with scarce.refused():
            try:
                self._asks, their_asks = self._pipe()
                their_answers, self._answers = self._pipe()
                self._stop, self._done = self._signal(), self._signal()
            except BaseException:
                self._close()
                raise
        #: For the program's descriptors 3 and 4.
        self.theirs = (their_asks, their_answers)
        # Whoever is inside can open the other end as well: nobody waits for it without watching the end.
        os.set_blocking(self._asks, False)
        os.set_blocking(self._answers, False)

    def _pipe(self) -> tuple[int, int]:
        ends = os.pipe()
        self._open += ends
        return ends

    def _signal(self) -> int:
        made = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._open.append(made)
        return made

    def begin(self) -> None:
        """The program has its ends."""
        for end in self.theirs:
            os.close(end)
            self._open.remove(end)
        self._thread = threading.Thread(target=self._serve, name="stockade-delegate", daemon=True)
        self._thread.start()

    def ended(self, events: Events) -> Steps[None]:
        """The run has ended: so does what it asked for. Nothing cuts this short."""
        os.eventfd_write(self._stop, 1)
        interruption: BaseException | None = None
        if self._thread is not None and self._thread.ident is not None:
            events.watch(self._done)
            while self._done not in events.ready:
                try:
                    yield None
                except BaseException as error:
                    interruption = error
            events.forget(self._done)
            self._thread.join()
        self._close()
        if interruption is not None:
            raise interruption

    def _close(self) -> None:
        while self._open:
            os.close(self._open.pop())

    def _serve(self) -> None:
        try:
            with contextlib.suppress(StoppedError, OSError):
                for _ in range(MOST_REQUESTS):
                    frame = self._frame()
                    if frame is None:
                        return
                    self._answer(self._handled(frame))
                self._answer(Answer(refused=f"that were {MOST_REQUESTS} requests, and there are no more"))
        finally:
            # Whoever still asks learns that nobody answers.
            for end in (self._asks, self._answers):
                self._open.remove(end)
                os.close(end)
            os.eventfd_write(self._done, 1)

    def _handled(self, frame: bytes) -> Answer:
        try:
            request = msgspec.json.decode(frame, type=Request)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            return Answer(refused=f"the request is malformed: {error}")
        try:
            return self._child(request)
        except RefusedError as error:
            return Answer(refused=error.message + (f" ({error.hint})" if error.hint else ""))
        except RecursionError:  # it could be read, and is too deep to say what is wrong with it
            return Answer(refused="the request is malformed: too many tables in each other")
        except StockadeError as error:
            # Its words may name files of the host.
            made = "" if error.receipt is None else error.receipt.hash
            self._note(made)
            return Answer(refused="the sandbox could not be made", receipt=made)

    def _note(self, receipt: str) -> None:
        if receipt:
            self._account.children.append(receipt)

    def _child(self, request: Request) -> Answer:
        parent = self._prepared
        found = child(request.policy, parent.resolved, parent.plan.backend)
        depth = self._account.depth + 1
        if found.policy.delegate and depth >= DEEPEST:
            raise RefusedError(f"delegate: {DEEPEST} sandboxes deep is the deepest")
        entry = parent.made.entry
        assert entry is not None  # else nothing was offered
        account = Account(self._limited(found.policy), _words(request), self._account.who)
        account.parent, account.depth = Parent(entry.record.id, parent.plan.hash), depth
        kept = (_Kept(), _Kept())
        used = 0.0
        try:
            result = self._run(request, found, account, kept)
            used = result.usage.cpu
        finally:
            self._spend(used + account.cpu_below)
        made = "" if result.receipt is None else result.receipt.hash
        self._note(made)
        return Answer(
            outcome=result.outcome,
            exit_code=result.exit_code,
            signal=result.signal,
            stdout=bytes(kept[0].data),
            stderr=bytes(kept[1].data),
            truncated=any(one.truncated for one in kept),
            receipt=made,
        )

    def _spend(self, cpu: float) -> None:
        """Also what the children of a child have used is gone."""
        self._account.cpu_below += cpu
        if self._cpu_left is not None:
            self._cpu_left -= cpu

    def _run(self, request: Request, found: Child, account: Account, kept: tuple[_Kept, _Kept]) -> Result:
        from stockade.sandbox.sandbox import _once, command

        with account.telling():
            prepared = prepare(account.policy, pinned=True, command=account.command)
            account.prepared = prepared
            try:
                own, parent = prepared.made.entry, account.parent
                # For the receipt that a killed supervisor cannot make.
                if own is not None and parent is not None:
                    own.update(parent=parent.sandbox, parent_plan=parent.plan)
                confirm(prepared.resolved, found.files, self._prepared.resolved)
                self._compare(prepared)
                room = min(MOST_OUTPUT, prepared.resolved.limits.output or 0)
                for stream in kept:
                    stream.room = room
                run = command(
                    prepared, account.command, given=request.input, env=None, cwd=request.cwd or None,
                    timeout=request.timeout, grace=0, on_stdout=kept[0], on_stderr=kept[1], keep=False,
                    kept=False, cancelled_by=(StoppedError,), meanwhile=account.ready,
                )  # fmt: skip
                with Events() as events:
                    return self._driven(_once(prepared, run, account, events), events)
            finally:
                prepared.close(discard=True, earlier=True)

    def _limited(self, policy: Policy) -> Policy:
        """The policy with no more time than is left of the parent's."""
        left: dict[str, float] = {}
        if self._until is not None:
            left["wall"] = self._until - time.monotonic()
        if self._cpu_left is not None:
            left["cpu_time"] = self._cpu_left
        for name, seconds in left.items():
            if seconds < 0.001:
                raise RefusedError(f"limits.{name}: nothing is left of the program's own")
        most = {
            name: min(seconds, had) if (had := getattr(policy.limits, name)) is not None else seconds
            for name, seconds in left.items()
        }
        return msgspec.structs.replace(policy, limits=msgspec.structs.replace(policy.limits, **most))

    def _compare(self, made: Prepared) -> None:
        """Refuse a child of which a wall is weaker than that of its parent."""
        for name, one in self._prepared.controls.items():
            own = made.controls.get(name)
            weaker = own is None or not own.grade.enforced
            if one.grade.enforced and weaker and name not in OF_WORKSPACES:
                raise RefusedError(f"{name}: would be weaker than for the program itself")

    def _driven(self, steps: Steps[T], events: Events) -> T:
        """Take every step in this thread, until the run that asks has ended."""
        events.watch(self._stop)
        stopped = False
        try:
            patience = next(steps)
            while True:
                events.wait(patience)
                if self._stop in events.ready and not stopped:
                    stopped = True
                    events.forget(self._stop)
                    events.ready = []
                    patience = steps.throw(StoppedError("the run that asked for it has ended"))
                else:
                    patience = next(steps)
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]

    def _frame(self) -> bytes | None:
        """The next request; None where no more will come, or it is none."""
        (size,) = LENGTH.unpack(header) if (header := self._read(LENGTH.size)) else (0,)
        if size > LARGEST:
            self._answer(Answer(refused=f"a request has at most {LARGEST} bytes"))
        return self._read(size) if 0 < size <= LARGEST else None

    def _read(self, size: int) -> bytes | None:
        data = bytearray()
        while len(data) < size:
            self._wait(self._asks, select.POLLIN)
            try:
                part = os.read(self._asks, size - len(data))
            except BlockingIOError:
                continue
            if not part:
                return None
            data += part
        return bytes(data)

    def _answer(self, answer: Answer) -> None:
        data = msgspec.json.encode(answer)
        view = memoryview(LENGTH.pack(len(data)) + data)
        while view:
            self._wait(self._answers, select.POLLOUT)
            with contextlib.suppress(BlockingIOError):
                view = view[os.write(self._answers, view[: select.PIPE_BUF]) :]

    def _wait(self, end: int, what: int) -> None:
        poll = select.poll()
        poll.register(end, what)
        poll.register(self._stop, select.POLLIN)
        ready = dict(poll.poll())
        if self._stop in ready:
            raise StoppedError


class _Kept:
    """As much of a stream as fits into an answer."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.room = 0
        self.truncated = False

    def __call__(self, data: bytes) -> None:
        fits = self.room - len(self.data)
        self.data += data[:fits]
        self.truncated = self.truncated or len(data) > fits


def _words(request: Request) -> list[str]:
    if not request.command or any("\0" in word for word in request.command):
        raise RefusedError("command: must be a list of words without NUL bytes")
    if "\0" in request.cwd:
        raise RefusedError("cwd: has a NUL byte in it")
    if request.timeout is not None and not 0 < request.timeout < 1e9:
        raise RefusedError("timeout: is not a time in seconds")
    return request.command
