"""Measure pipelines of three stages: data through them beside a shell's, and their start beside one run's."""

from __future__ import annotations

import contextlib
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from stockade import Policy, Stage
from stockade.bench.measure import Figure, Section, interleaved, peers, ratio, timing

SERVE = "from stockade.bench.pipeline_costs import serve; serve({options!r})"
STOCKADE = (sys.executable, "-m", "stockade")
TRUE, NO_PIPE = ["/bin/true"], "sandlock's pipeline was not measured: it is not installed"


def measure(rounds: int, size: int, sandlock: dict[str, Any] | None) -> Section:
    """Time all contenders in turns; `size` bytes go through; `sandlock` has its options if it is there."""
    moving = [["head", "-c", str(size), "/dev/zero"], ["cat"], ["wc", "-c"]]
    starting = [TRUE] * 3
    turns: dict[str, Callable[[], float]] = {
        "shell, data": _timed(lambda: _shell(moving)),
        "stockade, data": _timed(lambda: _ours(moving, size)),
        "stockade, one run, cold": _timed(lambda: _command("run", "--", *TRUE)),
        "stockade, three stages, cold": _timed(lambda: _command("pipe", "--", *TRUE, "|", *TRUE, "|", *TRUE)),
        "stockade, one run, warm": _timed(lambda: Stage(Policy(), TRUE).run().check()),
        "stockade, three stages, warm": _timed(lambda: _ours(starting, None)),
    }
    with contextlib.ExitStack() as stack:
        if sandlock is not None:
            # In a separate process: sandlock's supervision stays in there.
            command = [sys.executable, "-c", SERVE.format(options=sandlock)]
            rival = stack.enter_context(peers({"sandlock": command}))["sandlock"]
            turns["sandlock, data"] = lambda: float(rival.ask(json.dumps(moving)))
            turns["sandlock, three stages, warm"] = lambda: float(rival.ask(json.dumps(starting)))
        interleaved(turns, 1)
        times = interleaved(turns, rounds)
    figures = [
        Figure("pipeline/data", ratio(times["shell, data"], times["stockade, data"])),
        Figure(
            "pipeline/start", ratio(times["stockade, three stages, cold"], times["stockade, one run, cold"])
        ),
        Figure(
            "pipeline/warm start",
            ratio(times["stockade, three stages, warm"], times["stockade, one run, warm"]),
        ),
    ]
    if sandlock is not None:
        figures += [
            Figure("pipeline/data by sandlock", ratio(times["sandlock, data"], times["stockade, data"])),
            Figure(
                "pipeline/start by sandlock",
                ratio(times["stockade, three stages, warm"], times["sandlock, three stages, warm"]),
            ),
        ]
    notes = () if sandlock is not None else (NO_PIPE,)
    ran = {"shell, data": shlex.join(["sh", "-c", _line(moving)])}
    if sandlock is not None:
        options = ", ".join(f"{key}={value!r}" for key, value in sandlock.items())
        stages = "(box.cmd(first) | box.cmd(second) | box.cmd(third)).run()"
        ran["sandlock, three stages"] = f"{stages}, each box = sandlock.Sandbox({options})"
    return Section(tuple(figures), {name: timing(taken) for name, taken in times.items()}, notes, ran=ran)


def _timed(turn: Callable[[], object]) -> Callable[[], float]:
    def milliseconds() -> float:
        began = time.perf_counter()
        turn()
        return (time.perf_counter() - began) * 1000

    return milliseconds


def _line(commands: list[list[str]]) -> str:
    return " | ".join(map(shlex.join, commands))


def _shell(commands: list[list[str]]) -> None:
    subprocess.run(["sh", "-c", _line(commands)], stdout=subprocess.DEVNULL, check=True)


def _command(*words: str) -> None:
    subprocess.run([*STOCKADE, *words], stdin=subprocess.DEVNULL, check=True)


def _ours(commands: list[list[str]], size: int | None) -> None:
    first, second, third = (Stage(Policy(), words) for words in commands)
    result = (first | second | third).run().check()
    assert size is None or int(result.stdout) == size


def serve(options: dict[str, Any]) -> None:
    """Serve as a peer: a line has the commands of a pipeline of sandlock; the answer is its time in ms."""
    import sandlock

    for line in sys.stdin:
        began = time.perf_counter()
        first, second, third = (sandlock.Sandbox(**options).cmd(words) for words in json.loads(line))
        result = (first | second | third).run()
        if not result.success:
            raise RuntimeError(f"sandlock: {result}: {result.stderr!r}")
        print((time.perf_counter() - began) * 1000, flush=True)
