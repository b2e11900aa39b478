"""Runs the whole suite: `make test`.

As the current user; for root also as an ordinary user, because half of what
Stockade promises is a promise to those without privileges. The two go on at
the same time, and what does not depend on the user beside them, once: the tests
wait as much as they compute, and each looks for leaks only among what it has
started itself. If a few fail then, the suite runs them
again by themselves, and the summary names them: a busy machine is no failure.
A wall that gives way only sometimes has given way, so an attack must then hold
ten times in a row. Only what compares times follows, one after the other.

Tests wait for the disk more than for anything else, though all they write goes
a moment later. So root lets them work on a file system of the usual kind that
lies in memory. What compares times works on the disk.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO
from xml.etree import ElementTree

from support import as_user, wheel
from support.paths import ROOT

TIMED = "tests/performance"
ONCE = ("tests/style", "tests/unit")
OPTIONS = ["--durations=15"]
#: More failures than this are no accident.
FEW = 10
#: How often an attack that failed once must hold.
ATTACK_TIMES = 10
MEMORY = Path("/dev/shm")
#: Several times what the tests of both users have written at once, in GiB; and of files, which are small.
ROOM = 6
MOST_FILES = 1_500_000


def main() -> int:
    # Ended from outside, the user and its files still go.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with contextlib.ExitStack() as stack:
        directory = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="suite-", dir=as_user.PARENT))
        )
        directory.chmod(0o755)
        own, others = stack.enter_context(_in_memory(directory / "ram"))
        _say("the wheel, for everybody")
        dist = wheel.build(directory / "dist")
        dist.chmod(0o755)
        os.environ[wheel.DIST] = str(dist)
        name = pwd.getpwuid(os.geteuid()).pw_name
        _say(f"the suite as {name}")
        arguments = [f"--ignore={TIMED}", "tests"]
        once: Pass | None = None
        if os.geteuid() == 0:
            # As root: the kernel counts the tasks of an ordinary user, and tests there let them run out.
            told = stack.enter_context(open(directory / "once", "w+b"))
            once = stack.enter_context(
                _running(directory, own, f"{name}, once", [*ONCE], output=told, report="once")
            )
            arguments = [*(f"--ignore={folder}" for folder in ONCE), *arguments]
        first = stack.enter_context(_running(directory, own, name, arguments))
        passes = [first]
        left: list[str] = []
        if once is not None:
            user = stack.enter_context(as_user.ordinary_user())
            base = stack.enter_context(as_user.ground(user, dist))
            os.chown(others, user.pw_uid, user.pw_gid)
            log = stack.enter_context(open(directory / "log", "w+b"))
            second = stack.enter_context(_running(base / "t", others, as_user.NAME, arguments, user, log))
            for begun in (first, second, once):
                begun.wait()
            _say(f"the suite as the ordinary user {as_user.NAME}, at the same time")
            _show(log)
            _say("what does not depend on the user, at the same time")
            _show(told)
            passes += [second, *_again(stack, second, base / "t", others, as_user.NAME, user)]
            passes += [once, *_again(stack, once, directory, own, name)]
            _say(f"what is timed, as the ordinary user {as_user.NAME}")
            third = stack.enter_context(_running(base / "t", base / "t", as_user.NAME, [TIMED], user))
            third.wait()
            left = as_user.left_over(user)
            passes.append(third)
        first.wait()
        passes += _again(stack, first, directory, own, name)
        _say(f"what is timed, as {name}")
        last = stack.enter_context(_running(directory, directory, name, [TIMED]))
        last.wait()
        summaries = [each.summary() for each in [*passes, last]]
    print()
    for line, _ in summaries:
        print(line)
    for thing in left:
        print(f"left behind by {as_user.NAME}: {thing}")
    return 0 if all(ok for _, ok in summaries) and not left else 1


def _again(
    stack: contextlib.ExitStack,
    begun: Pass,
    directory: Path,
    ground: Path,
    name: str,
    user: pwd.struct_passwd | None = None,
) -> list[Pass]:
    """Run what failed in a pass again and alone; that verdict counts instead."""
    failed = begun.failed()
    if not 0 < len(failed) <= FEW:
        return []
    _say(f"what failed as {name}, by itself")
    tests = [*json.loads((begun.cache / "v/cache/lastfailed").read_bytes())]
    times = ATTACK_TIMES if any(test.startswith("tests.attacks") for test in failed) else 1
    begun.replaced = True
    passes: list[Pass] = []
    for number in range(times):
        report = f"{begun.cache.stem}-{number}"
        again = stack.enter_context(_running(directory, ground, name, tests, user, report=report))
        again.wait()
        passes.append(again)
        if not again.summary()[1]:
            break
    return passes


class Pass:
    """One run of pytest, as somebody."""

    def __init__(self, name: str, report: Path, cache: Path, process: subprocess.Popen[bytes]) -> None:
        #: Whether another pass has tried again what failed in this one.
        self.replaced = False
        #: What pytest remembers, such as what failed.
        self.cache = cache
        self._name = name
        self._report = report
        self._process = process

    def wait(self) -> None:
        self._process.wait()

    def end(self) -> None:
        self._process.kill()
        self._process.wait()

    def failed(self) -> list[str]:
        """Return the tests that did not pass; none also where there is no report."""
        with contextlib.suppress(OSError, ElementTree.ParseError):
            tests = ElementTree.parse(self._report).getroot().iter("testcase")
            bad = [
                test for test in tests if test.find("failure") is not None or test.find("error") is not None
            ]
            return [f"{test.attrib['classname']}::{test.attrib['name']}" for test in bad]
        return []

    def summary(self) -> tuple[str, bool]:
        """The counts, from the report that pytest wrote, and the verdict."""
        status, suite = self._process.wait(), self._counted()
        if not suite:
            return f"as {self._name}: pytest did not come to an end (exit code {status})", False
        total, failed, errors, skipped = (
            int(suite[key]) for key in ("tests", "failures", "errors", "skipped")
        )
        passed = total - failed - errors - skipped
        counts = f"{passed} passed, {failed} failed, {errors} errors, {skipped} skipped"
        after = f"; tried again: {', '.join(self.failed())}" if self.replaced else ""
        line = f"as {self._name}: {counts} in {float(suite['time']):.0f} s (exit code {status}){after}"
        return line, status == 0 or (self.replaced and status == 1)

    def _counted(self) -> dict[str, str]:
        try:
            return dict(next(ElementTree.parse(self._report).getroot().iter("testsuite")).attrib)
        except (OSError, ElementTree.ParseError, StopIteration):
            return {}


@contextlib.contextmanager
def _in_memory(place: Path) -> Iterator[tuple[Path, Path]]:
    """Two directories in memory; on the disk where that cannot be had."""
    place.mkdir()
    image = MEMORY / place.parent.name
    make = ["mkfs.ext4", "-q", "-F", "-N", str(MOST_FILES), str(image), f"{ROOM}G"]
    mount = ["mount", "-o", "loop,discard", str(image), str(place)]
    mounted = False
    try:
        if os.geteuid() == 0 and _free() >= ROOM << 30:
            mounted = all(
                subprocess.run(step, stdin=subprocess.DEVNULL, check=False).returncode == 0
                for step in (make, mount)
            )
    except FileNotFoundError as error:
        _say(f"{error.filename} is not there")
    finally:
        image.unlink(missing_ok=True)
    if not mounted:
        _say("the tests work on the disk")
    try:
        place.chmod(0o755)
        places = place / "own", place / "user"
        for each in places:
            each.mkdir()
        yield places
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", place], check=True)


def _free() -> int:
    """How much memory a file in memory may take."""
    limit = os.statvfs(MEMORY)
    available = Path("/proc/meminfo").read_text().partition("MemAvailable:")[2].split()[0]
    return min(limit.f_bavail * limit.f_frsize, int(available) << 10)


@contextlib.contextmanager
def _running(
    directory: Path,
    ground: Path,
    name: str,
    arguments: list[str],
    user: pwd.struct_passwd | None = None,
    output: IO[bytes] | None = None,
    report: str = "",
) -> Iterator[Pass]:
    """A pass that has begun and works on its ground; it does not outlive its context."""
    file = directory / f"{report or Path(arguments[-1]).name}.xml"
    cache = file.with_suffix(".cache")
    places = [f"--basetemp={ground / file.stem}", f"--junitxml={file}", "-o", f"cache_dir={cache}"]
    arguments = [*OPTIONS, *places, *arguments]
    if user is None:
        command = [sys.executable, "-m", "pytest", *arguments]
        process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    else:
        process = as_user.pytest(directory.parent, user, arguments, output)
    begun = Pass(name, file, cache, process)
    try:
        yield begun
    finally:
        begun.end()


def _show(log: IO[bytes]) -> None:
    log.seek(0)
    print(log.read().decode(errors="replace"), flush=True)


def _say(line: str) -> None:
    print(f"\n== {line}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
