"""Take the values of secrets out of what servers answer.

A server that is sent a secret may answer with it: in an error message, a header, a debug page; and so may
another server that has the same data. The program must not see it there. Values are searched for in the forms
in which programs write text (`written_forms`), and each occurrence is masked by as many asterisks, so that
lengths stay as they were announced.

An occurrence can be split anywhere, so the last bytes of what has arrived wait for what follows. How many
wait must not depend on the values: a program that could see whether a byte is held back would guess a value
byte by byte. All bytes wait that could belong to any value: those since the last control character, at most
one less than the longest form has. Values have no control characters, so a line or an event is never late.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

#: How much of an answer is searched at once.
SLICE = 64 * 1024
#: The shortest value, so that masks do not destroy answers by chance.
LEAST_VALUE = 8
#: Control characters, which no value has, as one of them.
_BREAKS = bytes(10 if byte < 32 else byte for byte in range(256))
_BREAK = b"\n"
MASK = b"*"
#: What a body can be decoded from; others are refused.
DECODED = ("gzip", "x-gzip", "deflate")


class UnreadableError(Exception):
    """An answer in which values could not be searched for."""


def written_forms(value: memoryview, room: memoryview) -> list[memoryview]:
    """Write the forms in which a value may come back into `room`, and return them with the value itself.

    They are the value quoted, escaped, in base64 and in hexadecimal. Base64 differs with what stands before
    the value, so there are three forms of it, without the characters that depend on what is beside. The forms
    are written byte by byte, so that no copy of a value stays in memory that is not locked. A `room` that is
    too small is a ValueError; `room_for` says how much is enough.
    """
    forms = [value]
    at = 0
    for writer in _WRITERS:
        first = at
        for byte in writer(value):
            if at == len(room):
                raise ValueError("no room for the forms of a value")
            room[at] = byte
            at += 1
        form = room[first:at]
        if len(form) < LEAST_VALUE or form in forms:
            at = first
        else:
            forms.append(form)
    return forms


def lowered_forms(forms: Iterable[memoryview], room: memoryview) -> tuple[memoryview, ...]:
    """Write forms with small letters for capitals into `room`, as names of headers have them; return them."""
    found = []
    for form in forms:
        lowered, room = room[: len(form)], room[len(form) :]
        for at, byte in enumerate(form):
            lowered[at] = byte + 32 if 65 <= byte <= 90 else byte
        found.append(lowered)
    return tuple(found)


def room_for(value: memoryview) -> int:
    """Return how many bytes the forms of a value take at most."""
    return sum(1 for writer in _WRITERS for _ in writer(value))


_HEX, _LOWER_HEX = b"0123456789ABCDEF", b"0123456789abcdef"
_UNRESERVED = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~")
_BASE64 = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
_BASE64_URL = _BASE64[:62] + b"-_"


def _spelled(letters: bytes, form: bytes) -> dict[int, bytes]:
    return {letter: form % letter for letter in letters}


_MARKUP = {ord("&"): b"&amp;", ord("<"): b"&lt;", ord(">"): b"&gt;", ord('"'): b"&quot;"}
#: How pages write a value: most of them, Python, Go, Handlebars and Mustache.
_ENTITIES: tuple[dict[int, bytes], ...] = (
    _MARKUP | _spelled(b"'", b"&#%d;"),
    _MARKUP | _spelled(b"'", b"&#x%X;"),
    _MARKUP | _spelled(b"\"'+", b"&#%d;"),
    _MARKUP | _spelled(b"'`=", b"&#x%X;"),
    _MARKUP | _spelled(b"'", b"&#%d;") | _spelled(b"/`=", b"&#x%X;"),
)
_JSON = {ord('"'): b'\\"', ord("\\"): b"\\\\"}
#: How texts of JSON write a value: most of them, PHP, Go, GSON and .NET.
_JSONS: tuple[dict[int, bytes], ...] = (
    _JSON,
    _JSON | {ord("/"): b"\\/"},
    _JSON | _spelled(b"&<>", b"\\u%04x"),
    _JSON | _spelled(b"&<>='", b"\\u%04x"),
    _JSON | _spelled(b"&<>'\"+`", b"\\u%04X"),
)

Writer = Callable[[memoryview], Iterator[int]]


def _percent(value: memoryview, digits: bytes, space: bytes, kept: bytes = b"") -> Iterator[int]:
    for byte in value:
        if byte in _UNRESERVED or byte in kept:
            yield byte
        elif byte == 32 and space:
            yield space[0]
        else:
            yield 37
            yield digits[byte >> 4]
            yield digits[byte & 15]


def _escaped(value: memoryview, escapes: Mapping[int, bytes]) -> Iterator[int]:
    for byte in value:
        if byte in escapes:
            yield from escapes[byte]
        else:
            yield byte


def _hexadecimal(value: memoryview, digits: bytes) -> Iterator[int]:
    for byte in value:
        yield digits[byte >> 4]
        yield digits[byte & 15]


def _base64(value: memoryview, before: int, letters: bytes) -> Iterator[int]:
    """Yield the letters of base64 that are the value's alone, `before` bytes after a group began."""
    # The letter that the last byte before it shares with the value is left out, and so is the last one if
    # what follows the value shares it.
    skip = -(before * 8) % 6
    held, bits = 0, 0
    for byte in value:
        held, bits = (held << 8 | byte) & 0xFFFF, bits + 8
        if skip:
            bits -= skip
            skip = 0
        while bits >= 6:
            bits -= 6
            yield letters[held >> bits & 63]


#: A value as it stands in a URL, and in a text of JSON.
percent: Writer = partial(_percent, digits=_HEX, space=b"")
json_escape: Writer = partial(_escaped, escapes=_JSON)
_WRITERS: tuple[Writer, ...] = (
    percent,
    partial(_percent, digits=_LOWER_HEX, space=b""),
    partial(_percent, digits=_HEX, space=b"+"),
    partial(_percent, digits=_HEX, space=b"", kept=b"/"),
    *(partial(_escaped, escapes=escapes) for escapes in (*_JSONS, *_ENTITIES)),
    partial(_hexadecimal, digits=_HEX),
    partial(_hexadecimal, digits=_LOWER_HEX),
    *(partial(_base64, before=before, letters=_BASE64) for before in range(3)),
    *(partial(_base64, before=before, letters=_BASE64_URL) for before in range(3)),
)


class Redactor:
    """Masks the given forms in one stream of bytes."""

    def __init__(self, forms: Sequence[memoryview]) -> None:
        self._forms = forms
        self._wait = max(map(len, forms), default=1) - 1
        self._held = b""
        #: How many of the first bytes held belong to an occurrence whose begin was passed on.
        self._masked = 0
        #: How many occurrences were masked.
        self.found = 0

    def feed(self, data: bytes, *, end: bool = False) -> bytes:
        """Return what may be passed on now, with all occurrences masked; at the `end` nothing waits."""
        passed = [
            self._step(data[at : at + SLICE], end=end and at + SLICE >= len(data))
            for at in range(0, max(1, len(data)), SLICE)
        ]
        return passed[0] if len(passed) == 1 else b"".join(passed)

    def _step(self, data: bytes, *, end: bool) -> bytes:
        seen = self._held + data
        spans = self._spans(seen)
        cut = len(seen) if end else self._cut(seen)
        # One that lies in what is held is found again.
        past = max((last for first, last in spans if first < cut), default=0)
        past = max(past, self._masked)
        self._held, self._masked = seen[cut:], max(0, past - cut)
        return _mask(seen, spans, cut)

    def _spans(self, seen: bytes) -> list[tuple[int, int]]:
        """Return where occurrences are, those that overlap too."""
        spans = [(0, self._masked)] if self._masked else []
        old = len(self._held)
        for form in self._forms:
            at = seen.find(form)
            while at >= 0:
                spans.append((at, at + len(form)))
                # One that ends in what was held is known already.
                self.found += at + len(form) > old
                at = seen.find(form, at + 1)
        return spans

    def _cut(self, seen: bytes) -> int:
        first = max(0, len(seen) - self._wait)
        return first + seen[first:].translate(_BREAKS).rfind(_BREAK) + 1


def _mask(seen: bytes, spans: list[tuple[int, int]], cut: int) -> bytes:
    if not spans:
        return seen[:cut]
    masked = bytearray(seen[:cut])
    done = 0
    for first, last in sorted(spans):
        begin, end = max(first, done), min(last, cut)
        if end > begin:
            masked[begin:end] = MASK * (end - begin)
            done = end
    return bytes(masked)


def redact_headers(
    headers: Iterable[tuple[bytes, bytes]], forms: Sequence[memoryview], name_forms: Sequence[memoryview]
) -> tuple[list[tuple[bytes, bytes]], int]:
    """Return headers with all occurrences masked, and how many there were.

    Names are in small letters, whatever the server wrote: `name_forms` are the forms in small letters too.
    """
    names, values = Redactor(name_forms), Redactor(forms)
    passed = [(names.feed(name, end=True), values.feed(value, end=True)) for name, value in headers]
    return passed, names.found + values.found


class BodyRedactor:
    """Masks values in the body of one answer, which may be compressed; what it passes on is not.

    Memory is bounded: `feed` returns pieces as they are decoded, and the caller passes on each before it
    takes the next.
    """

    def __init__(self, forms: Sequence[memoryview], encodings: Sequence[str] = ()) -> None:
        self._redactor = Redactor(forms)
        self._encoding = ""
        for name in (one.strip().lower() for one in encodings):
            if name in ("", "identity"):
                continue
            if name not in DECODED or self._encoding:
                raise UnreadableError("encoding")
            self._encoding = name
        self._decoder = _decoder(self._encoding)
        self._fresh = True

    @property
    def decodes(self) -> bool:
        """Whether the body comes out decoded, and so with another length."""
        return self._decoder is not None

    @property
    def found(self) -> int:
        """How many occurrences were masked."""
        return self._redactor.found

    def feed(self, data: bytes) -> Iterable[bytes]:
        """Yield what may be passed on after a piece of the body."""
        if self._decoder is None:
            if passed := self._redactor.feed(data):
                yield passed
            return
        for plain in self._decoded(data):
            if passed := self._redactor.feed(plain):
                yield passed

    def finish(self) -> bytes:
        """Return the rest, at the end of the body."""
        if self._decoder is not None and not self._decoder.eof and not self._fresh:
            raise UnreadableError("encoding")
        return self._redactor.feed(b"", end=True)

    def _decoded(self, data: bytes) -> Iterator[bytes]:
        more = True
        while data or more:
            assert self._decoder is not None
            if self._decoder.eof:
                if not data:
                    return
                # A gzip file may have several members; nothing may follow a deflate stream.
                if self._encoding == "deflate":
                    raise UnreadableError("encoding")
                self._decoder = _decoder(self._encoding)
                continue
            try:
                plain = self._decoder.decompress(data, SLICE)
            except zlib.error:
                if not (self._fresh and self._encoding == "deflate"):
                    raise UnreadableError("encoding") from None
                # Some servers send deflate without the wrapper of zlib.
                self._decoder = zlib.decompressobj(-zlib.MAX_WBITS)
                self._fresh = False
                continue
            self._fresh = False
            # A full piece may leave some behind, although all input was taken.
            more = len(plain) == SLICE
            data = self._decoder.unconsumed_tail or self._decoder.unused_data
            if plain:
                yield plain


def _decoder(encoding: str) -> zlib._Decompress | None:
    if not encoding:
        return None
    return zlib.decompressobj(zlib.MAX_WBITS | (0 if encoding == "deflate" else 16))
