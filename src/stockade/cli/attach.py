"""`stockade attach`: return to a terminal of a kept sandbox, or open another one in it.

The user's terminal is connected as for `stockade run` (`sessions.attach.user_terminal`),
but to a stream of the holder instead of the program's terminal. Signals that
`stockade run` would pass on to the program, because they concern the user's
job, stop and wake only this process; the program goes on.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
import struct
from typing import TYPE_CHECKING, NoReturn

import msgspec

from stockade.cli.ui import output
from stockade.cli.ui.argument_parser import Parser
from stockade.errors import NotFoundError, PolicyError, SetupError
from stockade.gate import client
from stockade.linux.user import Caller
from stockade.result import Outcome, Result
from stockade.runs.io.eventloop import Events
from stockade.runs.register import register, runlog, sandbox_record
from stockade.sessions.attach import protocol
from stockade.sessions.attach.protocol import (
    AttachAcceptance,
    AttachRefusal,
    AttachSocket,
    FromHolder,
    Hello,
    Redraw,
    TerminalEnd,
    TerminalEndReport,
    WindowSize,
)
from stockade.sessions.attach.terminal_modes import as_text
from stockade.sessions.attach.user_terminal import WAY_OUT_WORDS, UserTerminal
from stockade.state import state_dir

if TYPE_CHECKING:
    from stockade.runs.register.sandbox_record import SandboxRecord


def main(argv: list[str]) -> int:
    """Attach, and return the shell's own exit code; 0 if the user detached and it goes on."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.print and args.new:
        parser.error("--print and --new exclude each other: a new terminal has shown nothing yet")
    if not args.print:
        _require_terminal()
    caller = Caller.current()
    home = state_dir(caller.environ, caller.home)
    record = choose_sandbox(home, args.id)
    with contextlib.closing(_connect(home, record)) as line:
        if args.print:
            return _print_history(line, args.terminal or 0)
        return _Visit(line, -1 if args.new else args.terminal or 0, verbose=args.verbose).code()


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    parser = Parser(
        prog="stockade attach",
        description="Return to a shell that `stockade shell --keep` started: you see what it showed, and\n"
        "control what runs in it. Several terminals can be attached at once. Ctrl-] three times within a\n"
        "second detaches, and so does closing the terminal: the shell goes on. The sandbox ends with its\n"
        "last shell.",
        epilog="examples:\n"
        "  stockade attach             the only kept sandbox, or the only one of this directory\n"
        "  stockade attach 3f9a        the beginning of an id in `stockade ps`\n"
        "  stockade attach --new 3f9a  another shell in another terminal of that sandbox",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("id", nargs="?", metavar="ID", help="an id, or the beginning of one")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--new", action="store_true", help="open another terminal, with another shell")
    which.add_argument(
        "-t",
        "--terminal",
        metavar="N",
        type=_number,
        help="attach to terminal N (default: the last used one)",
    )
    parser.add_argument(
        "--print", action="store_true", help="only print what the shell has shown, as text; needs no terminal"
    )
    return output.add_verbosity(parser, verbose="print what was enforced once the shell has ended")


def _number(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def keep(args: argparse.Namespace, commands: list[list[str]]) -> int:
    """Start a sandbox that outlives this process, and attach to it: `stockade shell --keep`."""
    from stockade.cli import run
    from stockade.cli.ui.shell_prompt import environment

    _require_terminal()
    for option, is_set, hint in (
        ("--commit", args.on_exit == "commit", "run `stockade commit` when the shell has ended"),
        ("--json-fd", args.json_fd is not None, "`stockade logs --json` shows how the shell ended"),
        ("--receipt", args.receipt is not None, "`stockade receipts` has one for each of its terminals"),
    ):
        if is_set:
            raise PolicyError(
                f"{option} does not work with --keep: the shell may end while no terminal is attached",
                hint=hint,
            )
    from stockade.sandbox import attach_daemon

    workspace = run.continued_workspace(args)
    found = run.discover_policy(args, *run.user_and_state())
    wanted = attach_daemon.AttachRequest(
        policy=found.policy,
        pinned=found.pinned,
        commands=commands,
        environs={words[0]: environment(words, found.policy) for words in commands},
        cwd=run.start_directory(args, found),
        resume=workspace,
        discard=args.on_exit == "discard",
        snapshot=args.snapshot,
        name=args.name,
        publish=tuple(args.publish or ()),
        who=run.who_asks(args),
        timeout=run.seconds(args.timeout),
    )
    with contextlib.closing(attach_daemon.start(wanted)) as line:
        return _Visit(line, -1, verbose=args.verbose, new=True).code()


def choose_sandbox(home: str, id: str | None) -> SandboxRecord:
    """Return the kept sandbox with that id; without one, the only one, or the only one of this directory."""
    if id is not None:
        try:
            record = register.find(home, id)
        except NotFoundError as error:
            raise _ended_error(home, id) or error from None
        if not record.kept:
            raise SetupError(
                f"sandbox {record.id} was not started by `stockade shell --keep`",
                stage="attach",
                hint="start a shell that you can attach to: stockade shell --keep",
            )
        return record
    kept = [record for record in register.living(home) if record.kept]
    if not kept:
        raise NotFoundError("no sandbox is kept", hint="`stockade shell --keep` starts one")
    if len(kept) == 1:
        return kept[0]
    from stockade.cli.ui.workspace_choice import aligned, is_here

    here = [record for record in kept if is_here(record.workspace)]
    if len(here) == 1:
        return here[0]
    rows = [
        (record.id, output.name(shlex.join(record.command)), output.name(record.workspace)) for record in kept
    ]
    where = f", {len(here)} of them for this directory or one above it" if here else ""
    raise PolicyError(
        f"{len(kept)} sandboxes are kept{where}:\n{aligned(rows)}",
        hint=f"name one: stockade attach {kept[-1].id}",
    )


def _ended_error(home: str, id: str) -> NotFoundError | None:
    """Return an error that says how a sandbox ended; None if the log does not know it."""
    last = runlog.last_of(home, id)
    if last is None:
        return None
    left = f", and left {last.left} files that your tools run or obey" if last.left else ""
    return NotFoundError(
        f"sandbox {last.sandbox} has ended: {last.outcome}, exit code {last.exit_code}{left}",
        hint=f"`stockade logs {last.sandbox}` shows more",
    )


def _connect(home: str, record: SandboxRecord) -> AttachSocket:
    with sandbox_record.opened_run(home) as run:
        for _, directory in sandbox_record.directories(run):
            line = protocol.connected(directory, f"{record.id}.attach")
            if line is not None:
                return line
    raise _ended_error(home, record.id) or NotFoundError(
        f"sandbox {record.id} has ended", hint="`stockade ps`"
    )


def _print_history(line: AttachSocket, terminal: int) -> int:
    """Print what a terminal has shown, without its control sequences."""
    ours, theirs = protocol.streams()
    try:
        line.send(Hello(protocol.VERSION, terminal, 0, 0, b"", {}, look=True), theirs)
        letter, file = line.receive(FromHolder)
    finally:
        os.close(ours)
        os.close(theirs)
    if isinstance(letter, AttachRefusal):
        raise SetupError(letter.message, stage="attach", hint=letter.hint)
    if not isinstance(letter, TerminalEnd) or file < 0:
        raise _holder_gone_error()
    text = as_text(protocol.content_of(file)).decode("utf-8", "replace")
    print(output.clean(text), end="" if text.endswith("\n") else "\n")
    return 0


def _require_terminal() -> None:
    if not (os.isatty(0) and os.isatty(1)):
        raise PolicyError(
            "standard input and output must be a terminal",
            hint="in a script use `stockade run`; `stockade attach --print` works without a terminal",
        )


class _ClientTerminal(UserTerminal):
    """The user's terminal, connected to a stream of the holder."""

    def __init__(self, line: AttachSocket) -> None:
        super().__init__()
        self._line = line

    def hello(self, terminal: int) -> Hello:
        """Return the request for a terminal like the user's."""
        like = self.fit(client.Program(argv=[], env={}, cwd="/", grace=0))
        return Hello(protocol.VERSION, terminal, *like.size, settings=like.settings, env=like.env)

    def attach(self, stream: int, events: Events) -> None:
        """Show what the stream yields, and send it what the user types."""
        self.connect(stream, self, events)
        if self._behind:
            self.stopped(signal.SIGTTIN)

    def signal(self, number: int, *, in_front: bool | None = None) -> None:
        """Apply the signal to this process instead of the program, which goes on."""
        if number == signal.SIGTSTP:
            self.stopped(number)
        elif in_front is False:
            self.stopped(signal.SIGTTIN)
        elif in_front:
            self._line.send(Redraw())

    def stopped(self, number: int) -> None:
        """Restore the terminal and stop. The holder redraws the screen afterwards."""
        with contextlib.suppress(OSError):
            if self._in_front() and (off := self._modes.off(struct.unpack("HHHH", self._size())[0])):
                self._say(off)
        super().stopped(number)

    def _resize(self) -> None:
        with contextlib.suppress(OSError):  # hung up
            self._line.send(WindowSize(*struct.unpack("HHHH", self._size())[:2]))


class _Visit:
    """One attachment to a terminal, from the first message to the last."""

    def __init__(self, line: AttachSocket, terminal: int, *, verbose: bool, new: bool = False) -> None:
        self._line, self._wanted, self._verbose, self._new = line, terminal, verbose, new

    def code(self) -> int:
        """Stay attached until the program ends or the user detaches, report it, and return the exit code."""
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, _leave)
        terminal = _ClientTerminal(self._line)
        ending: TerminalEndReport | None = None
        left = ""
        try:
            joined, stream = self._join(terminal)
            if self._new:
                self._say_how_to_leave(joined)
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
            return self._report_detach(joined, left)
        return self._report_end(joined, ending)

    def _join(self, terminal: _ClientTerminal) -> tuple[AttachAcceptance, int]:
        ours, theirs = protocol.streams()
        try:
            self._line.send(terminal.hello(self._wanted), theirs)
        finally:
            os.close(theirs)
        letter, _ = self._line.receive(FromHolder)
        if not isinstance(letter, AttachAcceptance):
            os.close(ours)
            if isinstance(letter, AttachRefusal):
                raise SetupError(letter.message, stage="attach", hint=letter.hint)
            raise _holder_gone_error()
        return letter, ours

    def _say_how_to_leave(self, joined: AttachAcceptance) -> None:
        output.say(
            f"this shell outlives the terminal: Ctrl-] three times within a second leaves it, `stockade "
            f"attach {joined.sandbox}` returns to it, and `exit` ends it"
        )

    def _stay(self, terminal: _ClientTerminal, events: Events) -> TerminalEndReport:
        events.watch(self._line.fileno())
        while True:
            events.wait(terminal.patience())
            for end in events.ready:
                if end != self._line.fileno():
                    terminal.move(end)
                    continue
                letter, file = self._line.receive(FromHolder)
                if not isinstance(letter, TerminalEnd) or file < 0:
                    raise _holder_gone_error()
                with contextlib.suppress(msgspec.MsgspecError):  # the holder had no memory for all of it
                    return msgspec.json.decode(protocol.content_of(file), type=TerminalEndReport)
                raise _holder_gone_error()
            terminal.look()

    def _report_detach(self, joined: AttachAcceptance, why: str) -> int:
        output.say(f"detached; the shell goes on: `stockade attach {joined.sandbox}` returns to it")
        by = {WAY_OUT_WORDS: -128, "": signal.SIGINT}
        return 128 + by.get(why, getattr(signal, why, signal.SIGHUP))

    def _report_end(self, joined: AttachAcceptance, ending: TerminalEndReport) -> int:
        from stockade.cli import run

        result = Result(
            outcome=Outcome(ending.outcome), exit_code=ending.exit_code, signal=ending.signal,
            reason=ending.reason, hint=ending.hint, controls=ending.controls, changes=ending.changes,
            changes_cut=ending.changes_cut, workspace_id=ending.workspace, lost=ending.lost,
            handoffs=ending.handoffs, warnings=ending.warnings, denials=ending.denials,
        )  # fmt: skip
        if not output.Verbosity.quiet:
            result = run.report_denials(result)
        if result.signal != signal.SIGINT:
            run.report_end(result, quiet=output.Verbosity.quiet)
        if ending.others:
            there = ", ".join(map(str, ending.others))
            output.say(f"the sandbox goes on in terminal {there}: `stockade attach {joined.sandbox}`")
        else:
            run.report_handoffs(result)
            run.report(result, verbose=self._verbose, discarded=ending.discarded, count=ending.changed)
        if ending.error:
            output.error(ending.error)
        if result.lost:
            from stockade.result import describe_lost

            output.error(describe_lost(result.lost), hint="free some space in Stockade's state")
        return result.exit_code


def _holder_gone_error() -> SetupError:
    return SetupError(
        "the sandbox has ended, because the process that held it has ended",
        stage="attach",
        hint="its changes are kept: `stockade workspaces` lists them",
    )


def _leave(number: int, _: object) -> NoReturn:
    raise KeyboardInterrupt(signal.Signals(number).name)
