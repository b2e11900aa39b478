"""The process a contender runs in: small, alike for all, told by lines what to do next.

`python -m stockade.bench.worker JOB`, with the job as JSON.
"""

from __future__ import annotations

import mmap
import resource
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Literal

import msgspec

from stockade.bench.rivals import Contender, Run

TRUE = ("/bin/true",)
PAGE = 4096


class Job(msgspec.Struct, frozen=True):
    """times: a line is a number of runs, answered by their milliseconds. rate: a line is seconds,
    answered by the runs that ended in them. again: as times, in one living sandbox; shell: in a shell there.
    hold: a line is how many idle sandboxes to have; shells: each with a shell. pass: run one command on our
    own streams."""

    contender: Contender
    do: Literal["times", "rate", "again", "shell", "hold", "shells", "pass"]
    threads: int = 1
    heap: int = 0
    command: tuple[str, ...] = TRUE

    def argv(self) -> list[str]:
        """The command line of its worker."""
        return [sys.executable, "-m", "stockade.bench.worker", msgspec.json.encode(self).decode()]


def main() -> int:
    """Do the job until standard input ends."""
    job = msgspec.json.decode(sys.argv[1], type=Job)
    if job.do == "pass":
        return job.contender.pass_through(job.command)
    heap = _ballast(job.heap)
    ways = {"times": _times, "rate": _rate, "again": _again, "shell": _shell, "hold": _hold, "shells": _hold}
    ways[job.do](job)
    del heap
    return 0


def _ballast(size: int) -> mmap.mmap | None:
    """Memory that is really there, in small pages, as a heap of many objects is."""
    if not size:
        return None
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    memory[::PAGE] = b"\1" * len(range(0, size, PAGE))
    return memory


def _times(job: Job) -> None:
    _timed(job.contender.runner(), job)


def _again(job: Job) -> None:
    from stockade import Sandbox

    with Sandbox(job.contender.policy()) as box:
        _timed(lambda command: box.run(command).check().stdout, job)


def _shell(job: Job) -> None:
    from stockade import Sandbox

    with Sandbox(job.contender.policy()) as box, box.shell() as shell:
        _timed(lambda command: shell.run(command[0]).check().stdout, job)


def _timed(run: Run, job: Job) -> None:
    run(job.command)
    for line in sys.stdin:
        times = []
        for _ in range(int(line)):
            began = time.perf_counter()
            run(job.command)
            times.append((time.perf_counter() - began) * 1000)
        print(msgspec.json.encode(times).decode(), flush=True)


def _rate(job: Job) -> None:
    runners = [job.contender.runner() for _ in range(job.threads)]
    runners[0](job.command)

    def repeat(run: Run, end: float) -> int:
        count = 0
        while time.monotonic() < end:
            run(job.command)
            count += 1
        return count

    with ThreadPoolExecutor(job.threads) as pool:
        for line in sys.stdin:
            ends = [time.monotonic() + float(line)] * job.threads
            # A run that fails ends the worker: what is counted has really run.
            print(sum(pool.map(repeat, runners, ends)), flush=True)


def _hold(job: Job) -> None:
    from stockade import Sandbox

    job.contender.runner()(job.command)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with ExitStack() as stack:
        count = 0
        for line in sys.stdin:
            while count < int(line):
                box = stack.enter_context(Sandbox(job.contender.policy()))
                if job.do == "shells":
                    stack.enter_context(box.shell()).run("true").check()
                count += 1
            print(count, flush=True)


if __name__ == "__main__":
    sys.exit(main())
