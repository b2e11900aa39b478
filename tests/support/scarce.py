"""A supervising process that is short of something: WHAT it does, HOW it is short, cold or warm, a WORKSPACE.

Each attempt is given a little more until a run works. An attempt that fails must be a `SetupError` or,
where only its receipt could not be made, a `ReceiptError`, each with a hint; and afterwards, with everything
given back, the same process must work as before and have no more descriptors than before. What it finds is
printed as JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import resource
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import stockade
from stockade import AsyncSandbox, Policy, Sandbox
from stockade.gate import client
from stockade.runs import idle_cgroups

FEW = 64


def begun(result: stockade.Result) -> stockade.Result:
    """What the gate of a living sandbox could not start is a result that says so."""
    if result.outcome == "setup-failed":
        raise stockade.SetupError(result.reason, hint="it was refused by the gate")
    return result


def once(workspace: str) -> str:
    policy = Policy(workspace=workspace)
    return begun(stockade.run(["echo", "x"], policy, input=b"given", timeout=20)).text


def living(_: str) -> str:
    with Sandbox() as box:
        return begun(box.run(["echo", "x"], timeout=20)).text


def terminal(_: str) -> str:
    with Sandbox() as box, box.start(["echo", "x"], pty=True) as process:
        begun(process.wait(20))
        assert process.stdout is not None
        return process.stdout.read().decode().replace("\r", "")


def in_async(_: str) -> str:
    async def main() -> str:
        async with AsyncSandbox() as box:
            return begun(await box.run(["echo", "x"], timeout=20)).text

    return LOOP.run_until_complete(main())


def spawned(_: str) -> str:
    with stockade.Spawner() as spawner:
        return begun(spawner.collect(spawner.spawn(["echo", "x"], timeout=20), 60)).text


LOOP = asyncio.new_event_loop()
WAYS = {"once": once, "living": living, "terminal": terminal, "async": in_async, "spawned": spawned}


@contextlib.contextmanager
def descriptors(free: int) -> Iterator[None]:
    """Exactly so many descriptors are free, and no number above them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = {int(name) for name in os.listdir("/proc/self/fd")}
    limit = max(used) + 1 + free
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    taken: list[int] = []
    with contextlib.suppress(OSError):
        while True:
            taken.append(os.open("/dev/null", os.O_RDONLY))
    for _ in range(free):
        os.close(taken.pop())
    try:
        yield
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def limited(kind: int, value: Callable[[int], int]) -> Callable[[int], AbstractContextManager[None]]:
    @contextlib.contextmanager
    def limiting(step: int) -> Iterator[None]:
        before = resource.getrlimit(kind)
        resource.setrlimit(kind, (value(step), before[1]))
        try:
            yield
        finally:
            resource.setrlimit(kind, before)

    return limiting


def address_space() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def user_tasks() -> int:
    """Tasks of this user, as the kernel counts them."""
    count = 0
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{pid}").st_uid == os.getuid():
                count += len(os.listdir(f"/proc/{pid}/task"))
    return count


@contextlib.contextmanager
def in_cgroup(step: int) -> Iterator[None]:
    """So many tasks more than there are now, in the cgroup that the environment names."""
    directory = os.environ["SCARCE_CGROUP"]

    def limit(words: str) -> None:
        file = os.open(f"{directory}/pids.max", os.O_WRONLY)
        os.write(file, words.encode())
        os.close(file)

    with open(f"{directory}/pids.current") as file:
        limit(str(int(file.read()) + step))
    try:
        yield
    finally:
        limit("max")


HOWS: dict[str, Callable[[int], AbstractContextManager[None]]] = {
    "descriptors": descriptors,
    "cgroup": in_cgroup,
    "memory": limited(resource.RLIMIT_AS, lambda step: address_space() + step * 65536),
    "file size": limited(resource.RLIMIT_FSIZE, lambda step: (0, 1, 40, 300, 1 << 13, 1 << 20)[min(step, 5)]),
    "tasks": limited(resource.RLIMIT_NPROC, lambda step: max(0, user_tasks() + step - 2)),
}


def attempt(
    act: Callable[[str], str], workspace: str, around: AbstractContextManager[None]
) -> tuple[str, str]:
    """What one attempt came to: worked, refused or wrong, and the words for it."""
    try:
        with around:
            text = act(workspace)
    except (stockade.SetupError, stockade.ReceiptError) as error:
        return ("refused", str(error)) if error.hint else ("wrong", f"without a hint: {error}")
    except BaseException:
        return "wrong", traceback.format_exc()[-1500:]
    return ("worked", text) if text == "x\n" else ("wrong", repr(text))


def descriptors_in_use() -> list[str]:
    """Those that are open, without the cgroups that wait for the next sandbox: a slow end adds one."""
    gc.collect()
    idle_cgroups.shutdown()
    return sorted(os.listdir("/proc/self/fd"))


def main(what: str, how: str, cold: bool, workspace: str) -> dict[str, Any]:
    act = WAYS[what]
    act(workspace)
    act(workspace)
    found: dict[str, Any] = {"refused": [], "wrong": []}
    for step in range(FEW):
        if cold:
            client.shutdown()
        before = descriptors_in_use()
        verdict, words = attempt(act, workspace, HOWS[how](step))
        if cold:
            client.shutdown()
        after = descriptors_in_use()
        if verdict != "worked":
            found[verdict].append([step, words])
        # A resident gate that was started meanwhile is ours to keep; nothing else is.
        if len(after) > len(before):
            found["wrong"].append([step, f"descriptors: {before} {after}"])
        client.shutdown() if how != "descriptors" else None
        if (again := attempt(act, workspace, contextlib.nullcontext()))[0] != "worked":
            found["wrong"].append([step, f"afterwards: {again}"])
        if verdict == "worked":
            break
    found["enough"] = step
    return found


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], sys.argv[2], sys.argv[3] == "cold", sys.argv[4])))
