"""A DNS server of the tests' own: it answers from a zone that a test can change, and notes every question."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from typing import Any

#: By name: "A", "AAAA" (lists of addresses, or a list of such lists, which take turns), "CNAME", "TXT",
#: "ttl", "rcode" (2: SERVFAIL), "delay" (seconds; from a minute on it means never). `*.name` is everything
#: below a name.
Zone = dict[str, dict[str, Any]]
TYPES = {1: "A", 5: "CNAME", 12: "PTR", 16: "TXT", 28: "AAAA", 65: "HTTPS"}
NUMBERS = {name: number for number, name in TYPES.items()}
NEVER = 60
_SERVFAIL, _NXDOMAIN = 2, 3


class Names:
    """The zone and what is asked of it."""

    def __init__(self, zone: Zone, note: Callable[..., None]) -> None:
        self._note = note
        self.replace(zone)

    def replace(self, zone: Zone) -> None:
        """Answer from this zone from now on; what takes turns begins anew."""
        self.zone = {name: dict(record) for name, record in zone.items()}
        self._turns: dict[tuple[str, str], int] = {}

    def answer(self, query: bytes, server: str, transport: str) -> tuple[bytes, float]:
        """The answer to a question, and how long to wait before it is given."""
        name, kind, end = _question(query)
        self._note("dns", name=name, type=TYPES.get(kind, str(kind)), transport=transport, address=server)
        record = self._record(name)
        if record is None:
            return _message(query, end, [], _NXDOMAIN), 0
        records, owner = [], name
        for _ in range(8):
            if "CNAME" not in record:
                break
            records.append((owner, "CNAME", _name(record["CNAME"]), record.get("ttl", 60)))
            owner = record["CNAME"]
            record = self._record(owner) or {}
        wanted = TYPES.get(kind, "")
        for each in self._values(owner, wanted, record):
            records.append((owner, wanted, _data(wanted, each), record.get("ttl", 60)))
        code = record.get("rcode", 0)
        return _message(query, end, [] if code else records, code), record.get("delay", 0)

    def _record(self, name: str) -> dict[str, Any] | None:
        if name in self.zone:
            return self.zone[name]
        labels = name.split(".")
        for start in range(1, len(labels)):
            found = self.zone.get("*." + ".".join(labels[start:]))
            if found is not None:
                return found
        return None

    def _values(self, name: str, kind: str, record: dict[str, Any]) -> list[str]:
        values = record.get(kind, [])
        if not values or not isinstance(values[0], list):
            return list(values)
        turn = self._turns.get((name, kind), 0)
        self._turns[name, kind] = turn + 1
        return list(values[min(turn, len(values) - 1)])


async def serve(names: Names, address: str) -> None:
    """Answer on port 53 of an address, over UDP and TCP."""
    loop = asyncio.get_running_loop()
    tasks: set[asyncio.Task[None]] = set()

    async def datagram(transport: asyncio.DatagramTransport, query: bytes, peer: Any) -> None:
        answer, delay = names.answer(query, address, "udp")
        if delay >= NEVER:
            return
        await asyncio.sleep(delay)
        transport.sendto(answer if len(answer) <= 512 else _truncated(answer), peer)

    class Datagrams(asyncio.DatagramProtocol):
        def connection_made(self, transport: Any) -> None:
            self.transport = transport

        def datagram_received(self, data: bytes, peer: Any) -> None:
            task = loop.create_task(datagram(self.transport, data, peer))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    async def stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                (size,) = struct.unpack("!H", await reader.readexactly(2))
                answer, delay = names.answer(await reader.readexactly(size), address, "tcp")
                if delay >= NEVER:
                    return
                await asyncio.sleep(delay)
                writer.write(struct.pack("!H", len(answer)) + answer)
                await writer.drain()
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            writer.close()

    await loop.create_datagram_endpoint(Datagrams, local_addr=(address, 53))
    await asyncio.start_server(stream, address, 53)


def _question(query: bytes) -> tuple[str, int, int]:
    """The name that is asked for in lower case, the type, and where the question ends."""
    at, labels = 12, []
    while size := query[at]:
        labels.append(query[at + 1 : at + 1 + size].decode("ascii", "replace"))
        at += 1 + size
    (kind,) = struct.unpack_from("!H", query, at + 1)
    return ".".join(labels).lower(), kind, at + 5


def _message(query: bytes, end: int, records: list[tuple[str, str, bytes, int]], code: int) -> bytes:
    head = query[:2] + struct.pack("!HHHHH", 0x8580 | code, 1, len(records), 0, 0)
    body = b"".join(
        _name(owner) + struct.pack("!HHIH", NUMBERS[kind], 1, ttl, len(data)) + data
        for owner, kind, data, ttl in records
    )
    return head + query[12:end] + body


def _truncated(answer: bytes) -> bytes:
    _, _, end = _question(answer)
    return answer[:2] + struct.pack("!HHHHH", 0x8780, 1, 0, 0, 0) + answer[12:end]


def _name(name: str) -> bytes:
    return b"".join(bytes([len(label)]) + label.encode() for label in name.split(".")) + b"\0"


def _data(kind: str, value: str) -> bytes:
    match kind:
        case "A":
            return socket.inet_pton(socket.AF_INET, value)
        case "AAAA":
            return socket.inet_pton(socket.AF_INET6, value)
        case "TXT":
            return bytes([len(value)]) + value.encode()
        case "HTTPS":
            return bytes.fromhex(value)
        case _:
            return _name(value)
