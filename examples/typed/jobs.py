"""Run several jobs at once with asyncio, and stop reading when the first line comes.

python jobs.py
"""

from __future__ import annotations

import asyncio

import stockade
from stockade import AsyncSandbox, Outcome, Policy


async def lines(command: list[str]) -> list[str]:
    """Run a command in a sandbox of its own and return its lines."""
    result = await stockade.run_async(command, Policy(), timeout=30)
    if result.outcome is not Outcome.EXITED:
        raise RuntimeError(result.reason)
    return result.text.splitlines()


async def first_line() -> bytes:
    """Start a program that does not end by itself, read its first line and end it."""
    async with AsyncSandbox(Policy(), name="first-line") as box:
        await box.files.write("/tmp/greeting", "hello\n")
        async with await box.start(["sh", "-c", "cat /tmp/greeting; sleep 1000"]) as process:
            assert process.stdout is not None
            line = await process.stdout.readline()
            process.kill()
        return line


async def main() -> None:
    """Run all of it at once."""
    one, two, first = await asyncio.gather(lines(["echo", "one"]), lines(["seq", "2"]), first_line())
    print(one, two, first.decode().strip())


if __name__ == "__main__":
    asyncio.run(main())
