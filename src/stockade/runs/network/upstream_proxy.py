"""The proxies that the supervisor's environment names, for the egress process to dial through.

`HTTPS_PROXY`, `HTTP_PROXY`, `ALL_PROXY` and `NO_PROXY`, in either case, as other programs read them.
Passwords go to the egress process and nowhere else: receipts and plans name a proxy by host and port.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from stockade.errors import PolicyError

#: What each kind of proxy is called in the environment; see `egress.upstream` for what it is used for.
VARIABLES = {"https": "https_proxy", "http": "http_proxy", "all": "all_proxy"}
#: The ports that a proxy has if its address names none, by the scheme.
PORTS = {"http": 80, "socks5": 1080, "socks5h": 1080}
#: The most that `NO_PROXY` may have.
MOST_DIRECT, MOST_TEXT = 256, 16_384
_PROXY = (
    r"(?:(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://)?(?:(?P<user>[^:@/]*)(?::(?P<password>[^@/]*))?@)?"
    r"(?P<host>[A-Za-z0-9._-]+|\[[A-Fa-f0-9.:]+\])(?::(?P<port>[0-9]{1,5}))?/?"
)


class HostProxies(NamedTuple):
    """The proxies of the host, and the hosts that are reached without them."""

    #: By kind: scheme, host, port, user and password.
    proxies: Mapping[str, tuple[str, str, int, str, str]]
    no_proxy: tuple[str, ...]

    @property
    def ports(self) -> tuple[int, ...]:
        """The ports that the egress process must be able to dial for them."""
        return tuple(sorted({one[2] for one in self.proxies.values()}))

    @property
    def names(self) -> tuple[str, ...]:
        """Each proxy as `HTTPS_PROXY HOST:PORT`, without user and password."""
        return tuple(
            f"{VARIABLES[kind].upper()} {f'[{host}]' if ':' in host else host}:{port}"
            for kind, (_, host, port, _, _) in self.proxies.items()
        )

    def settings(self) -> dict[str, object]:
        """Return what the egress process is told."""
        return {"proxies": {kind: list(one) for kind, one in self.proxies.items()}, "no_proxy": self.no_proxy}


def proxies_of(environ: Mapping[str, str]) -> HostProxies | None:
    """Return the proxies that an environment names; None if there are none."""
    if not any(name in environ for one in VARIABLES.values() for name in (one, one.upper())):
        return None
    found = host_proxies(environ)
    return found if found.proxies else None


def host_proxies(environ: Mapping[str, str]) -> HostProxies:
    """Read the proxies of an environment; PolicyError for one that Stockade cannot use."""
    found: dict[str, tuple[str, str, int, str, str]] = {}
    for kind, name in VARIABLES.items():
        # A CGI program has HTTP_PROXY from a header of the request, so programs read the small letters alone.
        written = environ.get(name, "") or ("" if _is_cgi(kind, environ) else environ.get(name.upper(), ""))
        if written.strip():
            found[kind] = _parsed(name.upper(), written.strip())
    direct = (environ.get("no_proxy", "") or environ.get("NO_PROXY", ""))[:MOST_TEXT]
    entries = [one for one in re.split(r"[,\s]+", direct) if one and one.isascii() and one.isprintable()]
    return HostProxies(found if "*" not in entries else {}, tuple(entries[:MOST_DIRECT]))


def _is_cgi(kind: str, environ: Mapping[str, str]) -> bool:
    return kind == "http" and "REQUEST_METHOD" in environ


def _parsed(name: str, written: str) -> tuple[str, str, int, str, str]:
    match = re.fullmatch(_PROXY, written)
    if match is None:
        # Not with the value: it may have a password in it.
        raise PolicyError(
            f"{name}: Stockade connects through the proxy of your environment, and cannot read this address",
            hint=f"write it as http://proxy.example:3128, or unset {name}",
        )
    scheme = (match["scheme"] or "http").lower()
    if scheme not in PORTS:
        raise PolicyError(
            f"{name}: Stockade connects through the proxy of your environment, and does not speak {scheme}",
            hint=f"name an http:// or socks5:// proxy, or unset {name} for a direct connection",
        )
    port = int(match["port"] or PORTS[scheme])
    if not 1 <= port <= 65535:
        raise PolicyError(f"{name}: {port} is not a port", hint=f"correct {name}, or unset it")
    from urllib.parse import unquote

    user, password = (unquote(match[part] or "") for part in ("user", "password"))
    return "http" if scheme == "http" else "socks5", match["host"].strip("[]"), port, user, password
