"""The holder of a held sandbox: a process that supervises one sandbox and answers calls into it.

`held_sandbox` starts it as a program, with one end of a socket pair over which it gets its request. It ends
with its sandbox: when a client asks for that, when `stockade kill` names the sandbox, on SIGTERM, and after
the time without calls that the request names.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
import struct
import sys

from stockade.errors import LimitError, PolicyError, SetupError, StockadeError
from stockade.runs.io.captured_output import CapturedOutput
from stockade.sandbox.async_sandbox import AsyncSandbox
from stockade.sandbox.held_sandbox import (
    SOCKET,
    TAKEN,
    Call,
    CallAnswer,
    CallRefusal,
    EndCall,
    FileCall,
    HeldEntry,
    HeldReport,
    HeldRun,
    HoldRequest,
    LookCall,
    RunCall,
    receive,
    send,
)
from stockade.sessions.attach import protocol

#: The most calls at a time.
MOST_CALLS = 256
_CREDENTIALS = struct.Struct("3i")


class CallDaemon:
    """One sandbox and the calls that are being answered."""

    def __init__(self, request: HoldRequest) -> None:
        self._request = request
        self._box = AsyncSandbox(
            request.policy, name=request.name, on_exit=request.on_exit, who=request.who or None
        )
        self._calls: set[asyncio.Task[None]] = set()
        self._used = 0.0
        self._over = asyncio.Event()
        self._report = HeldReport("", "")

    async def hold(self, reader: asyncio.StreamReader, first: asyncio.StreamWriter) -> None:
        """Open the sandbox, tell the process that asked for it, and answer calls until the end."""
        loop = asyncio.get_running_loop()
        async with self._box:
            entry = self._box._require_open()[1].made.entry
            if entry is None or self._box.gate is None:
                raise SetupError("the sandbox cannot be held: it is not in the register", stage="state")
            where = (await self._box.run(["pwd", "-P"])).check().text.removesuffix("\n")
            self._report = HeldReport(self._box.id, where)
            path = entry.scratch(SOCKET)
            bound = protocol.listen(os.path.dirname(path), os.path.basename(path), socket.SOCK_STREAM)
            listener = socket.socket(fileno=bound.detach())
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self._over.set)
            loop.add_reader(self._box.gate, self._over.set)
            server = await asyncio.start_unix_server(
                self._let_in, sock=socket.socket(fileno=listener.detach())
            )
            os.chdir("/")
            try:
                await send(first, CallAnswer(report=self._report))
                taken = await reader.read(1) == TAKEN
                first.close()
                if taken:
                    await self._until_over()
            finally:
                loop.remove_reader(self._box.gate)
                with contextlib.suppress(OSError):
                    os.unlink(path)  # no new call may begin
                server.close()
                self._box.files.close()
                for task in self._calls:
                    task.cancel()
                await asyncio.gather(*self._calls, return_exceptions=True)

    async def _until_over(self) -> None:
        loop, idle = asyncio.get_running_loop(), self._request.idle
        self._used = loop.time()
        while not self._over.is_set():
            left = None if idle is None or self._calls else self._used + idle - loop.time()
            if left is not None and left <= 0:
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._over.wait(), idle if left is None else left)

    def _let_in(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        end = writer.get_extra_info("socket")
        peer = _CREDENTIALS.unpack(end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        if peer[1] != os.geteuid() or len(self._calls) >= MOST_CALLS:
            writer.close()
            return
        task = asyncio.get_running_loop().create_task(self._attend(reader, writer))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    async def _attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one call; a client that hangs up cancels it, and the end of the sandbox closes the line."""
        try:
            call: Call | None = await receive(reader, Call)
            if call is None:
                return
            if isinstance(call, EndCall):
                self._over.set()
                await asyncio.Event().wait()  # the line closes when everything has ended
            answering = asyncio.ensure_future(self._answer(call))
            hung_up = asyncio.ensure_future(reader.read(1))
            try:
                await asyncio.wait((answering, hung_up), return_when=asyncio.FIRST_COMPLETED)
                if answering.done() and not self._ended():
                    with contextlib.suppress(ConnectionError):
                        await send(writer, answering.result())
            finally:
                for one in (answering, hung_up):
                    one.cancel()
                await asyncio.gather(answering, hung_up, return_exceptions=True)
        finally:
            self._used = asyncio.get_running_loop().time()
            if not self._ended():
                writer.close()

    def _ended(self) -> bool:
        """Whether everything inside has ended: what a call says of it then is about the end, not the call."""
        return self._over.is_set() or self._box.ended

    async def _answer(self, call: Call) -> CallAnswer:
        try:
            match call:
                case RunCall():
                    return CallAnswer(run=await self._run(call))
                case FileCall():
                    return await asyncio.to_thread(self._file, call)
                case LookCall() | EndCall():
                    return CallAnswer(report=self._report)
        except StockadeError as error:
            return CallAnswer(refusal=_refusal(error))
        except OSError as error:
            return CallAnswer(refusal=CallRefusal(str(error), "", error.errno or errno.EIO))
        except ValueError as error:  # of Python's own calls, such as a NUL in a path
            return CallAnswer(refusal=CallRefusal(str(error), "", errno.EINVAL))

    async def _run(self, call: RunCall) -> HeldRun:
        stdout, stderr = CapturedOutput(call.limit), CapturedOutput(call.limit)
        result = await self._box.run(
            call.argv, env=call.env, timeout=call.timeout, on_stdout=stdout, on_stderr=stderr
        )
        return HeldRun(
            outcome=result.outcome,
            exit_code=result.exit_code,
            reason=result.reason,
            stdout=stdout.content,
            stderr=stderr.content,
            truncated=stdout.truncated or stderr.truncated,
        )

    def _file(self, call: FileCall) -> CallAnswer:
        files, path = self._box._open_files(), call.path
        match call.what:
            case "read":
                return CallAnswer(data=files.read(path))
            case "write":
                files.write(path, call.data, parents=True)
            case "mkdir":
                files.mkdir(path, parents=True)
            case "remove":
                files.remove(path, recursive=True)
            case "stat":
                return CallAnswer(files=[self._seen(path)])
            case "list":
                # With the slash, a link to a directory is followed.
                names = [one.path for one in files.list(f"{path.rstrip('/')}/")]
                return CallAnswer(files=[self._seen_in_listing(name) for name in names])
        return CallAnswer()

    def _seen(self, path: str) -> HeldEntry:
        """Describe a file through links."""
        files = self._box._open_files()
        info = files.info(path)
        if info.kind != "link":
            return HeldEntry(path, info.kind == "directory", info.size if info.kind == "file" else None)
        try:
            files.list(f"{path}/", limit=1)
            return HeldEntry(path, True, None)
        except NotADirectoryError:
            return HeldEntry(path, False, None)

    def _seen_in_listing(self, path: str) -> HeldEntry:
        """Describe a file of a listing; a link that leads nowhere is there, but no directory."""
        try:
            return self._seen(path)
        except OSError:
            return HeldEntry(path, False, None)


def _refusal(error: StockadeError) -> CallRefusal:
    if isinstance(error, OSError):
        # A read-only place is a PermissionError of ours, with a number that Python has no class for.
        number = errno.EACCES if isinstance(error, PermissionError) else error.errno or errno.EIO
        return CallRefusal(error.message, error.hint, number, str(error.filename or ""))
    if isinstance(error, LimitError):
        return CallRefusal(error.message, error.hint, errno.EFBIG)
    if isinstance(error, PolicyError):
        return CallRefusal(error.message, error.hint, errno.EINVAL)
    return CallRefusal(error.message, error.hint)


async def _serve(first: socket.socket) -> None:
    reader, writer = await asyncio.open_unix_connection(sock=first)
    try:
        request: HoldRequest | None = await receive(reader, HoldRequest)
        if request is not None:
            await CallDaemon(request).hold(reader, writer)
    except StockadeError as error:
        with contextlib.suppress(ConnectionError):
            await send(writer, CallAnswer(refusal=_refusal(error)))
    except ConnectionError:
        pass  # the process that asked for the sandbox has gone
    finally:
        writer.close()


def main(argv: list[str]) -> int:
    """Become the holder: a child of init, which leads no session and so can never get a terminal."""
    if os.fork():
        os._exit(0)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    asyncio.run(_serve(socket.socket(fileno=int(argv[0]))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
