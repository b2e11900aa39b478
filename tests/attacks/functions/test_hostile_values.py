"""Hostile encodings of each type that may come back: refused; nothing is executed or imported for them."""

from __future__ import annotations

import struct
import sys
import time
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from stockade.functions import FunctionError
from stockade.functions.sandboxed_function import call
from stockade.inside import encoder
from support import jobs

PRIME = (1 << 61) - 1
ENDLESS = b"\xff" + struct.pack(">Q", (1 << 64) - 1)


def encoded(value: Any) -> bytes:
    return encoder.encode(value, 1 << 30)


def made(name: str, *args: Any) -> bytes:
    parts = b"".join(map(encoded, args))
    return b"x" + bytes([len(name)]) + name.encode() + b"t" + bytes([len(args)]) + parts


def nested(depth: int, number: int = 0) -> bytes:
    """Sets of four sets, which differ in their last number only; all of them have one hash."""
    if not depth:
        return encoded((number + 1) * PRIME + 7)
    return b"z\4" + b"".join(nested(depth - 1, one) for one in (0, 1, 2, 3 + number))


HOSTILE = {
    "a class by name": (made("Popen", "ls"), "do not encode a value"),
    "a date": (made("date", 1 << 100_000, 1, 1), "do not encode a date"),
    "a timedelta": (made("timedelta", 10**12, 0, 0), "do not encode a timedelta"),
    "a zone outside": (made("ZoneInfo", "../../../../etc/shadow"), "no usable name"),
    "a module as a zone": (made("ZoneInfo", "os.path"), "no usable name"),
    "a Decimal": (made("Decimal", "1e" + "9" * 40), "wrong digits"),
    "a Fraction": (made("Fraction", (1 << 8_000_000) + 1, (1 << 7_999_999) - 1), "long fractions"),
    "digits as a key": (b"s\2" + encoded(Decimal(1)) + encoded(1 + (PRIME << 8_000_000)), "are keys beside"),
    "sets of sets": (nested(9), "one hash"),
    "a UUID": (made("UUID", bytes(1 << 20)), "do not encode a UUID"),
    "a path": (made("PosixPath", "a/" * (1 << 20)), "too long"),
    "an address": (made("IPv6Network", ":" * 1000), "too long"),
    "a range": (made("range", 1, 2, "3"), "wrong parts"),
    "a deque": (made("deque", [1], -1), "do not encode a deque"),
    "a factory": (b"m\x0bdefaultdict\x04exec\x00", "do not encode a value"),
    "a Counter": (b"m\x07Counter\x00" + ENDLESS, "a length exceeds"),
    "objects": (b"n\x03|O8C\x01\x01\x08" + bytes(8), "do not encode an array"),
    "an endless array": (b"n\x03<f8C\x02" + ENDLESS * 2 + b"\x08" + bytes(8), "do not encode a numpy array"),
    "an array of nothing": (b"n\x03<U0C\x01" + ENDLESS + b"\x00", "do not encode an array"),
    "text without end": (b"n\x0b<U999999999C\x01\x00\x00", "do not encode a numpy array"),
    "a unit of zero": (
        b"s\2v\x07<m8[0s]\x08\5" + bytes(7) + b"v\x06<m8[s]\x08" + bytes(8),
        "a number of numpy",
    ),
    "an array of such": (b"n\x07<M8[0s]C\x01\x01\x08\5" + bytes(7), "do not encode an array"),
    "characters": (b"n\x03<U1C\x01\x01\x04\xff\xff\xff\xff", "do not encode a numpy array"),
    "a namedtuple": (b"k\x17subprocess:CompletedJob\x01N", "was not declared"),
    "an enum": (b"e\x0esignal:Signals\x07SIGKILLi\x01\x09", "was not declared"),
    "an opaque value": (b"?\x01a\x01b", "not plain data"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_encoding_is_refused_soon(what: str) -> None:
    data, why = HOSTILE[what]
    begin = time.process_time()
    with pytest.raises(FunctionError, match=why):
        call(jobs.hostile, ("early", data), grace=0, timeout=60)
    assert time.process_time() - begin < 20


def test_nothing_that_a_sandbox_names_or_leaves_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that may write where the caller's modules lie leaves its own ones there."""
    mark = tmp_path / "mark"
    for name in ("numpy", "fractions", "zoneinfo", "planted"):
        (tmp_path / f"{name}.py").write_text(f"open({str(mark)!r}, 'w').write(__name__)")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.partition(".")[0] == "numpy"]:
        monkeypatch.delitem(sys.modules, name)
    for data in (
        b"n\x03<f8C\x01\x01\x08" + bytes(8), b"v\x03<f8\x08" + bytes(8), made("str_", "x"),
        b"k\x0cplanted:Pair\x01N", b"o\x0cplanted:Pair\x00", b"e\x0cplanted:Pair\x01AN",
    ):  # fmt: skip
        with pytest.raises(FunctionError):
            call(jobs.hostile, ("early", data), grace=0, timeout=60)
    for data in (made("Fraction", 1, 2), made("ZoneInfo", "Europe/Berlin")):
        call(jobs.hostile, ("early", data), grace=0, timeout=60)
    assert not mark.exists()
    __import__("planted")  # the control: it would have
    assert mark.read_text() == "planted"
    del sys.modules["planted"]
