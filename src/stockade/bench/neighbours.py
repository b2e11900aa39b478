"""What a program that takes locks of the whole kernel costs its neighbours.

For each job of `inside.lock_jobs`, a sandbox with every limit set does nothing else, in many tasks, until its
time is over. Meanwhile another sandbox and a network namespace of the host are started again and again. A job
that only computes is the control: whatever is much slower beside another job waits for a lock.
"""

from __future__ import annotations

import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

import stockade
from stockade.host import host
from stockade.inside import lock_jobs
from stockade.policy import Policy

PYTHON = "/usr/bin/python3"
CONTROL = "spin"
GRACE = 0.2
#: A neighbour's start is slow if it takes so many times as long as beside the control, and so much longer.
TIMES, MORE = 5.0, 0.5
#: A run that ends so many seconds later than the control's ends late.
LATE = 2.0
HOST_NETWORK = ("unshare", "-Urn", "true")


class NeighbourCosts(msgspec.Struct, frozen=True):
    """What one job did to its neighbours, in seconds: the median and the longest of their starts."""

    job: str
    #: How often the job was done in all tasks together.
    done: int
    starts: int
    start: float
    longest_start: float
    host: float
    longest_host: float
    #: How long after its time limit the run was over, with everything inside.
    late: float
    outcome: str
    #: What is wrong beside the control; empty if nothing is.
    verdict: str = ""


def measure(
    jobs: Sequence[str], seconds: float, tasks: int, say: Callable[[str], object]
) -> list[NeighbourCosts]:
    """Run each job beside neighbours, the control first, and judge it by the control."""
    stockade.run(["true"])  # what only the first start of a process costs
    found = []
    for job in dict.fromkeys((CONTROL, *jobs)):
        say(f"measuring {job}")
        found.append(_measure(job, seconds, tasks))
    return [judged(one, found[0]) for one in found]


def judged(one: NeighbourCosts, control: NeighbourCosts) -> NeighbourCosts:
    """Return the costs with a verdict beside those of the control."""
    wrong = [
        name
        for name, own, ordinary in (
            ("a neighbour waits", one.longest_start, control.longest_start),
            ("the host waits", one.longest_host, control.longest_host),
        )
        if own > TIMES * ordinary and own > ordinary + MORE
    ]
    wrong += ["it ends late"] if one.late > control.late + LATE else []
    wrong += [f"its outcome is {one.outcome}"] if one.outcome != "timed-out" else []
    return msgspec.structs.replace(one, verdict="; ".join(wrong))


def _policy(tasks: int) -> Policy:
    limits: dict[str, Any] = {"tasks": tasks + 8, "files": 1024, "disk": "256M"}
    if all(host().has(f"cgroup.{name}") for name in ("memory", "cpu")):
        limits |= {"memory": "1G", "cpu": 1}
    return Policy(limits=limits)


def _measure(job: str, seconds: float, tasks: int) -> NeighbourCosts:
    command = [PYTHON, "-I", "-c", Path(lock_jobs.__file__).read_text(), job, str(tasks)]
    results: list[stockade.Result] = []

    def attack() -> None:
        results.append(stockade.run(command, _policy(tasks), timeout=seconds, grace=GRACE))

    runner = threading.Thread(target=attack)
    began = time.monotonic()
    runner.start()
    starts, hosts = [], []
    while runner.is_alive():
        starts.append(_timed(lambda: stockade.run(["true"])))
        hosts.append(_timed(lambda: subprocess.run(HOST_NETWORK, check=True)))
    runner.join()
    late = time.monotonic() - began - seconds
    if not results:
        raise RuntimeError(f"the run of {job} ended with an exception")
    said = results[0].text.split()
    return NeighbourCosts(
        job=job,
        done=int(said[-1]) if said else 0,
        starts=len(starts),
        start=statistics.median(starts),
        longest_start=max(starts),
        host=statistics.median(hosts),
        longest_host=max(hosts),
        late=late,
        outcome=results[0].outcome.value,
    )


def _timed(work: Callable[[], object]) -> float:
    began = time.monotonic()
    work()
    return time.monotonic() - began
