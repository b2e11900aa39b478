"""Plain data as bytes and back: nothing is lost, and hostile bytes do no harm."""

from __future__ import annotations

import math
import random
import struct
import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stockade.inside import encoder
from stockade.inside.encoder import NotPlainDataError
from stockade.runs import decoder
from stockade.runs.decoder import Decoder
from support.points import Point, Trap

MANY = 1 << 30
KNOWN: dict[str, type] = {"support.points:Point": Point}

#: Of every length in UTF-8, and what is no character at all.
texts = st.text(st.sampled_from("a\0\n\x7f\xe9\u20ac\U0001f600\ud800\udfff"))
atoms = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(min_value=-(1 << 4000), max_value=1 << 4000),
    st.floats(allow_nan=False), st.complex_numbers(allow_nan=False), st.binary(), st.binary().map(bytearray),
    texts,
)  # fmt: skip
keys = st.recursive(
    st.one_of(st.none(), st.integers(), st.floats(allow_nan=False), texts, st.binary()),
    lambda inner: st.one_of(st.tuples(inner, inner), st.frozensets(inner, max_size=3)),
    max_leaves=4,
)
values = st.recursive(
    atoms,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4), st.sets(keys, max_size=4), st.frozensets(keys, max_size=4),
        st.lists(st.integers(), min_size=9, max_size=12), st.builds(Point, inner),
    ),
    max_leaves=12,
)  # fmt: skip


def back(value: Any) -> Any:
    return Decoder(encoder.encode(value, MANY), MANY, KNOWN).whole()


def same(one: Any, other: Any) -> bool:
    """Equal, and of the same types throughout."""
    if type(one) is not type(other):
        return False
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        alike = list(map(type, one)) == list(map(type, other))
        return alike and all(same(one[key], other[key]) for key in one)
    return bool(one == other)


@settings(max_examples=30)
@given(values)
def test_what_goes_in_comes_out(value: Any) -> None:
    assert same(back(value), value)


def test_numbers_that_are_not_equal_to_themselves() -> None:
    found = back([math.nan, -math.nan, math.inf, -math.inf, -0.0, complex(0, math.nan)])
    assert struct.pack(">3d", *found[2:5]) == struct.pack(">3d", math.inf, -math.inf, -0.0)
    assert math.isnan(found[0]) and math.isnan(found[1]) and math.isnan(found[5].imag)


def test_many_numbers_travel_packed() -> None:
    assert len(encoder.encode(list(range(1000)), MANY)) < 8020
    for value in ([1 << 63] * 9, [True] * 9, [1.5] * 9, tuple(range(9)), [1] * 8 + [1.0], [-(1 << 63)] * 9):
        assert same(back(value), value)


def test_anything_else_is_refused_inside() -> None:
    for value in (object(), int, print, type("I", (int,), {})(3), {1: {2: object()}}, iter([])):
        with pytest.raises(NotPlainDataError, match="not plain data"):
            encoder.encode(value, MANY)


def test_values_in_themselves_and_too_large_ones_are_refused_inside() -> None:
    nested: list[Any] = []
    nested.append(nested)
    with pytest.raises(NotPlainDataError, match="nested deeper"):
        encoder.encode(nested, MANY)
    twice: Any = "x" * 100
    for _ in range(60):
        twice = [twice, twice]
    with pytest.raises(OverflowError, match="more than 1000 bytes"):
        encoder.encode(twice, 1000)


def decoded(data: bytes, room: int = 1 << 20) -> Any:
    return Decoder(data, room, KNOWN).whole()


LONG = b"\xff" + struct.pack(">Q", (1 << 64) - 1)
BAD = {
    "nothing": b"",
    "an unknown letter": b"?",
    "something behind": b"NN",
    "a length beyond the end": b"b\x05abc",
    "a huge length": b"b" + LONG,
    "a huge list": b"l" + LONG,
    "a huge dictionary": b"d" + LONG + b"NN",
    "a huge record": b"o" + LONG,
    "half a number": b"f\0\0",
    "half a length": b"u\xff\0\0",
    "text that is none": b"u\x01\xff",
    "numbers that do not fit": b"pql\x07aaaaaaa",
    "packed nonsense": b"pxl\x08aaaaaaaa",
    "a key that is none": b"d\x01l\x00N",
    "a key that is there twice": b"d\x02NTNF",
    "a member that is none": b"s\x01d\x00",
    "too deep": b"l\x01" * 5000 + b"N",
    "a class that nobody declared": b"o\x0esupport.jobs:X\x00",
    "a field that it has not": b"o\x14support.points:Point\x01\x04evilN",
    "a field twice": b"o\x14support.points:Point\x02\x01xN\x01xN",
    "a field that is not set from outside": b"o\x14support.points:Point\x02\x01xN\x04madei\x01\x01",
    "a field too few": b"o\x14support.points:Point\x00",
}


def test_hostile_bytes_are_refused() -> None:
    for what, data in BAD.items():
        try:
            value = decoded(data)
        except (NotPlainDataError, OverflowError):
            continue
        pytest.fail(f"{what}: {value!r}")


def test_no_byte_that_is_changed_or_cut_does_more_than_to_be_refused_or_to_mean_something_else() -> None:
    chance = random.Random(1)
    whole = encoder.encode([1, -5.0, "text", {"a": (1, 2)}, {3}, b"x" * 300, Point(1), list(range(20))], MANY)
    for _ in range(1500):
        data = bytearray(whole[: chance.randrange(len(whole))] if chance.random() < 0.3 else whole)
        for _ in range(chance.randrange(3) + 1):
            if data:
                data[chance.randrange(len(data))] = chance.randrange(256)
        try:
            decoded(bytes(data))
        except (NotPlainDataError, OverflowError):
            continue


def many(letters: bytes, number: int, content: bytes) -> bytes:
    return letters + b"\xff" + struct.pack(">Q", number) + content


def test_a_few_bytes_cannot_become_much_memory() -> None:
    for data in (
        many(b"l", 200000, b"l\x00" * 200000),
        many(b"l", 200000, b"N" * 200000),
        many(b"d", 100000, b"NN" * 100000),
        many(b"u", 600003, b"a" * 600000 + "€".encode()),
        many(b"pdt", 800000, bytes(800000)),
    ):
        tracemalloc.start()
        try:
            with pytest.raises((OverflowError, NotPlainDataError)):
                decoded(data, 1 << 20)
            assert tracemalloc.get_traced_memory()[1] < 6 << 20
        finally:
            tracemalloc.stop()


def test_keys_that_all_have_one_hash_are_refused_before_they_cost_anything() -> None:
    prime = (1 << 61) - 1  # every multiple of it has the hash 0
    evil = {number * prime << 53: None for number in range(300)}
    assert decoded(encoder.encode(evil, MANY)) == evil
    data = b"".join(encoder.encode(number * prime << 53, MANY) + b"N" for number in range(20000))
    with pytest.raises(NotPlainDataError, match="one hash"):
        decoded(b"d\xff" + struct.pack(">Q", 20000) + data, MANY)
    usual = {(x, y): x for x in range(60) for y in range(60)}
    assert decoded(encoder.encode(usual, MANY), MANY) == usual


def chain(bits: int, most: int) -> list[int]:
    """Small numbers that fill the places of a dictionary as it goes along, and others that go there too."""
    mask, places, found = (1 << bits) - 1, {}, 0
    for number in range(most * 9 // 10):
        found = (5 * found + 1) & mask
        places[found] = number
    made, chance = dict.fromkeys(places), random.Random(1)
    while len(made) < most:
        key = perturb = chance.randrange(1 << bits + 4)
        place = key & mask
        while place in places and perturb:
            perturb >>= 5
            place = (place * 5 + perturb + 1) & mask
        if places.get(place, most) < most // 2:
            made[key] = None
    return list(made)


def test_small_numbers_that_look_for_one_anothers_place_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A million of them would take an hour."""
    monkeypatch.setattr(decoder, "KEY_TIME", 5e-7)
    monkeypatch.setattr(decoder, "SPARE_TIME", 0.003)
    usual = {number * 7919: None for number in range(10000)}
    assert decoded(encoder.encode(usual, MANY), MANY) == usual
    data = b"".join(encoder.encode(key, MANY) + b"N" for key in chain(14, 10000))
    with pytest.raises(NotPlainDataError, match="take too long"):
        decoded(many(b"d", 10000, data), MANY)


def test_a_class_is_made_only_if_it_was_declared(tmp_path: Any) -> None:
    trap: Any = Trap.__new__(Trap)
    trap.path = str(tmp_path / "sprung")
    with pytest.raises(NotPlainDataError, match="was not declared"):
        back(trap)
    assert not list(tmp_path.iterdir())
    Decoder(encoder.encode(trap, MANY), MANY, {"support.points:Trap": Trap}).whole()
    assert list(tmp_path.iterdir())  # the control: it would have
