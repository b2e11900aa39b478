"""The filter program, beside the one that libseccomp makes of the same answers."""

from __future__ import annotations

import errno
import os
import struct
from pathlib import Path

import pyseccomp
import pytest

from stockade.backends.seccomp import bpf, observed_calls, socket_bounds, syscalls
from stockade.policy import socket_options

ALLOW, ERRNO, KILL = 0x7FFF0000, 0x00050000, 0x80000000
MACHINE = os.uname().machine
HIGH = 1 << 32  # a bit that the kernel does not look at


def decide(program: bytes, number: int, *arguments: int, architecture: int | None = None) -> int:
    """What a BPF program answers. Only the instructions that such filters use are known."""
    arch = bpf.ARCHITECTURES[MACHINE] if architecture is None else architecture
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


#: Every second number, so that each is an interval of its own: no condition's eight bits reach over that.
NUMBERS = {name: pyseccomp.resolve_syscall(pyseccomp.Arch.NATIVE, name) for name in sorted(syscalls.ALLOWED)}
MANY = tuple(name for name, number in NUMBERS.items() if number > 0 and number % 2)


@pytest.mark.parametrize(("allow", "deny"), [((), ()), ((), ("read", "vfork")), ((), MANY)])
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
    assert (bpf.JUMP in [code for code, *_ in struct.iter_unpack("=HBBI", ours)]) == (deny == MANY)
    plain = [call for call in range(1024) if answers.get(call, "") not in bpf.BOUNDS | socket_bounds.bounds()]
    assert len(plain) > 990
    assert [decide(ours, call) for call in plain] == [decide(oracle, call) for call in plain]


def test_other_architectures_and_x32_are_killed(program: bytes) -> None:
    assert decide(program, number("read"), architecture=0x40000003) == KILL
    assert decide(program, number("read") | 0x40000000) == KILL


REFUSED, ABSENT, FAMILY = ERRNO | errno.EPERM, ERRNO | errno.ENOSYS, ERRNO | errno.EAFNOSUPPORT
UNKNOWN, NO_OPTION, NO_MEMORY = ERRNO | errno.EINVAL, ERRNO | errno.ENOPROTOOPT, ERRNO | errno.ENOMEM
NO_PROTOCOL = ERRNO | errno.EPROTONOSUPPORT
NOT_OFFERED = ERRNO | errno.EOPNOTSUPP
#: SIOCGIFBR, SIOCSIFBR, SIOCETHTOOL, SIOCWANDEV, SIOCADDDLCI, SIOCGIFVLAN, SIOCBRADDBR, SIOCDEVPRIVATE + 15.
DEVICES = (0x8940, 0x8941, 0x8946, 0x894A, 0x8980, 0x8982, 0x89A0, 0x89FF)
ANONYMOUS = 0x22  # MAP_PRIVATE | MAP_ANONYMOUS


@pytest.mark.parametrize(
    ("name", "arguments", "answer"),
    [
        ("ioctl", (0, 0x5401), ALLOW),
        ("ioctl", (0, bpf.TIOCSTI), REFUSED),
        ("ioctl", (0, bpf.TIOCSTI | HIGH), REFUSED),
        ("ioctl", (0, bpf.TIOCLINUX), REFUSED),
        ("ioctl", (0, bpf.TIOCSETD | HIGH), REFUSED),
        *(("ioctl", (0, request | HIGH), REFUSED) for request in bpf.SUBVOLUMES),
        ("ioctl", (0, 0x40049409), ALLOW),  # FICLONE
        *(("ioctl", (0, asked | HIGH), NOT_OFFERED) for asked in DEVICES),
        *(("ioctl", (0, asked), ALLOW) for asked in (0x8912, 0x893F, 0x8942, 0x8945, 0x894B, 0x8970, 0x8A00)),
        ("clone", (0x01200011,), ALLOW),
        *(("clone", (1 << bit | 17,), REFUSED) for bit in (17, 25, 26, 27, 28, 29, 30)),
        ("clone", (0x10000011 | HIGH,), REFUSED),
        ("socket", (1, 1, 0), ALLOW),
        ("socket", (2, 2, 0), ALLOW),
        ("socket", (10, 1, 0), ALLOW),
        *(("socket", (2, 1 | 0x80800, protocol), ALLOW) for protocol in (0, 6, 262)),
        *(("socket", (10, 2, protocol), ALLOW) for protocol in (0, 17, 58)),
        *(("socket", (2, kind, 0), NO_PROTOCOL) for kind in (4, 5, 6, 10, 5 | 0x80800)),
        *(
            ("socket", (2, 1, number | HIGH), NO_PROTOCOL)
            for number in (33, 115, 132, 136, 255, 256, 1 << 31)
        ),
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
        ("mmap", (0, 4096, 3, ANONYMOUS), ALLOW),
        ("mmap", (0, 4096, 3, ANONYMOUS | 0x40000), NO_MEMORY),
        ("mmap", (0, 4096, 3, ANONYMOUS | 0x40000 | 30 << 26 | HIGH), NO_MEMORY),
        ("shmget", (0, 4096, 0o1600), ALLOW),
        ("shmget", (0, 4096, 0o5600 | HIGH), REFUSED),
        ("memfd_create", (0, 3), ALLOW),
        ("memfd_create", (0, 4 | HIGH), REFUSED),
        ("memfd_secret", (0,), ABSENT),
        ("fcntl", (0, 3), ALLOW),  # F_GETFL
        ("fcntl", (0, 37), ALLOW),  # F_OFD_SETLK
        *(("fcntl", (0, command | HIGH), REFUSED) for command in (1024, 1026)),  # F_SETLEASE, F_NOTIFY
        *(("fcntl", (0, command), ALLOW) for command in (1025, *range(1028, 1036), 1037)),
        ("fcntl", (0, 1036 | HIGH), UNKNOWN),  # F_SET_RW_HINT
        ("fcntl", (0, 1038), UNKNOWN),
        ("fcntl", (0, 1040), UNKNOWN),  # F_SETDELEG
        ("fcntl", (0, 0xFFFFFFFF), UNKNOWN),
        *(("seccomp", (operation, flags), ABSENT) for operation in range(4) for flags in (0, 8)),
        *(("prctl", (22 | high, mode), UNKNOWN) for high in (0, HIGH) for mode in (1, 2)),  # PR_SET_SECCOMP
        *(("prctl", (option,), ALLOW) for option in (4, 15, 21, 23, 38, 39)),
        ("prctl", (62,), UNKNOWN),  # PR_SCHED_CORE
        ("setsockopt", (3, 1, 2), ALLOW),  # SO_REUSEADDR
        ("setsockopt", (3, 6, 26), NO_OPTION),  # of TCP
        *(("setsockopt", (3, level, 1), NO_OPTION) for level in (2, 58, 255, 263, 282, 284, 0xFFFFFFFF)),
        ("getsockopt", (3, 1, 4), ALLOW),  # SO_ERROR
        ("getsockopt", (3, 0 | HIGH, 41 | HIGH), NO_OPTION),  # IP_MSFILTER
        ("getsockopt", (3, 41, 48), NO_OPTION),  # MCAST_MSFILTER
        ("getsockopt", (3, 6, 35), NO_OPTION),  # TCP_ZEROCOPY_RECEIVE
        *(("setsockopt", (3, 1 | HIGH, option | HIGH), NO_OPTION) for option in (26, 50, 51, 52)),
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
        (8 | 4, REFUSED),
        (8, ALLOW),
        (9, ALLOW),
        (HIGH << 3, REFUSED),
        (8 | HIGH, ALLOW),
    ],
)
def test_memory_files_are_sealed_where_programs_are_listed(program: bytes, flags: int, answer: int) -> None:
    listed = syscalls.compile_filter((), (), syscalls.FilterKey(listed=True))
    assert decide(listed, number("memfd_create"), 0, flags) == answer
    assert decide(program, number("memfd_create"), 0, flags) == (REFUSED if flags & 4 else ALLOW)


@pytest.mark.parametrize(
    ("name", "arguments", "answer"),
    [
        ("seccomp", (1, 0), ALLOW),
        ("seccomp", (1, 1), ALLOW),
        ("seccomp", (2, 0), ALLOW),
        *(("seccomp", (1, flags), REFUSED) for flags in (8, 9, 40, 8 | HIGH)),
        ("prctl", (22, 2), ALLOW),
        ("prctl", (62,), UNKNOWN),
    ],
)
@pytest.mark.parametrize(
    "kind", [syscalls.WALLED, syscalls.FilterKey(listed=True), syscalls.FilterKey(alone=True)], ids=str
)
def test_a_policy_can_allow_filters_but_never_their_listeners(
    name: str, arguments: tuple[int, ...], answer: int, kind: syscalls.FilterKey
) -> None:
    allowing = syscalls.compile_filter(("seccomp",), (), kind)
    assert decide(allowing, number(name), *arguments) == answer
    denied = syscalls.compile_filter(("seccomp",), ("seccomp",), kind)
    assert decide(denied, number("prctl"), 22, 2) == UNKNOWN


def test_requests_to_devices_are_refused_without_namespaces_too() -> None:
    alone = syscalls.compile_filter((), (), syscalls.FilterKey(alone=True, network=True))
    assert {decide(alone, number("ioctl"), 0, asked) for asked in DEVICES} == {NOT_OFFERED}
    assert decide(alone, number("ioctl"), 0, 0x8912) == ALLOW
    assert decide(alone, number("ioctl"), 0, 0x8A00) == ERRNO | errno.ENOTTY


def test_exactly_the_options_of_the_tables_are_open(program: bytes) -> None:
    levels = {*socket_options.OPEN, socket_options.SOL_TLS}
    every = (*socket_options.NAMES,)
    all_opened = syscalls.compile_filter(every, ())
    for filter, allow in ((program, ()), (all_opened, every)):
        opened = socket_options.opened(allow)
        for level in levels:
            for option in (*range(256), 1 << 31, 0xFFFFFFFF):
                wanted = ALLOW if option in opened.get(level, ()) else NO_OPTION
                for high in (0, HIGH):
                    assert decide(filter, number("setsockopt"), 3, level | high, option | high) == wanted
    assert decide(all_opened, number("getsockopt"), 3, 0, 41) == ALLOW


def test_the_tables_of_options_do_not_overlap() -> None:
    places = [(level, number) for level, names in socket_options.OPEN.items() for number in names.values()]
    places += [(level, number) for level, names in socket_options.JOINS.items() for number in names.values()]
    places += socket_options.CLOSED.values()
    assert len(places) == len(set(places))
    # SO_ATTACH_FILTER, SO_ATTACH_BPF and those of ports: what bpf_jit_limit bounds, no policy opens.
    assert not {(1, 26), (1, 50), (1, 51), (1, 52)} & set(places)


def test_clone3_does_not_exist(program: bytes) -> None:
    assert decide(program, number("clone3")) == ABSENT


NOTIFY = 0x7FC00000


class TestObserved:
    """The filter of an observed sandbox, beside the ordinary one."""

    @pytest.fixture
    def observed(self, program: bytes) -> bytes:
        return observed_calls.notifying(program)

    def test_it_gives_the_ordinary_answer_or_notifies(self, program: bytes, observed: bytes) -> None:
        calls = f"{observed_calls.CALLS} {' '.join(observed_calls.CHANGES)}"
        families = {number(name) for name in calls.split()}
        for call in range(700):
            for arguments in ((), (1, 2, 3), (17, 3), (0x7E020000,), (0, 0x5412), (0, 0xFFFFFFFF)):
                ordinary, answer = decide(program, call, *arguments), decide(observed, call, *arguments)
                refused = ordinary in (REFUSED, NO_OPTION)
                notified = refused or (ordinary == ALLOW and call in families)
                assert answer == (NOTIFY if notified else ordinary), (call, arguments)

    def test_other_architectures_are_killed_as_ever(self, observed: bytes) -> None:
        assert decide(observed, 0, architecture=0x40000003) == KILL
        assert decide(observed, 0x40000000) == KILL

    def test_calls_that_libraries_try_stay_plain_refusals(self, observed: bytes) -> None:
        assert decide(observed, number("clone3")) == ERRNO | errno.ENOSYS
        assert decide(observed, number("socket"), 17, 3) == ERRNO | errno.EAFNOSUPPORT

    def test_the_gates_own_calls_notify_nobody_and_what_is_refused_does(self, observed: bytes) -> None:
        marked = (0, 0, 0, 0, 0, bpf.UNOBSERVED)
        assert decide(observed, number("openat"), *marked) == ALLOW
        assert decide(observed, number("mount"), *marked) == NOTIFY
        for name in observed_calls.CHANGES:
            assert decide(observed, number(name), *marked) == NOTIFY, name
        thrice = (0, 0, bpf.UNOBSERVED, bpf.UNOBSERVED, 0, bpf.UNOBSERVED)
        assert decide(observed, number("landlock_restrict_self"), *thrice) == ALLOW
        assert decide(observed, number("landlock_restrict_self"), *thrice[:5], 0) == NOTIFY

    def test_a_call_that_the_policy_denies_is_notified_as_a_refused_one(self) -> None:
        ordinary = syscalls.compile_filter((), ("openat", "connect"))
        observed = observed_calls.notifying(ordinary)
        assert decide(ordinary, number("openat")) == ERRNO | errno.EPERM
        # Also with the gate's mark: the observer answers by the ordinary filter, which refuses it.
        for arguments in ((), (0, 0, 0, 0, 0, bpf.UNOBSERVED)):
            assert decide(observed, number("openat"), *arguments) == NOTIFY
