"""The gate in C and its supervisor in Python mean the same by every number that they exchange."""

from __future__ import annotations

import ctypes
import re
import struct

import pytest

from stockade.gate import bwrap_operations, operations, wire
from stockade.sandbox.confine import _GateReport
from support.paths import GATE_SOURCES

COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
ENUM = re.compile(r"enum\s*\w*\s*\{([^}]*)\}")
DEFINE = re.compile(r"^[ \t]*#define[ \t]+(\w+)[ \t]+(\S.*)$", re.MULTILINE)
SUFFIX = re.compile(r"\b(0x[0-9a-fA-F]+|\d+)[uUlL]+\b")

Value = int | str


def evaluate(expression: str) -> Value:
    """A number, a shifted number or a string, as the header writes them."""
    text = SUFFIX.sub(r"\1", expression.strip())
    if text.startswith('"'):
        return text.strip('"')
    number, *shifts = (int(part, 0) for part in text.split("<<"))
    for by in shifts:
        number <<= by
    return number


def declared(header: str) -> dict[str, Value]:
    """Every constant of a C header, by its name."""
    code = COMMENT.sub("", header)
    found = {name: evaluate(value) for name, value in DEFINE.findall(code)}
    for body in ENUM.findall(code):
        following = 0
        for item in filter(None, map(str.strip, body.split(","))):
            name, _, value = item.partition("=")
            number = evaluate(value) if value else following
            assert isinstance(number, int)
            found[name.strip()] = number
            following = number + 1
    return found


def in_c() -> dict[str, Value]:
    return declared((GATE_SOURCES / "wire.h").read_text())


def in_python() -> dict[str, Value]:
    return {
        name: value
        for name, value in vars(wire).items()
        if name[0] != "_" and name.isupper() and isinstance(value, int | str)
    }


def operation_numbers() -> dict[str, int]:
    return {name: int(value) for name, value in in_python().items() if name.startswith("OP_")}


def test_both_sides_have_the_same_numbers() -> None:
    c, python = in_c(), in_python()
    assert sorted(c.keys() - python.keys()) == [], "numbers that only gate/src/wire.h has"
    assert sorted(python.keys() - c.keys()) == [], "numbers that only gate/wire.py has"
    assert {name: (c[name], python[name]) for name in c if c[name] != python[name]} == {}


def test_the_header_is_read_whole() -> None:
    text = """
    #define ONE 1u
    #define NAME "text"
    #define HIGH 0x100000000u
    enum kind { FIRST = 3, /* not THIS = 4, */ SECOND, };
    enum { ZERO, SIZE = 8 << 20 };
    """
    assert declared(text) == {
        "ONE": 1, "NAME": "text", "HIGH": 1 << 32, "FIRST": 3, "SECOND": 4, "ZERO": 0, "SIZE": 8 << 20,
    }  # fmt: skip
    words = set(
        re.findall(r"\b[A-Z][A-Z0-9]*_[A-Z0-9_]+\b", COMMENT.sub("", (GATE_SOURCES / "wire.h").read_text()))
    )
    assert words - in_c().keys() == {"STOCKADE_WIRE_H"}


@pytest.mark.parametrize(
    ("size", "record"),
    [
        (wire.RESIDENT_REQUEST_SIZE, wire.RESIDENT_REQUEST),
        (wire.REPLY_SIZE, wire.REPLY),
        (wire.REQUEST_SIZE, wire.REQUEST),
        (wire.EXEC_BODY_SIZE, wire.EXEC_BODY),
        (wire.PLAN_HEADER_SIZE, wire.PLAN_HEADER),
        (wire.PLAN_RECORD_SIZE, wire.PLAN_RECORD),
        (wire.ID_ROW_SIZE, wire.ID_ROW),
    ],
)
def test_a_record_is_as_long_as_its_structure(size: int, record: struct.Struct) -> None:
    assert record.size == size


def test_the_report_of_the_library_is_as_long_as_its_structure() -> None:
    assert ctypes.sizeof(_GateReport) == wire.CONFINED_SIZE


def test_every_operation_is_called_as_its_number_is() -> None:
    numbers = operation_numbers()
    assert numbers.pop("OP_END") == len(wire.OPERATIONS)
    called = {name.removeprefix("OP_").lower(): number for name, number in numbers.items()}
    assert called == {name: number for number, name in enumerate(wire.OPERATIONS) if number}


def test_every_number_of_an_operation_has_its_class() -> None:
    numbers = operation_numbers()
    del numbers["OP_END"]
    modules = operations.__name__, bwrap_operations.__name__
    kinds = [kind.kind for kind in operations.Op.__subclasses__() if kind.__module__ in modules]
    assert sorted(kinds) == sorted(numbers.values())
