"""`Client`: makes and finds sandboxes of a server."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Unpack

from stockade.client import sandbox_calls
from stockade.client.remote_sandbox import RemoteSandbox
from stockade.client.sandbox_calls import CreateOptions
from stockade.client.transport import SILENCE, ServerAddress, Transport
from stockade.client.values import SandboxInfo


class Client:
    """A connection to `stockade serve`.

    >>> with Client() as client, client.create(timeout=600) as box:
    ...     box.run("echo hello").text
    'hello\\n'

    Without arguments, `OPEN_SANDBOX_DOMAIN` names the server (`localhost:8080` by default), and
    `STOCKADE_API_KEY` or `OPEN_SANDBOX_API_KEY` has the key. `silence` is how many seconds the server may
    say nothing.
    """

    def __init__(
        self, domain: str | None = None, *, key: str | None = None, silence: float = SILENCE
    ) -> None:
        self._transport = Transport(ServerAddress.find(domain, key, silence))

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections. Sandboxes live on."""
        self._transport.close()

    def create(self, image: str = "host", **options: Unpack[CreateOptions]) -> RemoteSandbox:
        """Make a sandbox. What you leave out is the server's to decide.

        The options are `timeout`, `env`, `limits`, `net`, `metadata`, `extensions` and `policy`: see
        `CreateOptions`.
        """
        call = sandbox_calls.create(image, options)
        return RemoteSandbox(self._transport, self._transport.send(call).id)

    def get(self, sandbox: str) -> RemoteSandbox:
        """Find a sandbox by its id; raise a `NotFoundError` if there is none."""
        return RemoteSandbox(self._transport, self._transport.send(sandbox_calls.get(sandbox)).id)

    def list(
        self, *, states: Sequence[str] = (), metadata: Mapping[str, str] | None = None
    ) -> Iterator[SandboxInfo]:
        """Describe your sandboxes: those in one of the states, with all of the metadata."""
        number, more = 1, True
        while more:
            page = self._transport.send(sandbox_calls.page(number, states, metadata))
            yield from page.items
            number, more = number + 1, page.pagination.has_next_page
