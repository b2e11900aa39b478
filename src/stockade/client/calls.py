"""Calls as values: what to send, and how to read the answer. The transports send them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from urllib.parse import quote

import msgspec

from stockade.client.remote_errors import ServerError

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")

#: The port that the wire contract gives to commands, files, code and isolated sessions.
EXECD_PORT = 44772

Query = Sequence[tuple[str, str | int]]


class ServerCall(msgspec.Struct, Generic[T], frozen=True, kw_only=True):
    """One request, and the function that makes its result of a successful answer."""

    method: str
    path: str
    read: Callable[[httpx.Response], T]
    query: Query = ()
    json: Any = None
    files: Sequence[tuple[str, tuple[str, bytes, str]]] = ()
    headers: Mapping[str, str] = {}

    @property
    def repeatable(self) -> bool:
        """Whether a lost answer may be asked for again."""
        return self.method in ("GET", "DELETE") or "Idempotency-Key" in self.headers


def nothing(_: httpx.Response) -> None:
    """Read an answer whose status says everything."""


def content(answer: httpx.Response) -> bytes:
    """Read an answer as bytes."""
    return answer.content


def decoded(kind: type[T]) -> Callable[[httpx.Response], T]:
    """Return a function that reads an answer as JSON of one type."""

    def read(answer: httpx.Response) -> T:
        try:
            return msgspec.json.decode(answer.content, type=kind)
        except msgspec.DecodeError as error:
            raise ServerError(f"the server's answer is not what it should be: {error}") from None

    return read


def sandbox_path(sandbox: str, *parts: str) -> str:
    """Return the path of a sandbox, or of something below it."""
    return "/".join(("/v1/sandboxes", *(quote(part, safe="") for part in (sandbox, *parts))))


def execd_path(sandbox: str, rest: str) -> str:
    """Return the path of an endpoint that the sandbox's own supervisor serves."""
    return f"{sandbox_path(sandbox)}/proxy/{EXECD_PORT}/{rest}"


def present(**fields: Any) -> dict[str, Any]:
    """Return the fields that the caller gave: what is left out is the server's to decide."""
    return {name: value for name, value in fields.items() if value is not None}
