"""Delegation: a program inside asks for a further sandbox, and its supervisor makes it beside the first.

    program ──► descriptor 3: requests ──► a thread of the supervisor ──► a child sandbox
            ◄── descriptor 4: answers  ◄──

Each message is a length (four bytes, little-endian) and that many bytes of
JSON. The messages go through pipes and not through a socket: from a socket, the
kernel would give the program a pidfd of the supervisor.

The program gains nothing that it did not have. `resolve.child_policy` checks
the requested policy against the program's own, and the supervisor compares the
child's walls with the program's once they are known. One child lives at a time,
and none longer than the run that asked for it. What the children use counts
against the run's remaining processor time and wall time.
"""

from __future__ import annotations

import contextlib
import os
import select
import struct
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from stockade.controls import Control
from stockade.errors import SetupError, StockadeError
from stockade.linux import os_errors
from stockade.policy import Policy
from stockade.receipt.account import MOST_REQUESTS, Account
from stockade.receipt.statement import Parent
from stockade.resolve.child_policy import Child, ChildRefusedError, child, confirm
from stockade.runs.io.eventloop import Events, Steps
from stockade.runs.options import RunOptions
from stockade.runs.prepare import RunPreparation, prepare
from stockade.runs.supervise import Run

if TYPE_CHECKING:
    from stockade.result import Result


T = TypeVar("T")

#: The variable that names the program's descriptors for requests and answers, and its value.
VARIABLE, PLACE = "STOCKADE_DELEGATE", "3,4"
#: The largest request, the largest part of each stream in an answer, and how deep delegation may nest.
LARGEST, MOST_OUTPUT, DEEPEST = 1 << 20, 1 << 20, 3
LENGTH = struct.Struct("<I")
#: Controls of a workspace; a child has no workspace.
OF_WORKSPACES = (Control.WORKSPACE_OVERLAY, Control.PROTECT)


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A program's request. It needs no identity: each run has its own pipe."""

    command: list[str]
    policy: dict[str, Any] = {}
    input: bytes = b""
    cwd: str = ""
    timeout: float | None = None


class DelegationReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer to a program: why the request was refused, or how its child ended."""

    refused: str = ""
    outcome: str = ""
    exit_code: int | None = None
    signal: int | None = None
    stdout: bytes = b""
    stderr: bytes = b""
    truncated: bool = False
    receipt: str = ""


class StoppedError(Exception):
    """The run that asked for the child has ended."""


def with_requests(run: Run, prepared: RunPreparation, account: Account | None) -> Run:
    """Return the run, with the means to ask for sandboxes if its policy allows delegation."""
    if account is None or not prepared.resolved.policy.delegate:
        return run
    if prepared.made.entry is None:
        raise SetupError(
            "delegate: the sandbox is not in the register, so its children could not name their parent",
            stage="delegate",
        )
    program = msgspec.structs.replace(run.program, env={**run.program.env, VARIABLE: PLACE})
    begun = run.program
    return msgspec.structs.replace(
        run, program=program, delegates=lambda: Delegation(prepared, account, begun.wall, begun.env)
    )


class Delegation:
    """Answers the requests of one run, in a thread of its own."""

    def __init__(
        self, prepared: RunPreparation, account: Account, wall: float | None, environ: Mapping[str, str]
    ) -> None:
        self._prepared, self._account, self._environ = prepared, account, environ
        self._until = None if wall is None else time.monotonic() + wall
        self._cpu_left = prepared.resolved.limits.cpu_time
        self._thread: threading.Thread | None = None
        self._open: list[int] = []
        with os_errors.setup_errors():
            try:
                self._asks, their_asks = self._pipe()
                their_answers, self._answers = self._pipe()
                self._stop, self._done = self._signal(), self._signal()
            except BaseException:
                self._close()
                raise
        #: For the program's descriptors 3 and 4.
        self.theirs = (their_asks, their_answers)
        # A program inside can open these pipes' other ends too, so the thread must never block on them: it
        # polls them together with the stop signal.
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
        """Close the program's ends, which it has inherited by now, and start the thread."""
        for end in self.theirs:
            os.close(end)
            self._open.remove(end)
        self._thread = threading.Thread(target=self._serve, name="stockade-delegate", daemon=True)
        self._thread.start()

    def ended(self, events: Events) -> Steps[None]:
        """End the child of a run that has ended, and wait for that even if an exception arrives."""
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
                while (frame := self._frame()) is not None:
                    if not self._account.asked.take():
                        self._answer(
                            DelegationReply(
                                refused=f"the run has used up its {MOST_REQUESTS} requests for sandboxes"
                            )
                        )
                        return
                    self._answer(self._handle(frame))
        finally:
            # A program that still asks sees the pipes closed.
            for end in (self._asks, self._answers):
                self._open.remove(end)
                os.close(end)
            os.eventfd_write(self._done, 1)

    def _handle(self, frame: bytes) -> DelegationReply:
        try:
            request = msgspec.json.decode(frame, type=Request)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            return DelegationReply(refused=f"the request is malformed: {error}")
        try:
            return self._child(request)
        except ChildRefusedError as error:
            return DelegationReply(refused=error.message + (f" ({error.hint})" if error.hint else ""))
        except RecursionError:  # decoded, but nested too deeply to report what is wrong with it
            return DelegationReply(refused="the request is malformed: its tables are nested too deeply")
        except StockadeError as error:
            # The message may name files of the host, so the program does not get it.
            made = "" if error.receipt is None else error.receipt.hash
            self._note(made)
            return DelegationReply(refused="the supervisor could not make the sandbox", receipt=made)

    def _note(self, receipt: str) -> None:
        if receipt:
            self._account.children.append(receipt)

    def _child(self, request: Request) -> DelegationReply:
        parent = self._prepared
        found = child(request.policy, parent.resolved, parent.plan.backend, self._environ)
        self._refuse_denied_rules(found.policy)
        depth = self._account.depth + 1
        if found.policy.delegate and depth >= DEEPEST:
            raise ChildRefusedError(f"delegate: sandboxes nest at most {DEEPEST} deep")
        entry = parent.made.entry
        assert entry is not None  # `with_requests` has refused the run otherwise
        account = Account(self._limited(found.policy), _words(request), self._account.who)
        account.parent, account.depth = Parent(entry.record.id, parent.plan.hash), depth
        account.asked = self._account.asked
        kept = (_OutputHead(), _OutputHead())
        used = 0.0
        try:
            result = self._run(request, found, account, kept)
            used = result.usage.cpu
        finally:
            self._spend(used + account.cpu_below)
        made = "" if result.receipt is None else result.receipt.hash
        self._note(made)
        return DelegationReply(
            outcome=result.outcome,
            exit_code=result.exit_code,
            signal=result.signal,
            stdout=bytes(kept[0].data),
            stderr=bytes(kept[1].data),
            truncated=any(one.truncated for one in kept),
            receipt=made,
        )

    def _refuse_denied_rules(self, policy: Policy) -> None:
        """Refuse rules that the program itself has had, but that were denied since."""
        egress = None if self._account.box is None else self._account.box.egress
        if egress is None or not policy.net or policy.net == "open":
            return
        from stockade.policy.net_comparison import excess

        if Control.LIMITS_NETWORK in self._prepared.resolved.policy.controls():
            raise ChildRefusedError(
                "net: the limits on the program's own network do not count the connections of another sandbox"
            )
        if beyond := excess(policy.net, egress.in_force):
            raise ChildRefusedError(
                "the request asks for more than the program itself has:\n" + "\n".join(beyond)
            )

    def _spend(self, cpu: float) -> None:
        """Subtract the processor time of a child and of its own children."""
        self._account.cpu_below += cpu
        if self._cpu_left is not None:
            self._cpu_left -= cpu

    def _run(
        self, request: Request, found: Child, account: Account, kept: tuple[_OutputHead, _OutputHead]
    ) -> Result:
        from stockade.runs.command import command
        from stockade.sandbox.sandbox import _launch_and_run

        with account.telling():
            prepared = prepare(account.policy, pinned=True, command=account.command)
            account.prepared = prepared
            try:
                own, parent = prepared.made.entry, account.parent
                # For the receipt that the sweep writes if this supervisor is killed.
                if own is not None and parent is not None:
                    own.update(parent=parent.sandbox, parent_plan=parent.plan)
                confirm(prepared.resolved, found, self._prepared.resolved)
                self._compare(prepared)
                room = min(MOST_OUTPUT, prepared.resolved.limits.output or 0)
                for stream in kept:
                    stream.room = room
                options: RunOptions = {
                    "input": request.input,
                    "env": found.environ,
                    "cwd": request.cwd or None,
                    "timeout": request.timeout,
                    "grace": 0,
                    "on_stdout": kept[0],
                    "on_stderr": kept[1],
                }
                run = command(
                    prepared, account.command, options, keep=False, kept=False,
                    cancelled_by=(StoppedError,), meanwhile=account.ready,
                )  # fmt: skip
                with Events() as events:
                    return self._drive(_launch_and_run(prepared, run, account, events), events)
            finally:
                prepared.close(discard=True, earlier=True)

    def _limited(self, policy: Policy) -> Policy:
        """Return the policy with no more time than the parent has left."""
        left: dict[str, float] = {}
        if self._until is not None:
            left["wall"] = self._until - time.monotonic()
        if self._cpu_left is not None:
            left["cpu_time"] = self._cpu_left
        for name, seconds in left.items():
            if seconds < 0.001:
                raise ChildRefusedError(f"limits.{name}: the program has used up its own")
        most = {
            name: min(seconds, had) if (had := getattr(policy.limits, name)) is not None else seconds
            for name, seconds in left.items()
        }
        return msgspec.structs.replace(policy, limits=msgspec.structs.replace(policy.limits, **most))

    def _compare(self, made: RunPreparation) -> None:
        """Refuse a child with a wall that is weaker than its parent's."""
        for name, one in self._prepared.controls.items():
            own = made.controls.get(name)
            # No network at all is less than rules allow, and so is a network without rules for requests.
            if name in (Control.NETWORK_RULES, Control.NETWORK_HTTP):
                own = own or made.controls.get(Control.NETWORK_NONE.value)
            if name == Control.NETWORK_HTTP:
                own = own or made.controls.get(Control.NETWORK_RULES.value)
            weaker = own is None or not own.grade.enforced
            if one.grade.enforced and weaker and name not in OF_WORKSPACES:
                raise ChildRefusedError(f"{name}: would be weaker than for the program that asks")

    def _drive(self, steps: Steps[T], events: Events) -> T:
        """Take every step in this thread; end the child when the run that asked for it has ended."""
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
        """Return the next request; None if the pipe is closed or the length is invalid."""
        (size,) = LENGTH.unpack(header) if (header := self._read(LENGTH.size)) else (0,)
        if size > LARGEST:
            self._answer(DelegationReply(refused=f"a request may have at most {LARGEST} bytes"))
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

    def _answer(self, answer: DelegationReply) -> None:
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


class _OutputHead:
    """Keeps as much of a stream as fits into an answer."""

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
        raise ChildRefusedError("command: must be a list of words without NUL bytes")
    if "\0" in request.cwd:
        raise ChildRefusedError("cwd: contains a NUL byte")
    if request.timeout is not None and not 0 < request.timeout < 1e9:
        raise ChildRefusedError("timeout: must be between 0 and 1e9 seconds")
    return request.command
