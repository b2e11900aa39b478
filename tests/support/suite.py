"""Runs the whole suite: `make test`.

As the current user; for root also as an ordinary user, because half of what
Stockade promises is a promise to those without privileges. The two follow one
another: the tests look for leaks and compare times, and must not meet.
"""

from __future__ import annotations

import os
import pwd
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

from support import as_user
from support.paths import ROOT


def main() -> int:
    # Ended from outside, the user and its files still go.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    summaries = [as_current_user()]
    if os.geteuid() == 0:
        summaries.append(as_ordinary_user())
    print()
    for line, _ in summaries:
        print(line)
    return 0 if all(ok for _, ok in summaries) else 1


def as_current_user() -> tuple[str, bool]:
    name = pwd.getpwuid(os.geteuid()).pw_name
    _say(f"the suite as {name}")
    with tempfile.TemporaryDirectory(prefix="suite-") as directory:
        report = Path(directory, "report.xml")
        command = [sys.executable, "-m", "pytest", "--durations=15", f"--junitxml={report}", "tests"]
        status = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, check=False).returncode
        return _summary(name, report, status)


def as_ordinary_user() -> tuple[str, bool]:
    _say(f"the suite as the ordinary user {as_user.NAME}")
    with as_user.ordinary_user() as user, as_user.ground(user) as base:
        report = base / "t" / "report.xml"
        # Style does not depend on who looks.
        arguments = ["--durations=15", f"--junitxml={report}", "--ignore=tests/style", "tests"]
        status = as_user.pytest(base, user, arguments)
        line, ok = _summary(as_user.NAME, report, status)
        left = as_user.left_over(user)
        for thing in left:
            print(f"left behind by {as_user.NAME}: {thing}")
        return line + (f", {len(left)} things left behind" if left else ""), ok and not left


def _say(line: str) -> None:
    print(f"\n== {line}", flush=True)


def _summary(name: str, report: Path, status: int) -> tuple[str, bool]:
    """The counts of one run, from the report that pytest wrote."""
    try:
        suite = next(ElementTree.parse(report).getroot().iter("testsuite")).attrib
    except (OSError, ElementTree.ParseError, StopIteration):
        return f"as {name}: pytest did not come to an end (exit code {status})", False
    total, failed, errors, skipped = (int(suite[key]) for key in ("tests", "failures", "errors", "skipped"))
    passed = total - failed - errors - skipped
    counts = f"{passed} passed, {failed} failed, {errors} errors, {skipped} skipped"
    return f"as {name}: {counts} in {float(suite['time']):.0f} s (exit code {status})", status == 0


if __name__ == "__main__":
    sys.exit(main())
