"""Encode plain data as bytes and decode it: the data that may come out of a sandbox.

None, bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set,
frozenset and dataclasses; nothing else, and no subclasses of these. The
encoder runs inside. The decoder reads bytes that hostile code may have
written: it executes nothing, makes only dataclasses that the caller has
declared, and checks memory, depth and work against bounds before it spends
them.

This file is also sent inside and executed there by any Python from 3.8 on, so
it imports nothing of Stockade.
"""

from __future__ import annotations

import struct
import sys
from time import thread_time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

#: How deeply values may be nested.
DEEPEST = 100
#: The bound on keys that can be chosen to share one hash: their number times their bytes, in all.
MOST_WORK = 1 << 30
#: Processor time to build dictionaries and sets, in seconds: for each key, and in addition for all.
KEY_TIME, SPARE_TIME = 5e-6, 1.0
#: So few keys are always fast, even if all share one hash.
FEW = 64
#: Bytes of the smallest object, of its place in a list, and of its place in a dictionary or a set.
OBJECT, PLACE, ENTRY = 64, 16, 100
#: Additional bytes of an empty set, which has room for eight, and of a dataclass for its fields.
SET, RECORD = 160, 128
#: From this size on, bytes are not copied if possible.
LARGE = 1 << 16
_FLOAT, _COMPLEX, _LONG = struct.Struct(">d"), struct.Struct(">dd"), struct.Struct(">Q")
_SEQUENCES: dict[bytes, Any] = {b"l": list, b"t": tuple, b"s": set, b"z": frozenset}
_TEXTS: dict[bytes, Any] = {b"b": bytes, b"a": bytearray}


class NotPlainDataError(TypeError):
    """A value is not plain data, or bytes do not encode a value."""


class Encoder:
    """Encodes values, up to `most` bytes in all."""

    def __init__(self, most: int) -> None:
        #: The output: large texts and bytes are separate pieces, which are not copied.
        self.pieces: list[Any] = [bytearray()]
        self._room = most
        self._most = most

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
            raise NotPlainDataError(f"the result is nested deeper than {DEEPEST} levels, or contains itself")
        elif kind is list or kind is tuple:
            if not self._packed(value, kind):
                self._items(b"l" if kind is list else b"t", value, depth)
        elif kind is set or kind is frozenset:
            self._items(b"s" if kind is set else b"z", value, depth)
        elif kind is dict:
            self._add(b"d" + _size(len(value)))
            for key, item in list(value.items()):
                self.value(key, depth + 1)
                self.value(item, depth + 1)
        else:
            self._record(value, kind, depth)

    def _record(self, value: Any, kind: type, depth: int) -> None:
        fields = kind.__dict__.get("__dataclass_fields__")
        if fields is None:
            raise NotPlainDataError(
                f"{kind.__module__}.{kind.__qualname__} is not plain data (numbers, text, bytes, lists, "
                "tuples, dicts, sets, dataclasses)"
            )
        named = [field.name for field in fields.values() if field.init and field._field_type.name == "_FIELD"]
        self._sized(b"o", f"{kind.__module__}:{kind.__qualname__}".encode())
        self._add(_size(len(named)))
        for name in named:
            self._sized(b"", name.encode())
            self.value(getattr(value, name), depth + 1)

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


def _size(number: int) -> bytes:
    return bytes([number]) if number < 255 else b"\xff" + _LONG.pack(number)


def pieces(value: Any, most: int) -> list[Any]:
    """Encode a value as bytes, in pieces."""
    encoder = Encoder(most)
    encoder.value(value)
    return encoder.pieces


def encode(value: Any, most: int) -> bytes:
    """Encode a value as bytes."""
    return b"".join(pieces(value, most))


class Decoder:
    """Decodes one value, which takes no more than about `room` bytes of memory.

    `types` are the dataclasses that it may make, by module and name.
    """

    def __init__(self, data: bytes | bytearray, room: int, types: dict[str, type] | None = None) -> None:
        self._data, self._at = data, 0
        self.room = room
        self._types = types or {}
        self._work, self._spare = MOST_WORK, SPARE_TIME

    def whole(self) -> Any:
        """Decode the value and check that no bytes follow it."""
        value = self._value(0)
        if self._at != len(self._data):
            raise NotPlainDataError("more bytes follow the value")
        return value

    def _value(self, depth: int) -> Any:
        letter = self._bytes(1)
        if letter in b"NTF":
            self._charge(PLACE)
            return {b"N": None, b"T": True, b"F": False}[letter]
        if depth > DEEPEST:
            raise NotPlainDataError("values are nested too deeply")
        self._charge(OBJECT)
        if letter == b"i":
            return int.from_bytes(self._sized(), "big", signed=True)
        if letter == b"f":
            return _FLOAT.unpack(self._bytes(8))[0]
        if letter == b"c":
            return complex(*_COMPLEX.unpack(self._bytes(16)))
        if letter == b"u":
            return self._text()
        if letter in _TEXTS:
            return _TEXTS[letter](self._sized())
        if letter == b"p":
            return self._packed()
        if letter == b"o":
            return self._record(depth)
        if letter == b"d":
            return self._dict(depth)
        if letter in _SEQUENCES:
            return self._sequence(letter, depth)
        raise NotPlainDataError("the bytes do not encode a value")

    def _sequence(self, letter: bytes, depth: int) -> Any:
        count, hashed = self._count(), letter in b"sz"
        self._charge(SET + count * ENTRY if hashed else count * 8)
        if not hashed:
            return _SEQUENCES[letter]([self._value(depth + 1) for _ in range(count)])
        items, costs = [], _Costs()
        for _ in range(count):
            items.append(self._key(depth, costs))
        self._spend(costs)
        return self._build_hashed(_SEQUENCES[letter], items)

    def _dict(self, depth: int) -> Any:
        count = self._count()
        self._charge(count * ENTRY)
        pairs, costs = [], _Costs()
        for _ in range(count):
            key = self._key(depth, costs)
            pairs.append((key, self._value(depth + 1)))
        self._spend(costs)
        return self._build_hashed(dict, pairs)

    def _build_hashed(self, kind: Any, items: list[Any]) -> Any:
        """Build a dictionary or a set, in bounded time: even small numbers can be chosen to collide."""
        built: Any = {} if kind is dict else set()
        begin, late = thread_time(), 0.0
        for start in range(0, len(items), FEW):
            try:
                built.update(items[start : start + FEW])
            except TypeError:
                raise NotPlainDataError("a key is not hashable") from None
            if start:
                late = thread_time() - begin - KEY_TIME * (start + FEW)
                if late > self._spare:
                    raise NotPlainDataError("the keys collide so often that they take too long")
        self._spare -= max(0.0, late)
        if len(built) != len(items):
            raise NotPlainDataError("a key occurs twice")
        return frozenset(built) if kind is frozenset else built

    def _key(self, depth: int, costs: _Costs) -> Any:
        begin = self._at
        key = self._value(depth + 1)
        if _is_costly(key):
            costs.count += 1
            costs.size += self._at - begin
        return key

    def _spend(self, costs: _Costs) -> None:
        self._work -= costs.count * costs.size
        if self._work < 0:
            raise NotPlainDataError("there are too many keys that could share one hash")

    def _record(self, depth: int) -> Any:
        name = self._sized().decode("utf-8", "replace")
        kind: Any = self._types.get(name)
        if kind is None:
            raise NotPlainDataError(
                f"{name[:200]} is a dataclass that was not declared: annotate the function's return type, "
                "or name it in `types`"
            )
        wanted = {field.name for field in kind.__dataclass_fields__.values() if field.init}
        values = {}
        count = self._count()
        self._charge(RECORD + count * PLACE)
        for _ in range(count):
            field = self._sized().decode("utf-8", "replace")
            if field not in wanted or field in values:
                raise NotPlainDataError(f"{name} has no field {field[:200]!r}")
            values[field] = self._value(depth + 1)
        try:
            return kind(**values)
        except Exception as error:
            raise NotPlainDataError(f"{name} rejects its fields: {error}") from error

    def _packed(self) -> Any:
        letter, kind = self._bytes(1), self._bytes(1)
        content = self._sized()
        if letter not in (b"q", b"d") or kind not in (b"l", b"t") or len(content) % 8:
            raise NotPlainDataError("the bytes do not encode a value")
        count = len(content) // 8
        self._charge(count * (32 + PLACE))
        numbers = struct.unpack(f">{count}{letter.decode()}", content)
        return list(numbers) if kind == b"l" else numbers

    def _text(self) -> str:
        content = self._sized()
        try:
            text = content.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            raise NotPlainDataError("text is not UTF-8") from None
        self._charge(sys.getsizeof(text) - len(content))
        return text

    def _sized(self) -> bytes:
        size = self._number()
        if size > len(self._data) - self._at:
            raise NotPlainDataError("a length exceeds the data")
        self._charge(size)
        return self._bytes(size)

    def _count(self) -> int:
        """How many values follow; each takes at least one byte."""
        count = self._number()
        if count > len(self._data) - self._at:
            raise NotPlainDataError("a length exceeds the data")
        return count

    def _number(self) -> int:
        number = self._bytes(1)[0]
        return number if number < 255 else _LONG.unpack(self._bytes(8))[0]

    def _bytes(self, size: int) -> bytes:
        end = self._at + size
        if end > len(self._data):
            raise NotPlainDataError("a length exceeds the data")
        source: Any = self._data if size < LARGE else memoryview(self._data)
        content = bytes(source[self._at : end])
        self._at = end
        return content

    def _charge(self, size: int) -> None:
        self.room -= size
        if self.room < 0:
            raise OverflowError("the value would take more memory than is allowed")


class _Costs:
    """The keys of one container that can be chosen to share one hash: their number and their bytes."""

    def __init__(self) -> None:
        self.count = self.size = 0


def _is_costly(key: object) -> bool:
    """Whether an attacker can choose many such keys with one hash, which makes a dictionary very slow."""
    return not isinstance(key, (str, bytes)) and not (isinstance(key, int) and abs(key) < 1 << 53)
