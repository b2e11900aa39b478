"""Who may call: API keys, kept as digests, and the checks that stop web pages from calling.

A key is 256 random bits, so its SHA-256 needs no salt and no slow hash. Every comparison looks at all keys
and takes the same time.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import re
import secrets
from collections.abc import Mapping, Sequence

import msgspec

from stockade.errors import PolicyError
from stockade.server.config import LOOPBACK, ServerConfig
from stockade.server.directory import server_directory
from stockade.server.record import now
from stockade.server.wire.errors import INVALID_REQUEST, ApiError

#: The variable that sets the key of the first client.
VARIABLE = "STOCKADE_API_KEY"
#: The name of that client.
FIRST = "default"
FILE = "keys.json"
#: The shortest key that the variable may set.
SHORTEST = 16

API_KEY = b"open-sandbox-api-key"
TOKEN = b"x-execd-access-token"

UNKNOWN_KEY = (
    "the server does not know this key: `stockade serve --add-key NAME` on its machine makes one, and a new "
    "one for a client that has lost its key"
)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::[0-9]*)?")
#: Headers that decide who calls and by which name: none may come twice, with two meanings.
SINGLE = frozenset({b"host", b"origin", API_KEY, TOKEN})


class ApiKey(msgspec.Struct, frozen=True):
    """One client's key, as the server keeps it."""

    name: str
    #: The SHA-256 of the key, in hexadecimal.
    digest: str
    made: str


def digest_of(key: str | bytes) -> str:
    """Return what the server keeps of a key."""
    return hashlib.sha256(key.encode() if isinstance(key, str) else key).hexdigest()


class ClientKeys:
    """The keys of the server's clients. The file is read again after a change."""

    def __init__(self, home: str, environ: Mapping[str, str]) -> None:
        self._path = os.path.join(server_directory(home), FILE)
        self._seen: tuple[int, int] | None = None
        self._keys: tuple[ApiKey, ...] = ()
        self._given = environ.get(VARIABLE, "")
        if self._given and len(self._given) < SHORTEST:
            raise PolicyError(
                f"{VARIABLE} is shorter than {SHORTEST} characters",
                hint="leave it out, and the server makes a key; or: openssl rand -hex 32",
            )

    @property
    def from_environment(self) -> bool:
        """Whether the variable sets a key, which this process then holds as it is."""
        return bool(self._given)

    @property
    def empty(self) -> bool:
        """Whether no client could call."""
        return not self.keys()

    def has(self, name: str) -> bool:
        """Whether a client of this name has a key."""
        return any(key.name == name for key in self.keys())

    def keys(self) -> tuple[ApiKey, ...]:
        """Return the keys; the one that the variable sets replaces the first client's."""
        try:
            found = os.stat(self._path)
            seen = found.st_mtime_ns, found.st_ino
        except FileNotFoundError:
            seen = None
        if seen != self._seen or not self._keys:
            self._seen, self._keys = seen, self._read()
        return self._keys

    def _read(self) -> tuple[ApiKey, ...]:
        try:
            with open(self._path, "rb") as stream:
                stored = msgspec.json.decode(stream.read(), type=tuple[ApiKey, ...])
        except FileNotFoundError:
            stored = ()
        except msgspec.DecodeError:
            raise PolicyError(
                f"{self._path} is damaged", hint="remove it; the server makes a new key"
            ) from None
        if not self._given:
            return stored
        rest = tuple(key for key in stored if key.name != FIRST)
        return (ApiKey(FIRST, digest_of(self._given), ""), *rest)

    def add(self, name: str) -> str:
        """Make a key for a client and return it; only its digest is kept. A client's earlier key ends."""
        if not _NAME.fullmatch(name):
            raise PolicyError(
                f"{name!r} cannot name a key",
                hint="use up to 63 letters, digits, dots, dashes and underscores",
            )
        self._seen, given, self._given = None, self._given, ""
        stored = self._read()
        self._given = given
        key = f"stk_{secrets.token_urlsafe(32)}"
        kept = [one for one in stored if one.name != name]
        kept.append(ApiKey(name, digest_of(key), now().isoformat()))
        part = f"{self._path}.new"
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as stream:
            stream.write(msgspec.json.encode(kept))
        os.replace(part, self._path)
        return key

    def owner_of(self, key: bytes) -> str | None:
        """Return the client that has this key."""
        digest, found = digest_of(key), None
        for one in self.keys():
            if hmac.compare_digest(digest, one.digest):
                found = one.name
        return found

    def require(self, headers: Mapping[bytes, bytes]) -> str:
        """Return the client that sent a request, or refuse it."""
        key = headers.get(API_KEY)
        if key is None:
            raise ApiError(
                401,
                "MISSING_API_KEY",
                "the request has no key: send the header OPEN-SANDBOX-API-KEY; SDKs take the key from the "
                "variable OPEN_SANDBOX_API_KEY",
            )
        owner = self.owner_of(key)
        if owner is None:
            raise ApiError(401, "INVALID_API_KEY", UNKNOWN_KEY)
        return owner


def is_token(given: bytes | None, token: str) -> bool:
    """Whether a request carries a sandbox's token."""
    return given is not None and hmac.compare_digest(given, token.encode())


def single_headers(given: Sequence[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    """Return the headers of a request by name; refuse one that gives two answers to who calls."""
    names = [name for name, _ in given if name in SINGLE]
    if len(names) != len(set(names)):
        raise ApiError(400, INVALID_REQUEST, "a header that may come once came twice")
    return dict(given)


class OriginCheck:
    """Refuses requests that a web page made: by a name that an attacker points here, or by its origin."""

    def __init__(self, config: ServerConfig) -> None:
        self._names = {*LOOPBACK, *(name.lower() for name in config.hosts)}
        self._any_address = not config.is_local
        self._origins = set(config.origins)
        host = config.address[0]
        self._names.add(f"[{host}]" if ":" in host else host)

    def check(self, headers: Mapping[bytes, bytes]) -> bytes | None:
        """Refuse a request with a foreign `Host` or `Origin`; return the origin of a page that may call."""
        host = headers.get(b"host", b"").decode("latin-1").lower()
        if not self._is_ours(_host_name(host)):
            raise ApiError(
                403,
                "FORBIDDEN_HOST",
                "the server does not answer to this Host: add it to `hosts` in the configuration",
            )
        origin = headers.get(b"origin")
        if origin is not None and origin.decode("latin-1") not in self._origins:
            raise ApiError(
                403,
                "FORBIDDEN_ORIGIN",
                "web pages may not call the server: see `origins` in the configuration",
            )
        return origin

    def _is_ours(self, name: str) -> bool:
        if name in self._names:
            return True
        try:
            address = ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            return False
        # A page can give a name any address, but it cannot use an address as a name.
        return self._any_address or address.is_loopback


def _host_name(host: str) -> str:
    """Return the name in a Host header, without the port; empty if it is neither a name nor an address."""
    found = _HOST.fullmatch(host)
    return found[1] if found is not None else ""
