"""Shells for people in a sandbox that a program holds: `stockade attach ID` opens one, or returns to it.

The holder of kept shells (`attach_daemon`) lives for its terminals. Here the sandbox belongs to a program on
asyncio, such as an evaluation, and a person who wants to look inside is a guest: the protocol and the
terminals are the same, but none of them keeps the sandbox alive.
"""

from __future__ import annotations

import asyncio
import contextlib
import os

from stockade.errors import SetupError, StockadeError
from stockade.runs.command import command
from stockade.runs.io.async_eventloop import drive
from stockade.runs.io.eventloop import Events
from stockade.sandbox.async_sandbox import AsyncSandbox
from stockade.sandbox.attach_daemon import MOST_TERMINALS, SOCKET, end_report
from stockade.sessions.attach import protocol
from stockade.sessions.attach.protocol import AttachAcceptance, AttachRefusal, AttachSocket, FromClient, Hello
from stockade.sessions.attach.shared_terminal import SharedTerminal, TerminalClient

SHELL = ("bash", "-i")
#: Seconds from TERM, which an interactive bash ignores, to KILL.
GRACE = 0.1


class AttachListener:
    """Listens for clients that want a shell in one open sandbox."""

    def __init__(self, box: AsyncSandbox) -> None:
        entry = box._require_open()[1].made.entry
        if entry is None:
            raise SetupError("no one can attach to the sandbox: it is not in the register", stage="attach")
        self._box = box
        self._path = entry.scratch(SOCKET)
        self._listener = protocol.listen(os.path.dirname(self._path), os.path.basename(self._path))
        self._waiting: dict[int, AttachSocket] = {}
        self._shells: set[asyncio.Task[None]] = set()
        self._terminals: dict[int, SharedTerminal] = {}
        self._count = 0
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._listener.fileno(), self._let_in)
        entry.update(kept=True)

    async def close(self) -> None:
        """Let no one in any more, and end the shells."""
        self._loop.remove_reader(self._listener.fileno())
        with contextlib.suppress(OSError):
            os.unlink(self._path)
        self._listener.close()
        for line in [*self._waiting.values()]:
            self._stop_waiting(line).close()
        for task in self._shells:
            task.cancel()
        await asyncio.gather(*self._shells, return_exceptions=True)

    def _let_in(self) -> None:
        line = protocol.accept_client(self._listener)
        if line is None:
            return
        if len(self._waiting) + len(self._shells) >= MOST_TERMINALS:
            line.close()
            return
        self._waiting[line.fileno()] = line
        self._loop.add_reader(line.fileno(), self._read_hello, line)

    def _stop_waiting(self, line: AttachSocket) -> AttachSocket:
        self._loop.remove_reader(line.fileno())
        return self._waiting.pop(line.fileno())

    def _read_hello(self, line: AttachSocket) -> None:
        try:
            hello, stream = line.receive(FromClient)
        except BlockingIOError:
            return
        self._stop_waiting(line)
        try:
            if not isinstance(hello, Hello) or not protocol.is_stream(stream):
                raise SetupError("the client's first message is not a request to attach", stage="attach")
            if hello.version != protocol.VERSION:
                raise SetupError("a different version of Stockade holds this sandbox", stage="attach")
            if hello.look or (hello.terminal > 0 and hello.terminal not in self._terminals):
                raise SetupError(
                    "the sandbox has no such terminal",
                    stage="attach",
                    hint=f"open one: stockade attach --new {self._box.id}",
                )
        except SetupError as error:
            _refuse(line, stream, error)
            return
        number = hello.terminal or max(self._terminals, default=-1)
        if number > 0:
            line.send(AttachAcceptance(self._box.id, number))
            self._terminals[number].join(TerminalClient(line, stream, hello))
            return
        self._count += 1
        task = self._loop.create_task(self._serve(line, stream, hello, self._count))
        self._shells.add(task)
        task.add_done_callback(self._shells.discard)

    async def _serve(self, line: AttachSocket, stream: int, hello: Hello, number: int) -> None:
        """Run a shell in a new terminal, with one client at first."""
        box, shared = self._box, SharedTerminal(number, hello)
        result, failure = None, None
        try:
            account = box._account(SHELL, None)
            with Events() as events, account.telling():
                async with box._in_use() as (opened, prepared):
                    run = command(
                        prepared,
                        SHELL,
                        {"grace": GRACE},
                        keep=False,
                        kept=True,
                        meanwhile=account.ready,
                        terminal=shared,
                    )
                    line.send(AttachAcceptance(box.id, number))
                    shared.join(TerminalClient(line, stream, hello))
                    self._terminals[number] = shared
                    try:
                        result = await drive(box._run_steps(opened, prepared, run, events, account), events)
                    except StockadeError as error:
                        failure = error
                    if result is not None or failure is not None:
                        _take_leave(shared, protocol.encoded(end_report(result, failure)))
        except StockadeError as error:
            if not shared.clients:
                _refuse(line, stream, error)
        finally:
            self._terminals.pop(number, None)
            shared.leave_all()


def _take_leave(shared: SharedTerminal, report: bytes) -> None:
    """Tell the clients how the shell ended."""
    with contextlib.suppress(OSError):  # without a descriptor for it they only see that it has ended
        file = protocol.memory_file(report)
        try:
            shared.leave_all(file)
        finally:
            os.close(file)


def _refuse(line: AttachSocket, stream: int, error: StockadeError) -> None:
    line.send(AttachRefusal(error.message, error.hint))
    line.close()
    if stream >= 0:
        os.close(stream)
