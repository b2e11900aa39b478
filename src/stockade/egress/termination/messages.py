"""Heads of requests and responses as values, and what happens to one request and its response."""

from __future__ import annotations

from typing import NamedTuple

#: Names in lower case, in the order in which they came.
Fields = tuple[tuple[bytes, bytes], ...]


class RequestHead(NamedTuple):
    """The head of a request that was decoded without doubt."""

    #: A token in capitals.
    method: str
    #: "https" or "http".
    scheme: str
    #: The name that the connection was opened to: Host or `:authority` are this name, else it is refused.
    host: str
    port: int
    #: Path and query as they are sent to the server: printable ASCII.
    target: str
    #: Without Host, without what frames the body, and without what is about the connection alone.
    fields: Fields


class ResponseHead(NamedTuple):
    """The head of a response, final or interim."""

    status: int
    #: Without what frames the body, and without what is about the connection alone.
    fields: Fields


class HttpExchange:
    """One request that the rules allowed, and its response, on their way through the egress process.

    The connection calls the methods in this order and sends on what they return. A request's head comes after
    it was judged, so what is written into it here goes to the host that the rules allowed. Data keeps its
    length: a body whose Content-Length was announced must have as many bytes, unless `reframes_request` or
    `reframes_response` says after the head that it has another one.
    """

    reframes_request = reframes_response = False

    def request_head(self, head: RequestHead) -> RequestHead:
        """Return the head that is sent to the server."""
        return head

    def request_data(self, data: bytes) -> bytes:
        """Return what of the request's body may be sent now; it may hold back bytes until the next call."""
        return data

    def request_end(self) -> bytes:
        """Return what of the request's body was held back."""
        return b""

    def request_trailers(self, fields: Fields) -> Fields:
        """Return the trailers that are sent to the server."""
        return fields

    def response_words(self, words: bytes) -> bytes:
        """Return the words of the status line that the program gets."""
        return words

    def response_head(self, head: ResponseHead) -> ResponseHead:
        """Return the head that the program gets; interim responses come here too."""
        return head

    def response_data(self, data: bytes) -> bytes:
        """Return what of the response's body may be passed on now; it may hold back bytes."""
        return data

    def response_end(self) -> bytes:
        """Return what of the response's body was held back."""
        return b""

    def response_trailers(self, fields: Fields) -> Fields:
        """Return the trailers that the program gets."""
        return fields

    def upgraded_data(self, data: bytes) -> bytes:
        """Return what the program gets of the server's bytes after an upgrade; nothing is held back."""
        return data


_UNCHANGED = HttpExchange()


def pass_unchanged(_: RequestHead) -> HttpExchange:
    """Return the exchange of a sandbox without secrets: everything passes as it is."""
    return _UNCHANGED
