"""Creates with one key that overlap: at most one sandbox, also if the first of them fails."""

from __future__ import annotations

import asyncio
from typing import Any

from stockade.server.config import ServerConfig
from stockade.server.front.creation import SandboxFactory
from stockade.server.wire.errors import ApiError


class _CountedFactory(SandboxFactory):
    """Counts how many creates run at the same time; the first one fails."""

    def __init__(self) -> None:
        nothing: Any = None
        super().__init__(ServerConfig(), nothing, nothing, "", nothing)
        self.calls = self.now = self.most = 0

    async def _earlier(self, *_: object) -> None:  # type: ignore[override]
        return None

    async def _make(self, *_: object) -> Any:
        self.calls += 1
        self.now += 1
        self.most = max(self.most, self.now)
        fails = self.calls == 1
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        self.now -= 1
        if fails:
            raise ApiError(503, "SERVICE_UNAVAILABLE", "the first one fails")


async def _overlap(factory: _CountedFactory) -> None:
    nothing: Any = None

    async def create(turns: int) -> None:
        for _ in range(turns):
            await asyncio.sleep(0)
        await factory.create("me", nothing, "key", "digest")

    await asyncio.gather(*(create(turns) for turns in range(12)), return_exceptions=True)


def test_creates_with_one_key_take_turns_also_after_a_failure() -> None:
    factory = _CountedFactory()
    asyncio.run(_overlap(factory))
    assert (factory.calls, factory.most) == (12, 1)
    assert not factory._running  # nothing is kept of a key whose requests have been answered
