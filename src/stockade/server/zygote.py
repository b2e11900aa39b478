"""The zygote: a process with one thread and the supervisors' modules, which forks a supervisor for each
sandbox.

The server forks it first of all, while it is a process with one thread itself. If the zygote dies later, the
server starts another one as a program: by then the server has threads and an event loop, and no child of such
a process is sound. A server that got a key from its environment starts it as a program, too: a fork, and with
it every supervisor and file worker, would have that key in its memory. The zygote waits for packets on its
socket, each with two descriptors: the request, in a file in memory, and the socket on which the new
supervisor reports. It ends when the server's end of the socket is closed; its supervisors live on.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
import subprocess
import sys
from typing import Any

import msgspec

from stockade.linux.descriptors import memory_file, receive
from stockade.linux.sockets import unhindered
from stockade.server.config import ServerConfig
from stockade.server.record import ServerRecord
from stockade.server.wire.errors import RUNTIME_ERROR, SERVICE_UNAVAILABLE, ApiError

#: Seconds that a new sandbox may take.
PATIENCE = 60.0
NAME = "stockade-zygote"
#: How often a create is tried if the zygote dies meanwhile.
ATTEMPTS = 3
#: Seconds for the kernel to report the end of a process whose descriptors are closed.
SETTLED = 0.05
#: Seconds before a zygote that died is started again.
PAUSE = 0.5
#: Variables of the server that no supervisor needs.
SECRETS = ("STOCKADE_API_KEY",)


class SupervisorRequest(msgspec.Struct, frozen=True):
    """What a new supervisor is to do."""

    record: ServerRecord
    config: ServerConfig
    #: The directory of all sandboxes.
    root: str
    #: The state directory.
    home: str
    #: The server's own port, for messages about the network.
    port: int = 0


class SupervisorReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a new supervisor reports: nothing but zeros if its sandbox is open."""

    status: int = 0
    code: str = ""
    message: str = ""


class Zygote:
    """The server's side: starts the zygote, starts it again if it dies, and asks it for supervisors."""

    def __init__(self) -> None:
        #: Its process; 0 for none.
        self.pid = 0
        self._end: socket.socket | None = None
        self._stopped = False

    def fork(self) -> None:
        """Fork it from this process, which must have one thread."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.setsid()
                null = os.open(os.devnull, os.O_RDWR)
                os.dup2(null, 0)
                os.dup2(null, 1)
                ours.close()
                os.chdir("/")
                run(theirs)
            finally:
                os._exit(1)
        theirs.close()
        self._use(ours)

    def start(self) -> None:
        """Start it as a program; a request waits until it has loaded its modules."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            environ = {name: value for name, value in os.environ.items() if name not in SECRETS}
            started = subprocess.Popen(
                [sys.executable, "-P", "-m", "stockade.server.zygote", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env=environ,
                cwd="/",
            )
        self.pid = started.pid
        started.returncode = 0  # `stop` waits for it, as for one that was forked
        self._use(ours)

    def _use(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._end = end

    def watch(self) -> None:
        """Start it again soon after it has died, so that the next create need not wait for that."""
        loop, end = asyncio.get_running_loop(), self._end
        if end is not None:
            loop.add_reader(end, self._died, loop)

    def _died(self, loop: asyncio.AbstractEventLoop) -> None:
        self.stop()
        loop.call_later(PAUSE, self._revive)

    def _revive(self) -> None:
        if self._end is None and not self._stopped:
            self.start()
            self.watch()

    async def supervise(self, request: SupervisorRequest) -> None:
        """Start a supervisor and wait until its sandbox is open; raises what it reports."""
        data = msgspec.json.encode(request)
        for _ in range(ATTEMPTS):
            pid = self.pid
            report = await self._attempt(data)
            if report is not None:
                break
            if self.pid == pid:  # another create may have started a new one already
                self.stop()
            self._revive()
        else:
            raise ApiError(503, SERVICE_UNAVAILABLE, "the process that starts sandboxes keeps ending")
        if report.status:
            raise ApiError(report.status, report.code, report.message)

    async def _attempt(self, data: bytes) -> SupervisorReport | None:
        """Send one request; None if the zygote died before a supervisor could report."""
        loop, pid = asyncio.get_running_loop(), self.pid
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        ours.setblocking(False)
        file = memory_file("stockade-request", data)
        try:
            try:
                await self._send([file, theirs.fileno()])
            except (BrokenPipeError, ConnectionResetError):
                return None
            finally:
                os.close(file)
                theirs.close()
            answer = bytearray()
            try:
                async with asyncio.timeout(PATIENCE):
                    while piece := await loop.sock_recv(ours, 1 << 16):
                        answer += piece
            except TimeoutError:
                raise ApiError(503, SERVICE_UNAVAILABLE, "the sandbox did not open in time") from None
            if answer:
                return msgspec.json.decode(answer, type=SupervisorReport)
            await asyncio.sleep(SETTLED)
            if pid == self.pid and not self._has_ended():
                raise ApiError(
                    500, RUNTIME_ERROR, "the sandbox's supervisor died while it opened the sandbox"
                )
            return None
        finally:
            ours.close()

    def _has_ended(self) -> bool:
        """Whether the process has ended; it stays to be waited for."""
        if not self.pid:
            return True
        found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return found is not None

    async def _send(self, descriptors: list[int]) -> None:
        end, loop = self._end, asyncio.get_running_loop()
        if end is None:
            raise BrokenPipeError
        while True:
            try:
                with unhindered():
                    socket.send_fds(end, [b"fork"], descriptors)
                return
            except BlockingIOError:
                writable = loop.create_future()
                loop.add_writer(end, writable.set_result, None)
                try:
                    await writable
                finally:
                    loop.remove_writer(end)

    def stop(self) -> None:
        """End the zygote; supervisors live on."""
        if self._end is not None:
            with contextlib.suppress(RuntimeError):
                asyncio.get_running_loop().remove_reader(self._end)
            self._end.close()
            self._end = None
        if self.pid:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.pid, 0)
            self.pid = 0

    def close(self) -> None:
        """End the zygote for good."""
        self._stopped = True
        self.stop()


def _preload() -> Any:
    """Import everything that a supervisor uses, and build its application, which takes longer than a fork."""
    from stockade.server.supervisor import process

    return process.prepare()


def serve_forks(end: socket.socket) -> None:
    """Fork a supervisor for each packet, until the server's end is closed."""
    ready = _preload()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps supervisors that have ended
    gc.collect()
    gc.freeze()
    while (packet := receive(end, 16, socket.CMSG_SPACE(2 * 4))) is not None and packet.data:
        if len(packet.descriptors) == 2 and os.fork() == 0:
            from stockade.server.supervisor import process

            end.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            process.run(ready, *packet.descriptors)
        packet.close()


def run(end: socket.socket) -> None:
    """Be the zygote of a server at the other end of a socket."""
    with contextlib.suppress(OSError), open("/proc/self/comm", "w", encoding="ascii") as comm:
        comm.write(NAME)
    end.setblocking(True)
    end.set_inheritable(False)
    serve_forks(end)


if __name__ == "__main__":
    run(socket.socket(fileno=int(sys.argv[1])))
