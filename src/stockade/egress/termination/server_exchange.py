"""One request to a server and its response, whatever version of HTTP the server speaks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from stockade.egress.termination.byte_stream import ByteStream
from stockade.egress.termination.http1_heads import Http1Request, Http1Response
from stockade.egress.termination.messages import Fields, RequestHead

#: Waits until something may have come from a server.
ServerWait = Callable[[ByteStream], Awaitable[None]]


class ServerExchange(Protocol):
    """A request whose head was sent, and its response."""

    @property
    def trailers(self) -> Fields:
        """The trailers of the response, once `read_data` has returned its end."""

    async def send_data(self, data: bytes) -> None:
        """Send a piece of the request's body."""

    async def send_end(self, rest: bytes, trailers: Fields) -> None:
        """Send the last piece of the request's body, and its trailers."""

    async def read_head(self) -> Http1Response:
        """Return the next interim response, or the final one."""

    async def read_data(self) -> bytes:
        """Return the next piece of the response's body; b"" at its end."""

    def look(self) -> bool:
        """Whether something has come that was not read yet."""

    def finish(self, *, whole: bool) -> None:
        """Let go of the connection; `whole` says that request and response have both come to their end."""


class ServerRoute(Protocol):
    """What leads the requests of one connection of a program to its server, one after the other."""

    @property
    def watched(self) -> ByteStream | None:
        """The connection that waits for the next request, if there is one."""

    async def look(self) -> bool:
        """Take what came since the last response; return whether the next request may follow."""

    async def begin(
        self, request: Http1Request, head: RequestHead, wait: ServerWait, *, reframes: bool
    ) -> ServerExchange:
        """Send a head; with `reframes` the body has another length than the program announced."""

    def close(self) -> None:
        """Close the connection that waits for the next request."""
