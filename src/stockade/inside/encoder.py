"""Encode plain data as bytes: the data that may come out of a sandbox.

None, bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set,
frozenset; the values of the standard library in `MAKERS` and `MAPPINGS`; arrays
and scalars of numpy; dataclasses, namedtuples and members of an Enum. Nothing
else, and no subclasses of these. `runs/decoder.py` reads the bytes outside.

The host sends this file inside as text, and any Python from 3.8 on executes it
there, so it imports nothing of Stockade, and no module that the function has
not loaded itself.
"""

from __future__ import annotations

import struct
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

#: How deeply values may be nested.
DEEPEST = 100
#: From this size on, bytes are not copied if possible.
LARGE = 1 << 16
#: The longest name of the type of an opaque value, in characters.
LONGEST_NAME = 1000
_FLOAT, _COMPLEX, _LONG = struct.Struct(">d"), struct.Struct(">dd"), struct.Struct(">Q")


def _date(value: Any) -> tuple[int, int, int]:
    return value.year, value.month, value.day


def _clock(value: Any) -> tuple[int, int, int, int]:
    return value.hour, value.minute, value.second, value.microsecond


def _text(value: Any) -> tuple[str]:
    return (str(value),)


#: Classes of the standard library by name: their module, and the arguments that make an equal value.
MAKERS: dict[str, tuple[str, Callable[[Any], tuple[Any, ...]]]] = {
    "range": ("builtins", lambda value: (value.start, value.stop, value.step)),
    "date": ("datetime", _date),
    "time": ("datetime", lambda value: (*_clock(value), value.tzinfo, value.fold)),
    "datetime": ("datetime", lambda value: (*_date(value), *_clock(value), value.tzinfo, value.fold)),
    "timedelta": ("datetime", lambda value: (value.days, value.seconds, value.microseconds)),
    "timezone": ("datetime", lambda value: value.__getinitargs__()),
    "ZoneInfo": ("zoneinfo", lambda value: (value.key,)),
    "Decimal": ("decimal", _text),
    "Fraction": ("fractions", lambda value: (value.numerator, value.denominator)),
    "UUID": ("uuid", lambda value: (value.bytes,)),
    "PosixPath": ("pathlib", _text),
    "PurePosixPath": ("pathlib", _text),
    "PureWindowsPath": ("pathlib", _text),
    "deque": ("collections", lambda value: (list(value), value.maxlen)),
    "IPv4Address": ("ipaddress", _text),
    "IPv6Address": ("ipaddress", _text),
    "IPv4Network": ("ipaddress", _text),
    "IPv6Network": ("ipaddress", _text),
    "IPv4Interface": ("ipaddress", _text),
    "IPv6Interface": ("ipaddress", _text),
}
#: Dictionaries of `collections`.
MAPPINGS = ("Counter", "OrderedDict", "defaultdict")
#: What a defaultdict may make of a missing key.
FACTORIES = (bool, bytes, dict, float, int, list, set, str, tuple)
#: The kinds of numpy's types, and the largest size of one number: long doubles differ between machines.
NUMBERS = {"b": 1, "i": 8, "u": 8, "f": 8, "c": 16, "m": 8, "M": 8, "S": sys.maxsize, "U": sys.maxsize}


class NotPlainDataError(TypeError):
    """A value is not plain data, or bytes do not encode a value."""


class Encoder:
    """Encodes values, up to `most` bytes in all.

    Anything that is not plain data is an error, or with `opaque`, which returns its text, a type and a text.
    """

    def __init__(self, most: int, opaque: Callable[[Any], str] | None = None) -> None:
        #: The output: large texts and bytes are separate pieces, which are not copied.
        self.pieces: list[Any] = [bytearray()]
        self._room = most
        self._most = most
        self._opaque = opaque

    def value(self, value: Any, depth: int = 0) -> None:
        """Encode one value."""
        kind = type(value)
        if value is None or kind is bool:
            self._add(b"N" if value is None else b"T" if value else b"F")
        elif kind is int:
            self._sized(b"i", value.to_bytes(value.bit_length() // 8 + 1, "big", signed=True))
        elif kind is float:
            self._add(b"f" + _FLOAT.pack(value))
        elif kind is complex:
            self._add(b"c" + _COMPLEX.pack(value.real, value.imag))
        elif kind is str:
            self._sized(b"u", value.encode("utf-8", "surrogatepass"))
        elif kind is bytes or kind is bytearray:
            self._sized(b"b" if kind is bytes else b"a", value)
        elif depth >= DEEPEST:
            self._refuse(value, f"the result is nested deeper than {DEEPEST} levels, or contains itself")
        elif kind is list or kind is tuple:
            if not self._packed(value, kind):
                self._items(b"l" if kind is list else b"t", value, depth)
        elif kind is set or kind is frozenset:
            self._items(b"s" if kind is set else b"z", value, depth)
        elif kind is dict:
            self._add(b"d")
            self._pairs(value, depth)
        else:
            self._other(value, kind, depth)

    def _other(self, value: Any, kind: type, depth: int) -> None:
        name = kind.__qualname__
        if name in MAKERS and _is(kind, MAKERS[name][0], name):
            self._sized(b"x", name.encode())
            self._items(b"t", MAKERS[name][1](value), depth)
        elif name in MAPPINGS and _is(kind, "collections", name):
            self._mapping(value, name, depth)
        elif kind.__module__ == "numpy" and "numpy" in sys.modules:
            self._numpy(value, kind, depth)
        elif self._opaque is not None:
            self._refuse(value, "")
        elif "__dataclass_fields__" in kind.__dict__:
            self._record(value, kind, depth)
        elif issubclass(kind, tuple) and isinstance(getattr(kind, "_fields", None), tuple):
            self._sized(b"k", _name(kind))
            self._items(b"", value, depth)
        elif "enum" in sys.modules and issubclass(kind, sys.modules["enum"].Enum):
            self._sized(b"e", _name(kind))
            self._sized(b"", (value._name_ or "").encode())  # a combination of flags may have no name
            self.value(value._value_ if isinstance(value._value_, int) else None, depth + 1)
        else:
            self._refuse(value, f"{kind.__module__}.{name} is not plain data")

    def _refuse(self, value: Any, why: str) -> None:
        if self._opaque is None:
            raise NotPlainDataError(why)
        kind = type(value)
        self._sized(b"?", f"{kind.__module__}.{kind.__qualname__}"[:LONGEST_NAME].encode("utf-8", "replace"))
        text = self._opaque(value)[: max(0, self._room // 2)]
        self._sized(b"", text.encode("utf-8", "replace"))

    def _record(self, value: Any, kind: Any, depth: int) -> None:
        fields = kind.__dataclass_fields__.values()
        named = [field.name for field in fields if field.init and field._field_type.name == "_FIELD"]
        self._sized(b"o", _name(kind))
        self._add(_size(len(named)))
        for name in named:
            self._sized(b"", name.encode())
            self.value(getattr(value, name), depth + 1)

    def _mapping(self, value: Any, name: str, depth: int) -> None:
        factory = getattr(value, "default_factory", None)
        if factory is not None and factory not in FACTORIES:
            self._refuse(value, f"a defaultdict that calls {factory!r} is not plain data: return dict(...)")
            return
        self._sized(b"m", name.encode())
        self._sized(b"", b"" if factory is None else factory.__name__.encode())
        self._pairs(value, depth)

    def _numpy(self, value: Any, kind: type, depth: int) -> None:
        numpy: Any = sys.modules["numpy"]
        dtype = getattr(value, "dtype", None)
        if not (kind is numpy.ndarray or issubclass(kind, numpy.generic)) or dtype is None:
            self._refuse(value, f"numpy.{kind.__qualname__} is not plain data")
        elif dtype.itemsize > NUMBERS.get(dtype.kind, -1) or (kind is numpy.ndarray and not dtype.itemsize):
            self._refuse(value, f"a numpy {kind.__qualname__} of type {dtype} is not plain data")
        elif kind is numpy.ndarray:
            self._array(value)
        elif dtype.kind in "SU":
            self._sized(b"x", kind.__name__.encode())
            self._items(b"t", (bytes(value) if dtype.kind == "S" else str(value),), depth)
        else:
            self._sized(b"v", dtype.str.encode())
            self._sized(b"", value.tobytes())

    def _array(self, array: Any) -> None:
        by_columns = array.flags.f_contiguous and not array.flags.c_contiguous
        self._sized(b"n", array.dtype.str.encode())
        self._add((b"F" if by_columns else b"C") + _size(array.ndim))
        for length in array.shape:
            self._add(_size(length))
        rows = array.T if by_columns else array
        rows = rows if rows.flags.c_contiguous else rows.copy()
        self._sized(b"", memoryview(rows.reshape(-1).view("u1")))

    def _packed(self, value: Any, kind: type) -> bool:
        """Encode many numbers of one type at once; False if the value is something else."""
        first = type(value[0]) if len(value) > 8 else None
        if first not in (int, float) or not all(type(item) is first for item in value):
            return False
        letter = "q" if first is int else "d"
        try:
            packed = struct.pack(f">{len(value)}{letter}", *value)
        except struct.error:
            return False
        self._sized(b"p" + letter.encode() + (b"l" if kind is list else b"t"), packed)
        return True

    def _items(self, letter: bytes, items: Any, depth: int) -> None:
        self._add(letter + _size(len(items)))
        for item in list(items):
            self.value(item, depth + 1)

    def _pairs(self, pairs: Any, depth: int) -> None:
        self._add(_size(len(pairs)))
        for key, item in list(pairs.items()):
            self.value(key, depth + 1)
            self.value(item, depth + 1)

    def _sized(self, letter: bytes, content: Any) -> None:
        self._add(letter + _size(len(content)))
        self._add(content)

    def _add(self, data: Any) -> None:
        self._room -= len(data)
        if self._room < 0:
            raise OverflowError(f"the result takes more than {self._most} bytes")
        if len(data) < LARGE or isinstance(data, bytearray):  # a bytearray may change later
            self.pieces[-1] += data
        else:
            self.pieces += [data, bytearray()]


def _is(kind: type, module: str, name: str) -> bool:
    """Whether a class is that of a module, and not another one of the same name."""
    return getattr(sys.modules.get(module), name, None) is kind


def _name(kind: type) -> bytes:
    return f"{kind.__module__}:{kind.__qualname__}".encode()


def _size(number: int) -> bytes:
    return bytes([number]) if number < 255 else b"\xff" + _LONG.pack(number)


def pieces(value: Any, most: int, opaque: Callable[[Any], str] | None = None) -> list[Any]:
    """Encode a value as bytes, in pieces."""
    encoder = Encoder(most, opaque)
    encoder.value(value)
    return encoder.pieces


def encode(value: Any, most: int, opaque: Callable[[Any], str] | None = None) -> bytes:
    """Encode a value as bytes."""
    return b"".join(pieces(value, most, opaque))


def encode_opaque(value: Any, text: str) -> bytes:
    """Encode only the type of a value, and a text instead of its own."""
    encoder = Encoder(sys.maxsize, lambda _: text)
    encoder._refuse(value, "")
    return b"".join(encoder.pieces)
