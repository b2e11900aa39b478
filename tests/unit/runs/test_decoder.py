"""Plain data as bytes and back: nothing is lost, and hostile bytes do no harm."""

from __future__ import annotations

import dataclasses
import functools
import math
import random
import struct
import sys
import time
import tracemalloc
from collections import Counter, OrderedDict, defaultdict, deque
from datetime import datetime, timedelta, timezone
from datetime import time as clock
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any
from zoneinfo import ZoneInfo

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stockade.inside import encoder
from stockade.inside.encoder import NotPlainDataError
from stockade.runs import decoder
from stockade.runs.decoder import Decoder
from support.points import Colour, Pair, Point, Trap, Way

MANY = 1 << 30
KNOWN: dict[str, type] = {f"support.points:{kind.__name__}": kind for kind in (Point, Pair, Colour, Way)}

#: Of every length in UTF-8, and what is no character at all.
texts = st.text(st.sampled_from("a\0\n\x7f\xe9\u20ac\U0001f600\ud800\udfff"))
zones = st.one_of(
    st.none(), st.timedeltas(timedelta(hours=-23), timedelta(hours=23)).map(timezone),
    st.sampled_from([ZoneInfo("Europe/Berlin"), ZoneInfo("America/New_York")]),
)  # fmt: skip
#: What the standard library has; all of it can be a key.
library = st.one_of(
    st.dates(), st.datetimes(timezones=zones), st.times(), st.timedeltas(), st.fractions(), st.uuids(),
    st.decimals(allow_nan=False), st.ip_addresses(), st.builds(range, *[st.integers(1, 1 << 70)] * 3),
    st.lists(st.sampled_from(["a", "é", "..", "b c"])).map(lambda parts: PurePosixPath(*parts)),
    st.text("ab.").map(lambda name: PureWindowsPath("C:/", name)), st.text("ab/.").map(Path),
)  # fmt: skip
arrays = st.builds(
    lambda dtype, shape, data: numpy.frombuffer(data, "u1").astype(dtype).reshape(shape),
    st.sampled_from(["?", "i1", ">i2", "<u4", "f2", ">f8", "c8", "c16", "M8[s]", "m8[ns]", "S3", ">U5"]),
    st.sampled_from([(6,), (2, 3), (3, 1, 2)]), st.binary(min_size=6, max_size=6),
)  # fmt: skip
scalars = arrays.map(lambda array: array.ravel()[0])
atoms = st.one_of(
    library, arrays, scalars,
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
        st.builds(Pair, inner, inner),
        st.dictionaries(texts, inner, max_size=4).map(OrderedDict), st.lists(texts, max_size=4).map(Counter),
        st.dictionaries(texts, inner, max_size=4).map(lambda pairs: defaultdict(list, pairs)),
        st.lists(inner, max_size=4).map(lambda items: deque(items, 7)), st.sets(library, max_size=3),
        st.sampled_from([Colour.RED, Way.UP | Way.LEFT]),
    ),
    max_leaves=12,
)  # fmt: skip


def back(value: Any) -> Any:
    return Decoder(encoder.encode(value, MANY), MANY, KNOWN).whole()


def same(one: Any, other: Any) -> bool:
    """Equal, and of the same types throughout."""
    if type(one) is not type(other):
        return False
    if isinstance(one, numpy.ndarray):
        alike = one.dtype == other.dtype and one.shape == other.shape
        return alike and one.tobytes() == other.tobytes() and bool(other.flags.writeable)
    if isinstance(one, numpy.generic):
        return bool(one.dtype == other.dtype) and one.tobytes() == other.tobytes()
    if isinstance(one, deque):
        return one.maxlen == other.maxlen and same(list(one), list(other))
    if isinstance(one, datetime | clock):
        return (one.replace(tzinfo=None), one.tzinfo, one.fold) == (
            other.replace(tzinfo=None), other.tzinfo, other.fold
        )  # fmt: skip
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        alike = list(map(type, one)) == list(map(type, other))
        return alike and all(same(one[key], other[key]) for key in one)
    if dataclasses.is_dataclass(one):
        return same(vars(one), vars(other))
    return bool(one == other)


@settings(max_examples=150, deadline=None)
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


def encoded_made(name: str, *args: Any) -> bytes:
    """What an encoder would send for a class of the standard library and these arguments."""
    parts = b"".join(encoder.encode(arg, MANY) for arg in args)
    return b"x" + bytes([len(name)]) + name.encode() + b"t" + bytes([len(args)]) + parts


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
    "a namedtuple that nobody declared": b"k\x0esupport.jobs:X\x00",
    "a namedtuple with a field too many": b"k\x13support.points:Pair\x03NNN",
    "a namedtuple that is a dataclass": b"k\x14support.points:Point\x01N",
    "a dataclass that is a namedtuple": b"o\x13support.points:Pair\x02\x05firstN\x06secondN",
    "a member that an enum has not": b"e\x15support.points:Colour\x04BLUEN",
    "a flag of which nobody knows": b"e\x12support.points:Way\x00i\x01\x40",
    "an enum that nobody declared": b"e\x0esignal:Signals\x06SIGINTN",
    "something opaque": b"?\x01x\x01y",
    "a class that is not in the table": b"x\x06systemt\x01u\x02ls",
    "arguments that are no tuple": b"x\x04datel\x03i\x01\x01i\x01\x01i\x01\x01",
    "a day that is none": b"x\x04datet\x03i\x02\x07\xe8i\x01\x02i\x01\x1e",
    "a date of texts": b"x\x04datet\x03u\x011u\x011u\x011",
    "a datetime whose zone is a text": encoded_made("datetime", 2024, 1, 1, 0, 0, 0, 0, "UTC", 0),
    "a zone that is a path": encoded_made("ZoneInfo", "../../../etc/localtime"),
    "a zone that is absolute": encoded_made("ZoneInfo", "/etc/localtime"),
    "a zone that is a directory": encoded_made("ZoneInfo", "Europe"),
    "a zone without a name": encoded_made("ZoneInfo", None),
    "a Decimal of letters": encoded_made("Decimal", "__import__('os')"),
    "a Decimal of a tuple": encoded_made("Decimal", (0, (1,), 10**18)),
    "a fraction of nothing": encoded_made("Fraction", 1, 0),
    "a fraction of a text": encoded_made("Fraction", "1e1000000000", 1),
    "a UUID that is too short": encoded_made("UUID", b"short"),
    "a path that is too long": encoded_made("PosixPath", "a" * (1 << 16 | 1)),
    "an address of a text": encoded_made("IPv4Address", "1" * 101),
    "a range without steps": encoded_made("range", 1, 2, 0),
    "a deque of a text": encoded_made("deque", "text", None),
    "a defaultdict that calls something": b"m\x0bdefaultdict\x04eval\x00",
    "a Counter that calls something": b"m\x07Counter\x03int\x00",
    "a mapping that is none": b"m\x08ChainMap\x00\x00",
    "an array of objects": b"n\x03|O8C\x01\x01\x08" + bytes(8),
    "an array of records": b"n\x0d[('a', '<i4')]C\x01\x01\x04" + bytes(4),
    "an array that is longer than its bytes": b"n\x03<f8C\x01" + LONG + b"\x08" + bytes(8),
    "an array without bytes and without end": b"n\x03<U0C\x01" + LONG + b"\x00",
    "an array of too many dimensions": b"n\x03|i1C\x28" + b"\x01" * 40 + b"\x01\x00",
    "an empty array that is too long": b"n\x03<f8C\x03\x00" + LONG * 2 + b"\x00",
    "an array of another order": b"n\x03|i1X\x01\x01\x01\x00",
    "truth values beyond truth": b"n\x03|b1C\x01\x01\x01\x02",
    "characters beyond Unicode": b"n\x03<U1C\x01\x01\x04\xff\xff\xff\xff",
    "a number of numpy without bytes": b"v\x03<f8\x00",
    "a number of numpy that is a text": b"v\x03|S1\x01a",
    "a long double": b"v\x04<f16\x10" + bytes(16),
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


def test_sets_of_tuples_may_be_keys() -> None:
    usual = {frozenset({(x, "a"), (x, "b"), (x, 1.5)}): x for x in range(2000)}
    assert decoded(encoder.encode(usual, MANY), MANY) == usual


@pytest.mark.parametrize(("width", "depth"), [(2, 17), (4, 9), (8, 6), (300, 2)])
def test_nested_sets_that_all_have_one_hash_are_refused_before_they_cost_anything(
    width: int, depth: int
) -> None:
    @functools.cache  # the same few sets, thousands of times
    def nested(depth: int, number: int = 0) -> bytes:
        if not depth:
            return encoder.encode((number + 1) * ((1 << 61) - 1), MANY)
        inner = [nested(depth - 1, one) for one in (*range(width - 1), width - 1 + number)]
        return b"z\xff" + struct.pack(">Q", width) + b"".join(inner)

    with pytest.raises(NotPlainDataError, match="one hash"):
        decoded(nested(depth), 1 << 30)


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


DENSE = 1 << 61  # the modulus of Python's hashes of numbers is one less
PRIME = DENSE - 1


def test_keys_that_are_slow_or_large_to_compare_are_refused() -> None:
    """Of each pair both have one hash, so a set compares them: hours, or terabytes."""
    long = encoder.encode(1 + PRIME * (1 << 8_000_000), MANY)
    for keys in (
        encoder.encode(Decimal(1), MANY) + long,
        encoder.encode(Fraction(1), MANY) + long,
        encoder.encode((Decimal(1),), MANY) + b"t\x01" + long,
        encoder.encode(numpy.int64(hash(range(10**12))), MANY) + encoder.encode(range(10**12), MANY),
        encoder.encode(numpy.int64(hash((1, 2))), MANY) + encoder.encode((1, 2), MANY),
        encoder.encode((numpy.int64(hash((1, 2))),), MANY) + encoder.encode(((1, 2),), MANY),
    ):
        for data in (b"s\x02" + keys, b"z\x02" + keys):
            with pytest.raises(NotPlainDataError, match="are keys beside"):
                decoded(data, MANY)
    assert decoded(b"s\x01" + long, MANY) and decoded(encoder.encode({Decimal(1), 2, "a"}, MANY), MANY)


def test_long_fractions_share_what_may_be_done() -> None:
    """The common divisor of two numbers of a megabyte takes minutes."""
    with pytest.raises(NotPlainDataError, match="long fractions"):
        decoded(encoded_made("Fraction", (1 << 800_000) + 1, 3**500_000), MANY)
    many = [Fraction(3**2000, 2**3000)] * 10_000
    with pytest.raises(NotPlainDataError, match="long fractions"):
        decoded(encoder.encode(many, MANY), MANY)
    assert decoded(encoder.encode(many[:100], MANY), MANY) == many[:100]


def test_a_decimal_of_many_digits_is_read_in_a_moment() -> None:
    begin = time.thread_time()
    assert decoded(encoder.encode(Decimal("9" * 1_000_000), MANY), MANY).adjusted() == 999_999
    assert time.thread_time() - begin < 10


def test_without_numpy_outside_the_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encoder.encode([numpy.arange(3)], MANY)
    monkeypatch.delitem(sys.modules, "numpy")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(NotPlainDataError, match="numpy is not installed outside"):
        decoded(data)
    (value,) = Decoder(data, MANY, opaque=lambda kind, text: (kind, text)).whole()
    assert value[0] == "numpy.array" and "shape (3,)" in value[1]


def test_numpy_is_not_taken_from_where_a_program_may_have_put_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    data = encoder.encode(numpy.arange(3), MANY)
    (tmp_path / "numpy.py").write_text("raise SystemExit('sprung')")
    monkeypatch.delitem(sys.modules, "numpy")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(NotPlainDataError, match="is no installed numpy"):
        decoded(data)


def checked(data: bytes) -> None:
    """Decode hostile bytes; nothing else may be raised, and little memory used."""
    room = 1 << 20
    tracemalloc.start()
    try:
        decoded(data, room)
    except (NotPlainDataError, OverflowError):
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 4 * room


letters = st.sampled_from([bytes([letter]) for letter in b"xmnvkeodszltpif?"])
words = st.sampled_from(
    [bytes([len(name)]) + name for name in (
        b"date", b"time", b"datetime", b"timedelta", b"timezone", b"ZoneInfo", b"Decimal", b"Fraction",
        b"UUID", b"PosixPath", b"deque", b"IPv6Network", b"range", b"str_", b"Counter", b"OrderedDict",
        b"defaultdict", b"<f8", b"|b1", b"<U3", b"<M8[ns]", b"support.points:Pair", b"support.points:Way",
    )]
)  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(st.lists(st.one_of(letters, words, st.binary(max_size=12), st.just(LONG)), max_size=12).map(b"".join))
def test_arbitrary_bytes_do_no_harm(data: bytes) -> None:
    checked(data)


@settings(max_examples=400, deadline=None)
@given(values, st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 255)), min_size=1, max_size=4))
def test_mutated_messages_do_no_harm(value: Any, changes: list[tuple[int, int]]) -> None:
    data = bytearray(encoder.encode(value, MANY))
    for place, byte in changes:
        data[place % len(data)] = byte
    checked(bytes(data))
