"""The filter program, beside the one that libseccomp makes of the same answers."""

from __future__ import annotations

import errno
import os
import struct
from pathlib import Path

import pyseccomp
import pytest

from stockade.backends import filters, syscalls

ALLOW, ERRNO, KILL = 0x7FFF0000, 0x00050000, 0x80000000
MACHINE = os.uname().machine
HIGH = 1 << 32  # a bit that the kernel does not look at


def decide(program: bytes, number: int, *arguments: int, architecture: int | None = None) -> int:
    """What a BPF program answers. Only the instructions that such filters use are known."""
    arch = filters.ARCHITECTURES[MACHINE] if architecture is None else architecture
    data = struct.pack("=IIQ6Q", number, arch, 0, *arguments, *[0] * (6 - len(arguments)))
    code = list(struct.iter_unpack("=HBBI", program))
    accumulator = at = 0
    while True:
        kind, if_true, if_false, operand = code[at]
        at += 1
        if kind == 0x06:
            return operand
        if kind == 0x20:
            (accumulator,) = struct.unpack_from("=I", data, operand)
        elif kind == 0x05:
            at += operand
        elif kind == 0x54:
            accumulator &= operand
        else:
            holds = {
                0x15: accumulator == operand,
                0x25: accumulator > operand,
                0x35: accumulator >= operand,
                0x45: bool(accumulator & operand),
            }[kind]
            at += if_true if holds else if_false


@pytest.fixture(scope="module")
def program() -> bytes:
    return syscalls.compile_filter((), ())


def number(name: str) -> int:
    return int(pyseccomp.resolve_syscall(pyseccomp.Arch.NATIVE, name))


@pytest.mark.parametrize(("allow", "deny"), [((), ()), ((), ("read", "vfork"))])
def test_every_number_gets_the_answer_that_libseccomp_gives(
    allow: tuple[str, ...], deny: tuple[str, ...], tmp_path: Path
) -> None:
    answers = syscalls.answers(allow, deny)
    rules = pyseccomp.SyscallFilter(pyseccomp.ERRNO(errno.ENOSYS))
    for call, answer in answers.items():
        if answer in ("allow", "refuse"):
            action = pyseccomp.ALLOW if answer == "allow" else pyseccomp.ERRNO(errno.EPERM)
            rules.add_rule(action, call)
    with (tmp_path / "oracle").open("w+b") as file:
        rules.export_bpf(file)
        file.seek(0)
        oracle = file.read()
    ours = syscalls.compile_filter(allow, deny)
    plain = [call for call in range(1024) if answers.get(call, "") not in filters.BOUNDS]
    assert len(plain) > 1000
    assert [decide(ours, call) for call in plain] == [decide(oracle, call) for call in plain]


def test_other_architectures_and_x32_are_killed(program: bytes) -> None:
    assert decide(program, number("read"), architecture=0x40000003) == KILL
    assert decide(program, number("read") | 0x40000000) == KILL


REFUSED, ABSENT, FAMILY = ERRNO | errno.EPERM, ERRNO | errno.ENOSYS, ERRNO | errno.EAFNOSUPPORT


@pytest.mark.parametrize(
    ("name", "arguments", "answer"),
    [
        ("ioctl", (0, 0x5401), ALLOW),
        ("ioctl", (0, filters.TIOCSTI), REFUSED),
        ("ioctl", (0, filters.TIOCSTI | HIGH), REFUSED),
        ("ioctl", (0, filters.TIOCLINUX), REFUSED),
        ("ioctl", (0, filters.TIOCSETD | HIGH), REFUSED),
        *(("ioctl", (0, request | HIGH), REFUSED) for request in filters.SUBVOLUMES),
        ("ioctl", (0, 0x40049409), ALLOW),  # FICLONE
        ("clone", (0x01200011,), ALLOW),
        *(("clone", (1 << bit | 17,), REFUSED) for bit in (17, 25, 26, 27, 28, 29, 30)),
        ("clone", (0x10000011 | HIGH,), REFUSED),
        ("socket", (1, 1, 0), ALLOW),
        ("socket", (2, 2, 0), ALLOW),
        ("socket", (10, 1, 0), ALLOW),
        ("socket", (16, 3, 0), ALLOW),
        ("socket", (16, 3, 9), FAMILY),
        *(("socket", (family, 1, 0), FAMILY) for family in (0, 3, 9, 15, 17, 38, 40, 45)),
        ("socketpair", (1, 1, 0), ALLOW),
        ("socketpair", (30, 1, 0), FAMILY),
        ("personality", (0,), ALLOW),
        ("personality", (0xFFFFFFFF,), ALLOW),
        ("personality", (0x0040000,), REFUSED),
        ("prlimit64", (0,), ALLOW),
        ("prlimit64", (1,), REFUSED),
        ("prlimit64", (1 | HIGH,), REFUSED),
        ("setpriority", (0, 0), ALLOW),
        ("setpriority", (0, 1), REFUSED),
        ("setpriority", (0, 7), REFUSED),
        ("sched_setattr", (0,), ALLOW),
        ("sched_setattr", (7,), REFUSED),
        ("sched_setscheduler", (0, 5), ALLOW),
        ("sched_setscheduler", (1, 0), REFUSED),
        ("sched_setscheduler", (7, 3), ALLOW),
        ("sched_setscheduler", (7, 5), REFUSED),
        ("sched_setscheduler", (7, 0x40000005), REFUSED),
        ("setpriority", (2, 0), REFUSED),
        ("ioprio_set", (1, 0), ALLOW),
        ("ioprio_set", (1, 1), REFUSED),
    ],
)
def test_bounds_hold(program: bytes, name: str, arguments: tuple[int, ...], answer: int) -> None:
    assert decide(program, number(name), *arguments) == answer


@pytest.mark.parametrize(
    ("flags", "answer"),
    [
        (0, REFUSED),
        (1, REFUSED),
        (0x10, REFUSED),
        (8, ALLOW),
        (9, ALLOW),
        (HIGH << 3, REFUSED),
        (8 | HIGH, ALLOW),
    ],
)
def test_memory_files_are_sealed_where_programs_are_listed(program: bytes, flags: int, answer: int) -> None:
    listed = syscalls.compile_filter((), (), syscalls.Kind(listed=True))
    assert decide(listed, number("memfd_create"), 0, flags) == answer
    assert decide(program, number("memfd_create"), 0, flags) == ALLOW


def test_clone3_does_not_exist(program: bytes) -> None:
    assert decide(program, number("clone3")) == ABSENT
