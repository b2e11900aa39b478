"""System calls of another architecture, whose numbers mean something else, end the program."""

from __future__ import annotations

import os
import signal

import pytest

from attacks.arena import outside, run, run_outside
from support.means import applies, need


@pytest.fixture(autouse=True)
def only_x86() -> None:
    applies(os.uname().machine == "x86_64", "int 0x80 and x32 are of x86")


def test_a_32_bit_system_call_ends_the_program() -> None:
    result = run("int80.c")
    assert (result.outcome, result.signal) == ("denied", signal.SIGSYS)
    control = run_outside("int80.c")
    need(control.returncode != -signal.SIGSEGV, "this kernel has no 32-bit entry to attack")
    assert control.stdout == b'"ok"\n'


def test_an_x32_system_call_ends_the_program() -> None:
    result = run("x32.c")
    assert (result.outcome, result.signal) == ("denied", signal.SIGSYS)
    applies(outside("x32.c") != "ENOSYS", "refused inside; this kernel has no x32 calls to show outside")
    assert outside("x32.c") == "ok"
