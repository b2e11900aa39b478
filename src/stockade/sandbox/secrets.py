"""`box.secrets`: the secrets of a living sandbox, whose values may be read again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import stockade
from stockade.runs.io import async_eventloop
from stockade.runs.io.eventloop import Events, Steps, drive

if TYPE_CHECKING:
    from stockade.runs.launch import LaunchedSandbox


class SecretsView:
    """What `SandboxSecrets` and `AsyncSandboxSecrets` share: everything but the waiting."""

    def __init__(self, sandbox: stockade.Sandbox | stockade.AsyncSandbox) -> None:
        self._living = sandbox

    @property
    def placeholders(self) -> dict[str, str]:
        """What programs have instead of each secret, by its name. A placeholder is worth nothing outside."""
        return dict(self._living._require_open()[1].placeholders)

    def _refresh_steps(self, box: LaunchedSandbox, events: Events) -> Steps[None]:
        from stockade.runs.network.egress_changes import refresh_secrets

        return (yield from refresh_secrets(box, events))


class SandboxSecrets(SecretsView):
    """The secrets of a living `Sandbox`: `box.secrets`."""

    _living: stockade.Sandbox

    def refresh(self) -> None:
        """Read all values from their sources again; requests that begin from now on get the new ones.

        Programs keep their placeholders, so nothing has to be started again. If a source fails, the values
        that the sandbox has stay in use, and a `SetupError` says which source it was.
        """
        with self._living._in_use() as (box, _), Events() as events:
            drive(self._refresh_steps(box, events), events)


class AsyncSandboxSecrets(SecretsView):
    """The secrets of a living `AsyncSandbox`: `box.secrets`."""

    _living: stockade.AsyncSandbox

    async def refresh(self) -> None:
        """Read all values from their sources again, as `SandboxSecrets.refresh` does."""
        async with self._living._in_use() as (box, _):
            with Events() as events:
                await async_eventloop.drive(self._refresh_steps(box, events), events)
