"""What one egress process hands to the next, which does not trust it."""

from __future__ import annotations

import random
import struct

from stockade.egress import inner_connections
from stockade.egress.decoders.dns import NameBudget
from stockade.egress.names import NAMES, SyntheticNames
from stockade.gate import wire


def test_names_keep_their_addresses() -> None:
    first, second = SyntheticNames(), SyntheticNames()
    names = [f"n{number}.example" for number in range(100)]
    before = {name: first.addresses(name) for name in names}
    second.read(first.written())
    assert {name: second.addresses(name) for name in names} == before
    assert second.addresses("new.example") == first.addresses("new.example")


def test_what_is_no_name_leaves_its_place_empty() -> None:
    first, second = SyntheticNames(), SyntheticNames()
    for name in ("one.example", "two.example", "three.example"):
        first.addresses(name)
    second.read(b"one.example\nTWO.example\xff\nthree.example")
    found = first.addresses("two.example")
    assert found is not None and second.name_of(found[0]) is None and second.name_of(found[1]) is None
    assert second.addresses("three.example") == first.addresses("three.example")
    assert second.addresses("two.example") not in (None, found)


def test_a_name_twice_counts_once() -> None:
    names = SyntheticNames()
    names.read(b"one.example\none.example\nOne.Example\n1.2.3.4\n..\n*")
    assert [names.name_of(f"198.18.0.{number}") for number in range(3, 9)] == ["one.example", *[None] * 5]


def test_too_many_names_are_left_out() -> None:
    names = SyntheticNames(limit=10)
    names.read(b"\n".join(b"n%d.example" % number for number in range(50)))
    assert names.addresses("n9.example") is not None and names.addresses("new.example") is None
    assert NAMES == 65_536


def test_any_bytes_can_be_read() -> None:
    chance = random.Random(18)
    for _ in range(300):
        names = SyntheticNames(limit=50)
        names.read(chance.randbytes(chance.randint(0, 400)))
        names.read(b"\n".join(chance.randbytes(chance.randint(0, 6)) for _ in range(20)))


def test_nothing_is_no_name() -> None:
    names = SyntheticNames()
    names.read(b"")
    assert names.written() == b"" and names.name_of("198.18.0.3") is None


def test_a_budget_goes_on() -> None:
    first = NameBudget(total=3, label=5, long_names=1)
    assert first.spend("a.example", "example") and first.spend("longer-label.example", "example")
    assert first.spent == (2, 1)
    second = NameBudget(total=3, label=5, long_names=1, spent=first.spent)
    assert not second.spend("another-long.example", "example")
    assert second.spend("b.example", "example") and not second.spend("c.example", "example")
    assert second.spent == (3, 1)


def test_requests_to_init_have_the_numbers_of_the_wire() -> None:
    ours = inner_connections
    assert ours.REQUEST.format == wire.REQUEST.format and wire.REPLY.size == ours.REPLY_SIZE
    assert wire.REPLY.format.startswith(ours.REPLY.format) and struct.calcsize(ours.REPLY.format) == 20
    assert (ours.REQUEST_CONNECT, ours.REPLY_CONNECTED, ours.CONNECT_ANY) == (
        wire.REQUEST_CONNECT,
        wire.REPLY_CONNECTED,
        wire.CONNECT_ANY,
    )
