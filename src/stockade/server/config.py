"""The configuration of the server: one TOML file, checked key by key.

Errors name the file, the line and the key, and the nearest name if a key does not exist. The values are
plain, so that the server can hand them to each sandbox's supervisor.
"""

from __future__ import annotations

import contextlib
import fnmatch
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import msgspec

from stockade.errors import PolicyError
from stockade.images.names import HOST
from stockade.policy import Policy
from stockade.policy.toml import decode, line_of, read_file, text_of
from stockade.policy.values import InvalidValueError, many, nearest, one_of, size, syscall

#: The variable that names the file, if `--config` does not.
VARIABLE = "STOCKADE_SERVER_CONFIG"
#: The images that work without a configuration: the code interpreter's SDK names the second.
KNOWN_IMAGES = {HOST: HOST, "opensandbox/code-interpreter:*": HOST}
#: Names of this machine that a client may use in `Host`, whatever the configuration says.
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What the server does beyond its defaults."""

    #: The address and port of the server. The SDKs try this one unless they are told another.
    listen: str = "127.0.0.1:8080"
    #: Further names that clients may use in `Host`, such as that of a proxy.
    hosts: tuple[str, ...] = ()
    #: Web pages, by origin, that may call the server from a browser.
    origins: tuple[str, ...] = ()
    #: By a pattern of image names: `host`, or the name of a registered image.
    images: dict[str, str] = {}
    #: The directory of the sandboxes' files; empty for the state directory's `sandboxes`.
    upper_root: str = ""
    #: How many bytes the changes of one isolated session may take; 0 for no limit.
    upper_max_bytes: int = 0
    #: The largest diff that is sent.
    diff_max_bytes: int = 256 << 20
    #: Where isolated sessions may write or bind, as paths inside the sandbox.
    writable_paths: tuple[str, ...] = ("/workspace", "/mnt", "/media", "/data")
    #: Seconds that an isolated session may idle, unless its creator says otherwise; 0 for ever.
    idle_timeout: int = 1800
    #: What a sandbox without a `networkPolicy` of its own reaches: "none", or rules.
    network: Literal["none"] | tuple[str, ...] = "none"
    #: A policy that no sandbox may go beyond, as clauses.
    ceiling: dict[str, Any] = {}
    #: Controls that a request may ask for and this machine only has in part, such as `limits.memory`
    #: without cgroups. Without this, such a request is refused: the SDKs ask for memory and processor limits.
    accept: tuple[str, ...] = ()
    #: System calls that are refused besides the built-in ones.
    deny_syscalls: tuple[str, ...] = ()
    #: Whether text of commands keeps its line endings: by the client's version, always, or never.
    line_endings: Literal["auto", "keep", "cut"] = "auto"
    #: What one client can take: connections, the head of a request, and a body in JSON.
    max_connections: int = 1000
    max_header_bytes: int = 64 << 10
    max_body_bytes: int = 16 << 20
    #: How many bytes one upload of files may have.
    max_upload_bytes: int = 16 << 30
    #: Seconds that a client has for the head of a request, and between two pieces of its body.
    client_timeout: int = 30

    @property
    def address(self) -> tuple[str, int]:
        """The host and the port of `listen`."""
        host, _, port = self.listen.rpartition(":")
        return host.strip("[]"), int(port)

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the server."""
        host = self.address[0]
        return host in ("localhost", "::1") or host.startswith("127.")

    def image_of(self, uri: str) -> str | None:
        """Return what an image's name stands for: `host`, a registered name, or None."""
        for pattern, target in (*self.images.items(), *KNOWN_IMAGES.items()):
            if fnmatch.fnmatchcase(uri, pattern):
                return target
        return None

    def ceiling_policy(self) -> Policy | None:
        """Return the policy that no sandbox may go beyond."""
        return Policy(**self.ceiling) if self.ceiling else None


def load_config(option: str | None, environ: Mapping[str, str]) -> ServerConfig:
    """Load the file that `--config` or the variable names; without one, the defaults."""
    path = option or environ.get(VARIABLE, "")
    if not path:
        return ServerConfig()
    try:
        data = read_file(path)
    except PolicyError as error:
        # The reader is that of policies, and its advice is about them.
        named = "" if option else f" ({VARIABLE} names it)"
        raise PolicyError(
            f"{error.message}{named}", hint="check the path; docs/reference/serve.toml is an example"
        ) from error
    return parse_config(text_of(data, path), path)


def parse_config(text: str, name: str) -> ServerConfig:
    """Parse a configuration; `name` is the file's for messages.

    >>> parse_config('idle_timeout = 60', "serve.toml").idle_timeout
    60
    """
    table = decode(text, name)
    checked: dict[str, Any] = {}
    try:
        for key, value in table.items():
            if key not in CHECKS:
                raise InvalidValueError(key, None, "there is no such key", nearest(key, CHECKS))
            checked[key] = CHECKS[key](key, value)
    except InvalidValueError as error:
        line = line_of(text, tuple(error.key.partition("[")[0].split(".")), error.value)
        where = f"{name}:{line}: " if line else f"{name}: "
        raise PolicyError(where + error.message, hint=error.hint) from None
    return ServerConfig(**checked)


def _text(key: str, value: Any) -> str:
    if not isinstance(value, str) or not value or "\0" in value:
        raise InvalidValueError(key, value, "must be text")
    return value


def _address(key: str, value: Any) -> str:
    host, _, port = _text(key, value).rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise InvalidValueError(key, value, "is not an address", 'write listen = "127.0.0.1:8080"')
    return value if ":" not in host or host.startswith("[") else f"[{host}]:{port}"


def _origin(key: str, value: Any) -> str:
    text = _text(key, value)
    if not text.startswith(("http://", "https://")) or text.count("/") != 2:
        raise InvalidValueError(key, value, "is not an origin", 'write "https://app.example.com"')
    return text


def _images(key: str, value: Any) -> dict[str, str]:
    hint = 'write below [images]: "python:*" = "host"'
    if not isinstance(value, dict):
        raise InvalidValueError(key, value, "must be a table", hint)
    for pattern, target in value.items():
        if not isinstance(target, str) or not target:
            raise InvalidValueError(f"{key}.{pattern}", target, "must name a root", hint)
    return dict(value)


def _directory(key: str, value: Any) -> str:
    if not os.path.isabs(_text(key, value)):
        raise InvalidValueError(key, value, "must be an absolute path")
    return str(os.path.realpath(value))


def _inner_path(key: str, value: Any) -> str:
    text = _text(key, value)
    if not text.startswith("/") or os.path.normpath(text) != text or text == "/":
        raise InvalidValueError(
            key, value, "must be an absolute path below /, without . and ..", 'such as "/workspace"'
        )
    return text


def _whole(least: int, most: int) -> Callable[[str, Any], int]:
    def check(key: str, value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise InvalidValueError(key, value, f"must be a whole number from {least} to {most}")
        return value

    return check


def _bytes(key: str, value: Any) -> int:
    return 0 if value == 0 else size(key, value) or 0


def _network(key: str, value: Any) -> Any:
    if value == "open":
        raise InvalidValueError(
            key, value, "would show sandboxes the server's own port", 'name hosts: network = ["example.com"]'
        )
    with _written_as("net", key):
        rules = Policy(net=value).net
    return value if isinstance(value, str) else tuple(rules)


@contextlib.contextmanager
def _written_as(clause: str, key: str) -> Iterator[None]:
    """Name the key of this file in an error about the policy's clause that takes its value."""
    try:
        yield
    except InvalidValueError as error:
        inner = key + error.key.removeprefix(clause)
        hint = error.hint.replace(f"{clause} = ", f"{key} = ")
        raise InvalidValueError(inner, error.value, error.problem, hint) from None


def _ceiling(key: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidValueError(
            key, value, "must be a table of a policy's clauses", "write them below [ceiling]"
        )
    try:
        return Policy(**value).table()
    except InvalidValueError as error:
        inner = f"{key}.{error.key}"
        raise InvalidValueError(inner, error.value, error.problem, error.hint) from None


def _accepted(key: str, value: Any) -> tuple[str, ...]:
    names = many(_text)(key, value)
    return tuple(map(str, Policy(accept=names).accept))


CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "listen": _address,
    "hosts": many(_text),
    "origins": many(_origin),
    "images": _images,
    "upper_root": _directory,
    "upper_max_bytes": _bytes,
    "diff_max_bytes": _bytes,
    "writable_paths": many(_inner_path),
    "idle_timeout": _whole(0, 30 * 86400),
    "network": _network,
    "ceiling": _ceiling,
    "accept": _accepted,
    "deny_syscalls": many(syscall),
    "line_endings": one_of("auto", "keep", "cut"),
    "max_connections": _whole(1, 1_000_000),
    "max_header_bytes": _whole(1 << 10, 1 << 20),
    "max_body_bytes": _whole(1 << 10, 1 << 30),
    "max_upload_bytes": _whole(1 << 10, 1 << 50),
    "client_timeout": _whole(1, 3600),
}


def with_listen(config: ServerConfig, listen: str) -> ServerConfig:
    """Return the configuration with another address, which the command line gave."""
    try:
        return msgspec.structs.replace(config, listen=_address("--listen", listen))
    except InvalidValueError:
        port = listen.rpartition(":")[2]
        example = port if _is_port(port) else "8080"
        raise PolicyError(
            f"--listen {listen} is not an address and a port",
            hint=f"write --listen 127.0.0.1:{example}, or --port {example}",
        ) from None


def with_address(config: ServerConfig, host: str | None, port: str | None) -> ServerConfig:
    """Return the configuration with another address or port, or both, which the command line gave."""
    if host is not None and (not host or "/" in host or host.count(":") == 1):
        raise PolicyError(
            f"--host {host} is not an address", hint="write --host 127.0.0.1, and the port as --port 8080"
        )
    if port is not None and not _is_port(port):
        raise PolicyError(
            f"--port {port} is not a port", hint="write a number up to 65535, such as --port 8080"
        )
    old_host, old_port = config.address
    host = old_host if host is None else host.strip("[]")
    return with_listen(config, f"{f'[{host}]' if ':' in host else host}:{old_port if port is None else port}")


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdecimal() and int(text) <= 65535
