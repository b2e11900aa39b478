"""The process that is the small internet: it lives in namespaces of its own and ends with its standard input.

It makes the network (addresses, routes), the files by which the machine in it
finds names and trusts certificates, and the servers; then it obeys commands,
one line of JSON each, and answers each with a line.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from support import internet_datagrams, internet_names, internet_web
from support.internet_certificates import Authority
from support.internet_layout import (
    ADDRESSES,
    DNS_SERVERS,
    ECHO,
    GREETER,
    GREETING,
    HOSTS,
    HTTP_PORTS,
    HTTPS_PORTS,
    NSSWITCH,
    RESOLV_CONF,
    SILENT,
    ZONE,
)

BUNDLE = Path("/etc/ssl/certs/ca-certificates.crt")
_MS_BIND = 4096
Streams = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class SmallInternet:
    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._events: list[dict[str, Any]] = []
        self._files = directory / "etc"
        self._authority = Authority(directory)
        self._names = internet_names.Names(ZONE, self.note)
        self._web = internet_web.Web(self.note)
        self._servers: list[asyncio.Server] = []

    def note(self, kind: str, **about: Any) -> None:
        self._events.append({"kind": kind, "time": time.time(), **about})

    async def start(self) -> dict[str, Any]:
        """Make the network and its servers; return what a test wants to know about them."""
        ipv6 = _make_network()
        self._make_files()
        for address in DNS_SERVERS:
            await internet_names.serve(self._names, address)
        context = self._authority.context("address.example", *(a for a in ADDRESSES if ipv6 or ":" not in a))
        for port in HTTP_PORTS:
            await self._listen(self._web.serve, port)
        for port in HTTPS_PORTS:
            await self._listen(self._web.serve, port, ssl=context)
        await self._listen(self._noted(_echo), ECHO)
        await self._listen(self._noted(_greet), GREETER)
        await self._listen(self._noted(_say_nothing), SILENT)
        internet_datagrams.serve(self.note, ipv6=ipv6)
        return {"ipv6": ipv6, "certificate": str(self._authority.certificate), "bundle": str(self._bundle)}

    async def obey(self, command: dict[str, Any]) -> Any:
        match command.pop("do"):
            case "events":
                return self._events
            case "clear":
                self._events.clear()
            case "zone":
                self._names.replace({**self._names.zone, **command["records"]})
            case "reset":
                self._names.replace(ZONE)
                self._events.clear()
                self._write("resolv.conf", RESOLV_CONF)
                self._write("hosts", HOSTS)
            case "write":
                self._write(command["name"], command["text"])
            case "publish":
                self._web.publish(command["name"], command["directory"])
            case "handle":
                self._web.handle(command["name"], command["function"], command["options"])
            case "issue":
                return [str(path) for path in self._authority.issue(command["name"])]
            case "serve":
                behaviour = {"echo": _echo, "greet": _greet, "silent": _say_nothing}[command["behaviour"]]
                await self._listen(self._noted(behaviour), command["port"])
        return None

    async def _listen(self, serve: Streams, port: int, **options: Any) -> None:
        server = await asyncio.start_server(serve, None, port, backlog=4096, **options)
        self._servers.append(server)

    def _noted(self, serve: Streams) -> Streams:
        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            address, port = writer.get_extra_info("sockname")[:2]
            self.note("connection", address=address, port=port, sni=None)
            try:
                await serve(reader, writer)
            except OSError:
                pass
            finally:
                writer.close()

        return connected

    def _make_files(self) -> None:
        self._files.mkdir()
        self._write("resolv.conf", RESOLV_CONF)
        self._write("hosts", HOSTS)
        self._write("nsswitch.conf", NSSWITCH)
        self._write("passwd", _accounts())
        for name in ("resolv.conf", "hosts", "nsswitch.conf", "passwd"):
            _bind(self._files / name, Path("/etc", name))
        # Programs trust the authority as they trust those of the system.
        self._bundle = self._files / "ca-certificates.crt"
        others = BUNDLE.read_bytes() if BUNDLE.exists() else b""
        self._bundle.write_bytes(others + self._authority.certificate.read_bytes())
        if BUNDLE.exists():
            _bind(self._bundle, BUNDLE)

    def _write(self, name: str, text: str) -> None:
        (self._files / name).write_text(text)


def _accounts() -> str:
    """The machine's accounts, with a shell for this user: a server for SSH starts it."""
    lines = []
    for line in Path("/etc/passwd").read_text().splitlines():
        fields = line.split(":")
        if len(fields) == 7 and fields[2] == str(os.geteuid()):
            fields[6] = "/bin/sh"
        lines.append(":".join(fields))
    return "\n".join([*lines, ""])


def _make_network() -> bool:
    """Give the loopback device the addresses of the whole world; return whether IPv6 works."""
    sysctl = Path("/proc/sys/net/ipv4/ip_unprivileged_port_start")
    sysctl.write_text("0")
    lines = ["link set lo up", *(f"addr add {a} dev lo" for a in ADDRESSES.values() if ":" not in a)]
    subprocess.run(["ip", "-batch", "-"], input="\n".join(lines), text=True, check=True)
    lines = [f"addr add {a} dev lo nodad" for a in ADDRESSES.values() if ":" in a]
    done = subprocess.run(
        ["ip", "-batch", "-"], input="\n".join(lines), text=True, capture_output=True, check=False
    )
    return done.returncode == 0


def _bind(source: Path, target: Path) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    at = os.path.realpath(target)
    if not os.path.exists(at):
        return
    if libc.mount(os.fsencode(source), os.fsencode(at), None, _MS_BIND, None):
        raise OSError(ctypes.get_errno(), "mount", at)


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()


async def _greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(GREETING)
    await _echo(reader, writer)


async def _say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while await reader.read(65536):
        pass


async def main() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, hard), hard))
    internet = SmallInternet(Path(sys.argv[1]))
    commands = asyncio.StreamReader(limit=1 << 24)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    answer: Any = await internet.start()
    while True:
        print(json.dumps({"answer": answer}), flush=True)
        line = await commands.readline()
        if not line:
            return
        answer = await internet.obey(json.loads(line))


if __name__ == "__main__":
    asyncio.run(main())
