"""Builds of the package as a source distribution and a wheel, as they are handed out."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from support.paths import ROOT

#: The variable that names a directory in which they were built from these very sources.
DIST = "STOCKADE_DIST"
SCRIPT = "scripts/build_wheels.py"
#: The copy of the sources that an ordinary user tests has no history to take the time from.
EPOCH = {"SOURCE_DATE_EPOCH": "1767225600"}

# Nothing is fetched: the build uses the setuptools of the environment that the tests run in.
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
OFFLINE = ["--no-deps", "--no-index", "--no-build-isolation"]


def build(out: Path, *, sources: Path = ROOT, umask: int = -1, **environment: str) -> Path:
    """Build the source distribution and the wheel into a directory, with the script of the sources."""
    command = [sys.executable, str(sources / SCRIPT), "--out", str(out)]
    done = call(command, umask=umask, **EPOCH, **environment)
    assert done.returncode == 0, done.stdout
    return out


def call(command: list[str], *, umask: int = -1, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command with its errors among its output."""
    return subprocess.run(
        command,
        env=os.environ | environment,
        umask=umask,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
