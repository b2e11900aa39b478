"""Decode the plain data that comes out of a sandbox (`inside/encoder.py` encodes it).

The bytes may have been written by hostile code. The decoder executes nothing
of theirs and imports nothing that they name: they choose among the classes
here, and among the dataclasses, namedtuples and enums that the caller has
declared. It checks memory, depth and work against bounds before it spends
them.
"""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import fractions
import ipaddress
import os
import pathlib
import re
import struct
import sys
import uuid
import zoneinfo
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from time import thread_time
from typing import Any, NoReturn

# These modules are loaded before a sandbox runs: one that may write where your program imports from could
# otherwise have its own `fractions.py` loaded by sending a Fraction.
from stockade.inside.encoder import DEEPEST, FACTORIES, MAKERS, NotPlainDataError

#: The bound on work that grows faster than the data, in bytes times bytes: keys that can be chosen to share
#: one hash, and the common divisor of a fraction.
MOST_WORK = 1 << 30
#: Processor time to build dictionaries and sets, in seconds: for each key, and in addition for all.
KEY_TIME, SPARE_TIME = 5e-6, 1.0
#: So few keys are always fast, even if all share one hash.
FEW = 64
#: Bytes of the smallest object, of its place in a list, and of its place in a dictionary or a set.
OBJECT, PLACE, ENTRY = 64, 16, 100
#: Additional bytes of an empty set, which has room for eight; of a dataclass for its fields; of a dictionary
#: of `collections`, an array or a path; of a time zone.
SET, RECORD, WIDE, ZONE = 160, 128, 400, 1 << 15
#: A path's memory by its text, of which each part becomes a text of its own.
PARTS = 40
#: The longest path, and the longest text of an address or the key of a time zone, in characters.
MOST_PATH, MOST_NAME = 1 << 16, 100
#: From this size on, bytes are not copied if possible.
LARGE = 1 << 16
#: From this size on, numbers in keys may not meet a Decimal or a Fraction: comparing them is quadratic.
LONG_NUMBER = 128
#: What the keys of a container hold.
HAS_LONG, HAS_EXACT, HAS_NUMPY = 1, 2, 4
MOST_DIMENSIONS = 32
LAST_CHARACTER = 0x10FFFF
_FLOAT, _COMPLEX, _LONG = struct.Struct(">d"), struct.Struct(">dd"), struct.Struct(">Q")
_SEQUENCES: dict[bytes, Any] = {b"l": list, b"t": tuple, b"s": set, b"z": frozenset}
_TEXTS: dict[bytes, Any] = {b"b": bytes, b"a": bytearray}
#: Compiled on first use.
_DECIMAL = r"-?(?:[0-9]+(?:\.[0-9]+)?(?:E[+-][0-9]{1,18})?|Infinity|s?NaN[0-9]*)"
_ZONE = r"[A-Za-z0-9_+-]+(?:/[A-Za-z0-9_+-]+){0,3}"
#: A unit of time has no multiple of zero: numpy divides by it, which ends the process with SIGFPE.
_DTYPE = (
    r"[<>|](?:b1|[iu][1248]|f[248]|c8|c16|[SU][1-9][0-9]{0,8}"
    r"|[mM]8(?:\[(?:[1-9][0-9]{0,3})?(?:Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?)"
)
_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_FACTORIES = {factory.__name__: factory for factory in FACTORIES}


class Decoder:
    """Decodes one value, which takes no more than about `room` bytes of memory.

    `types` are the classes that it may make, by module and name. `opaque` makes a value of a type and a text
    for what is not plain data; without it such a value is refused.
    """

    def __init__(
        self,
        data: bytes | bytearray,
        room: int,
        types: dict[str, type] | None = None,
        opaque: Callable[[str, str], Any] | None = None,
    ) -> None:
        self._source, self._at = data, 0
        self.room = room
        self._types = types or {}
        self._opaque = opaque
        self._work, self._spare = MOST_WORK, SPARE_TIME
        self._zones: dict[str, datetime.tzinfo] = {}
        self._dtypes: dict[str, Any] = {}
        #: What the key that is being decoded holds so far, and what comparing the sets in it may cost.
        self._holds = self._slow = 0

    def go_on_from(self, other: Decoder | None) -> None:
        """Use what another decoder has left, so that both values together cost no more than one may."""
        if other is not None:
            self.room, self._work, self._spare = other.room, other._work, other._spare

    def whole(self) -> Any:
        """Decode the value and check that no bytes follow it."""
        try:
            value = self._value(0)
        except RecursionError:
            raise NotPlainDataError("values are nested too deeply") from None
        if self._at != len(self._source):
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
            content = self._sized()
            self._note(len(content), 0)
            return int.from_bytes(content, "big", signed=True)
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
        if letter == b"d":
            return self._pairs({}, dict.update, depth)
        if letter in _SEQUENCES:
            return self._sequence(letter, depth)
        if letter in _OTHERS:
            return _OTHERS[letter](self, depth)
        raise NotPlainDataError("the bytes do not encode a value")

    def _sequence(self, letter: bytes, depth: int) -> Any:
        count, hashed = self._count(), letter in b"sz"
        self._charge(SET + count * ENTRY if hashed else count * 8)
        if not hashed:
            return _SEQUENCES[letter]([self._value(depth + 1) for _ in range(count)])
        items, costs = [], _Costs()
        for _ in range(count):
            items.append(self._key(depth, costs))
        self._check_keys(items, costs)
        built: set[Any] = set()
        self._build_hashed(built, set.update, items)
        return frozenset(built) if letter == b"z" else built

    def _pairs(self, built: Any, update: Callable[[Any, Any], None], depth: int, entry: int = ENTRY) -> Any:
        count = self._count()
        self._charge(count * entry)
        pairs, costs = [], _Costs()
        for _ in range(count):
            key = self._key(depth, costs)
            pairs.append((key, self._value(depth + 1)))
        self._check_keys([key for key, _ in pairs] if costs.holds & HAS_NUMPY else (), costs)
        self._build_hashed(built, update, pairs)
        return built

    def _build_hashed(self, built: Any, update: Callable[[Any, Any], None], items: list[Any]) -> None:
        """Fill a dictionary or a set, in bounded time: even small numbers can be chosen to collide."""
        begin, late = thread_time(), 0.0
        for start in range(0, len(items), FEW):
            try:
                update(built, items[start : start + FEW])
            except Exception:  # comparing keys of numpy can raise anything
                raise NotPlainDataError("a key is not hashable, or cannot be compared") from None
            if start:
                late = thread_time() - begin - KEY_TIME * (start + FEW)
                if late > self._spare:
                    raise NotPlainDataError("the keys collide so often that they take too long")
        self._spare -= max(0.0, late)
        if len(built) != len(items):
            raise NotPlainDataError("a key occurs twice")

    def _key(self, depth: int, costs: _Costs) -> Any:
        begin, around, beside = self._at, self._holds, self._slow
        self._holds = self._slow = 0
        key = self._value(depth + 1)
        costs.holds |= self._holds
        self._holds |= around
        if _is_costly(key):
            costs.count += 1
            costs.size += self._at - begin + self._slow
        self._slow = beside
        return key

    def _note(self, size: int, holds: int) -> None:
        self._holds |= holds | (HAS_LONG if size > LONG_NUMBER else 0)

    def _check_keys(self, keys: Any, costs: _Costs) -> None:
        """Refuse keys that would be slow to compare, or large.

        Stored under equal hashes, a Decimal is compared with an int by converting all its digits, and a
        scalar of numpy with a sequence by making an array of it, which can take any amount of memory.
        """
        self._spend(costs.count * costs.size)
        # Two sets are compared by looking up each item of one in the other, which multiplies in nested sets.
        self._slow += (costs.count + 1) * costs.size // 2
        if costs.holds & HAS_LONG and costs.holds & HAS_EXACT:
            raise NotPlainDataError("long numbers are keys beside a Decimal or a Fraction")
        if costs.holds & HAS_NUMPY and {_shape(key) for key in keys} not in ({"plain"}, {"tuple"}):
            raise NotPlainDataError("scalars of numpy are keys beside keys that they cannot be compared with")

    def _spend(self, work: int) -> None:
        self._work -= work
        if self._work < 0:
            raise NotPlainDataError("there are too many keys that could share one hash, or long fractions")

    def _record(self, depth: int) -> Any:
        name, kind = self._declared("dataclass", dataclasses.is_dataclass)
        wanted = {field.name for field in kind.__dataclass_fields__.values() if field.init}
        values = {}
        count = self._count()
        self._charge(RECORD + count * PLACE)
        for _ in range(count):
            field = self._name()
            if field not in wanted or field in values:
                raise NotPlainDataError(f"{name} has no field {field[:200]!r}")
            values[field] = self._value(depth + 1)
        try:
            return kind(**values)
        except Exception as error:
            raise NotPlainDataError(f"{name} rejects its fields: {error}") from error

    def _namedtuple(self, depth: int) -> Any:
        name, kind = self._declared("namedtuple", is_namedtuple)
        values = self._sequence(b"t", depth)
        if len(values) != len(kind._fields):
            raise NotPlainDataError(f"{name} has {len(kind._fields)} fields, not {len(values)}")
        try:
            return kind(*values)
        except Exception as error:
            raise NotPlainDataError(f"{name} rejects its fields: {error}") from error

    def _member(self, depth: int) -> Any:
        name, kind = self._declared("Enum", is_enum)
        member, value = self._name(), self._value(depth + 1)
        if member in kind._member_map_:
            return kind._member_map_[member]
        # Python keeps each combination of flags for good, so only those of known flags are made.
        self._charge(WIDE)
        if issubclass(kind, enum.Flag) and type(value) is int and value & kind._flag_mask_ == value:
            return kind(value)
        raise NotPlainDataError(f"{name} has no member {member[:200]!r}")

    def _declared(self, what: str, is_such: Callable[[Any], bool]) -> tuple[str, Any]:
        """Return the declared class that follows, and its name."""
        name = self._name()
        kind = self._types.get(name)
        if kind is None or not is_such(kind):
            raise NotPlainDataError(
                f"{name[:200]} is a {what} that was not declared: annotate the function's return type, "
                "or name it in `types`"
            )
        return name, kind

    def _made(self, depth: int) -> Any:
        """Decode a value of a class of the standard library."""
        name = self._name()
        maker = _MAKERS.get(name)
        if maker is None or self._bytes(1) != b"t":
            raise NotPlainDataError("the bytes do not encode a value")
        args = self._sequence(b"t", depth)
        if maker is _zone:
            return self._zone(*args[:1])
        sizes = [_size(arg) for arg in args]
        self._charge(_COSTS.get(maker, (0, 1))[0] + sum(sizes) * _COSTS.get(maker, (0, 1))[1])
        if maker is _numpy_text:
            self._note(0, HAS_NUMPY)
        elif maker in (_decimal, _fraction):
            self._note(max(sizes, default=0), HAS_EXACT)
            self._spend(sizes[0] * sizes[1] if len(sizes) == 2 else 0)
        try:
            return maker(name, *args)
        except NotPlainDataError as error:
            if maker is not _numpy_text or self._opaque is None:
                raise
            return self._opaque(f"numpy.{name}", f"<{name}: {error}>")
        except Exception:
            raise NotPlainDataError(f"the bytes do not encode a {name}") from None

    def _zone(self, key: Any = None) -> datetime.tzinfo:
        """Return a time zone of this system; its files are found by a key that names nothing else."""
        if not isinstance(key, str) or len(key) > MOST_NAME or re.fullmatch(_ZONE, key) is None:
            raise NotPlainDataError("a time zone has no usable name")
        if key not in self._zones:
            self._charge(ZONE)
            if not any(os.path.isfile(os.path.join(root, key)) for root in zoneinfo.TZPATH):
                raise NotPlainDataError(f"the time zone {key} is not known outside")
            try:
                self._zones[key] = zoneinfo.ZoneInfo(key)
            except Exception:
                raise NotPlainDataError(f"the time zone {key} is not known outside") from None
        return self._zones[key]

    def _mapping(self, depth: int) -> Any:
        name, factory = self._name(), self._name()
        self._charge(WIDE)
        if name == "defaultdict" and (factory in _FACTORIES or not factory):
            return self._pairs(defaultdict(_FACTORIES.get(factory)), dict.update, depth)
        if name == "Counter" and not factory:
            return self._pairs(Counter(), dict.update, depth)
        if name == "OrderedDict" and not factory:
            return self._pairs(OrderedDict(), OrderedDict.update, depth, 2 * ENTRY)
        raise NotPlainDataError("the bytes do not encode a value")

    def _scalar(self, depth: int) -> Any:
        self._note(0, HAS_NUMPY)
        dtype, content = self._name(), self._sized()
        if re.fullmatch(_DTYPE, dtype) is None or dtype[1] in "SU":
            raise NotPlainDataError("the bytes do not encode a number of numpy")
        return self._with_numpy("numpy scalar", dtype, (), content, "C")

    def _array(self, depth: int) -> Any:
        dtype, order, count = self._name(), self._bytes(1), self._count()
        if re.fullmatch(_DTYPE, dtype) is None or order not in (b"C", b"F") or count > MOST_DIMENSIONS:
            raise NotPlainDataError("the bytes do not encode an array of numpy")
        shape = tuple(self._number() for _ in range(count))
        size = self._number()
        self._charge(WIDE + size)
        start, self._at = self._at, self._at + size
        if self._at > len(self._source):
            raise NotPlainDataError("a length exceeds the data")
        content = memoryview(self._source)[start : self._at]
        return self._with_numpy("numpy array", dtype, shape, content, order.decode())

    def _with_numpy(self, what: str, name: str, shape: tuple[int, ...], content: Any, order: Any) -> Any:
        try:
            numpy = _numpy()
        except NotPlainDataError as error:
            if self._opaque is None:
                raise
            return self._opaque(what.replace(" ", "."), f"<{what} of {name}, shape {shape}: {error}>")
        if name not in self._dtypes:
            self._charge(WIDE)
        try:
            self._dtypes.setdefault(name, numpy.dtype(name))
            array = _array_of(numpy, self._dtypes[name], shape, content, order)
        except (ValueError, TypeError, ArithmeticError):
            raise NotPlainDataError(f"the bytes do not encode a {what}") from None
        return array if what == "numpy array" else array[()]

    def _unknown(self, depth: int) -> Any:
        kind, text = self._text(), self._text()
        if self._opaque is None:
            raise NotPlainDataError(f"{kind[:200]} is not plain data")
        return self._opaque(kind, text)

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

    def _name(self) -> str:
        return self._sized().decode("utf-8", "replace")

    def _sized(self) -> bytes:
        size = self._number()
        if size > len(self._source) - self._at:
            raise NotPlainDataError("a length exceeds the data")
        self._charge(size)
        return self._bytes(size)

    def _count(self) -> int:
        """Return how many values follow; each takes at least one byte."""
        count = self._number()
        if count > len(self._source) - self._at:
            raise NotPlainDataError("a length exceeds the data")
        return count

    def _number(self) -> int:
        number = self._bytes(1)[0]
        return number if number < 255 else _LONG.unpack(self._bytes(8))[0]

    def _bytes(self, size: int) -> bytes:
        end = self._at + size
        if end > len(self._source):
            raise NotPlainDataError("a length exceeds the data")
        source: Any = self._source if size < LARGE else memoryview(self._source)
        content = bytes(source[self._at : end])
        self._at = end
        return content

    def _charge(self, size: int) -> None:
        self.room -= size
        if self.room < 0:
            raise OverflowError("the value would take more memory than is allowed")


_OTHERS: dict[bytes, Callable[[Decoder, int], Any]] = {
    b"o": Decoder._record,
    b"k": Decoder._namedtuple,
    b"e": Decoder._member,
    b"x": Decoder._made,
    b"m": Decoder._mapping,
    b"v": Decoder._scalar,
    b"n": Decoder._array,
    b"?": Decoder._unknown,
}


class _Costs:
    """The keys of one container that can be chosen to share one hash: their number, and bytes to compare."""

    def __init__(self) -> None:
        self.count = self.size = self.holds = 0


def _is_costly(key: object) -> bool:
    """Whether an attacker can choose many such keys with one hash, which makes a dictionary very slow."""
    return type(key) not in (str, bytes) and not (isinstance(key, int) and abs(key) < 1 << 53)


def _shape(key: Any) -> str:
    """Say where numpy's scalars may stand among keys: among plain ones, or in tuples of plain ones."""
    if type(key) in _PLAIN or type(key).__module__ == "numpy":
        return "plain"
    return "tuple" if type(key) is tuple and all(_shape(part) == "plain" for part in key) else "other"


def is_namedtuple(kind: type) -> bool:
    """Whether a class was made by `namedtuple` or `NamedTuple`, or derives from one."""
    return issubclass(kind, tuple) and isinstance(getattr(kind, "_fields", None), tuple)


def is_enum(kind: type) -> bool:
    return issubclass(kind, enum.Enum)


def _size(part: Any) -> int:
    """Return the bytes of a number, the characters of a text, or the items of a list."""
    if isinstance(part, int):
        return part.bit_length() // 8 + 1
    return len(part) if isinstance(part, str | bytes | list) else 0


def _checked(args: tuple[Any, ...], *kinds: Any) -> tuple[Any, ...]:
    if len(args) != len(kinds) or not all(map(isinstance, args, kinds)):
        raise NotPlainDataError("a value has the wrong parts")
    return args


def _moment(name: str, *args: Any) -> Any:
    """Make a date, a time or both; a time has a zone and a fold at its end."""
    if name in ("date", "timedelta"):
        return getattr(datetime, name)(*_checked(args, int, int, int))
    *numbers, zone, fold = args
    _checked((*numbers, zone, fold), *(int for _ in numbers), (datetime.tzinfo, type(None)), int)
    return getattr(datetime, name)(*numbers, zone, fold=fold)


def _timezone(_: str, *args: Any) -> datetime.timezone:
    return datetime.timezone(*_checked(args, *(datetime.timedelta, str)[: len(args)]))


def _zone(_: str, *args: Any) -> NoReturn:
    """Stand for the method of the decoder, which keeps the zones that it has made."""
    raise NotPlainDataError("a time zone has no usable name")


def _decimal(_: str, *args: Any) -> decimal.Decimal:
    (text,) = _checked(args, str)
    if re.fullmatch(_DECIMAL, text) is None:
        raise NotPlainDataError("a Decimal has the wrong digits")
    return decimal.Decimal(text)


def _fraction(_: str, *args: Any) -> fractions.Fraction:
    return fractions.Fraction(*_checked(args, int, int))


def _uuid(_: str, *args: Any) -> uuid.UUID:
    return uuid.UUID(bytes=_checked(args, bytes)[0])


def _path(name: str, *args: Any) -> pathlib.PurePath:
    (text,) = _checked(args, str)
    if len(text) > MOST_PATH:
        raise NotPlainDataError("a path is too long")
    kind: type[pathlib.PurePath] = getattr(pathlib, "Path" if name == "PosixPath" else name)
    return kind(text)


def _address(name: str, *args: Any) -> Any:
    (text,) = _checked(args, str)
    if len(text) > MOST_NAME:
        raise NotPlainDataError("an address is too long")
    return getattr(ipaddress, name)(text)


def _deque(_: str, *args: Any) -> deque[Any]:
    items, most = _checked(args, list, (int, type(None)))
    return deque(items, most)


def _numpy_text(name: str, *args: Any) -> Any:
    (text,) = _checked(args, str if name == "str_" else bytes)
    return getattr(_numpy(), name)(text)


def _range(_: str, *args: Any) -> range:
    return range(*_checked(args, int, int, int))


_MAKERS: dict[str, Callable[..., Any]] = {
    "range": _range, "date": _moment, "time": _moment, "datetime": _moment, "timedelta": _moment,
    "timezone": _timezone, "ZoneInfo": _zone, "Decimal": _decimal, "Fraction": _fraction, "UUID": _uuid,
    "deque": _deque, "str_": _numpy_text, "bytes_": _numpy_text,
    **{name: _path for name, (module, _) in MAKERS.items() if module == "pathlib"},
    **{name: _address for name, (module, _) in MAKERS.items() if module == "ipaddress"},
}  # fmt: skip


#: The memory of a value, and of each unit of its parts.
_COSTS: dict[Callable[..., Any], tuple[int, int]] = {
    _path: (WIDE, PARTS), _address: (WIDE, 1), _deque: (2 * WIDE, PLACE), _numpy_text: (OBJECT, 8),
    _uuid: (RECORD, 1),
}  # fmt: skip


def _array_of(numpy: Any, dtype: Any, shape: tuple[int, ...], content: Any, order: Any) -> Any:
    """Return a new array of these bytes, if they are as many as it takes and have a meaning."""
    count = 1
    for length in shape:
        count *= length
    if count * dtype.itemsize != len(content):
        raise ValueError("the bytes do not fill the array")
    if dtype.kind == "b" and len(content) and numpy.frombuffer(content, "u1").max() > 1:
        raise ValueError("a truth value is neither 0 nor 1")
    letters = numpy.dtype("u4").newbyteorder(dtype.byteorder)
    if dtype.kind == "U" and len(content) and numpy.frombuffer(content, letters).max() > LAST_CHARACTER:
        raise ValueError("a text has no such character")
    return numpy.ndarray(shape, dtype, content, order=order).copy(order)


def _numpy() -> Any:
    """Return numpy, if it is loaded or installed; never one that lies where a program may have put it."""
    if "numpy" not in sys.modules:
        import importlib.util
        import site
        import sysconfig

        try:
            found = importlib.util.find_spec("numpy")
        except ValueError:
            found = None
        installs = [*site.getsitepackages(), site.getusersitepackages(), *sysconfig.get_paths().values()]
        if found is None or found.origin is None:
            raise NotPlainDataError(
                "numpy is not installed outside: install it, or let the code return `.tolist()`"
            )
        if os.path.dirname(os.path.dirname(os.path.realpath(found.origin))) not in map(
            os.path.realpath, installs
        ):
            raise NotPlainDataError(f"{found.origin} is no installed numpy: import numpy before the call")
    import numpy  # type: ignore[import-not-found,unused-ignore]

    return numpy
