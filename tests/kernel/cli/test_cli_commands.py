"""The `stockade` command as a whole: its commands, their help, and what it makes of a wrong word."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from stockade import __version__

STOCKADE = str(Path(sys.executable).with_name("stockade"))


def test_the_installed_command_is_this_one() -> None:
    done = subprocess.run([STOCKADE, "--version"], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, f"stockade {__version__}\n")


@pytest.mark.parametrize(
    "words", [["doctor"], ["profiles"], ["plan", "-q", "--", "true"], ["--help"]], ids=" ".join
)
def test_a_reader_that_went_away_is_no_failure_to_speak_of(words: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [STOCKADE, *words],
            cwd="/",
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")
