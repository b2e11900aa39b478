"""`AsyncClient`: `Client` with `await`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Unpack

from stockade.client import sandbox_calls
from stockade.client.async_remote_sandbox import AsyncRemoteSandbox
from stockade.client.sandbox_calls import CreateOptions
from stockade.client.transport import SILENCE, AsyncTransport, ServerAddress
from stockade.client.values import SandboxInfo


class AsyncClient:
    """A connection to `stockade serve`: `Client` for asyncio, with the same arguments.

    >>> import asyncio
    >>> async def main():
    ...     async with AsyncClient() as client, await client.create(timeout=600) as box:
    ...         return (await box.run("echo hello")).text
    >>> asyncio.run(main())
    'hello\\n'
    """

    def __init__(
        self, domain: str | None = None, *, key: str | None = None, silence: float = SILENCE
    ) -> None:
        self._transport = AsyncTransport(ServerAddress.find(domain, key, silence))

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections. Sandboxes live on."""
        await self._transport.close()

    async def create(self, image: str = "host", **options: Unpack[CreateOptions]) -> AsyncRemoteSandbox:
        """Make a sandbox. What you leave out is the server's to decide.

        The options are `timeout`, `env`, `limits`, `net`, `metadata`, `extensions` and `policy`: see
        `CreateOptions`.
        """
        call = sandbox_calls.create(image, options)
        return AsyncRemoteSandbox(self._transport, (await self._transport.send(call)).id)

    async def get(self, sandbox: str) -> AsyncRemoteSandbox:
        """Find a sandbox by its id; raise a `NotFoundError` if there is none."""
        return AsyncRemoteSandbox(
            self._transport, (await self._transport.send(sandbox_calls.get(sandbox))).id
        )

    async def list(
        self, *, states: Sequence[str] = (), metadata: Mapping[str, str] | None = None
    ) -> AsyncIterator[SandboxInfo]:
        """Describe your sandboxes: those in one of the states, with all of the metadata."""
        number, more = 1, True
        while more:
            page = await self._transport.send(sandbox_calls.page(number, states, metadata))
            for one in page.items:
                yield one
            number, more = number + 1, page.pagination.has_next_page
