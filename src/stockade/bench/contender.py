"""The process that a contender runs in: small, the same for all, controlled by lines on stdin.

`python -m stockade.bench.contender JOB`, with the job as JSON.
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

from stockade.bench.competitors import Contender, Run

TRUE = ("/bin/true",)
PAGE = 4096


class BenchJob(msgspec.Struct, frozen=True):
    """One job of a worker.

    times: a line is a number of runs; the answer is their milliseconds. again: the same in one living
    sandbox; shell: in a shell there. rate: a line is a number of seconds; the answer is how many runs ended
    in them. hold: a line is the number of idle sandboxes to keep; shells: each with a shell. pass: run one
    command on the worker's own streams.
    """

    contender: Contender
    do: Literal["times", "rate", "again", "shell", "hold", "shells", "pass"]
    threads: int = 1
    heap: int = 0
    command: tuple[str, ...] = TRUE

    def argv(self) -> list[str]:
        """Return the command line of the worker."""
        return [sys.executable, "-m", "stockade.bench.contender", msgspec.json.encode(self).decode()]


def main() -> int:
    """Do the job until standard input ends."""
    job = msgspec.json.decode(sys.argv[1], type=BenchJob)
    if job.do == "pass":
        return job.contender.pass_through(job.command)
    heap = _ballast(job.heap)
    ways = {"times": _times, "rate": _rate, "again": _again, "shell": _shell, "hold": _hold, "shells": _hold}
    ways[job.do](job)
    del heap
    return 0


def _ballast(size: int) -> mmap.mmap | None:
    """Allocate resident memory in small pages, like a heap of many objects."""
    if not size:
        return None
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    memory[::PAGE] = b"\1" * len(range(0, size, PAGE))
    return memory


def _times(job: BenchJob) -> None:
    _timed(job.contender.runner(), job)


def _again(job: BenchJob) -> None:
    from stockade import Sandbox

    with Sandbox(job.contender.policy()) as box:
        _timed(lambda command: box.run(command).check().stdout, job)


def _shell(job: BenchJob) -> None:
    from stockade import Sandbox

    with Sandbox(job.contender.policy()) as box, box.shell() as shell:
        _timed(lambda command: shell.run(command[0]).check().stdout, job)


def _timed(run: Run, job: BenchJob) -> None:
    run(job.command)
    for line in sys.stdin:
        times = []
        for _ in range(int(line)):
            began = time.perf_counter()
            run(job.command)
            times.append((time.perf_counter() - began) * 1000)
        print(msgspec.json.encode(times).decode(), flush=True)


def _rate(job: BenchJob) -> None:
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
            # A failed run ends the worker, so only real runs are counted.
            print(sum(pool.map(repeat, runners, ends)), flush=True)


def _hold(job: BenchJob) -> None:
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
