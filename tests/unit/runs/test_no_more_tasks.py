"""A program that could not start one more task gets the limit named, in whatever words it says so."""

from __future__ import annotations

import pytest

from stockade.runs.explain.ran_and_failed import no_more_tasks

PRINTED = {
    "bash": b"bash: fork: retry: Resource temporarily unavailable\n",
    "dash": b"sh: 1: Cannot fork\n",
    "busybox": b"sh: can't fork: Resource temporarily unavailable\n",
    "make": b"make: vfork: Resource temporarily unavailable\n",
    "python process": b"_fork_exec(\nBlockingIOError: [Errno 11] Resource temporarily unavailable\n",
    "python thread": b"RuntimeError: can't start new thread\n",
    "node": b"Error: spawn /usr/bin/git EAGAIN\n    at ChildProcess.spawn (node:internal/errors)\n",
    "go thread": b"runtime: failed to create new OS thread (have 9 already; errno=11)\n",
    "go process": b"panic: fork/exec /bin/true: resource temporarily unavailable\n",
    "rust": b'failed to spawn thread: Os { code: 11, message: "Resource temporarily unavailable" }\n',
    "java": b"java.lang.OutOfMemoryError: unable to create native thread\n",
    "ruby": b"can't create Thread: Resource temporarily unavailable (ThreadError)\n",
    "openblas": b"OpenBLAS blas_thread_init: pthread_create failed: Resource temporarily unavailable\n",
}
OTHER = [
    b"",
    b"cat: -: Resource temporarily unavailable\n",
    b"BlockingIOError: [Errno 11] Resource temporarily unavailable\n",
    b"fork me on the web\n",
    b"the thread was started\nread: Resource temporarily unavailable\n",
]


@pytest.mark.parametrize("name", PRINTED)
def test_it_is_told_the_limit_and_how_to_raise_it(name: str) -> None:
    hint = no_more_tasks(PRINTED[name], 64)
    assert "64 at once" in hint and "--limit tasks=128" in hint


@pytest.mark.parametrize("printed", OTHER)
def test_other_words_get_no_hint(printed: bytes) -> None:
    assert no_more_tasks(printed, 64) == ""


def test_without_a_limit_there_is_nothing_to_raise() -> None:
    assert no_more_tasks(PRINTED["dash"], None) == ""
