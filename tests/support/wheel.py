"""Builds of the package as a source distribution and a wheel."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from support.paths import ROOT

PARTS = ("pyproject.toml", "setup.py", "MANIFEST.in", "LICENSE", "README.md", "src")

# Nothing is fetched: the build uses the setuptools of the environment that the tests run in.
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
OFFLINE = ["--no-deps", "--no-index", "--no-build-isolation"]


def copy_of_the_source(directory: Path) -> Path:
    """Copy what a build needs, and nothing that an earlier build has left."""
    source = directory / "source"
    source.mkdir()
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "bin")
    for part in PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, source / part, ignore=ignored)
        elif (ROOT / part).exists():
            shutil.copy(ROOT / part, source / part)
    return source


def call(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command with its errors among its output."""
    return subprocess.run(
        command,
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def build_wheel(directory: Path) -> Path:
    """Build a wheel from the source distribution: what that lacks is missed in the wheel."""
    source = copy_of_the_source(directory)
    build = "from setuptools.build_meta import build_sdist; build_sdist('..')"
    made = subprocess.run(
        [sys.executable, "-c", build], cwd=source, capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stdout + made.stderr
    (archive,) = directory.glob("stockade-*.tar.gz")
    done = call([*PIP, "wheel", *OFFLINE, "--wheel-dir", str(directory), str(archive)])
    assert done.returncode == 0, done.stdout
    (built,) = directory.glob("*.whl")
    return built
