"""A sink that takes a stream over: the program waits for it, and the run keeps nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

import stockade
from stockade import AsyncSandbox, Policy
from stockade.runs.io.streams import StreamConsumer

MEGABYTES = 4
CODE = f"head -c {MEGABYTES << 20} /dev/zero; echo done >&2"


class SlowConsumer(StreamConsumer):
    """Has room for one piece, and takes the next one a moment later."""

    def __init__(self, pause: float) -> None:
        self._pause = pause
        self.taken = 0

    def __call__(self, data: bytes) -> None:
        self.taken += len(data)
        self.full = self._pause > 0

    def when_room(self, resume: Callable[[], None]) -> None:
        def go_on() -> None:
            self.full = False
            resume()

        asyncio.get_running_loop().call_later(self._pause, go_on)


Runner = Callable[[AsyncSandbox, SlowConsumer], Awaitable[stockade.Result]]


async def command(box: AsyncSandbox, sink: SlowConsumer) -> stockade.Result:
    return await box.run(["sh", "-c", CODE], on_stdout=sink)


async def shell(box: AsyncSandbox, sink: SlowConsumer) -> stockade.Result:
    async with box.shell() as session:
        return await session.run(CODE, on_stdout=sink)


@pytest.mark.parametrize("runner", [command, shell])
def test_a_slow_consumer_gets_everything_and_the_run_keeps_nothing(runner: Runner) -> None:
    async def main() -> None:
        sink = SlowConsumer(0.001)
        async with AsyncSandbox(Policy(limits=stockade.policy.Limits(output="1K"))) as box:
            result = await runner(box, sink)
        assert result.ok and result.stderr_text == "done\n"
        assert sink.taken == MEGABYTES << 20
        assert (result.stdout, result.truncated, result.spilled) == (b"", False, ())

    asyncio.run(main())


@pytest.mark.parametrize("runner", [command, shell])
def test_a_program_whose_output_is_not_taken_waits_and_can_be_cancelled(runner: Runner) -> None:
    async def main() -> None:
        sink = SlowConsumer(3600)
        async with AsyncSandbox() as box:
            running = asyncio.ensure_future(runner(box, sink))
            await asyncio.sleep(0.5)
            assert 0 < sink.taken <= 1 << 20 and not running.done()
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            assert (await box.run(["true"])).ok

    asyncio.run(main())
