"""The server's process: the lock of its state directory, the zygote, the listening socket, and the end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import logging
import os
import resource
import signal
import socket
from collections.abc import Callable, Iterator, Mapping

import uvloop

from stockade.backends.selection import select
from stockade.errors import SetupError, UnsupportedError
from stockade.host import host
from stockade.policy import Policy
from stockade.server.config import ServerConfig, with_listen
from stockade.server.directory import how_to_end, sandboxes_root, server_directory
from stockade.server.front.app import FrontApp
from stockade.server.front.authentication import FIRST, ClientKeys
from stockade.server.front.creation import SandboxFactory
from stockade.server.front.otel import exporting
from stockade.server.front.sandbox_table import SandboxTable
from stockade.server.front.telemetry import Telemetry
from stockade.server.http_server import ClientBounds, HttpServer
from stockade.server.record import LOCK
from stockade.server.wire.errors import ServerPaths, waiver_of
from stockade.server.zygote import Zygote

#: What the published SDKs ask for if their user says nothing.
SDK_LIMITS = {"memory": "2G", "cpu": 1}

Announce = Callable[[str], None]


def serve(config: ServerConfig, home: str, environ: Mapping[str, str], announce: Announce) -> None:
    """Serve until SIGTERM or SIGINT. The sandboxes live on."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    root = sandboxes_root(home, config.upper_root)
    ServerPaths.roots = (root, home)
    keys = ClientKeys(home, environ)
    # Sessions take descriptors of their supervisor, sandboxes of the server. Programs have a limit of theirs.
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    zygote = Zygote()
    if keys.from_environment:
        # A fork would hold a copy of the key, and so would every supervisor.
        zygote.start()
    else:
        zygote.fork()
    with contextlib.closing(zygote), _alone(home), _listening(config) as listener:
        if keys.empty:
            announce("the key of your first client; it is not kept, so store it now:")
            announce(f"export OPEN_SANDBOX_API_KEY={keys.add(FIRST)}")
        if not config.is_local:
            announce(
                f"{config.listen} is not a loopback address, and the server has no TLS: keys and files "
                "cross the network in clear; put a proxy with TLS in front"
            )
        for line in missing_controls(config):
            announce(line)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(config, home, environ, root, keys, zygote, listener, announce))


async def _serve(
    config: ServerConfig,
    home: str,
    environ: Mapping[str, str],
    root: str,
    keys: ClientKeys,
    zygote: Zygote,
    listener: socket.socket,
    announce: Announce,
) -> None:
    loop, done = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, done.set)
    host, port = listener.getsockname()[:2]
    address = f"{f'[{host}]' if ':' in host else host}:{port}"
    # Sandboxes must know the port that they may not reach, also if the kernel has chosen it.
    config = with_listen(config, address)
    table = SandboxTable(root, home)
    telemetry = Telemetry(table)
    factory = SandboxFactory(config, table, zygote, home, telemetry)
    patience = config.client_timeout
    bounds = ClientBounds(config.max_connections, config.max_header_bytes, patience, unread=patience)
    server = HttpServer(FrontApp(config, keys, table, factory, telemetry), bounds, date=True)
    zygote.watch()
    table.start()
    try:
        await server.start(listener)
        announce(f"serving on http://{address}")
        with exporting(telemetry, environ):
            await done.wait()
    finally:
        await server.stop()
        living = sum(known.lives for known in table.all())
        table.stop()
    # The terminal may be gone by now.
    with contextlib.suppress(OSError):
        announce(_farewell(living))


def missing_controls(config: ServerConfig) -> list[str]:
    """Warn if this machine can make no sandbox, or cannot keep the limits that the SDKs always ask for."""
    for consequence, limits in (
        ("this machine cannot make a sandbox, so the server will refuse every request for one", {}),
        ("the SDKs ask for limits of memory and processors, and the server will refuse them", SDK_LIMITS),
    ):
        try:
            select(Policy(backend="native", limits=limits, accept=config.accept), host())
        except UnsupportedError as error:
            # The hint's own waiver is that of a policy.
            lines = [line for line in error.hint.splitlines() if "accept = " not in line]
            lines += [f"or {waiver}"] if (waiver := waiver_of(error)) else []
            return [f"warning: {consequence}:", *(f"  {line}" for line in _reasons(error) + lines)]
    return []


def _reasons(error: UnsupportedError) -> list[str]:
    return error.message.splitlines()[1:]


def _farewell(living: int) -> str:
    if not living:
        return "the server has ended; it has no sandboxes"
    lives, them = ("1 sandbox lives on", "it") if living == 1 else (f"{living} sandboxes live on", "them")
    return f"the server has ended, and {lives}: `stockade ps` lists {them}, `stockade kill` ends {them}"


@contextlib.contextmanager
def _alone(home: str) -> Iterator[None]:
    """Hold the lock of the server's directory: a state directory has one server."""
    lock = os.open(f"{server_directory(home)}/{LOCK}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise SetupError(
                f"another server already runs with the state directory {home}",
                stage="server",
                hint=f"{how_to_end(home)}; or set STOCKADE_HOME to another directory, and --port",
            ) from None
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(lock)


@contextlib.contextmanager
def _listening(config: ServerConfig) -> Iterator[socket.socket]:
    host, port = config.address
    listener = None
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
        listener.setblocking(False)
    except OSError as error:
        if listener is not None:
            listener.close()
        raise SetupError(
            f"cannot listen on {config.listen}: {error.strerror}",
            stage="server",
            errno=error.errno or 0,
            hint=_hint_for(error, port),
        ) from None
    with listener:
        yield listener


def _hint_for(error: OSError, port: int) -> str:
    """Return what to type if the server cannot listen."""
    if error.errno == errno.EADDRINUSE:
        return (
            f"another program has the port (`ss -ltnp` shows which): stockade serve --port {port % 65535 + 1}"
        )
    if error.errno == errno.EACCES:
        return "ordinary users cannot have a port below 1024: stockade serve --port 8080"
    return "name an address of this machine: stockade serve --host 127.0.0.1"
