"""The two ways to send a call: with `httpx.Client`, and with `httpx.AsyncClient` and `await`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

import msgspec

from stockade._version import __version__
from stockade.client.calls import ServerCall
from stockade.client.event_stream import EventCollector
from stockade.client.remote_errors import UnreachableError, error_of
from stockade.errors import PolicyError, SetupError, StockadeError, TimeoutError

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")

DEFAULT_DOMAIN = "localhost:8080"
#: How many seconds the server may be silent: while a command runs, it says every few seconds that it lives.
SILENCE = 60.0
LOOPBACK = ("localhost", "127.0.0.1", "::1")


class ServerAddress(msgspec.Struct, frozen=True):
    """Where the server is, and the key that it knows the caller by."""

    url: str
    key: str
    silence: float = SILENCE

    @classmethod
    def find(cls, domain: str | None, key: str | None, silence: float) -> ServerAddress:
        """Complete what the caller gave with the environment and the defaults."""
        domain = domain or os.environ.get("OPEN_SANDBOX_DOMAIN") or DEFAULT_DOMAIN
        key = key or os.environ.get("STOCKADE_API_KEY") or os.environ.get("OPEN_SANDBOX_API_KEY") or ""
        url = domain if "://" in domain else f"http://{domain}"
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
            raise PolicyError(
                f"{domain!r} is not the address of a server",
                hint="write host:port, or https://host:port",
            )
        # The calls have the version in their paths; addresses of such servers are often written with it.
        return cls(url.rstrip("/").removesuffix("/v1"), key, silence)

    def __repr__(self) -> str:
        return f"<ServerAddress {self.url}>"  # logs and tracebacks do not get the key

    def options(self) -> dict[str, Any]:
        """Return the options of the httpx client."""
        httpx = _httpx()
        headers = {"User-Agent": f"stockade/{__version__} (client)"}
        if self.key:
            headers["OPEN-SANDBOX-API-KEY"] = self.key
        # A proxy of the environment is for other machines, and would see the key.
        loopback = urlsplit(self.url).hostname in LOOPBACK
        return {
            "base_url": self.url,
            "headers": headers,
            "timeout": httpx.Timeout(self.silence, connect=min(self.silence, 10.0)),
            "trust_env": not loopback,
        }

    def failure(self, error: httpx.TransportError) -> StockadeError:
        """Return our error for one of httpx."""
        if isinstance(error, _httpx().TimeoutException):
            return TimeoutError(
                f"the server at {self.url} has been silent for {self.silence:g} seconds",
                hint="give the client a larger `silence`, or look at the server's log",
            )
        return UnreachableError(
            f"the server at {self.url} cannot be reached: {error}",
            hint="start it with `stockade serve`, or name it in OPEN_SANDBOX_DOMAIN",
        )


def _httpx() -> Any:
    try:
        import httpx
    except ImportError:
        raise SetupError(
            "stockade.client needs the package httpx",
            stage="client",
            hint="pip install 'stockade[client]'",
        ) from None
    return httpx


def _request(client: httpx.Client | httpx.AsyncClient, call: ServerCall[T]) -> httpx.Request:
    extra: dict[str, Any] = {"files": list(call.files)} if call.files else {}
    if call.json is not None:
        extra = {"content": msgspec.json.encode(call.json)}
    headers = dict(call.headers) | ({"Content-Type": "application/json"} if "content" in extra else {})
    return client.build_request(
        call.method, call.path, params=list(call.query) or None, headers=headers, **extra
    )


def _result(call: ServerCall[T], answer: httpx.Response) -> T:
    if not answer.is_success:
        raise error_of(answer.status_code, answer.content, answer.headers.get("X-Request-ID", ""))
    return call.read(answer)


class Transport:
    """Sends calls and waits for their answers in the calling thread."""

    def __init__(self, address: ServerAddress) -> None:
        self.address = address
        self._errors: type[httpx.TransportError] = _httpx().TransportError
        self._client: httpx.Client = _httpx().Client(**address.options())

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def send(self, call: ServerCall[T]) -> T:
        """Send a call and return its result; ask again once if the answer was lost and that is harmless."""
        try:
            answer = self._client.send(_request(self._client, call))
        except self._errors as error:
            if not call.repeatable or isinstance(error, _httpx().TimeoutException):
                raise self.address.failure(error) from error
            try:
                answer = self._client.send(_request(self._client, call))
            except self._errors as again:
                raise self.address.failure(again) from again
        return _result(call, answer)

    def follow(self, call: ServerCall[T], events: EventCollector) -> T:
        """Send a call whose answer is a stream of events, and give them to the collector as they come."""
        try:
            answer = self._client.send(_request(self._client, call), stream=True)
            try:
                if not answer.is_success:
                    answer.read()
                    return _result(call, answer)
                for data in answer.iter_bytes():
                    events.feed(data)
            finally:
                answer.close()
        except self._errors as error:
            raise self.address.failure(error) from error
        return call.read(answer)


class AsyncTransport:
    """Sends calls and awaits their answers."""

    def __init__(self, address: ServerAddress) -> None:
        self.address = address
        self._errors: type[httpx.TransportError] = _httpx().TransportError
        self._client: httpx.AsyncClient = _httpx().AsyncClient(**address.options())

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def send(self, call: ServerCall[T]) -> T:
        """Send a call and return its result; ask again once if the answer was lost and that is harmless."""
        try:
            answer = await self._client.send(_request(self._client, call))
        except self._errors as error:
            if not call.repeatable or isinstance(error, _httpx().TimeoutException):
                raise self.address.failure(error) from error
            try:
                answer = await self._client.send(_request(self._client, call))
            except self._errors as again:
                raise self.address.failure(again) from again
        return _result(call, answer)

    async def follow(self, call: ServerCall[T], events: EventCollector) -> T:
        """Send a call whose answer is a stream of events, and give them to the collector as they come."""
        try:
            answer = await self._client.send(_request(self._client, call), stream=True)
            try:
                if not answer.is_success:
                    await answer.aread()
                    return _result(call, answer)
                async for data in answer.aiter_bytes():
                    events.feed(data)
            finally:
                await answer.aclose()
        except self._errors as error:
            raise self.address.failure(error) from error
        return call.read(answer)
