"""What an observer has written down, decoded: also where the bytes are not what an observer writes."""

from __future__ import annotations

import errno
import random
import struct

from stockade.gate import wire
from stockade.observe import records
from stockade.observe.access import Access, Action
from support.mutation import run_fuzzer


def record(
    action: int,
    target: bytes,
    other: bytes = b"",
    *,
    error: int = 0,
    program: int = 0,
    count: int = 1,
    call: int = 0,
) -> bytes:
    size = (wire.OBSERVATION_SIZE + len(target) + len(other) + 7) & ~7
    head = wire.OBSERVATION.pack(size, action, 0, error, program, count, call, len(target), len(other))
    return (head + target + other).ljust(size, b"\0")


def memory(*written: bytes, missed: int = 0, unread: int = 0, used: int | None = None) -> bytes:
    body = b"".join(written)
    magic = wire.OBSERVATIONS_MAGIC.encode()
    return wire.OBSERVATIONS.pack(magic, len(body) if used is None else used, missed, unread) + body


CAT = record(wire.OBSERVED_PROGRAM, b"/usr/bin/cat")
FIRST = wire.OBSERVATIONS_HEADER_SIZE


def test_an_access_has_its_program_and_a_normal_path() -> None:
    written = record(wire.OBSERVED_READ, b"/tmp/./a/../b//c", error=2, program=FIRST, count=3)
    (access,) = records.decode(memory(CAT, written)).accesses
    assert access == Access(
        action=Action.READ, target="/tmp/b/c", program="/usr/bin/cat", error=errno.ENOENT, count=3
    )


def test_both_names_of_a_rename() -> None:
    (access,) = records.decode(memory(record(wire.OBSERVED_RENAME, b"/a", b"/b"))).accesses
    assert (access.action, access.target, access.other) == (Action.RENAME, "/a", "/b")


def test_a_call_is_named_and_those_that_mount_are_told_apart() -> None:
    import pyseccomp

    numbers = [pyseccomp.resolve_syscall(pyseccomp.Arch.NATIVE, name) for name in ("ptrace", "fsopen")]
    calls = [record(wire.OBSERVED_CALL, b"", error=1, call=number) for number in (*numbers, 99999)]
    found = [(one.action, one.target) for one in records.decode(memory(*calls)).accesses]
    assert found == [(Action.CALL, "ptrace"), (Action.MOUNT, "fsopen"), (Action.CALL, "call 99999")]


def test_only_what_happened_since_a_moment() -> None:
    before = memory(CAT, record(wire.OBSERVED_READ, b"/a", count=2), missed=1)
    counts = {place: fields[5] for place, fields in records._records(before, len(before))}
    later = memory(
        CAT,
        record(wire.OBSERVED_READ, b"/a", count=5),
        record(wire.OBSERVED_READ, b"/b"),
        missed=1,
        unread=4,
    )
    found = records.decode(later, records.Mark(counts, missed=1))
    assert [(one.target, one.count) for one in found.accesses] == [("/a", 3), ("/b", 1)]
    assert found.cut == "4 calls came from programs whose memory the observer cannot read"


def test_what_did_not_fit_is_said() -> None:
    assert records.decode(memory(missed=7)).cut == "7 accesses did not fit in the memory of the observer"


def test_memory_that_no_observer_has_written_is_empty() -> None:
    for content in (b"", bytes(10), bytes(4096)):
        assert records.decode(content) == records.Observations()


def test_a_record_that_is_impossible_ends_the_list() -> None:
    good, bad = record(wire.OBSERVED_READ, b"/a"), bytearray(record(wire.OBSERVED_READ, b"/b"))
    for size in (0, 8, 33, 1 << 31):
        struct.pack_into("=I", bad, 0, size)
        assert len(records.decode(memory(good, bytes(bad), good)).accesses) == 1
    assert len(records.decode(memory(good, used=1 << 62)).accesses) == 1


def test_no_bytes_make_the_decoder_fail() -> None:
    corpus = [
        memory(
            CAT,
            record(wire.OBSERVED_READ, b"/a", error=2, program=FIRST),
            record(wire.OBSERVED_RENAME, b"/x/\xff", b"../y"),
            record(wire.OBSERVED_CALL, b"", call=165, error=1),
            record(wire.OBSERVED_CONNECT, b"[::1]:80", error=101),
        )
    ]

    def examine(data: bytes, chance: random.Random) -> bool:
        found = records.decode(data)
        assert len(found.accesses) <= len(data) // wire.OBSERVATION_SIZE
        assert sum(len(one.target) + len(one.other) for one in found.accesses) <= len(data) + 20 * len(
            found.accesses
        )
        return bool(found.accesses)

    run_fuzzer(corpus, examine, (b"\0", b"\xff\xff\xff\xff", b"/", b"..", b"\x20\0\0\0"), 1.0)
