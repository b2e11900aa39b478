"""Plain data as bytes and back: what may come out of a sandbox.

None, bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set,
frozenset and dataclasses; nothing else, and no subclasses of these. The
encoder is used inside. The decoder meets whatever hostile code has written:
it executes nothing, makes only dataclasses that the caller has declared, and
bounds the memory, the depth and the work before it spends them.

This file is also sent inside and executed there, by whatever Python that is
(3.8 or newer), so it imports nothing of Stockade.
"""

from __future__ import annotations

import struct
import sys
from time import thread_time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

#: How deep values may be in one another.
DEEPEST = 100
#: What keys may cost that somebody can choose to have one hash: their number times their bytes, in all.
MOST_WORK = 1 << 30
#: What it may take the processor to make dictionaries and sets, in seconds: for each key, and besides in all.
KEY_TIME, SPARE_TIME = 5e-6, 1.0
#: So few keys take no time, however they are chosen.
FEW = 64
#: What the smallest object takes, its place in a list, and its place in a dictionary.
OBJECT, PLACE, ENTRY = 64, 16, 100
#: So many bytes are not copied where that can be helped.
LARGE = 1 << 16
_FLOAT, _COMPLEX, _LONG = struct.Struct(">d"), struct.Struct(">dd"), struct.Struct(">Q")
_SEQUENCES: dict[bytes, Any] = {b"l": list, b"t": tuple, b"s": set, b"z": frozenset}
_TEXTS: dict[bytes, Any] = {b"b": bytes, b"a": bytearray}


class NotPlainError(TypeError):
    """A value that is no plain data, or bytes that are no value."""


class Encoder:
    """Writes values, `most` bytes in all."""

    def __init__(self, most: int) -> None:
        #: What was written: large texts and bytes are pieces of their own, and not copied.
        self.pieces: list[Any] = [bytearray()]
        self._room = most
        self._most = most

    def value(self, value: Any, depth: int = 0) -> None:
        """Add one value."""
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
            raise NotPlainError(f"the result is nested deeper than {DEEPEST}, or in itself")
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
            raise NotPlainError(
                f"{kind.__module__}.{kind.__qualname__} is no plain data (numbers, text, bytes, lists, "
                "tuples, dicts, sets, dataclasses)"
            )
        named = [field.name for field in fields.values() if field.init and field._field_type.name == "_FIELD"]
        self._sized(b"o", f"{kind.__module__}:{kind.__qualname__}".encode())
        self._add(_size(len(named)))
        for name in named:
            self._sized(b"", name.encode())
            self.value(getattr(value, name), depth + 1)

    def _packed(self, value: Any, kind: type) -> bool:
        """Write many numbers of one kind at once."""
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
        if len(data) < LARGE or isinstance(data, bytearray):  # which may change
            self.pieces[-1] += data
        else:
            self.pieces += [data, bytearray()]


def _size(number: int) -> bytes:
    return bytes([number]) if number < 255 else b"\xff" + _LONG.pack(number)


def pieces(value: Any, most: int) -> list[Any]:
    """A value as bytes in pieces, one after the other."""
    encoder = Encoder(most)
    encoder.value(value)
    return encoder.pieces


def encode(value: Any, most: int) -> bytes:
    """A value as bytes."""
    return b"".join(pieces(value, most))


class Decoder:
    """Reads one value. What it makes takes no more than `room` bytes of memory, roughly.

    `types` are the dataclasses that may be made, by module and name.
    """

    def __init__(self, data: bytes | bytearray, room: int, types: dict[str, type] | None = None) -> None:
        self._data, self._at = data, 0
        self.room = room
        self._types = types or {}
        self._work, self._spare = MOST_WORK, SPARE_TIME

    def whole(self) -> Any:
        """The value, if there is nothing behind it."""
        value = self._value(0)
        if self._at != len(self._data):
            raise NotPlainError("there is something behind the value")
        return value

    def _value(self, depth: int) -> Any:
        letter = self._bytes(1)
        if letter in b"NTF":
            self._charge(PLACE)
            return {b"N": None, b"T": True, b"F": False}[letter]
        if depth > DEEPEST:
            raise NotPlainError("values are nested too deep")
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
        raise NotPlainError("bytes that are no value")

    def _sequence(self, letter: bytes, depth: int) -> Any:
        count, hashed = self._count(), letter in b"sz"
        self._charge(count * (ENTRY if hashed else 8))
        if not hashed:
            return _SEQUENCES[letter]([self._value(depth + 1) for _ in range(count)])
        items, costs = [], _Costs()
        for _ in range(count):
            items.append(self._key(depth, costs))
        self._spend(costs)
        return self._hashed(_SEQUENCES[letter], items)

    def _dict(self, depth: int) -> Any:
        count = self._count()
        self._charge(count * ENTRY)
        pairs, costs = [], _Costs()
        for _ in range(count):
            key = self._key(depth, costs)
            pairs.append((key, self._value(depth + 1)))
        self._spend(costs)
        return self._hashed(dict, pairs)

    def _hashed(self, kind: Any, items: list[Any]) -> Any:
        """A dictionary or a set. Also small numbers can be chosen that all look for one another's place."""
        made: Any = {} if kind is dict else set()
        begin, late = thread_time(), 0.0
        for start in range(0, len(items), FEW):
            try:
                made.update(items[start : start + FEW])
            except TypeError:
                raise NotPlainError("a key that is none") from None
            if start:
                late = thread_time() - begin - KEY_TIME * (start + FEW)
                if late > self._spare:
                    raise NotPlainError("keys that were chosen to take for ever")
        self._spare -= max(0.0, late)
        if len(made) != len(items):
            raise NotPlainError("a key that is there twice")
        return frozenset(made) if kind is frozenset else made

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
            raise NotPlainError("too many keys that could be chosen to have one hash")

    def _record(self, depth: int) -> Any:
        name = self._sized().decode("utf-8", "replace")
        kind: Any = self._types.get(name)
        if kind is None:
            raise NotPlainError(
                f"{name[:200]} is a dataclass that was not declared: annotate what the function returns, "
                "or name it in `types`"
            )
        wanted = {field.name for field in kind.__dataclass_fields__.values() if field.init}
        found = {}
        for _ in range(self._count()):
            field = self._sized().decode("utf-8", "replace")
            if field not in wanted or field in found:
                raise NotPlainError(f"{name} has no field {field[:200]!r}")
            found[field] = self._value(depth + 1)
        try:
            return kind(**found)
        except Exception as error:
            raise NotPlainError(f"{name} refuses its fields: {error}") from error

    def _packed(self) -> Any:
        letter, kind = self._bytes(1), self._bytes(1)
        content = self._sized()
        if letter not in (b"q", b"d") or kind not in (b"l", b"t") or len(content) % 8:
            raise NotPlainError("bytes that are no value")
        count = len(content) // 8
        self._charge(count * 32)
        found = struct.unpack(f">{count}{letter.decode()}", content)
        return list(found) if kind == b"l" else found

    def _text(self) -> str:
        content = self._sized()
        try:
            text = content.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            raise NotPlainError("text that is none") from None
        self._charge(sys.getsizeof(text) - len(content))
        return text

    def _sized(self) -> bytes:
        size = self._number()
        if size > len(self._data) - self._at:
            raise NotPlainError("more is announced than there is")
        self._charge(size)
        return self._bytes(size)

    def _count(self) -> int:
        """How many values follow: each takes a byte at least."""
        count = self._number()
        if count > len(self._data) - self._at:
            raise NotPlainError("more is announced than there is")
        return count

    def _number(self) -> int:
        number = self._bytes(1)[0]
        return number if number < 255 else _LONG.unpack(self._bytes(8))[0]

    def _bytes(self, size: int) -> bytes:
        end = self._at + size
        if end > len(self._data):
            raise NotPlainError("more is announced than there is")
        source: Any = self._data if size < LARGE else memoryview(self._data)
        found = bytes(source[self._at : end])
        self._at = end
        return found

    def _charge(self, size: int) -> None:
        self.room -= size
        if self.room < 0:
            raise OverflowError("it would take more memory than is allowed")


class _Costs:
    """Of the keys of one container: how many can be chosen to have one hash, and their bytes."""

    def __init__(self) -> None:
        self.count = self.size = 0


def _is_costly(key: object) -> bool:
    """Whether somebody can choose many such keys that all have one hash: then a dictionary takes for ever."""
    return not isinstance(key, (str, bytes)) and not (isinstance(key, int) and abs(key) < 1 << 53)
