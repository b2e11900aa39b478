"""Headers by which some servers let a client replace the method, the path or the host of a request.

Gateways write them, and servers behind a gateway believe them; some believe every client. No rule could judge
what such a server does, so a request passes only if each of them repeats what the rules have judged. In
trailers none of them passes.
"""

from __future__ import annotations

import re

from stockade.egress.decoders.http_requests import DECISIVE, RequestRefusedError
from stockade.egress.termination.messages import Fields, RequestHead
from stockade.policy.http_rules import check_method
from stockade.policy.http_targets import AmbiguousTargetError

_METHOD_FIELDS = frozenset(
    {
        b"x-http-method-override", b"x-http-method", b"x-method-override", b"x-original-method",
        b"x-forwarded-method",
    }
)  # fmt: skip
#: Their value is a path, or a URL with one; no program needs to repeat its own path.
_PATH_FIELDS = frozenset(
    {
        b"x-original-url", b"x-original-uri", b"x-original-path", b"x-rewrite-url", b"x-rewrite-uri",
        b"x-override-url", b"x-forwarded-uri", b"x-forwarded-url", b"x-forwarded-path",
        b"x-forwarded-prefix", b"x-forwarded-request-uri", b"x-envoy-original-path", b"x-replaced-path",
        b"x-request-uri", b"x-http-destinationurl", b"x-http-path-override", b"x-proxy-url",
        b"x-script-name", b"x-waws-unencoded-url",
    }
)  # fmt: skip
_HOST_FIELDS = frozenset(
    {
        b"x-forwarded-host", b"x-original-host", b"x-host", b"x-forwarded-server", b"x-http-host-override",
        b"x-envoy-original-host", b"x-host-override", b"x-rewrite-host",
    }
)  # fmt: skip
#: RFC 7239: its elements may have a parameter `host`.
_FORWARDED = b"forwarded"
_NOT_IN_NAME = re.compile(rb"[^0-9a-z]")
_SEPARATORS = re.compile(rb"[;,]")


def _plain(name: bytes) -> bytes:
    """Return the name that servers may read: through CGI all of `x-host`, `x_host` and `x.host` are one."""
    return _NOT_IN_NAME.sub(b"-", name)


def is_override(name: bytes) -> bool:
    """Whether some server could take the header of this name, in lower case, for a part of the request."""
    plain = _plain(name)
    return plain == _FORWARDED or plain in _METHOD_FIELDS | _PATH_FIELDS | _HOST_FIELDS


def override_methods(fields: Fields) -> set[str]:
    """Return the methods that headers name, or raise AmbiguousTargetError."""
    found = set()
    for name, value in fields:
        if name in _METHOD_FIELDS:
            method = value.decode("latin-1").upper()
            if not check_method(method):
                raise AmbiguousTargetError(f"its {name.decode()} is not a method")
            found.add(method)
    return found


def check_overrides(head: RequestHead) -> None:
    """Refuse headers that name another path or host than the request, with AmbiguousTargetError."""
    for name, _ in head.fields:
        plain = _plain(name)
        if plain in _PATH_FIELDS or (plain != name and plain in _METHOD_FIELDS):
            raise AmbiguousTargetError(f"some servers take {plain.decode()} for another path or method")
    check_hosts(head)


def check_hosts(head: RequestHead) -> None:
    """Refuse headers that name another host, or that decide where a request ends, by another spelling."""
    host = head.host.encode("ascii")
    hosts = (host, b"%b:%d" % (host, head.port))
    for name, value in head.fields:
        plain = _plain(name)
        if plain != name and plain in DECISIVE:
            raise AmbiguousTargetError(f"some servers take {name.decode()} for {plain.decode()}")
        other = plain in _HOST_FIELDS and value.lower() not in hosts
        if other or (plain == _FORWARDED and _names_other_host(value, hosts)):
            raise AmbiguousTargetError(f"its {plain.decode()} names another host")


def check_trailers(fields: Fields) -> None:
    """Refuse trailers that some servers add to the headers, and then take for a part of the request."""
    if any(is_override(name) or _plain(name) in DECISIVE for name, _ in fields):
        raise RequestRefusedError("trailer that must be a header")


def _names_other_host(value: bytes, hosts: tuple[bytes, bytes]) -> bool:
    """Whether a Forwarded could name another host, to a parser that heeds quotes or to one that does not."""
    for part in _SEPARATORS.split(value.lower()):
        pair = part.strip(b" \t").replace(b'"', b"")
        if b"\\" in pair or (b"host" in pair and pair not in [b"host=" + host for host in hosts]):
            return True
    return False
