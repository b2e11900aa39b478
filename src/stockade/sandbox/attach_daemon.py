"""The holder: a process without a terminal that keeps a sandbox alive while no client is attached.

`stockade shell --keep` forks the holder before it makes the sandbox, so the
holder is the sandbox's supervisor from the start: the gate watches it, and
everything inside ends with it. It holds the outer ends of the sandbox's
terminals and listens on a socket beside its record in the register
(`stockade.sessions.attach.protocol`). Each terminal is one run with its own
receipt. When the last one has ended, the sandbox ends, and the holder reports
the changes to the attached clients and exits.

One thread does everything. Each run has its own set of descriptors to wait
for, and the holder waits for those sets.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn

import msgspec

from stockade.errors import SetupError, StockadeError
from stockade.result import Outcome, Result
from stockade.runs.command import command
from stockade.runs.finish import left_by_sandbox
from stockade.runs.io.eventloop import Events, Steps, drive
from stockade.sandbox.sandbox import Sandbox
from stockade.sessions.attach import protocol
from stockade.sessions.attach.protocol import (
    AttachAcceptance,
    AttachRefusal,
    AttachSocket,
    FromClient,
    Hello,
    TerminalEnd,
    TerminalEndReport,
)
from stockade.sessions.attach.shared_terminal import SharedTerminal, TerminalClient

if TYPE_CHECKING:
    from stockade.policy import Policy
    from stockade.receipt.account import Account
    from stockade.runs.register.register import RegisterEntry
    from stockade.runs.supervise import Run
    from stockade.sandbox.workspace import Workspace

SOCKET = "attach"
#: How many terminals a sandbox may have, how many clients, and how many connections without a Hello yet.
MOST_TERMINALS, MOST_CLIENTS, MOST_WAITING = 32, 64, 16
#: Seconds that a connection has for its Hello.
HELLO_SECONDS = 5.0
#: The signals that a terminal sends to the processes that it controls.
CALLERS = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTSTP)


class AttachRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The sandbox to keep, and what runs in its terminals."""

    policy: Policy
    pinned: bool
    #: Each terminal runs the first of these commands that exists inside.
    commands: list[list[str]]
    #: By the name of a shell: its further variables.
    environs: Mapping[str, Mapping[str, str]]
    #: Where they start; None for the workspace itself.
    cwd: str | None
    resume: Workspace | None
    discard: bool
    snapshot: bool
    who: Mapping[str, str] | None
    name: str
    #: Ports of the host that lead inside, as `[HOST:]PORT:PORT`.
    publish: tuple[str, ...]
    #: Seconds that the sandbox may live.
    timeout: float | None


class _DaemonTerminal:
    """One terminal and the run in it."""

    def __init__(self, shared: SharedTerminal, commands: Sequence[list[str]]) -> None:
        self.shared = shared
        self.commands = list(commands)
        self.events = Events()
        self.steps: Steps[Result] | None = None
        self.until: float | None = None
        self.result: Result | None = None
        self.failure: StockadeError | None = None
        #: When a client last attached.
        self.used = time.monotonic()


class AttachDaemon:
    """The sandbox, its terminals, and the connections that wait to attach."""

    def __init__(self, wanted: AttachRequest) -> None:
        self._wanted = wanted
        self._terminals: dict[int, _DaemonTerminal] = {}
        self._count = 0
        #: By descriptor: the connections without a Hello yet, and until when they may send one.
        self._waiting: dict[int, tuple[AttachSocket, float]] = {}
        self._poll = select.poll()
        #: SIGTERM has just arrived; and it arrived earlier, so that no new client may attach.
        self._sigterm_arrived = self._ending = False
        self._until: float | None = None
        self._box = Sandbox(
            wanted.policy,
            on_exit="discard" if wanted.discard else "keep",
            resume=wanted.resume,
            snapshot=wanted.snapshot,
            name=wanted.name,
            publish=wanted.publish,
            who=wanted.who,
        )
        self._box._pinned = wanted.pinned

    def hold(self, first: AttachSocket) -> None:
        """Keep the sandbox until its last terminal has ended. `first` is the client that asked for it."""
        seconds = [one for one in (self._wanted.timeout, self._wanted.policy.limits.wall) if one is not None]
        self._until = time.monotonic() + min(seconds) if seconds else None
        self._box.open()
        try:
            self._serve(first)
        finally:
            self._close()

    @property
    def id(self) -> str:
        """The id of the sandbox, as `stockade ps` shows it."""
        return self._entry().record.id

    def _entry(self) -> RegisterEntry:
        entry = self._box._require_open()[1].made.entry
        if entry is None:
            raise SetupError("the sandbox cannot be kept: it is not in the register", stage="state")
        return entry

    def _serve(self, first: AttachSocket) -> None:
        entry = self._entry()
        path = entry.scratch(SOCKET)
        listener = protocol.listen(os.path.dirname(path), os.path.basename(path))
        heard, writer = os.pipe()
        os.set_blocking(heard, False)
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._end)
        try:
            entry.update(command=tuple(self._wanted.commands[0]), kept=True)
            os.chdir("/")
            for end in (listener.fileno(), heard):
                self._poll.register(end, select.POLLIN)
            self._await_hello(first)
            while self._terminals or self._waiting:
                for end, _ in self._poll.poll(self._patience()):
                    if end == listener.fileno():
                        self._let_in(protocol.accept_client(listener))
                    elif end == heard:
                        with contextlib.suppress(BlockingIOError):
                            os.read(heard, 4096)
                    elif end in self._waiting:
                        self._read_hello(end)
                self._step_all()
        finally:
            # No client may attach while the sandbox ends.
            with contextlib.suppress(OSError):
                os.unlink(path)
            listener.close()
            signal.set_wakeup_fd(-1)
            os.close(heard)
            os.close(writer)

    def _end(self, *_: object) -> None:
        self._sigterm_arrived = True

    def _patience(self) -> float | None:
        """Return the milliseconds until something is due."""
        times = [until for _, until in self._waiting.values()]
        times += [one.until for one in self._terminals.values() if one.until is not None]
        return max(0.0, min(times) - time.monotonic()) * 1000 if times else None

    # New connections

    def _let_in(self, line: AttachSocket | None) -> None:
        if line is None:
            time.sleep(0.01)  # another user's, or no descriptor is free: do not spin
        else:
            self._await_hello(line)

    def _await_hello(self, line: AttachSocket) -> None:
        if len(self._waiting) >= MOST_WAITING:
            # The oldest connection has had its time for a Hello.
            self._stop_waiting(next(iter(self._waiting))).close()
        self._waiting[line.fileno()] = (line, time.monotonic() + HELLO_SECONDS)
        self._poll.register(line.fileno(), select.POLLIN)

    def _stop_waiting(self, end: int) -> AttachSocket:
        self._poll.unregister(end)
        return self._waiting.pop(end)[0]

    def _read_hello(self, end: int) -> None:
        line = self._waiting[end][0]
        try:
            hello, stream = line.receive(FromClient)
        except BlockingIOError:
            return
        self._stop_waiting(end)
        try:
            if not isinstance(hello, Hello) or not protocol.is_stream(stream):
                raise SetupError("the client's first message is not a request to attach", stage="attach")
            if line.hung_up:
                # Cancelled before it began: no one would know of the terminal that this would start.
                raise SetupError("the client has gone", stage="attach")
            if sum(len(one.shared.clients) for one in self._terminals.values()) >= MOST_CLIENTS:
                raise SetupError(
                    f"the sandbox already has {MOST_CLIENTS} clients",
                    stage="attach",
                    hint="detach one of them first",
                )
            terminal = self._choose_terminal(hello)
            if hello.look:
                self._show(line, terminal)
                os.close(stream)
                return
        except (StockadeError, OSError) as error:
            # Also if no descriptor is left for one more client: those that are attached stay.
            refused = _failure(error)
            line.send(AttachRefusal(refused.message, refused.hint))
            line.close()
            if stream >= 0:
                os.close(stream)
            return
        line.send(AttachAcceptance(self.id, terminal.shared.number))
        terminal.used = time.monotonic()
        terminal.shared.join(TerminalClient(line, stream, hello))
        terminal.until = time.monotonic()  # step its run at once, so that it computes its wait anew

    def _show(self, line: AttachSocket, terminal: _DaemonTerminal) -> None:
        """Send the client what a terminal has shown so far, and close the connection."""
        file = protocol.memory_file(terminal.shared.shown())
        try:
            line.send(TerminalEnd(), file)
        finally:
            os.close(file)
        line.close()

    def _choose_terminal(self, hello: Hello) -> _DaemonTerminal:
        if hello.version != protocol.VERSION:
            raise SetupError(
                "a different version of Stockade keeps this sandbox",
                stage="attach",
                hint="attach with the version that started it",
            )
        if self._ending:
            raise SetupError("the sandbox is ending", stage="attach")
        if hello.terminal < 0 and not hello.look:
            return self._new_terminal(hello)
        if not self._terminals:
            raise SetupError("the sandbox is ending", stage="attach")
        if hello.terminal <= 0:
            return max(self._terminals.values(), key=lambda one: one.used)
        if hello.terminal not in self._terminals:
            there = ", ".join(map(str, self._terminals))
            raise SetupError(
                f"the sandbox has no terminal {hello.terminal}", stage="attach", hint=f"it has {there}"
            )
        return self._terminals[hello.terminal]

    # Terminals

    def _new_terminal(self, hello: Hello) -> _DaemonTerminal:
        if len(self._terminals) >= MOST_TERMINALS:
            raise SetupError(
                f"the sandbox already has {MOST_TERMINALS} terminals",
                stage="attach",
                hint="end the program in one of them first",
            )
        terminal = _DaemonTerminal(SharedTerminal(self._count + 1, hello), self._wanted.commands)
        try:
            self._start(terminal)
        except BaseException:
            terminal.events.close()
            raise
        self._count += 1
        self._terminals[self._count] = terminal
        self._poll.register(terminal.events.fileno(), select.POLLIN)
        return terminal

    def _start(self, one: _DaemonTerminal) -> None:
        """Start the run of a terminal with its next command."""
        words = one.commands.pop(0)
        left = None if self._until is None else max(0.001, self._until - time.monotonic())
        account = self._box._account(words, None, advise=True)
        with account.telling():
            _, prepared = self._box._require_open()
            run = command(
                prepared, words,
                {"env": self._wanted.environs.get(words[0]), "timeout": left, "cwd": self._wanted.cwd},
                keep=False, kept=True, cancelled_by=(KeyboardInterrupt,), meanwhile=account.ready,
                terminal=one.shared,
            )  # fmt: skip
            self._box._before_run()
        one.steps = self._run_steps(one, run, account)
        one.until = time.monotonic()

    def _run_steps(self, one: _DaemonTerminal, run: Run, account: Account) -> Steps[Result]:
        box, prepared = self._box._require_open()
        with account.telling():
            return (yield from self._box._run_steps(box, prepared, run, one.events, account))

    def _step_all(self) -> None:
        now = time.monotonic()
        for end, (_, until) in tuple(self._waiting.items()):
            if until <= now:
                self._stop_waiting(end).close()
        terminated, self._sigterm_arrived = self._sigterm_arrived, False
        self._ending |= terminated
        for one in tuple(self._terminals.values()):
            one.events.wait(0)
            if terminated and one.steps is not None:
                one.events.ready = []
                self._step(one, lambda steps: steps.throw(KeyboardInterrupt("SIGTERM")))
            elif one.events.ready or (one.until is not None and one.until <= now):
                self._step(one, next)
            if one.steps is None and not self._tries_again(one):
                self._remove_terminal(one)

    def _step(self, one: _DaemonTerminal, go_on: Callable[[Steps[Result]], float | None]) -> None:
        assert one.steps is not None
        try:
            patience = go_on(one.steps)
        except StopIteration as done:
            one.steps, one.result = None, done.value
        except (StockadeError, OSError) as error:
            one.steps, one.failure = None, _failure(error)
        except KeyboardInterrupt:
            one.steps, one.failure = None, SetupError("the run was ended before it began", stage="attach")
        else:
            one.until = None if patience is None else time.monotonic() + patience

    def _tries_again(self, one: _DaemonTerminal) -> bool:
        """Start the next command if the last one does not exist inside; return whether one was started."""
        result = one.result
        if result is None or (result.outcome, result.exit_code) != (Outcome.SETUP_FAILED, 127):
            return False
        if not one.commands or self._ending:
            return False
        try:
            self._start(one)
        except (StockadeError, OSError) as error:
            one.result, one.failure = None, _failure(error)
            return False
        return True

    def _remove_terminal(self, one: _DaemonTerminal) -> None:
        """Remove a terminal whose run has ended; end the sandbox if it was the last."""
        number = one.shared.number
        self._poll.unregister(one.events.fileno())
        one.events.close()
        del self._terminals[number]
        if self._terminals:
            self._send_report(one, end_report(one.result, one.failure, tuple(self._terminals)))
        else:
            self._finish(one)

    def _send_report(self, one: _DaemonTerminal, ending: TerminalEndReport) -> None:
        try:
            file = protocol.memory_file(protocol.encoded(ending))
        except OSError:  # the clients get no report, but see that the terminal has ended
            one.shared.leave_all()
            return
        try:
            one.shared.leave_all(file)
        finally:
            os.close(file)

    def _finish(self, one: _DaemonTerminal) -> None:
        """End the sandbox and report its changes to the clients that are still attached."""
        while self._waiting:
            line = self._stop_waiting(next(iter(self._waiting)))
            line.send(AttachRefusal("the sandbox is ending", "`stockade logs` shows how it ended"))
            line.close()
        ending = end_report(one.result, one.failure)
        try:
            ending = self._put_away(ending)
        except (StockadeError, OSError) as error:
            ending = msgspec.structs.replace(ending, error=_failure(error).message)
        self._send_report(one, ending)

    def _put_away(self, ending: TerminalEndReport) -> TerminalEndReport:
        """End what still runs inside, and keep or discard the changes, as `stockade.run` does."""
        discard = self._wanted.discard
        box, prepared = self._box._detach()
        if box is None or prepared is None:
            return ending
        try:
            with Events() as events:
                drive(box.closed(events), events)
            layer = prepared.layer
            if layer is not None:
                changes = layer.changes()
                ending = msgspec.structs.replace(
                    ending,
                    changes=tuple(changes[: protocol.SHOWN_CHANGES]),
                    changed=len(changes),
                    changes_cut=layer.cut,
                    discarded=discard,
                    workspace=layer.id if changes or layer.cut or layer.continued else "",
                    lost=() if discard or not (changes or layer.cut) else layer.bring_last(),
                )
            if (found := left_by_sandbox(prepared)) is not None:
                ending = msgspec.structs.replace(ending, handoffs=found.left, warnings=found.warnings)
            return ending
        finally:
            with contextlib.suppress(StockadeError, OSError):  # on an error the changes are kept
                discard = discard or prepared.unchanged()
            prepared.close(discard=discard, earlier=self._wanted.discard)

    def _close(self) -> None:
        """Close everything, whatever happened before."""
        while self._waiting:
            self._stop_waiting(next(iter(self._waiting))).close()
        for one in self._terminals.values():
            if one.steps is not None:
                one.steps.close()
            one.shared.leave_all()
            one.events.close()
        self._box.close()


def end_report(
    result: Result | None, failure: StockadeError | None, others: tuple[int, ...] = ()
) -> TerminalEndReport:
    """Return the report of a terminal whose run has a result, or could not begin."""
    if result is None:
        assert failure is not None
        return TerminalEndReport(
            outcome=Outcome.SETUP_FAILED, exit_code=125, signal=None, reason=failure.message,
            hint=failure.hint, others=others,
        )  # fmt: skip
    return TerminalEndReport(
        outcome=result.outcome, exit_code=result.exit_code, signal=result.signal, reason=result.reason,
        hint=result.hint, others=others, controls=result.controls, denials=result.denials,
    )  # fmt: skip


def _failure(error: StockadeError | OSError) -> StockadeError:
    if isinstance(error, StockadeError):
        return error
    return SetupError(
        f"the holder of the sandbox failed: {error.strerror}", stage="attach", errno=error.errno or 0
    )


def start(wanted: AttachRequest) -> AttachSocket:
    """Start a holder and return the connection to it. The holder then says whether it made the sandbox."""
    ours, theirs = protocol.line_pair()
    # Until the child has left the terminal, a Ctrl-C would raise KeyboardInterrupt in it too, and it would
    # return into the caller's code as a second caller.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, CALLERS)
    try:
        child = os.fork()
        if child == 0:
            _become_holder(wanted, theirs, before)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.waitpid(child, 0)
    except BaseException:
        ours.close()
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
    return ours


def _become_holder(wanted: AttachRequest, first: AttachSocket, mask: Iterable[int]) -> NoReturn:
    """Keep the sandbox in a session of its own, without a terminal and without the caller's descriptors."""
    code = 1
    try:
        os.setsid()
        # A process that does not lead its session cannot acquire a terminal.
        if os.fork():
            os._exit(0)
        _close_inherited(first.fileno())
        for number in CALLERS:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        _hold(wanted, first)
        code = 0
    finally:
        import atexit

        with contextlib.suppress(BaseException):
            atexit._run_exitfuncs()
        os._exit(code)


def _hold(wanted: AttachRequest, first: AttachSocket) -> None:
    holder = AttachDaemon(wanted)
    # Exempt the modules loaded so far from garbage collection: they stay.
    gc.freeze()
    try:
        holder.hold(first)
    except StockadeError as error:
        first.send(AttachRefusal(error.message, error.hint))
    except OSError as error:
        first.send(AttachRefusal(f"the sandbox cannot be kept: {error.strerror}", ""))


def _close_inherited(kept: int) -> None:
    """Close all the caller's descriptors except `kept`."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nowhere, number)
    for name in os.listdir("/proc/self/fd"):
        if (number := int(name)) > 2 and number != kept:
            with contextlib.suppress(OSError):
                os.close(number)
