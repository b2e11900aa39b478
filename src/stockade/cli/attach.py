"""`stockade attach`: come back to a terminal of a kept sandbox, or open another one in it.

The user's terminal is connected as with `stockade run` (`cli.terminal`), but
with a stream of the holder's in the place of the program's terminal. What
would be told to the program there, since it concerns the user's job, happens
to this process alone: it is stopped and woken, and the program goes on.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import struct
from typing import TYPE_CHECKING, NoReturn

import msgspec

from stockade.cli import output
from stockade.cli.options import Parser
from stockade.cli.terminal import WAY_OUT_WORDS, Terminal
from stockade.errors import NotFoundError, PolicyError, SetupError
from stockade.gate import client
from stockade.live import letters
from stockade.live.letters import Again, Ending, FromHolder, Hello, Joined, Line, Over, Refused, Size
from stockade.live.modes import as_text
from stockade.policy import Caller
from stockade.sandbox import records, register, runlog
from stockade.sandbox.result import Outcome, Result
from stockade.sandbox.steps import Events
from stockade.state import state_dir

if TYPE_CHECKING:
    from stockade.sandbox.records import Record


def main(argv: list[str]) -> int:
    """Attach, and return the shell's own exit code; 0 if it goes on without us."""
    made = parser()
    args = made.parse_args(argv)
    if args.print and args.new:
        made.error("--print: a new terminal has shown nothing")
    if not args.print:
        _at_a_terminal()
    caller = Caller.current()
    home = state_dir(caller.environ, caller.home)
    record = chosen(home, args.id)
    with contextlib.closing(_connected(home, record)) as line:
        if args.print:
            return _printed(line, args.terminal or 0)
        return _Visit(line, -1 if args.new else args.terminal or 0, verbose=args.verbose).code()


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    made = Parser(
        prog="stockade attach",
        description="Come back to a shell that `stockade shell --keep` started: what it showed is shown\n"
        "again, and what runs in it is yours. Several can be attached at once. Ctrl-] three times within\n"
        "a second leaves it, and so does closing the terminal: it goes on. With its last shell it ends.",
        epilog="examples:\n"
        "  stockade attach             the sandbox that was kept last\n"
        "  stockade attach 3f9a        the beginning of an id in `stockade ps`\n"
        "  stockade attach --new 3f9a  another shell in another terminal of it",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("id", nargs="?", metavar="ID", help="an id, or the beginning of one")
    which = made.add_mutually_exclusive_group()
    which.add_argument("--new", action="store_true", help="open another terminal, with another shell")
    which.add_argument(
        "-t", "--terminal", metavar="N", type=_number, help="its terminal N (default: the one used last)"
    )
    made.add_argument(
        "--print", action="store_true", help="only print what it has shown, as text; needs no terminal"
    )
    return output.with_manners(made, verbose="say what was enforced, once it has ended")


def _number(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def keep(args: argparse.Namespace, commands: list[list[str]]) -> int:
    """`stockade shell --keep`: start a sandbox that lives on without us, and attach to it."""
    from stockade.cli import run

    _at_a_terminal()
    for option, given, hint in (
        ("--commit", args.on_exit == "commit", "`stockade commit` takes the changes over when it has ended"),
        ("--json-fd", args.json_fd is not None, "`stockade logs --json` tells how it ended"),
        ("--receipt", args.receipt is not None, "`stockade receipts` has one for each of its terminals"),
    ):
        if given:
            raise PolicyError(f"{option} is not for a shell that may end when nobody is there", hint=hint)
    from stockade.live import holder

    workspace = run.continued(args)
    found = run.discovered(args)
    wanted = holder.Wanted(
        policy=found.policy,
        pinned=found.pinned,
        commands=commands,
        workspace=workspace,
        discard=args.on_exit == "discard",
        snapshot=args.snapshot,
        who=run.who_asks(args),
        timeout=run.seconds(args.timeout),
    )
    with contextlib.closing(holder.start(wanted)) as line:
        return _Visit(line, -1, verbose=args.verbose).code()


def chosen(home: str, id: str | None) -> Record:
    """The kept sandbox that is meant: the last one unless it is named."""
    if id is not None:
        try:
            record = register.find(home, id)
        except NotFoundError as error:
            raise _ended(home, id) or error from None
        if not record.kept:
            raise SetupError(
                f"sandbox {record.id} has a terminal that is not ours, or none",
                stage="attach",
                hint="only what `stockade shell --keep` started can be attached to",
            )
        return record
    kept = [record for record in register.living(home) if record.kept]
    if not kept:
        raise NotFoundError("no sandbox is kept", hint="`stockade shell --keep` starts one")
    return kept[-1]


def _ended(home: str, id: str) -> NotFoundError | None:
    """What is known of a sandbox that does not live any more."""
    ran = [one for one in runlog.read(home)[0] if id and one.sandbox.startswith(id)]
    if not ran:
        return None
    last = ran[-1]
    return NotFoundError(
        f"sandbox {last.sandbox} has ended: {last.outcome}, exit code {last.exit_code}",
        hint=f"`stockade logs {last.sandbox}` tells more",
    )


def _connected(home: str, record: Record) -> Line:
    with records.opened_run(home) as run:
        for _, directory in records.directories(run):
            line = letters.connected(directory, f"{record.id}.attach")
            if line is not None:
                return line
    raise _ended(home, record.id) or NotFoundError(f"sandbox {record.id} has ended", hint="`stockade ps`")


def _printed(line: Line, terminal: int) -> int:
    """Print what a terminal has shown, without what a terminal would obey."""
    ours, theirs = letters.streams()
    try:
        line.send(Hello(letters.VERSION, terminal, 0, 0, b"", {}, look=True), theirs)
        letter, file = line.receive(FromHolder)
    finally:
        os.close(ours)
        os.close(theirs)
    if isinstance(letter, Refused):
        raise SetupError(letter.message, stage="attach", hint=letter.hint)
    if not isinstance(letter, Over) or file < 0:
        raise _gone()
    text = as_text(letters.content_of(file)).decode("utf-8", "replace")
    print(output.clean(text), end="" if text.endswith("\n") else "\n")
    return 0


def _at_a_terminal() -> None:
    if not (os.isatty(0) and os.isatty(1)):
        raise PolicyError(
            "there is no terminal to attach: standard input and output must be one",
            hint="`stockade attach --print` needs none; a script uses `stockade run`",
        )


class _Attached(Terminal):
    """The user's terminal at a stream of the holder's."""

    def __init__(self, line: Line) -> None:
        super().__init__()
        self._line = line

    def hello(self, terminal: int) -> Hello:
        """What a new terminal is to be like."""
        like = self.fit(client.Program(argv=[], env={}, cwd="/", grace=0))
        return Hello(letters.VERSION, terminal, *like.size, settings=like.settings, env=like.env)

    def attach(self, stream: int, events: Events) -> None:
        """Show what comes, and hand on what is typed."""
        self.connect(stream, self, events)
        if self._behind:
            self.stopped(signal.SIGTTIN)

    def signal(self, number: int, *, in_front: bool | None = None) -> None:
        """What is told to the program elsewhere happens to us: it goes on."""
        if number == signal.SIGTSTP:
            self.stopped(number)
        elif in_front is False:
            self.stopped(signal.SIGTTIN)
        elif in_front:
            self._line.send(Again())

    def stopped(self, number: int) -> None:
        """Stop with the terminal as it was. What it shows afterwards is drawn afresh."""
        with contextlib.suppress(OSError):
            if self._in_front() and (off := self._modes.off(struct.unpack("HHHH", self._size())[0])):
                self._say(off)
        super().stopped(number)

    def _resize(self) -> None:
        with contextlib.suppress(OSError):  # hung up
            self._line.send(Size(*struct.unpack("HHHH", self._size())[:2]))


class _Visit:
    """One stay at a terminal, from hello to good-bye."""

    def __init__(self, line: Line, terminal: int, *, verbose: bool) -> None:
        self._line, self._wanted, self._verbose = line, terminal, verbose

    def code(self) -> int:
        """Stay until the program has ended or we are to leave, and tell which."""
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, _leave)
        terminal = _Attached(self._line)
        ending: Ending | None = None
        left = ""
        try:
            joined, stream = self._join(terminal)
            with Events() as events:
                try:
                    terminal.attach(stream, events)
                    ending = self._stay(terminal, events)
                    terminal.rest()
                except KeyboardInterrupt as why:
                    left = str(why)
                finally:
                    terminal.close()
        except KeyboardInterrupt:
            output.say("cancelled")
            return 130
        finally:
            terminal.close()
        if ending is None:
            return self._detached(joined, left)
        return self._told(joined, ending)

    def _join(self, terminal: _Attached) -> tuple[Joined, int]:
        ours, theirs = letters.streams()
        try:
            self._line.send(terminal.hello(self._wanted), theirs)
        finally:
            os.close(theirs)
        letter, _ = self._line.receive(FromHolder)
        if not isinstance(letter, Joined):
            os.close(ours)
            if isinstance(letter, Refused):
                raise SetupError(letter.message, stage="attach", hint=letter.hint)
            raise _gone()
        return letter, ours

    def _stay(self, terminal: _Attached, events: Events) -> Ending:
        events.watch(self._line.fileno())
        while True:
            events.wait(terminal.patience())
            for end in events.ready:
                if end != self._line.fileno():
                    terminal.move(end)
                    continue
                letter, file = self._line.receive(FromHolder)
                if not isinstance(letter, Over) or file < 0:
                    raise _gone()
                with contextlib.suppress(msgspec.MsgspecError):  # there was no memory for all of it
                    return msgspec.json.decode(letters.content_of(file), type=Ending)
                raise _gone()
            terminal.look()

    def _detached(self, joined: Joined, why: str) -> int:
        output.say(f"detached; it goes on: `stockade attach {joined.sandbox}` comes back")
        by = {WAY_OUT_WORDS: -128, "": signal.SIGINT}
        return 128 + by.get(why, getattr(signal, why, signal.SIGHUP))

    def _told(self, joined: Joined, ending: Ending) -> int:
        from stockade.cli import run

        result = Result(
            outcome=Outcome(ending.outcome), exit_code=ending.exit_code, signal=ending.signal,
            reason=ending.reason, hint=ending.hint, controls=ending.controls, changes=ending.changes,
            workspace=ending.workspace, lost=ending.lost,
        )  # fmt: skip
        if result.signal != signal.SIGINT:
            run.report_end(result, quiet=output.Manner.quiet)
        if ending.others:
            there = ", ".join(map(str, ending.others))
            output.say(f"the sandbox goes on in terminal {there}: `stockade attach {joined.sandbox}`")
        else:
            run.report(result, verbose=self._verbose, discarded=ending.discarded)
        if ending.error:
            output.error(ending.error)
        if result.lost:
            from stockade.workspace.layers import lost

            output.error(lost(result.lost), hint="free some space in Stockade's state")
        return result.exit_code


def _gone() -> SetupError:
    return SetupError(
        "the sandbox has ended, because the process that kept it has",
        stage="attach",
        hint="what it changed is kept: `stockade workspaces`",
    )


def _leave(number: int, _: object) -> NoReturn:
    raise KeyboardInterrupt(signal.Signals(number).name)
