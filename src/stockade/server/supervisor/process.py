"""The supervisor's process, forked from the zygote: a session of its own, until its sandbox has ended."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import importlib
import logging
import os
import signal
import socket
import sys
from typing import NoReturn

import msgspec
import uvloop

from stockade import host
from stockade.errors import StockadeError
from stockade.linux.user import Caller
from stockade.server.directory import listen_in, make_directory, remove_directory
from stockade.server.http_server import ClientBounds, HttpServer
from stockade.server.supervisor.app import SupervisorApp
from stockade.server.supervisor.supervisor import SandboxSupervisor
from stockade.server.wire.errors import ServerPaths, create_error
from stockade.server.zygote import SupervisorReport, SupervisorRequest

NAME = "stockade-box"
LOG = "logs/supervisor.log"
#: The server is the only client, and trusted.
BOUNDS = ClientBounds(connections=100_000, header_bytes=1 << 20, seconds=60.0, idle=86400)

_log = logging.getLogger("stockade.server")


#: What a supervisor loads when it opens a sandbox and serves the first run: loaded before the fork instead.
LOADED_BEFORE = (
    "_sqlite3", "pyseccomp", "stockade.backends.native", "stockade.backends.private_mounts",
    "stockade.receipt.builder", "stockade.receipt.chain", "stockade.receipt.ed25519", "stockade.receipt.keys",
    "stockade.resolve.config_files", "stockade.resolve.paths.programs", "stockade.resolve.receipt_settings",
    "stockade.sandbox.finalize", "uvicorn.lifespan.off",
)  # fmt: skip


def prepare() -> SupervisorApp:
    """Build the application of all supervisors, in the zygote, and find out what this machine can do."""
    Caller.from_python = False
    for name in LOADED_BEFORE:
        importlib.import_module(name)
    # Each supervisor would try again what was refused, which takes 10 ms. What fails here fails there too,
    # where a client reads it.
    with contextlib.suppress(StockadeError, OSError):
        host.host()
    return SupervisorApp()


def run(app: SupervisorApp, request: int, report: int) -> NoReturn:
    """Run a supervisor in this forked process to its end."""
    code = 1
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        with contextlib.suppress(OSError), open("/proc/self/comm", "w", encoding="ascii") as comm:
            comm.write(NAME)
        os.lseek(request, 0, os.SEEK_SET)
        with os.fdopen(request, "rb") as stream:
            wanted = msgspec.json.decode(stream.read(), type=SupervisorRequest)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_supervise(app, wanted, socket.socket(fileno=report)))
        code = 0
    except Exception:
        _log.exception("a supervisor failed")
    finally:
        try:
            atexit._run_exitfuncs()
        except Exception:
            _log.exception("a supervisor did not end cleanly")
        finally:
            os._exit(code)


async def _supervise(app: SupervisorApp, wanted: SupervisorRequest, report: socket.socket) -> None:
    """Open the sandbox, report, and serve it until it has ended."""
    ServerPaths.roots = (wanted.root, wanted.home)
    server = HttpServer(app, BOUNDS)
    supervisor: SandboxSupervisor | None = None
    listener: socket.socket | None = None
    made = False
    try:
        directory, _ = make_directory(wanted.root, wanted.record.id)
        made = True
        _log_to(directory)
        supervisor = SandboxSupervisor(wanted.record, wanted.config, wanted.root, directory, wanted.home)
        await supervisor.open()
        app.serve(supervisor)
        listener = listen_in(directory)
        await server.start(listener)
        supervisor.publish()
    except BaseException as error:
        found = create_error(error)
        try:
            if supervisor is not None:
                await supervisor.end()
            elif made:
                remove_directory(wanted.root, wanted.record.id)
        finally:
            _tell(report, SupervisorReport(found.status, found.code, found.message))
        return
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, supervisor.end_soon)
    if not _tell(report, SupervisorReport()) and not wanted.record.idempotency_key:
        await supervisor.end()  # the server has gone, so no client knows the sandbox
    await supervisor.ended.wait()
    await server.stop()


def _log_to(directory: int) -> None:
    """Send the log of this process, and what else it prints, to a file of the sandbox."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    file = os.open(LOG, flags, 0o600, dir_fd=directory)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO,
        format="%(asctime)s %(name)s %(levelname)s %(message)s",
        force=True,
    )


def _tell(report: socket.socket, words: SupervisorReport) -> bool:
    """Report to the server; return whether it is still there."""
    with report:
        try:
            report.sendall(msgspec.json.encode(words))
        except OSError:
            return False
    return True
