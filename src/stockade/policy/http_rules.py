"""The part of a rule that judges HTTP requests: methods, path and query.

    GET,HEAD https://api.example.com/v1/**
    POST https://api.example.com/v1/items/*?draft=true

In a path, `*` is one segment or a part of one, `**` any number of segments. The query is ignored, unless the
rule has one: then the request must have these parameters and no others, in any order.

Servers do not agree on what a path means, so it has readings (`http_targets`). A request is allowed only if
one rule allows every reading of it, and denied if a rule denies one. A rule that denies means a path without
regard to capitals of ASCII, and with and without a slash at its end.

The egress process judges hostile requests with this module, so all work is counted and bounded
(`Target.spend`), and nothing but the standard library is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from stockade.policy.http_targets import (
    AmbiguousTargetError,
    QueryParameters,
    Target,
    decoded,
    fold,
    is_dots,
    is_query,
    parameters,
    read_path,
)
from stockade.policy.net_errors import NetRuleError

SCHEMES = {"https": 443, "http": 80}
#: Methods that IANA has registered, and those beyond them that caches, UPnP and streams use.
_KNOWN_METHODS = (
    *("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "QUERY", "PRI", "SEARCH"),
    *("ACL", "BASELINE-CONTROL", "BIND", "CHECKIN", "CHECKOUT", "COPY", "LABEL", "LINK", "LOCK", "MERGE"),
    *("MKACTIVITY", "MKCALENDAR", "MKCOL", "MKREDIRECTREF", "MKWORKSPACE", "MOVE", "ORDERPATCH", "PROPFIND"),
    *("PROPPATCH", "REBIND", "REPORT", "UNBIND", "UNCHECKOUT", "UNLINK", "UNLOCK", "UPDATE"),
    *("UPDATEREDIRECTREF", "VERSION-CONTROL"),
    *("M-SEARCH", "NOTIFY", "PURGE", "SOURCE", "SUBSCRIBE", "UNSUBSCRIBE"),
)
_METHOD = re.compile(r"[A-Z][A-Z0-9_-]{0,31}")
_ANY_PATH = ("**",)


class HttpPattern(NamedTuple):
    """Which requests a rule is about."""

    #: Sorted; empty for every method.
    methods: tuple[str, ...]
    #: "https" or "http".
    scheme: str
    #: The segments after the first slash; `**` is any number of them.
    path: tuple[str, ...]
    #: The parameters that a request must have; None if any.
    query: tuple[tuple[str, str], ...] | None

    @property
    def target(self) -> str:
        """Path and query as a rule writes them."""
        query = "" if self.query is None else "?" + "&".join(f"{name}={value}" for name, value in self.query)
        return "/" + "/".join(self.path) + query


# Rules


def split_rule(body: str) -> tuple[str, str, str, str] | None:
    """Split a rule into methods, scheme, authority and target; None if it is not about requests."""
    methods, space, url = body.partition(" ")
    scheme, has_scheme, rest = url.lstrip(" ").partition("://")
    if not space or not has_scheme:
        return None
    at = min((place for place in map(rest.find, "/?#") if place >= 0), default=len(rest))
    return methods, scheme, rest[:at], rest[at:]


def parse_pattern(methods: str, scheme: str, authority: str, target: str) -> HttpPattern:
    """Return the pattern of a rule from its parts."""
    known = scheme.lower()
    if known in ("ws", "wss"):
        raise NetRuleError(
            "a WebSocket begins as a GET request",
            f"write GET {'https' if known == 'wss' else 'http'}://{authority}{target}",
        )
    if known not in SCHEMES:
        raise NetRuleError("rules for requests are about http and https", f"write GET https://{authority}/**")
    if "@" in authority:
        raise NetRuleError("a rule has no user", f"write {scheme}://{authority.rpartition('@')[2]}{target}")
    if "#" in target:
        raise NetRuleError("servers never see what follows a #", f"write {target.partition('#')[0] or '/**'}")
    if not target.startswith("/"):
        raise NetRuleError("has no path", f"write {methods} {known}://{authority}/** for every path")
    path, has_query, query = target.partition("?")
    return HttpPattern(
        _methods(methods), known, _pattern_path(path), _pattern_query(query) if has_query else None
    )


def _methods(text: str) -> tuple[str, ...]:
    if text == "*":
        return ()
    found = text.split(",")
    for method in found:
        if not _METHOD.fullmatch(method):
            upper = method.upper()
            hint = f"write {text.upper()}" if _METHOD.fullmatch(upper) else "write methods as GET,POST or *"
            raise NetRuleError(f"{method!r} is not a method" if method else "a method is missing", hint)
        if method == "CONNECT":
            raise NetRuleError("CONNECT is no request to a host", "name the host and its methods")
    return tuple(sorted(set(found)))


def refuse_mistyped_methods(pattern: HttpPattern) -> None:
    """Refuse a method that is likely a typing error of a known one; others may be a server's own."""
    for method in sorted({*pattern.methods} - {*_KNOWN_METHODS}):
        from stockade.policy.suggestions import closest

        if near := closest(method, _KNOWN_METHODS):
            raise NetRuleError(
                f"{method} is not a known method",
                f"did you mean {near}? If your server really has {method}, write * for every method",
            )


def _pattern_path(path: str) -> tuple[str, ...]:
    try:
        normal, plain = read_path(path)
    except AmbiguousTargetError as error:
        raise NetRuleError(
            str(error), "write letters beyond ASCII as UTF-8 with %, such as %20 for a space"
        ) from None
    segments = tuple(normal[1:].split("/"))
    if plain.count("/") > len(segments) or set(plain) & set("\\?#;"):
        raise NetRuleError(
            "servers read %2F, %5C, %3F, %23 and ; in different ways", "write * for that part of the path"
        )
    if plain.count("*") > normal.count("*"):
        raise NetRuleError("a * in a path is a wildcard, also as %2A", "write * for that part of the path")
    for segment in segments:
        if segment != "**" and "**" in segment:
            raise NetRuleError(
                "** stands for whole segments", "write /**/ between slashes, or * in a segment"
            )
        if is_dots(segment):
            raise NetRuleError("the path has a . or .. segment", "write the path that the server sees")
    if "" in segments[:-1]:
        raise NetRuleError("the path has an empty segment", "write one slash between two segments")
    return segments


def _pattern_query(query: str) -> tuple[tuple[str, str], ...]:
    if not is_query(query):
        raise NetRuleError("the query has letters that no URL has", "write them with %")
    found = parameters(query)
    if len(dict(found)) < len(found) or ";" in query or any(";" in one for pair in found for one in pair):
        raise NetRuleError("a query names a parameter once", "write ?name=value&other=*")
    return tuple(sorted(found))


def rule_text(pattern: HttpPattern, host: str) -> str:
    """Return the one way to write a rule; `host` is with its port, if that is another than the scheme's."""
    return f"{','.join(pattern.methods) or '*'} {pattern.scheme}://{host}{pattern.target}"


# Requests


def check_method(method: str) -> bool:
    """Whether a method is one that every server reads alike."""
    return bool(_METHOD.fullmatch(method))


def matches(pattern: HttpPattern, method: str, target: Target, *, deny: bool) -> bool:
    """Whether a rule is about a request: in every reading for one that allows, in any for one that denies.

    Raises AmbiguousTargetError if all rules together have taken too much work.
    """
    target.spend(1)
    if pattern.methods and method not in pattern.methods:
        return False
    decide = any if deny else all
    if pattern.query is not None and not decide(
        _matches_query(pattern.query, query, target, deny=deny) for query in target.queries
    ):
        return False
    if pattern.path == _ANY_PATH:
        return True
    wanted = _segments(pattern.path, deny)
    readings = target.folded if deny else target.readings
    return decide(_matches_path(wanted, path, target) for path in readings)


class _Segment(NamedTuple):
    """One segment of a pattern."""

    #: As it is written and, if that differs, decoded, as a reading may be.
    forms: tuple[str, ...]
    #: `**`: any number of segments.
    any_number: bool
    glob: bool

    def matches(self, text: str) -> bool:
        """Whether a segment of a path is one of this pattern."""
        if not self.glob:
            return text in self.forms
        return bool(text) and any(_matches_glob(form, text) for form in self.forms)


@lru_cache(maxsize=512)
def _segments(path: tuple[str, ...], deny: bool) -> tuple[_Segment, ...]:
    written, plain = path, tuple(map(decoded, path))
    if deny:
        written, plain = fold(written), fold(plain)
    return tuple(
        _Segment(tuple(dict.fromkeys(forms)), forms[0] == "**", "*" in forms[0])
        for forms in zip(written, plain, strict=True)
    )


def _matches_path(pattern: Sequence[_Segment], path: Sequence[str], target: Target) -> bool:
    """Match segments; `**` takes as few as it can, and more if the rest does not fit (no backtracking)."""
    at = here = 0
    again = resume = -1
    while here < len(path):
        segment = pattern[at] if at < len(pattern) else None
        target.spend(1 + (len(path[here]) >> 8))
        if segment is not None and segment.any_number:
            again, resume = at, here
            at += 1
        elif segment is not None and segment.matches(path[here]):
            at, here = at + 1, here + 1
        elif again >= 0:
            resume += 1
            at, here = again + 1, resume
        else:
            return False
    return all(segment.any_number for segment in pattern[at:])


def _matches_glob(pattern: str, text: str) -> bool:
    first, *rest = pattern.split("*")
    if not text.startswith(first):
        return False
    at = len(first)
    for part in rest[:-1]:
        found = text.find(part, at)
        if found < 0:
            return False
        at = found + len(part)
    return len(text) - at >= len(rest[-1]) and text.endswith(rest[-1])


def _matches_query(
    wanted: tuple[tuple[str, str], ...], query: QueryParameters, target: Target, *, deny: bool
) -> bool:
    if not deny and (query.ambiguous or len(query.values) != len(wanted)):
        return False
    for name, value in wanted:
        given = query.values.get(name, [])
        target.spend(1 + len(given) + (sum(map(len, given)) >> 8))
        if not any(_matches_glob(value, one) if "*" in value else value == one for one in given):
            return False
    return True


# One rule within another


def covers(wide: HttpPattern, narrow: HttpPattern) -> bool:
    """Whether every request of `narrow` is one of `wide`; False if that is not certain."""
    if wide.scheme != narrow.scheme:
        return False
    if wide.methods and not (narrow.methods and set(narrow.methods) <= set(wide.methods)):
        return False
    if wide.query is not None and wide.query != narrow.query:
        return False
    return _covers_path(wide.path, narrow.path)


def meets(one: HttpPattern, other: HttpPattern) -> bool:
    """Whether a request could be one of both; True if that is not certain."""
    if one.scheme != other.scheme:
        return False
    return not (one.methods and other.methods) or bool(set(one.methods) & set(other.methods))


def _covers_path(wide: tuple[str, ...], narrow: tuple[str, ...]) -> bool:
    """Whether each path of `narrow` is one of `wide`, by the ways to lay one over the other."""
    reached = {0}
    for segment in narrow:
        # From each place in `wide`, where this segment leads; `**` of `wide` takes any number.
        places = set()
        for at in _skipped(wide, reached):
            if at < len(wide) and wide[at] == "**":
                places.add(at)
            elif at < len(wide) and segment != "**" and _covers_segment(wide[at], segment):
                places.add(at + 1)
        reached = places
    return len(wide) in _skipped(wide, reached)


def _skipped(wide: tuple[str, ...], places: set[int]) -> set[int]:
    """Return the places and those behind a `**` that takes nothing."""
    found = set(places)
    for place in places:
        at = place
        while at < len(wide) and wide[at] == "**":
            at += 1
            found.add(at)
    return found


def _covers_segment(wide: str, narrow: str) -> bool:
    if wide == narrow:
        return True
    if wide == "*":
        return bool(narrow.strip("*"))
    (segment,) = _segments((wide,), False)
    return "*" not in narrow and segment.matches(narrow) and segment.matches(decoded(narrow))
