"""The part of a rule that judges HTTP requests: methods, path and query.

    GET,HEAD https://api.example.com/v1/**
    POST https://api.example.com/v1/items/*?draft=true

In a path, `*` is one segment or a part of one, `**` any number of segments. The query is ignored, unless the
rule has one: then the request must have these parameters and no others, in any order.

Servers do not agree on what a path means: some decode `%2F` before they split it into segments, merge double
slashes, or cut off `;parameters`. So a path has readings. A request is allowed only if the rules allow every
reading of it, and denied if a rule denies one. What can be read as `.` or `..` is refused altogether.

The egress process judges hostile requests with this module, so every function takes any text in time that
grows with its length alone, and nothing but the standard library is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from stockade.policy.net_errors import NetRuleError

#: The longest target of a request that is judged.
MOST_TARGET = 16384
#: How often a path is decoded to find what a server that decodes too often would find.
_DECODINGS = 4
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
_UNRESERVED = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~")
#: What may be in a path as it is: RFC 3986, and what browsers send beyond that.
_PATH = re.compile(r"/(?:[A-Za-z0-9\-._~!$&'()*+,;=:@/|^\[\]`{}\"<>]|%[0-9A-Fa-f]{2})*")
_QUERY = re.compile(r"(?:[A-Za-z0-9\-._~!$&'()*+,;=:@/?|^\[\]`{}\"<>\\]|%[0-9A-Fa-f]{2})*")
_ESCAPE = re.compile(r"%([0-9A-Fa-f]{2})")
#: Bytes that UTF-8 never has: with them, some decoders write a dot or a slash in a second way.
_NEVER_IN_UTF8 = re.compile("[\xc0\xc1\xf5-\xff]")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
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


class AmbiguousTargetError(ValueError):
    """The target of a request that servers could read in different ways; the message says why."""


class Target(NamedTuple):
    """Path and query of a request, in every reading."""

    #: Percent-encoding in its one form; what messages show.
    path: str
    readings: tuple[tuple[str, ...], ...]
    #: None if there is no `?`.
    query: str | None


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
    if not _PATH.fullmatch(path):
        raise NetRuleError(
            "the path has letters that no URL has", "write them with %, such as %20 for a space"
        )
    segments = tuple(_normal(one) for one in path[1:].split("/"))
    plain = _decoded("/".join(segments))
    if plain != "/".join(segments) and (plain.count("/") != len(segments) - 1 or "\\" in plain):
        raise NetRuleError("servers read %2F and %5C in different ways", "write * for that part of the path")
    for segment in segments:
        if segment != "**" and "**" in segment:
            raise NetRuleError(
                "** stands for whole segments", "write /**/ between slashes, or * in a segment"
            )
        if ";" in segment:
            raise NetRuleError("servers read a ; in a path in different ways", "write * for that segment")
        if _is_dots(segment):
            raise NetRuleError("the path has a . or .. segment", "write the path that the server sees")
    if "" in segments[:-1]:
        raise NetRuleError("the path has an empty segment", "write one slash between two segments")
    return segments


def _pattern_query(query: str) -> tuple[tuple[str, str], ...]:
    if not _QUERY.fullmatch(query):
        raise NetRuleError("the query has letters that no URL has", "write them with %")
    found = [_parameter(one) for one in query.split("&")] if query else []
    names = [name for name, _ in found]
    if len(set(names)) < len(names) or any(";" in one for pair in found for one in pair):
        raise NetRuleError("a query names a parameter once", "write ?name=value&other=*")
    return tuple(sorted(found))


def rule_text(pattern: HttpPattern, host: str) -> str:
    """Return the one way to write a rule; `host` is with its port, if that is another than the scheme's."""
    return f"{','.join(pattern.methods) or '*'} {pattern.scheme}://{host}{pattern.target}"


# Requests


def read_target(text: str) -> Target:
    """Return path and query of a request in all readings, or raise AmbiguousTargetError."""
    if len(text) > MOST_TARGET:
        raise AmbiguousTargetError("the URL is too long")
    path, has_query, query = text.partition("?")
    if not _PATH.fullmatch(path):
        raise AmbiguousTargetError("the path has letters that no URL has")
    if has_query and not _QUERY.fullmatch(query):
        raise AmbiguousTargetError("the query has letters that no URL has")
    normal = _normal(path)
    plain = _decoded(normal)
    if _CONTROL.search(plain):
        raise AmbiguousTargetError("the path has a control character")
    if _NEVER_IN_UTF8.search(plain):
        raise AmbiguousTargetError("the path has bytes that are not UTF-8")
    readings = {tuple(normal[1:].split("/")): None}
    slashed = plain.replace("\\", "/")
    for one in (plain, slashed, normal, _without_parameters(slashed), _without_parameters(normal)):
        segments = one[1:].split("/")
        if any(map(_is_dots, segments)):
            raise AmbiguousTargetError("the path has a . or .. segment")
        readings[tuple(segments)] = None
        readings[(*(segment for segment in segments[:-1] if segment), segments[-1])] = None
    return Target(normal, tuple(readings), query if has_query else None)


def check_method(method: str) -> bool:
    """Whether a method is one that every server reads alike."""
    return bool(_METHOD.fullmatch(method))


def matches(pattern: HttpPattern, method: str, target: Target, *, deny: bool) -> bool:
    """Whether a rule is about a request: in every reading for one that allows, in any for one that denies."""
    if pattern.methods and method not in pattern.methods:
        return False
    if pattern.query is not None and not _matches_query(pattern.query, target.query, deny=deny):
        return False
    if pattern.path == _ANY_PATH:
        return True
    if deny:
        # Some servers do not tell capitals from small letters.
        wanted = tuple(segment.lower() for segment in pattern.path)
        return any(_matches_path(wanted, [one.lower() for one in path]) for path in target.readings)
    return all(_matches_path(pattern.path, path) for path in target.readings)


def _matches_path(pattern: Sequence[str], path: Sequence[str]) -> bool:
    """Match segments; `**` takes as few as it can, and more if the rest does not fit (no backtracking)."""
    at = here = 0
    again = resume = -1
    while here < len(path):
        if at < len(pattern) and pattern[at] == "**":
            again, resume = at, here
            at += 1
        elif at < len(pattern) and _matches_segment(pattern[at], path[here]):
            at, here = at + 1, here + 1
        elif again >= 0:
            resume += 1
            at, here = again + 1, resume
        else:
            return False
    return all(segment == "**" for segment in pattern[at:])


def _matches_segment(pattern: str, text: str) -> bool:
    if "*" not in pattern:
        # A reading may have decoded what the pattern writes with a %.
        return pattern == text or ("%" in pattern and _decoded(pattern) == text)
    if pattern == "*":
        return bool(text)
    return _matches_glob(pattern, text) or ("%" in pattern and _matches_glob(_decoded(pattern), text))


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


def _matches_query(wanted: tuple[tuple[str, str], ...], query: str | None, *, deny: bool) -> bool:
    found = parameters(query)
    if deny:
        return all(
            any(name == key and _matches_glob_or_equal(value, given) for key, given in found)
            for name, value in wanted
        )
    # Servers differ in which of two equal names they take, and in whether a ; separates.
    if len(found) != len(wanted) or len(dict(found)) < len(found) or (query and ";" in query):
        return False
    values = dict(found)
    return all(name in values and _matches_glob_or_equal(value, values[name]) for name, value in wanted)


def _matches_glob_or_equal(pattern: str, text: str) -> bool:
    return _matches_glob(pattern, text) if "*" in pattern else pattern == text


def parameters(query: str | None) -> list[tuple[str, str]]:
    """Return the parameters of a query, as a server finds them that separates them by `;` too."""
    return [_parameter(one) for one in re.split("[&;]", query)] if query else []


def _parameter(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    return _decoded(name.replace("+", " ")), _decoded(value.replace("+", " "))


def _normal(path: str) -> str:
    """Return percent-encoding in its one form: unreserved letters as they are, the others in capitals."""
    return _ESCAPE.sub(_normal_escape, path)


def _normal_escape(found: re.Match[str]) -> str:
    letter = chr(int(found[1], 16))
    return letter if letter in _UNRESERVED else found[0].upper()


def _decoded(text: str) -> str:
    """Decode a text until nothing is left to decode, byte by byte; a few times at most."""
    for _ in range(_DECODINGS):
        if "%" not in text:
            break
        text = _ESCAPE.sub(lambda found: chr(int(found[1], 16)), text)
    return text


def _without_parameters(path: str) -> str:
    return "/".join(segment.partition(";")[0] for segment in path.split("/")) if ";" in path else path


def _is_dots(segment: str) -> bool:
    return segment.partition(";")[0].strip(" ") in (".", "..")


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
    return "*" not in narrow and _matches_segment(wide, narrow)
