"""The holder: a process without a terminal that keeps a sandbox alive while nobody looks.

`stockade shell --keep` forks it before the sandbox is made, so it is the
sandbox's supervisor from the start: the gate watches it, and all inside ends
with it. It holds the outer ends of the sandbox's terminals and listens on a
socket beside its record in the register (`stockade.live.letters`). Each
terminal is one run with its own receipt; when the last has ended, the sandbox
has, and the holder tells those who are there what was changed and goes.

One thread does everything. Each run has descriptors of its own to wait for,
and the holder waits for those sets.
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
from stockade.live import letters
from stockade.live.letters import Ending, FromClient, Hello, Joined, Line, Over, Refused
from stockade.live.shared import Client, Shared
from stockade.sandbox.result import Outcome, Result
from stockade.sandbox.sandbox import Sandbox, command
from stockade.sandbox.steps import Events, Steps, drive

if TYPE_CHECKING:
    from stockade.policy import Policy
    from stockade.receipt.account import Account
    from stockade.sandbox.register import Entry
    from stockade.sandbox.supervise import Run
    from stockade.workspace.workspace import Workspace

SOCKET = "attach"
#: How many terminals a sandbox may have, how many clients, and how many that have not said what they want.
MOST_TERMINALS, MOST_CLIENTS, MOST_WAITING = 32, 64, 16
#: How long one of those may take.
HELLO_SECONDS = 5.0
#: What a terminal sends to those whom it controls.
CALLERS = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTSTP)


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What to keep."""

    policy: Policy
    pinned: bool
    #: The first of these that exists inside is what runs in each terminal.
    commands: list[list[str]]
    workspace: Workspace | None
    discard: bool
    snapshot: bool
    who: Mapping[str, str] | None
    #: Seconds that the sandbox may live.
    timeout: float | None


class _Terminal:
    """One terminal and the run in it."""

    def __init__(self, shared: Shared, commands: Sequence[list[str]]) -> None:
        self.shared = shared
        self.commands = list(commands)
        self.events = Events()
        self.steps: Steps[Result] | None = None
        self.until: float | None = None
        self.result: Result | None = None
        self.failure: StockadeError | None = None
        #: When somebody last came.
        self.used = time.monotonic()


class Holder:
    """The sandbox, its terminals, and those who want to be let in."""

    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted
        self._terminals: dict[int, _Terminal] = {}
        self._count = 0
        #: By descriptor: until when each has to say what it wants.
        self._waiting: dict[int, tuple[Line, float]] = {}
        self._poll = select.poll()
        #: It was told to end just now; and it has been, so that nobody new is let in.
        self._told_to_end = self._ending = False
        self._until: float | None = None
        self._box = Sandbox(
            wanted.policy,
            on_exit="discard" if wanted.discard else "keep",
            workspace=wanted.workspace,
            snapshot=wanted.snapshot,
            who=wanted.who,
            pinned=wanted.pinned,
        )

    def hold(self, first: Line) -> None:
        """Keep the sandbox until its last terminal has ended. `first` is who asked for it."""
        seconds = [one for one in (self._wanted.timeout, self._wanted.policy.limits.wall) if one is not None]
        self._until = time.monotonic() + min(seconds) if seconds else None
        self._box.open()
        try:
            self._serve(first)
        finally:
            self._close()

    @property
    def id(self) -> str:
        """The sandbox's, as `stockade ps` shows it."""
        return self._entry().record.id

    def _entry(self) -> Entry:
        entry = self._box._opened()[1].made.entry
        if entry is None:
            raise SetupError("a sandbox that is not in the register cannot be kept", stage="state")
        return entry

    def _serve(self, first: Line) -> None:
        entry = self._entry()
        path = entry.scratch(SOCKET)
        listener = letters.listening(os.path.dirname(path), os.path.basename(path))
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
                        self._let_in(letters.accepted(listener))
                    elif end == heard:
                        with contextlib.suppress(BlockingIOError):
                            os.read(heard, 4096)
                    elif end in self._waiting:
                        self._meet(end)
                self._go_on()
        finally:
            # Nobody is let in while it ends.
            with contextlib.suppress(OSError):
                os.unlink(path)
            listener.close()
            signal.set_wakeup_fd(-1)
            os.close(heard)
            os.close(writer)

    def _end(self, *_: object) -> None:
        self._told_to_end = True

    def _patience(self) -> float | None:
        """In milliseconds."""
        times = [until for _, until in self._waiting.values()]
        times += [one.until for one in self._terminals.values() if one.until is not None]
        return max(0.0, min(times) - time.monotonic()) * 1000 if times else None

    # Those who come

    def _let_in(self, line: Line | None) -> None:
        if line is None:
            time.sleep(0.01)  # somebody else's, or nothing is left to hold it with: not without pause
        else:
            self._await_hello(line)

    def _await_hello(self, line: Line) -> None:
        if len(self._waiting) >= MOST_WAITING:
            # Whoever has something to say has said it by now.
            self._stop_waiting(next(iter(self._waiting))).close()
        self._waiting[line.fileno()] = (line, time.monotonic() + HELLO_SECONDS)
        self._poll.register(line.fileno(), select.POLLIN)

    def _stop_waiting(self, end: int) -> Line:
        self._poll.unregister(end)
        return self._waiting.pop(end)[0]

    def _meet(self, end: int) -> None:
        line = self._waiting[end][0]
        try:
            hello, stream = line.receive(FromClient)
        except BlockingIOError:
            return
        self._stop_waiting(end)
        try:
            if not isinstance(hello, Hello) or not letters.is_stream(stream):
                raise SetupError("this is not how one attaches", stage="attach")
            if line.hung_up:
                # Cancelled before it began: nobody would know of what was started.
                raise SetupError("whoever wanted to attach has gone", stage="attach")
            if sum(len(one.shared.clients) for one in self._terminals.values()) >= MOST_CLIENTS:
                raise SetupError(f"{MOST_CLIENTS} are attached to the sandbox already", stage="attach")
            terminal = self._wanted_by(hello)
            if hello.look:
                self._show(line, terminal)
                os.close(stream)
                return
        except (StockadeError, OSError) as error:
            # Also where there is nothing left to let one more in with: those who are there stay.
            refused = _failure(error)
            line.send(Refused(refused.message, refused.hint))
            line.close()
            if stream >= 0:
                os.close(stream)
            return
        line.send(Joined(self.id, terminal.shared.number))
        terminal.used = time.monotonic()
        terminal.shared.join(Client(line, stream, hello))
        terminal.until = time.monotonic()  # its run is looked at, and waits anew

    def _show(self, line: Line, terminal: _Terminal) -> None:
        """Hand over what a terminal has shown so far."""
        file = letters.file_of(terminal.shared.shown())
        try:
            line.send(Over(), file)
        finally:
            os.close(file)
        line.close()

    def _wanted_by(self, hello: Hello) -> _Terminal:
        if hello.version != letters.VERSION:
            raise SetupError(
                "the sandbox is kept by another version of Stockade",
                stage="attach",
                hint="attach with the version that started it",
            )
        if self._ending:
            raise SetupError("the sandbox is ending", stage="attach")
        if hello.terminal < 0 and not hello.look:
            return self._new(hello)
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

    def _new(self, hello: Hello) -> _Terminal:
        if len(self._terminals) >= MOST_TERMINALS:
            raise SetupError(f"the sandbox has {MOST_TERMINALS} terminals already", stage="attach")
        made = _Terminal(Shared(self._count + 1, hello), self._wanted.commands)
        try:
            self._start(made)
        except BaseException:
            made.events.close()
            raise
        self._count += 1
        self._terminals[self._count] = made
        self._poll.register(made.events.fileno(), select.POLLIN)
        return made

    def _start(self, one: _Terminal) -> None:
        """Begin the run of a terminal with the next of its commands."""
        words = one.commands.pop(0)
        left = None if self._until is None else max(0.001, self._until - time.monotonic())
        account = self._box._account(words, None)
        with account.telling():
            _, prepared = self._box._opened()
            run = command(
                prepared, words, env=None, cwd=None, timeout=left, keep=False, kept=True,
                cancelled_by=(KeyboardInterrupt,), meanwhile=account.ready, terminal=one.shared,
            )  # fmt: skip
            self._box._before_run()
        one.steps = self._running(one, run, account)
        one.until = time.monotonic()

    def _running(self, one: _Terminal, run: Run, account: Account) -> Steps[Result]:
        box, prepared = self._box._opened()
        with account.telling():
            return (yield from self._box._running(box, prepared, run, one.events, account))

    def _go_on(self) -> None:
        now = time.monotonic()
        for end, (_, until) in tuple(self._waiting.items()):
            if until <= now:
                self._stop_waiting(end).close()
        told, self._told_to_end = self._told_to_end, False
        self._ending |= told
        for one in tuple(self._terminals.values()):
            one.events.wait(0)
            if told and one.steps is not None:
                one.events.ready = []
                self._step(one, lambda steps: steps.throw(KeyboardInterrupt("SIGTERM")))
            elif one.events.ready or (one.until is not None and one.until <= now):
                self._step(one, next)
            if one.steps is None and not self._tries_again(one):
                self._over(one)

    def _step(self, one: _Terminal, go_on: Callable[[Steps[Result]], float | None]) -> None:
        assert one.steps is not None
        try:
            patience = go_on(one.steps)
        except StopIteration as done:
            one.steps, one.result = None, done.value
        except (StockadeError, OSError) as error:
            one.steps, one.failure = None, _failure(error)
        except KeyboardInterrupt:
            one.steps, one.failure = None, SetupError("it was ended before it began", stage="attach")
        else:
            one.until = None if patience is None else time.monotonic() + patience

    def _tries_again(self, one: _Terminal) -> bool:
        """Whether there is another command for a terminal whose first is not there inside."""
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

    def _over(self, one: _Terminal) -> None:
        """The run of a terminal has ended; the sandbox goes on if there is another."""
        number = one.shared.number
        self._poll.unregister(one.events.fileno())
        one.events.close()
        del self._terminals[number]
        if self._terminals:
            self._part(one, _ending(one, others=tuple(self._terminals)))
        else:
            self._finish(one)

    def _part(self, one: _Terminal, ending: Ending) -> None:
        try:
            file = letters.file_of(letters.encoded(ending))
        except OSError:  # they are told nothing, and see that it has ended
            one.shared.leave_all()
            return
        try:
            one.shared.leave_all(file)
        finally:
            os.close(file)

    def _finish(self, one: _Terminal) -> None:
        """End the sandbox, and tell those who are still there what it has changed."""
        while self._waiting:
            line = self._stop_waiting(next(iter(self._waiting)))
            line.send(Refused("the sandbox is ending", "`stockade logs` tells how it ended"))
            line.close()
        ending = _ending(one)
        try:
            ending = self._put_away(ending)
        except (StockadeError, OSError) as error:
            ending = msgspec.structs.replace(ending, error=_failure(error).message)
        self._part(one, ending)

    def _put_away(self, ending: Ending) -> Ending:
        """End what still runs inside, and keep or forget the changes: what `stockade.run` does."""
        discard = self._wanted.discard
        box, prepared = self._box._taken()
        if box is None or prepared is None:
            return ending
        try:
            with Events() as events:
                drive(box.closed(events), events)
            layer = prepared.layer
            if layer is not None:
                changes = tuple(layer.changes())
                ending = msgspec.structs.replace(
                    ending,
                    changes=changes,
                    discarded=discard,
                    workspace=layer.id if changes or layer.continued else "",
                    lost=() if discard or not changes else layer.bring_last(),
                )
            return ending
        finally:
            with contextlib.suppress(StockadeError, OSError):  # then it is kept
                discard = discard or prepared.unchanged()
            prepared.close(discard=discard, earlier=self._wanted.discard)

    def _close(self) -> None:
        """Whatever happened, nothing is left."""
        while self._waiting:
            self._stop_waiting(next(iter(self._waiting))).close()
        for one in self._terminals.values():
            if one.steps is not None:
                one.steps.close()
            one.shared.leave_all()
            one.events.close()
        self._box.close()


def _ending(one: _Terminal, others: tuple[int, ...] = ()) -> Ending:
    if one.result is None:
        assert one.failure is not None
        return Ending(
            outcome=Outcome.SETUP_FAILED, exit_code=125, signal=None, reason=one.failure.message,
            hint=one.failure.hint, others=others,
        )  # fmt: skip
    result = one.result
    return Ending(
        outcome=result.outcome, exit_code=result.exit_code, signal=result.signal, reason=result.reason,
        hint=result.hint, others=others, controls=result.controls,
    )  # fmt: skip


def _failure(error: StockadeError | OSError) -> StockadeError:
    if isinstance(error, StockadeError):
        return error
    return SetupError(f"what keeps the sandbox met: {error.strerror}", stage="attach", errno=error.errno or 0)


def start(wanted: Wanted) -> Line:
    """Start a holder, and return the way to it. It says itself whether it could make the sandbox."""
    ours, theirs = letters.line_pair()
    # A Ctrl-C in the child, before it has let go of the terminal, would make it a second caller.
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


def _become_holder(wanted: Wanted, first: Line, mask: Iterable[int]) -> NoReturn:
    """In a session of its own, with no terminal and nothing open that is the caller's."""
    code = 1
    try:
        os.setsid()
        # Not the leader of the session, it can get no terminal either.
        if os.fork():
            os._exit(0)
        _let_go(first.fileno())
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


def _hold(wanted: Wanted, first: Line) -> None:
    holder = Holder(wanted)
    # Much was loaded to get here, and stays.
    gc.freeze()
    try:
        holder.hold(first)
    except StockadeError as error:
        first.send(Refused(error.message, error.hint))
    except OSError as error:
        first.send(Refused(f"the sandbox cannot be kept: {error.strerror}", ""))


def _let_go(kept: int) -> None:
    """Close everything of the caller's but one descriptor."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nowhere, number)
    for name in os.listdir("/proc/self/fd"):
        if (number := int(name)) > 2 and number != kept:
            with contextlib.suppress(OSError):
                os.close(number)
