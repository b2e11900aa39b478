"""The secrets of one sandbox: where their values are, and where a placeholder is replaced by one.

Programs inside have placeholders only. Once a rule has allowed a request, `SecretStore.rewrite` puts the
values into it, if the request goes to a host that the secret is bound to and has the placeholder at a place
that the policy names. A placeholder anywhere else stays what it is, and is reported.

The values and the forms in which servers may send them back are in one arena: memory that is locked, left out
of core dumps and wiped when other values take their place. It is filled straight from the control socket.
A request that has a value is a copy of it, which HTTP and TLS code handles until it is sent.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from stockade.egress.redaction import LEAST_VALUE, Writer, json_escape, percent, written_forms
from stockade.linux.secure_buffer import SecureBuffer

#: All values and their forms together. An ordinary user may lock 64 KiB on older systems.
ARENA_SIZE = 64 * 1024
#: One value, and all of them.
MOST_VALUE, MOST_VALUES = 4096, 16 * 1024
#: The longest user and password in base64 that is looked into.
_MOST_BASIC = 16 * 1024
#: The schemes of Authorization whose text is a token.
_TOKEN_SCHEMES = (b"bearer", b"token")

Headers = Sequence[tuple[bytes, bytes]]


class BoundSecret(NamedTuple):
    """One secret without its value."""

    name: str
    placeholder: bytes
    #: Scheme, name and port of each host that may get the value.
    hosts: frozenset[tuple[str, str, int]]
    #: `bearer`, `basic`, `body`, `header:` and `query:` with a name in lower case or as it is.
    forms: frozenset[str]


class RewrittenRequest(NamedTuple):
    """A request as it goes to the server."""

    target: bytes
    headers: list[tuple[bytes, bytes]]
    #: The secrets whose values are in it.
    used: tuple[str, ...]
    #: The secrets whose placeholders are in it where no value may be.
    misplaced: tuple[str, ...]


class SecretStore:
    """The secrets of this sandbox. It is empty until `load`."""

    def __init__(self) -> None:
        self._arena: SecureBuffer | None = None
        self._secrets: tuple[BoundSecret, ...] = ()
        self._values: dict[str, memoryview] = {}
        #: Everything that is masked in answers.
        self.forms: tuple[memoryview, ...] = ()
        self._longest = 0

    def __bool__(self) -> bool:
        return bool(self._secrets)

    @property
    def size(self) -> int:
        """How many bytes of memory are locked."""
        return 0 if self._arena is None else ARENA_SIZE

    def load(self, described: Sequence[Mapping[str, Any]], fill: Callable[[memoryview], int]) -> None:
        """Take other secrets. `fill` writes their values, one after another, and returns how many bytes.

        The values that were there are wiped.
        """
        secrets = tuple(_secret(one) for one in described)
        sizes = [int(one["size"]) for one in described]
        self.clear()
        arena = SecureBuffer(ARENA_SIZE)
        try:
            if fill(arena.view[:MOST_VALUES]) != sum(sizes):
                raise ValueError("the values are not as long as was said")
            values: dict[str, memoryview] = {}
            forms: list[memoryview] = []
            at, free = 0, sum(sizes)
            for secret, size in zip(secrets, sizes, strict=True):
                values[secret.name] = value = arena.view[at : at + size]
                at += size
                found = written_forms(value, arena.view[free:])
                forms += found
                free += sum(map(len, found[1:]))
        except BaseException:
            arena.close()
            raise
        self._arena, self._secrets, self._values, self.forms = arena, secrets, values, tuple(forms)
        self._longest = max((len(one.placeholder) for one in secrets), default=0)

    def clear(self) -> None:
        """Wipe all values."""
        arena, self._arena = self._arena, None
        self._secrets, self._values, self.forms = (), {}, ()
        if arena is not None:
            arena.close()

    def is_bound(self, scheme: str, host: str, port: int) -> bool:
        """Whether some secret is bound to a host, so that its answers are redacted."""
        return any((scheme, host, port) in one.hosts for one in self._secrets)

    def rewrite(self, scheme: str, host: str, port: int, target: bytes, headers: Headers) -> RewrittenRequest:
        """Return a request that a rule has allowed with values in place of placeholders.

        `host` and `port` are those that the connection goes to, not what the program says they are.
        """
        place = scheme, host, port
        found = [one for one in self._secrets if _has_placeholder(one, target, headers)]
        if not found:
            return RewrittenRequest(target, list(headers), (), ())
        used: set[str] = set()
        bound = [one for one in found if place in one.hosts]
        for secret in bound:
            target, headers = self._insert(secret, target, headers, used)
        misplaced = {one.name for one in found if _has_placeholder(one, target, headers)}
        return RewrittenRequest(target, list(headers), tuple(sorted(used)), tuple(sorted(misplaced)))

    def _insert(
        self, secret: BoundSecret, target: bytes, headers: Headers, used: set[str]
    ) -> tuple[bytes, Headers]:
        value = self._values[secret.name]
        rewritten = []
        for name, text in headers:
            fresh = _header(secret, value, name.lower(), text)
            if fresh is not text:
                used.add(secret.name)
            rewritten.append((name, fresh))
        fresh = _query(secret, value, target)
        if fresh is not target:
            used.add(secret.name)
        return fresh, rewritten

    def wants_body(self, scheme: str, host: str, port: int) -> bool:
        """Whether a placeholder in a body for this host is replaced, so that the body must be whole."""
        return any((scheme, host, port) in one.hosts and "body" in one.forms for one in self._secrets)

    def rewrite_body(
        self, scheme: str, host: str, port: int, body: bytes, media_type: str
    ) -> tuple[bytes, tuple[str, ...], tuple[str, ...]]:
        """Return a whole body with values in it, those used, and those whose placeholders stay there.

        Values are escaped for forms and JSON. In bodies of other types nothing is replaced.
        """
        used = set()
        kind = media_type.partition(";")[0].strip().lower()
        escape = _BODY_ESCAPES.get("application/json" if kind.endswith("+json") else kind)
        for secret in self._secrets:
            bound = (scheme, host, port) in secret.hosts and "body" in secret.forms
            if escape is not None and bound and secret.placeholder in body:
                body = body.replace(secret.placeholder, bytes(escape(self._values[secret.name])), 8)
                used.add(secret.name)
        misplaced = {one.name for one in self._secrets if one.placeholder in body}
        return body, tuple(sorted(used)), tuple(sorted(misplaced))

    def scan(self) -> PlaceholderScan:
        """Return what looks for placeholders in a body as it passes."""
        return PlaceholderScan(self._secrets, self._longest)


class PlaceholderScan:
    """Looks for placeholders in a stream, across the borders of its pieces; changes nothing."""

    def __init__(self, secrets: Sequence[BoundSecret], longest: int) -> None:
        self._secrets, self._longest = secrets, longest
        self._tail = b""
        #: The secrets whose placeholders were seen.
        self.seen: set[str] = set()

    def feed(self, data: bytes) -> None:
        """Look at the next piece."""
        if len(self.seen) == len(self._secrets):
            return
        joined = self._tail + data
        self.seen.update(one.name for one in self._secrets if one.placeholder in joined)
        self._tail = joined[-self._longest + 1 :]


def describe(
    name: str, placeholder: str, hosts: Iterable[tuple[str, str, int]], forms: Iterable[str], size: int
) -> dict[str, object]:
    """Return what a control message says about one secret; its value comes by itself."""
    return {
        "name": name,
        "placeholder": placeholder,
        "hosts": [list(one) for one in hosts],
        "forms": list(forms),
        "size": size,
    }


def _secret(described: Mapping[str, Any]) -> BoundSecret:
    if not LEAST_VALUE <= int(described["size"]) <= MOST_VALUE:
        raise ValueError("a value is too short or too long")
    return BoundSecret(
        str(described["name"]),
        str(described["placeholder"]).encode("ascii"),
        frozenset((str(scheme), str(host), int(port)) for scheme, host, port in described["hosts"]),
        frozenset(map(str, described["forms"])),
    )


def _has_placeholder(secret: BoundSecret, target: bytes, headers: Headers) -> bool:
    wanted = secret.placeholder
    return wanted in target or any(
        wanted in value
        or wanted in name
        or wanted.lower() in name
        or wanted in _decoded_basic(name, value)[1]
        for name, value in headers
    )


def _decoded_basic(name: bytes, value: bytes) -> tuple[bytes, bytes]:
    """Return the scheme of an Authorization with base64 as it was written, and the user and password."""
    scheme, _, text = value.strip().partition(b" ")
    if name.lower() != b"authorization" or scheme.lower() != b"basic" or len(text) > _MOST_BASIC:
        return b"", b""
    try:
        return scheme, base64.b64decode(text.strip(), validate=True)
    except (binascii.Error, ValueError):
        return b"", b""


def _header(secret: BoundSecret, value: memoryview, name: bytes, text: bytes) -> bytes:
    """Return the text of a header with the value in it; the same object if nothing is replaced."""
    wanted = secret.placeholder
    if f"header:{name.decode('latin-1')}" in secret.forms and wanted in text:
        return text.replace(wanted, value, 1)
    if name != b"authorization":
        return text
    scheme = text.strip().partition(b" ")[0].lower()
    if "bearer" in secret.forms and scheme in _TOKEN_SCHEMES and wanted in text:
        return text.replace(wanted, value, 1)
    if "basic" in secret.forms and scheme == b"basic":
        written, user = _decoded_basic(name, text)
        if wanted in user:
            return written + b" " + base64.b64encode(user.replace(wanted, value, 1))
    return text


def _query(secret: BoundSecret, value: memoryview, target: bytes) -> bytes:
    """Return a target with the value as those parameters that the secret names."""
    names = [form[6:].encode() for form in secret.forms if form.startswith("query:")]
    if not names or secret.placeholder not in target:
        return target
    path, question, query = target.partition(b"?")
    parts = query.split(b"&")
    for number, part in enumerate(parts):
        name, equals, text = part.partition(b"=")
        if equals and name in names and secret.placeholder in text:
            parts[number] = name + equals + text.replace(secret.placeholder, bytes(percent(value)), 1)
    fresh = path + question + b"&".join(parts)
    return target if fresh == target else fresh


_BODY_ESCAPES: dict[str, Writer] = {
    "application/x-www-form-urlencoded": percent,
    "application/json": json_escape,
}
