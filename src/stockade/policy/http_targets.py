"""The target of a request, its path and query, in every way in which servers may read it.

Some servers decode `%2F` before they split a path into segments, merge double slashes, cut off `;parameters`,
or end the path at a decoded `?` or `#`. So a target has readings. What can be read as `.` or `..`, and what
is not UTF-8, is refused altogether.

The egress process reads hostile targets with this module. Reading takes time that grows with the length of
the target alone. To judge a target takes time that grows with the rules too, so that work is metered:
`Target.spend` refuses a target when it has used up `MOST_WORK`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

#: The longest target of a request that is judged.
MOST_TARGET = 16384
#: How many comparisons of segments and parameters the rules may take for one request.
MOST_WORK = 50_000
#: How often a path is decoded to find what a server that decodes too often would find.
_DECODINGS = 4
_UNRESERVED = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~")
#: What may be in a path as it is: RFC 3986, and what browsers send beyond that.
_PATH = re.compile(r"/(?:[A-Za-z0-9\-._~!$&'()*+,;=:@/|^\[\]`{}\"<>]|%[0-9A-Fa-f]{2})*")
_QUERY = re.compile(r"(?:[A-Za-z0-9\-._~!$&'()*+,;=:@/?|^\[\]`{}\"<>\\]|%[0-9A-Fa-f]{2})*")
_ESCAPE = re.compile(r"%([0-9A-Fa-f]{2})")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
#: Where a path ends for a server that decodes it before it looks for the query.
_PATH_END = re.compile(r"[?#]|%3F|%23")


class AmbiguousTargetError(ValueError):
    """The target of a request that servers could read in different ways; the message says why."""


class LongTargetError(AmbiguousTargetError):
    """The target of a request that is too long, or takes too much work to judge."""


class QueryParameters(NamedTuple):
    """The parameters of a query, as a server finds them that separates them by `;` too."""

    values: Mapping[str, list[str]]
    #: Servers differ in which of two equal names they take, and in whether a ; separates.
    ambiguous: bool


class Target:
    """Path and query of a request, in every reading."""

    def __init__(
        self, path: str, readings: tuple[tuple[str, ...], ...], queries: tuple[QueryParameters, ...]
    ) -> None:
        #: Percent-encoding in its one form; what messages show.
        self.path = path
        self.readings, self.queries = readings, queries
        self._folded: tuple[tuple[str, ...], ...] | None = None
        #: What the rules have spent of `MOST_WORK`.
        self.work = 0

    @property
    def folded(self) -> tuple[tuple[str, ...], ...]:
        """The readings without regard to capitals and a slash at the end, as rules that deny compare them."""
        if self._folded is None:
            self._folded = tuple({fold(reading): None for reading in self.readings})
        return self._folded

    def spend(self, amount: int) -> None:
        """Count comparisons, and refuse the request if the rules would take too many."""
        self.work += amount
        if self.work > MOST_WORK:
            raise LongTargetError("it takes too long to compare its URL with all rules")


def read_target(text: str) -> Target:
    """Return path and query of a request in all readings, or raise AmbiguousTargetError."""
    if len(text) > MOST_TARGET:
        raise LongTargetError("the URL is too long")
    path, has_query, query = text.partition("?")
    if has_query and not _QUERY.fullmatch(query):
        raise AmbiguousTargetError("the query has letters that no URL has")
    normal, plain = read_path(path)
    readings: dict[tuple[str, ...], None] = {}
    wholes = {normal: None, plain: None, plain.replace("\\", "/"): None}
    ended = wholes | {_PATH_END.split(one, maxsplit=1)[0]: None for one in wholes}
    for one in ended | {_without_parameters(one): None for one in ended}:
        _add_reading(readings, one)
    queries = _query_readings(plain, query if has_query else None)
    return Target(normal, tuple(readings), tuple(map(_query, queries)))


def read_path(path: str) -> tuple[str, str]:
    """Return a path with percent-encoding in its one form, and decoded; refuse one that is not text."""
    if not _PATH.fullmatch(path):
        raise AmbiguousTargetError("the path has letters that no URL has")
    normal = normal_escapes(path)
    plain = normal
    for _ in range(_DECODINGS):
        if "%" not in plain:
            break
        plain = _decode_once(plain)
        if _CONTROL.search(plain):
            raise AmbiguousTargetError("the path has a control character")
        try:
            # Overlong forms too, with which some decoders write a dot or a slash in a second way.
            plain.encode("latin-1").decode("utf-8")
        except UnicodeDecodeError:
            raise AmbiguousTargetError("the path has bytes that are not UTF-8") from None
    if _ESCAPE.search(plain):
        raise AmbiguousTargetError("the path is encoded too many times")
    return normal, plain


def _add_reading(readings: dict[tuple[str, ...], None], path: str) -> None:
    segments = path[1:].split("/")
    if any(map(is_dots, segments)):
        raise AmbiguousTargetError("the path has a . or .. segment")
    readings[tuple(segments)] = None
    readings[(*(segment for segment in segments[:-1] if segment), segments[-1])] = None


def _query_readings(plain: str, query: str | None) -> dict[str | None, None]:
    """Return the query, and what else is one if the path ends at a decoded `?` or `#`."""
    end = _PATH_END.search(plain)
    if end is None:
        return {query: None}
    if end[0] == "#":
        return {query: None, None: None}
    inner = plain[end.end() :]
    return {query: None, inner: None, inner if query is None else f"{inner}?{query}": None}


def _query(text: str | None) -> QueryParameters:
    values: dict[str, list[str]] = {}
    found = parameters(text or "")
    for name, value in found:
        values.setdefault(name, []).append(value)
    return QueryParameters(values, len(values) < len(found) or ";" in (text or ""))


def parameters(query: str) -> list[tuple[str, str]]:
    """Return the parameters of a query, as a server finds them that separates them by `;` too."""
    return [_parameter(one) for one in re.split("[&;]", query)] if query else []


def _parameter(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    return decoded(name.replace("+", " ")), decoded(value.replace("+", " "))


def is_query(text: str) -> bool:
    """Whether a query has only letters that URLs have."""
    return bool(_QUERY.fullmatch(text))


def is_dots(segment: str) -> bool:
    """Whether a server could read a segment as `.` or `..`."""
    return segment.partition(";")[0].strip(" ") in (".", "..")


def fold(segments: tuple[str, ...]) -> tuple[str, ...]:
    """Return a path as rules that deny compare it: some servers ignore capitals, or a slash at the end."""
    # Of bytes: letters beyond ASCII are several of them here, which have no capitals.
    lower = "/".join(segments).encode("latin-1").lower().decode("latin-1").split("/") if segments else []
    return tuple(lower[:-1] if lower and not lower[-1] else lower)


def normal_escapes(text: str) -> str:
    """Return percent-encoding in its one form: unreserved letters as they are, the others in capitals."""
    return _ESCAPE.sub(_normal_escape, text)


def _normal_escape(found: re.Match[str]) -> str:
    letter = chr(int(found[1], 16))
    return letter if letter in _UNRESERVED else found[0].upper()


def decoded(text: str) -> str:
    """Decode a text until nothing is left to decode, byte by byte; a few times at most."""
    for _ in range(_DECODINGS):
        if "%" not in text:
            break
        text = _decode_once(text)
    return text


def _decode_once(text: str) -> str:
    return _ESCAPE.sub(lambda found: chr(int(found[1], 16)), text)


def _without_parameters(path: str) -> str:
    return "/".join(segment.partition(";")[0] for segment in path.split("/")) if ";" in path else path
