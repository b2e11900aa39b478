"""What an egress process did, in memory that it shares with the supervisor.

The supervisor makes a memfd of fixed size and seals the size. The egress writes to it, whether or not the
supervisor looks: counters at the beginning, then slots of one size, one for each connection or name. The
reader trusts nothing that it finds: it reads with pread, checks each field, and leaves out a slot that makes
no sense.

A program can ask for more names and connections than there are slots. Each class has slots of its own, so
that refusals cannot push out what was allowed; equal refusals share a slot and count. Once there have been so
many allowed connections that the slots are used up, further ones to the same place share a slot, so that a
program cannot hide one behind thousands of others. What finds no slot is counted as dropped.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import time
from collections.abc import Callable, Iterator
from ipaddress import IPv4Address, IPv6Address
from typing import NamedTuple

from stockade.egress.network_budget import CLAUSES

SLOTS = 4608
#: How many slots each class may use: names, connections and requests that were refused or failed, connections
#: that were allowed, requests that were allowed, and places that further allowed ones went to.
NAME_SLOTS, REFUSED_SLOTS, ALLOWED_SLOTS, REQUEST_SLOTS, PLACE_SLOTS = 1024, 1024, 1792, 512, 256
_FIRST_PLACE = SLOTS - PLACE_SLOTS
_FIRST_REQUEST = _FIRST_PLACE - REQUEST_SLOTS

#: The order is the format: add new words at the end.
KINDS = ("connect", "name", "publish", "request", "secret", "udp")
VERDICTS = ("allowed", "denied", "failed")
#: The order is the format: add new words at the end.
REASONS = (
    "",
    "no rule",
    "deny rule",
    "private address",
    "loopback address",
    "link-local address",
    "metadata address",
    "translated address",
    "special address",
    "no SNI",
    "SNI differs",
    "Host differs",
    "not TLS",
    "not HTTP",
    "limit",
    "name not found",
    "resolver failed",
    "connection refused",
    "unreachable",
    "timed out",
    "reset",
    "idle",
    "port not open",
    "too many names",
    "malformed query",
    "nothing sent",
    "ended",
    "failed",
    "ambiguous request",
    "bad certificate",
    "certificate refused",
    "bad response",
    "another host",
    "another place",
    "echoed",
    *(f"limits.{clause}" for clause in CLAUSES),
    "refused when asked",
    "no answer",
    "too many questions",
    "no proxy request",
    "proxy refused",
)
_REASON_NUMBERS = {word: number for number, word in enumerate(REASONS)}
_FAILED = _REASON_NUMBERS["failed"]
#: The most letters of a request that are kept.
MOST_REQUEST = 300

_MAGIC = b"egress-2"
_HEADER = struct.Struct("<8s12Q")
_U64 = struct.Struct("<Q")
#: Slots begin on a page of their own.
_HEADER_SIZE = 4096
#: Change, time, duration, sent, received, times, rule, port, kind, verdict, reason, open, IP version, length
#: of the name, address, name; of a connection as the program has it, IP version, its own port, its own
#: address and the one that it asked for; of a request, its length and method with URL.
_SLOT = struct.Struct("<QddQQIiHBBBBBB16s253sBH16s16sH300s")
_SLOT_SIZE = 664
SIZE = _HEADER_SIZE + SLOTS * _SLOT_SIZE
_SENT_AT, _RECEIVED_AT = 24, 32

# Where each counter lies in the header.
(
    _CHANGES, _ALLOWED, _REFUSED, _ANSWERED, _UNANSWERED, _SENT, _RECEIVED, _RECORDS, _DROPPED, _PUBLISHED,
    _REQUESTS_ALLOWED, _REQUESTS_REFUSED,
) = range(8, 104, 8)  # fmt: skip
_SEALS = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
_LIMIT = 2**63
#: How often the reader reads a slot again that was being written.
_TRIES = 3


class Totals(NamedTuple):
    """What an egress process counted since it began."""

    connections_allowed: int
    #: Refused by a rule or a bound, or failed.
    connections_refused: int
    names_answered: int
    names_refused: int
    bytes_sent: int
    bytes_received: int
    #: Slots in use.
    records: int
    #: What found no slot.
    dropped: int
    #: Connections from outside to published ports.
    published: int = 0
    requests_allowed: int = 0
    #: Refused by a rule, or because servers could read them in different ways.
    requests_refused: int = 0


NO_TOTALS = Totals(0, 0, 0, 0, 0, 0, 0, 0)


class InsideEnds(NamedTuple):
    """The two ends of a connection as the program inside has them."""

    #: The program's own address and port.
    address: str
    port: int
    #: The address that it asked for; the port is the record's.
    asked: str


class RawRecord(NamedTuple):
    """One connection or name, as an egress process recorded it.

    The kind "publish" is a connection from outside to a published port: `address` is the client's and `port`
    the one inside.
    """

    #: The slot says which record it is: a later reading of the same one has the same slot, until the
    #: supervisor has told the egress that it has read the record's end.
    slot: int
    kind: str
    #: Seconds since the epoch.
    time: float
    name: str
    #: The address that was dialled, else the one that the program asked for; may be empty.
    address: str
    port: int
    verdict: str
    reason: str
    #: Index in the list of rules that the supervisor keeps; -1 if no rule decided.
    rule: int
    sent: int
    received: int
    duration: float
    #: The connection still goes on.
    open: bool
    #: How many equal ones share this record.
    times: int
    #: Only of a connection that came about.
    inside: InsideEnds | None = None
    #: Method and URL of a request, without its query; "" for the other kinds.
    request: str = ""


def create_records() -> int:
    """Make the memfd that an egress process writes to, of fixed size."""
    descriptor = os.memfd_create("egress records", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, SIZE)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


class RecordWriter:
    """Writes records; the egress process has one."""

    def __init__(self, descriptor: int, nudge: Callable[[], None] = lambda: None) -> None:
        self._memory = mmap.mmap(descriptor, SIZE)
        self._nudge = nudge
        self._counters = dict.fromkeys(range(_CHANGES, _REQUESTS_REFUSED + 8, 8), 0)
        #: Slots of each class that were never used.
        self._fresh = {
            "name": iter(range(NAME_SLOTS)),
            "refused": iter(range(NAME_SLOTS, NAME_SLOTS + REFUSED_SLOTS)),
            "allowed": iter(range(NAME_SLOTS + REFUSED_SLOTS, _FIRST_REQUEST)),
            "request": iter(range(_FIRST_REQUEST, _FIRST_PLACE)),
            "place": iter(range(_FIRST_PLACE, SLOTS)),
        }
        #: Refusals and names that later ones may share: what they are, and their slot and count.
        self._shared: dict[tuple[object, ...], tuple[int, int]] = {}
        #: The bytes of all connections that share a slot, by the slot.
        self._sums: dict[int, tuple[int, int]] = {}
        #: Slots that allowed requests have.
        self._requests = 0
        self._memory[:8] = _MAGIC

    def name(self, name: str, *, allowed: bool, reason: str = "", rule: int = -1) -> None:
        """Record that a name was asked for."""
        self._add(_ANSWERED if allowed else _UNANSWERED)
        self.share("name", "name", name, "", 53, "allowed" if allowed else "denied", reason, rule)

    def refuse(
        self,
        name: str,
        address: str,
        port: int,
        reason: str,
        *,
        rule: int = -1,
        verdict: str = "denied",
        kind: str = "connect",
    ) -> None:
        """Record a connection or datagram that was refused or, with verdict "failed", never came about."""
        self._add(_REFUSED)
        self.share("refused", kind, name, address, port, verdict, reason, rule)

    def connection(
        self, name: str, address: str, port: int, rule: int, inside: InsideEnds | None = None
    ) -> ConnectionRecord:
        """Record a connection that goes on from now."""
        self._add(_ALLOWED)
        return self._begin("connect", name, address, port, rule, inside)

    def flow(self, name: str, address: str, port: int, rule: int) -> ConnectionRecord:
        """Record datagrams to one peer, which go on from now; they count as a connection."""
        self._add(_ALLOWED)
        return self._begin("udp", name, address, port, rule)

    def request(self, name: str, port: int, request: str, *, reason: str = "", rule: int = -1) -> None:
        """Record a request, allowed without a reason. Once there were many, only their hosts count."""
        self._add(_REQUESTS_REFUSED if reason else _REQUESTS_ALLOWED)
        request = request[:MOST_REQUEST]
        pool, verdict = ("refused", "denied") if reason else ("request", "allowed")
        key = ("request", name, "", port, verdict, reason, rule, request)
        if not reason and key not in self._shared and self._requests >= REQUEST_SLOTS:
            # The host alone: a program could have a place for each method and path.
            pool, request = "place", "* " + "/".join(request.partition(" ")[2].split("/")[:3]) + "/**"
        elif not reason and key not in self._shared:
            self._requests += 1
        self.share(pool, "request", name, "", port, verdict, reason, rule, request)

    def secret(self, host: str, port: int, name: str, reason: str) -> None:
        """Record that the value of a secret was sent; with a reason, that it was not, or came back."""
        pool, verdict = ("refused", "denied") if reason else ("place", "allowed")
        self.share(pool, "secret", host, "", port, verdict, reason, -1, name)

    def published_connection(self, address: str, port: int) -> ConnectionRecord:
        """Record a connection from outside that goes on from now."""
        self._add(_PUBLISHED)
        return self._begin("publish", "", address, port, -1)

    def fail_published(self, address: str, port: int, reason: str) -> None:
        """Record a connection from outside that found no server inside."""
        self.share("refused", "publish", "", address, port, "failed", reason, -1)

    def _begin(
        self, kind: str, name: str, address: str, port: int, rule: int, inside: InsideEnds | None = None
    ) -> ConnectionRecord:
        slot = self._next_slot("allowed")
        if slot >= 0:
            self._add(_RECORDS)
        record = ConnectionRecord(self, slot, kind, (name, address, port, rule), inside)
        record.write(is_open=True)
        if slot < 0:
            # By name alone: a name can have as many addresses as its server likes.
            place = "" if name else address
            record.place = self.share("place", kind, name, place, port, "allowed", "", rule)
        return record

    def count_bytes(self, sent: int, received: int) -> None:
        """Add to the bytes of all connections."""
        if sent:
            self._add(_SENT, sent)
        if received:
            self._add(_RECEIVED, received)

    def count_as_refused(self) -> None:
        """Count a connection that was allowed at first as refused."""
        self._add(_ALLOWED, -1)
        self._add(_REFUSED)

    def share(
        self,
        pool: str,
        kind: str,
        name: str,
        address: str,
        port: int,
        verdict: str,
        reason: str,
        rule: int,
        request: str = "",
    ) -> int:
        """Count one more of the same in their slot, and return it; -1 if there is none."""
        key = (kind, name, address, port, verdict, reason, rule, request)
        slot, times = self._shared.get(key, (-1, 0))
        if slot < 0:
            slot = self._take(pool)
            if slot < 0:
                return -1
        times = min(times + 1, 2**32 - 1)
        self._shared[key] = (slot, times)
        now = time.time()
        sent, received = self._sums.get(slot, (0, 0))
        self.write_slot(
            slot, kind, now, name, address, port, verdict, reason, rule,
            sent=sent, received=received, times=times, request=request,
        )  # fmt: skip
        return slot

    def _take(self, pool: str) -> int:
        slot = self._next_slot(pool)
        self._add(_DROPPED if slot < 0 else _RECORDS)
        return slot

    def _next_slot(self, pool: str) -> int:
        return next(self._fresh[pool], -1)

    def _add(self, counter: int, amount: int = 1) -> None:
        value = self._counters[counter] = (self._counters[counter] + amount) % _LIMIT
        _U64.pack_into(self._memory, counter, value)

    def write_slot(
        self,
        slot: int,
        kind: str,
        when: float,
        name: str,
        address: str,
        port: int,
        verdict: str,
        reason: str,
        rule: int,
        *,
        sent: int = 0,
        received: int = 0,
        duration: float = 0.0,
        is_open: bool = False,
        times: int = 1,
        inside: InsideEnds | None = None,
        request: str = "",
    ) -> None:
        """Write a whole slot; the supervisor finds it as changed."""
        at = _HEADER_SIZE + slot * _SLOT_SIZE
        version, packed = _pack_address(address)
        label, shown = _printable(name, 253), _printable(request, MOST_REQUEST, space=True)
        own_version, own = _pack_address(inside.address if inside else "")
        # Change 0 means "being written": a reader in between leaves the slot for later.
        _U64.pack_into(self._memory, at, 0)
        body = _SLOT.pack(
            0, when, duration, sent, received, times, rule, port, KINDS.index(kind), VERDICTS.index(verdict),
            _REASON_NUMBERS.get(reason, _FAILED), is_open, version, len(label), packed, label,
            own_version, inside.port if inside else 0, own, _pack_address(inside.asked if inside else "")[1],
            len(shown), shown,
        )  # fmt: skip
        self._memory[at + 8 : at + _SLOT.size] = body[8:]
        self._add(_CHANGES)
        _U64.pack_into(self._memory, at, self._counters[_CHANGES])
        # A program that repeats itself a million times wakes the supervisor twenty times for that.
        if times & (times - 1) == 0:
            self._nudge()

    def write_bytes(self, slot: int, sent: int, received: int) -> None:
        """Update the bytes of a slot in place; the supervisor does not find it as changed."""
        at = _HEADER_SIZE + slot * _SLOT_SIZE
        _U64.pack_into(self._memory, at + _SENT_AT, sent)
        _U64.pack_into(self._memory, at + _RECEIVED_AT, received)

    def add_shared_bytes(self, slot: int, sent: int, received: int) -> None:
        """Add to the bytes of a slot that connections share."""
        before = self._sums.get(slot, (0, 0))
        self._sums[slot] = (before[0] + sent) % _LIMIT, (before[1] + received) % _LIMIT
        self.write_bytes(slot, *self._sums[slot])


class ConnectionRecord:
    """The record of one connection while it goes on."""

    __slots__ = (
        "_began", "_inside", "_kind", "_slot", "_what", "_when", "_writer",
        "closed", "place", "received", "sent",
    )  # fmt: skip

    def __init__(
        self,
        writer: RecordWriter,
        slot: int,
        kind: str,
        what: tuple[str, str, int, int],
        inside: InsideEnds | None,
    ) -> None:
        self._writer, self._slot, self._kind, self._what = writer, slot, kind, what
        self._inside = inside
        self._when, self._began = time.time(), time.monotonic()
        self.sent = self.received = 0
        self.closed = False
        #: The slot that it shares with others, if it has none of its own.
        self.place = -1

    def add(self, sent: int, received: int) -> None:
        """Count bytes that were passed on."""
        self.sent += sent
        self.received += received
        self._writer.count_bytes(sent, received)
        if self._slot >= 0 and not self.closed:
            self._writer.write_bytes(self._slot, self.sent, self.received)
        elif self.place >= 0 and not self.closed:
            self._writer.add_shared_bytes(self.place, sent, received)

    def close(self, verdict: str = "allowed", reason: str = "") -> None:
        """Record the connection's end, once; the first call decides."""
        if not self.closed:
            self.closed = True
            if verdict != "allowed":
                self._writer.count_as_refused()
                if self._slot < 0:
                    name, address, port, rule = self._what
                    self._writer.share("refused", self._kind, name, address, port, verdict, reason, rule)
            self.write(verdict, reason, is_open=False)

    def write(self, verdict: str = "allowed", reason: str = "", *, is_open: bool) -> None:
        """Write the slot, if the record has one."""
        if self._slot < 0:
            return
        name, address, port, rule = self._what
        self._writer.write_slot(
            self._slot, self._kind, self._when, name, address, port, verdict, reason, rule,
            sent=self.sent, received=self.received, duration=time.monotonic() - self._began, is_open=is_open,
            inside=self._inside,
        )  # fmt: skip


class RecordReader:
    """Reads records; the supervisor has one for each egress process, and trusts nothing that it reads."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def totals(self) -> Totals:
        """Return the counters."""
        block = os.pread(self._descriptor, _HEADER.size, 0)
        if len(block) < _HEADER.size:
            return NO_TOTALS
        _, _, *counters = _HEADER.unpack(block)
        found = Totals(*(min(value, _LIMIT - 1) for value in counters))
        return found._replace(records=min(found.records, SLOTS))

    def since(self, cursor: int) -> tuple[list[RawRecord], int]:
        """Return the records that are new or changed since a cursor, in order of change, and the next cursor.

        The first cursor is 0. A connection is found when it begins and again when it ends; a shared refusal
        each time that its count has grown.
        """
        found = self.changed_since(cursor)
        return [record for _, record in found], max([cursor, *(change for change, _ in found)])

    def changes(self) -> int:
        """Return how many changes there were: the cursor of what comes next."""
        block = os.pread(self._descriptor, 8, _CHANGES)
        return int.from_bytes(block, "little") if len(block) == 8 else 0

    def changed_since(self, cursor: int) -> list[tuple[int, RawRecord]]:
        """Return the records that `since` returns, each with the cursor of its change."""
        found: list[tuple[int, RawRecord]] = []
        for slots in self._written():
            block = os.pread(self._descriptor, len(slots) * _SLOT_SIZE, _HEADER_SIZE + slots[0] * _SLOT_SIZE)
            for slot, at in zip(slots, range(0, len(block) - _SLOT_SIZE + 1, _SLOT_SIZE), strict=False):
                if _U64.unpack_from(block, at)[0] > cursor:
                    read = self._read(slot)
                    if read is not None:
                        found.append(read)
        return sorted(found)

    def _written(self) -> Iterator[range]:
        """Yield the slots that lie in memory that was ever written, as the kernel knows it."""
        end = _HEADER_SIZE
        next_slot = 0
        while end < SIZE:
            try:
                begin = os.lseek(self._descriptor, end, os.SEEK_DATA)
            except OSError:  # nothing was written from there on
                return
            end = os.lseek(self._descriptor, begin, os.SEEK_HOLE)
            slots = range(
                max(next_slot, (begin - _HEADER_SIZE) // _SLOT_SIZE),
                min(SLOTS, -(-(end - _HEADER_SIZE) // _SLOT_SIZE)),
            )
            if slots:
                yield slots
                next_slot = slots[-1] + 1

    def _change(self, slot: int) -> int:
        block = os.pread(self._descriptor, 8, _HEADER_SIZE + slot * _SLOT_SIZE)
        return int.from_bytes(block, "little") if len(block) == 8 else 0

    def _read(self, slot: int) -> tuple[int, RawRecord] | None:
        for _ in range(_TRIES):
            block = os.pread(self._descriptor, _SLOT.size, _HEADER_SIZE + slot * _SLOT_SIZE)
            if len(block) < _SLOT.size:
                return None
            change = int.from_bytes(block[:8], "little")
            if change and change == self._change(slot):
                record = _parse(slot, block)
                return None if record is None else (change, record)
        return None


def _parse(slot: int, block: bytes) -> RawRecord | None:
    """Return a slot's record, or None if its fields make no sense."""
    (
        _, when, duration, sent, received, times, rule, port, kind, verdict, reason, is_open, version, length,
        packed, label, own_version, own_port, own, asked, shown_length, shown,
    ) = _SLOT.unpack(block)  # fmt: skip
    if kind >= len(KINDS) or verdict >= len(VERDICTS) or length > 253 or times == 0 or is_open > 1:
        return None
    # Of the kind "secret" it is the name; that of an echoed value is not known.
    wanted = KINDS[kind] == "request" or (shown_length > 0 and KINDS[kind] == "secret")
    if shown_length > MOST_REQUEST or bool(shown_length) is not wanted:
        return None
    # NaN fails the comparison too.
    if not 0 <= when < 2**40 or not 0 <= duration < 2**40 or max(sent, received) >= _LIMIT or rule < -1:
        return None
    name = label[:length]
    request = shown[:shown_length]
    if not all(0x21 <= byte <= 0x7E for byte in name) or not all(0x20 <= byte <= 0x7E for byte in request):
        return None
    inside = None
    if own_version in (4, 6) and own_port:
        inside = InsideEnds(_unpack_address(own_version, own), own_port, _unpack_address(own_version, asked))
    words = REASONS[reason] if reason < len(REASONS) else "failed"
    return RawRecord(
        slot, KINDS[kind], when, name.decode("ascii"), _unpack_address(version, packed), port,
        VERDICTS[verdict], words, rule, sent, received, duration, bool(is_open), times, inside,
        request.decode("ascii"),
    )  # fmt: skip


def _printable(text: str, most: int, *, space: bool = False) -> bytes:
    least = 0x20 if space else 0x21
    return bytes(byte if least <= byte <= 0x7E else 0x3F for byte in text.encode("ascii", "replace")[:most])


def _pack_address(address: str) -> tuple[int, bytes]:
    if not address:
        return 0, b""
    return (6, IPv6Address(address).packed) if ":" in address else (4, IPv4Address(address).packed)


def _unpack_address(version: int, packed: bytes) -> str:
    if version == 4:
        return str(IPv4Address(packed[:4]))
    return str(IPv6Address(packed)) if version == 6 else ""
