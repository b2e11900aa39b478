"""The secrets of one sandbox: where their values are, and where a placeholder is replaced by one.

Programs inside have placeholders only. Once a rule has allowed a request, `SecretStore.rewrite` puts the
values into it, if the request goes to a host that the secret is bound to and has the placeholder at a place
that the policy names. A placeholder anywhere else stays what it is, and is reported. Values are searched for
in the answers of every host: one that has a value may give it to another.

The values and the forms in which servers may send them back are in memory that is locked, left out of core
dumps and wiped when other values have taken their place. It is filled straight from the control socket.
A request that has a value is a copy of it, which HTTP and TLS code handles until it is sent.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from stockade.egress.redaction import (
    LEAST_VALUE,
    Writer,
    json_escape,
    lowered_forms,
    percent,
    room_for,
    written_forms,
)
from stockade.linux.secure_buffer import SecureBuffer

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


class SecretMemory:
    """The values of all secrets, and the forms in which they may come back, in locked memory.

    What is under way keeps the memory that it began with. The memory is wiped when nothing uses it any more.
    """

    def __init__(self, sizes: Mapping[str, int], fill: Callable[[memoryview], int]) -> None:
        self._buffers: list[SecureBuffer] = []
        self.values: dict[str, memoryview] = {}
        #: Everything that is masked in answers; in small letters, what is masked in the names of headers.
        self.forms: tuple[memoryview, ...] = ()
        self.name_forms: tuple[memoryview, ...] = ()
        if not sizes:
            return
        try:
            values = self._lock(sum(sizes.values()))
            if fill(values) != len(values):
                raise ValueError("the values are not as long as was said")
            at = 0
            for name, size in sizes.items():
                self.values[name] = values[at : at + size]
                at += size
            room = self._lock(sum(map(room_for, self.values.values())))
            forms: list[memoryview] = []
            for value in self.values.values():
                found = written_forms(value, room)
                room = room[sum(map(len, found[1:])) :]
                forms += found
            self.forms = tuple(forms)
            self.name_forms = lowered_forms(forms, self._lock(sum(map(len, forms))))
        except BaseException:
            self.wipe()
            raise

    def _lock(self, size: int) -> memoryview:
        self._buffers.append(SecureBuffer(max(1, size)))
        return self._buffers[-1].view

    def wipe(self) -> None:
        """Wipe it now, whatever is under way."""
        for buffer in self._buffers:
            buffer.close()


class SecretStore:
    """The secrets of this sandbox. It is empty until `load`."""

    def __init__(self) -> None:
        self._secrets: tuple[BoundSecret, ...] = ()
        self.memory = SecretMemory({}, len)
        self._longest = 0
        #: How many bytes of compressed answers are under way, decoded.
        self.decoded = 0

    def __bool__(self) -> bool:
        return bool(self._secrets)

    def load(self, described: Sequence[Mapping[str, Any]], fill: Callable[[memoryview], int]) -> None:
        """Take other secrets. `fill` writes their values, one after another, and returns how many bytes."""
        secrets = tuple(_secret(one) for one in described)
        sizes = {str(one["name"]): int(one["size"]) for one in described}
        self.memory = SecretMemory(sizes, fill)
        self._secrets = secrets
        self._longest = max((len(one.placeholder) for one in secrets), default=0)

    def clear(self) -> None:
        """Wipe all values."""
        self.memory.wipe()
        self._secrets, self.memory = (), SecretMemory({}, len)

    def is_bound(self, scheme: str, host: str, port: int) -> bool:
        """Whether some secret is bound to a host."""
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
        value = self.memory.values[secret.name]
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

    def body_rewriter(self, scheme: str, host: str, port: int, headers: Headers) -> BodyRewriter | None:
        """Return what puts values into a body for this host; None if no secret may be there.

        Values are escaped for forms and JSON. In bodies of other types nothing is replaced.
        """
        bound = [one for one in self._secrets if (scheme, host, port) in one.hosts and "body" in one.forms]
        fields = dict(headers)
        kind = fields.get(b"content-type", b"").partition(b";")[0].strip().lower()
        escape = _BODY_ESCAPES.get(b"application/json" if kind.endswith(b"+json") else kind)
        if not bound or escape is None or b"content-encoding" in fields:
            return None
        return BodyRewriter([(one, self.memory.values[one.name]) for one in bound], escape)

    def scan(self) -> PlaceholderScan:
        """Return what looks for placeholders in a body as it passes."""
        return PlaceholderScan(self._secrets, self._longest)


class BodyRewriter:
    """Puts values in place of placeholders in one body, also where pieces of it meet."""

    def __init__(self, secrets: Sequence[tuple[BoundSecret, memoryview]], escape: Writer) -> None:
        self._secrets, self._escape = secrets, escape
        self._held = b""
        #: The secrets whose values are in the body.
        self.used: set[str] = set()
        self._left = _MOST_IN_BODY

    def feed(self, data: bytes, *, end: bool = False) -> bytes:
        """Return what can be sent now."""
        seen = self._held + data
        for secret, value in self._secrets:
            count = min(seen.count(secret.placeholder), self._left)
            if count:
                self.used.add(secret.name)
                self._left -= count
                seen = seen.replace(secret.placeholder, bytes(self._escape(value)), count)
        keep = 0 if end else max(_begun(seen, one.placeholder) for one, _ in self._secrets)
        self._held = seen[len(seen) - keep :]
        return seen[: len(seen) - keep]


def _begun(seen: bytes, wanted: bytes) -> int:
    """Return how many bytes at the end are the beginning of a placeholder."""
    for size in range(min(len(seen), len(wanted) - 1), 0, -1):
        if seen.endswith(wanted[:size]):
            return size
    return 0


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


_BODY_ESCAPES: dict[bytes, Writer] = {
    b"application/x-www-form-urlencoded": percent,
    b"application/json": json_escape,
}
#: How often placeholders are replaced in one body.
_MOST_IN_BODY = 8
