"""Hostile clients of a kept shell, and hostile programs in one: the holder stays small, others are served."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from stockade.runs.register import register
from stockade.sessions.attach import protocol
from stockade.sessions.attach.protocol import (
    AttachAcceptance,
    AttachRefusal,
    AttachSocket,
    Hello,
    Redraw,
    WindowSize,
)
from support.kept import HELLO, asked, closed, connected, heard, until
from support.screens import PATIENCE, Terminal, stockade

LEAVE = b"\x1d\x1d\x1d"
#: What a holder may have, in KiB, whatever others do: it begins with some 25 MiB.
MOST_RESIDENT = 80 << 10


@pytest.fixture
def kept(workspace: Path, stockade_home: Path) -> Iterator[Terminal]:
    """A kept shell, with us at it; it is usable at the end."""
    short = ("--env", "PS1=# ")
    with stockade(workspace, "shell", "--keep", *short, environment={"SHELL": "/bin/sh"}) as terminal:
        terminal.until("\n#")
        yield terminal
        for record in register.living(str(stockade_home)):
            register.stop(str(stockade_home), record, now=True)
    until(lambda: not register.living(str(stockade_home)))


class Holder:
    """What the process that keeps the only sandbox uses."""

    def __init__(self, home: Path) -> None:
        (record,) = register.living(str(home))
        self._process = Path(f"/proc/{record.supervisor}")

    def open(self) -> int:
        return len(os.listdir(self._process / "fd"))

    def resident(self) -> int:
        lines = (self._process / "status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))

    def busy(self, seconds: float) -> float:
        """The part of the time for which it keeps a processor."""
        before = self._ticks()
        time.sleep(seconds)
        return (self._ticks() - before) / os.sysconf("SC_CLK_TCK") / seconds

    def _ticks(self) -> int:
        words = (self._process / "stat").read_text().rpartition(")")[2].split()
        return int(words[11]) + int(words[12])


@pytest.fixture
def holder(kept: Terminal, stockade_home: Path) -> Holder:
    return Holder(stockade_home)


def usable(home: Path) -> None:
    """A client that comes is let in and can work."""
    began = time.monotonic()
    one = connected(home)
    try:
        assert isinstance(asked(one, hello(terminal=1)), AttachAcceptance)
        os.write(one[1], b"echo all $((6 * 7))\n")
        heard(one[1], b"all 42")
    finally:
        closed(one)
    assert time.monotonic() - began < PATIENCE


def hello(**fields: object) -> Hello:
    return msgspec.structs.replace(HELLO, **fields)


HELLOS = {
    "a NUL in a name": hello(terminal=-1, env={"A\0B=x": "c"}),
    "a NUL in a value": hello(terminal=-1, env={"A": "c\0B=x"}),
    "a name that is none": hello(terminal=-1, env={"": "x", "A=B": "y"}),
    "much": hello(terminal=-1, env={"A": "x" * 60_000}),
    "a loader": hello(terminal=-1, env={"LD_PRELOAD": "/no/such", "PATH": "", "HOME": "/no"}),
    "settings too short": hello(terminal=-1, settings=b"x"),
    "settings of nonsense": hello(terminal=-1, settings=b"\xff" * 36),
    "no cells": hello(terminal=-1, lines=0, columns=0),
    "many cells": hello(terminal=-1, lines=0xFFFF, columns=0xFFFF),
    "no such terminal": hello(terminal=1 << 62),
    "less than new": hello(terminal=-(1 << 62)),
    "another version": hello(version=1 << 62),
    "only looking at a new one": hello(terminal=-1, look=True),
}


def test_what_a_client_says_of_itself_ends_nobody_else(
    kept: Terminal, stockade_home: Path, holder: Holder
) -> None:
    for what, words in HELLOS.items():
        before = holder.open()
        one = connected(stockade_home)
        one[0].send(words, one[2])
        answer, file = one[0].receive(protocol.FromHolder)
        assert isinstance(answer, AttachAcceptance | AttachRefusal | protocol.TerminalEnd), (what, answer)
        if file >= 0:
            os.close(file)
        closed(one)
        usable(stockade_home)
        # A shell that was started for it has no reader any more, and lives; nothing else is left.
        until(lambda before=before: holder.open() <= before + 8)  # type: ignore[misc]
    kept.type("echo still $((6 * 7))\n")
    kept.until("still 42")


def _raw(home: Path) -> socket.socket:
    (place,) = (home / "run").glob("*/*.attach")
    end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    directory = os.open(place.parent, os.O_PATH)
    try:
        end.connect(f"/proc/self/fd/{directory}/{place.name}")
    finally:
        os.close(directory)
    return end


def test_a_thousand_connections_take_little_and_bar_nobody(
    kept: Terminal, stockade_home: Path, holder: Holder
) -> None:
    before = holder.open()
    noise = [
        b"",
        b"\0",
        b"{",
        b"x" * 65_535,
        b"x" * 70_000,
        b"[" * 60_000,
        b'{"type":"Hello"}',
        b'{"type":"Size"}',
    ]
    held = []
    most = 0
    for number in range(1000):
        end = _raw(stockade_home)
        with contextlib.suppress(OSError):
            end.send(noise[number % len(noise)])
        if number % 3:
            held.append(end)
        else:
            end.close()
        most = max(most, holder.open())
    usable(stockade_home)
    assert most <= before + 2 * 16
    assert holder.resident() < MOST_RESIDENT
    for end in held:
        end.close()
    until(lambda: holder.open() <= before)
    assert holder.busy(0.5) < 0.2


def test_more_clients_than_there_may_be_are_refused(
    kept: Terminal, stockade_home: Path, holder: Holder
) -> None:
    before = holder.open()
    found = [connected(stockade_home) for _ in range(15)]
    kinds = [type(asked(one, HELLO)) for one in found]
    while AttachRefusal not in kinds:
        found.append(connected(stockade_home))
        kinds.append(type(asked(found[-1], HELLO)))
        assert len(found) < 100
    kept.type("seq 100000\n")
    kept.until("100000")
    assert holder.resident() < MOST_RESIDENT + (40 << 10)
    for one in found:
        closed(one)
    until(lambda: holder.open() <= before)
    usable(stockade_home)


def _pipe() -> tuple[int, ...]:
    return os.pipe()


def _alone() -> tuple[int, ...]:
    return (socket.socket(socket.AF_UNIX, socket.SOCK_STREAM).detach(),)


def _listening() -> tuple[int, ...]:
    end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    end.bind(f"\0stockade-{os.getpid()}-{time.monotonic()}")
    end.listen(1)
    return (end.detach(),)


def _datagrams() -> tuple[int, ...]:
    return tuple(end.detach() for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM))


def _half_closed() -> tuple[int, ...]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    ours.shutdown(socket.SHUT_RD)
    return theirs.detach(), ours.detach()


def _urgent() -> tuple[int, ...]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with contextlib.suppress(OSError):  # older kernels
        ours.send(b"x", socket.MSG_OOB)
    return theirs.detach(), ours.detach()


@pytest.mark.parametrize("times", [1, 2])
def test_descriptors_that_are_no_stream_or_no_good_one_are_let_go_of(
    times: int, kept: Terminal, stockade_home: Path, holder: Holder
) -> None:
    for made in (_pipe, _alone, _listening, _datagrams, _half_closed, _urgent):
        _pass(made(), times, stockade_home, holder)


def _pass(passed: tuple[int, ...], times: int, stockade_home: Path, holder: Holder) -> None:
    before = holder.open()
    with _raw(stockade_home) as end:
        socket.send_fds(end, [protocol.encoded(HELLO)], [passed[0]] * times)
        end.settimeout(PATIENCE)
        assert end.recv(1000)
        for _ in range(3):  # and with what is no hello
            with contextlib.suppress(OSError):
                socket.send_fds(end, [protocol.encoded(WindowSize(10, 10))], [passed[0]])
        usable(stockade_home)
        assert holder.busy(0.3) < 0.3
    for descriptor in passed:
        os.close(descriptor)
    until(lambda: holder.open() <= before)


def test_one_that_never_stops_talking_is_one_of_several(
    kept: Terminal, stockade_home: Path, holder: Holder
) -> None:
    kept.type("seq 60000\n")
    kept.until("60000")
    loud = connected(stockade_home)
    assert isinstance(asked(loud, HELLO), AttachAcceptance)
    stop = threading.Event()

    def talk(line: AttachSocket) -> None:
        number = 0
        while not stop.is_set():
            number += 1
            line.send(Redraw() if number % 2 else WindowSize(number % 0x10000, 0xFFFF))

    threads = [threading.Thread(target=talk, args=(loud[0],)) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        time.sleep(1)
        usable(stockade_home)
        assert holder.resident() < MOST_RESIDENT
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        closed(loud)
    usable(stockade_home)
    assert holder.busy(0.5) < 0.3


#: Programs that are unkind to their terminal, or to whoever keeps it. Each says `ready` first.
PROGRAMS = {
    "a flood": "yes 0123456789012345678901234567890123456789",
    "a flood of questions": r"while :; do printf '\033[6n\033[c\033]11;?\007\033[5n'; done",
    "a flood of half sequences": r"while :; do printf '\033[\033]\033P\233\302\233\033[99999999'; done",
    "one sequence without end": r"printf '\033]0;'; tr '\0' x </dev/zero",
    "a flood of modes": r"i=0; while :; do i=$((i+1)); printf '\033[?%d;%d;%dh\033[>%du' $i $i $i $i; done",
    "a flood of lines without end": "tr '\\0' x </dev/zero",
    "one that stops itself": "(while :; do kill -CONT $$; done) & while :; do kill -STOP $$; done",
    "one that closes its terminal": "exec </dev/null >/dev/null 2>&1; exec sleep 60",
    "one that reads nothing": "stty raw -echo; exec sleep 60",
    "one that stops its output": "stty ixon -icanon; printf '\\023'; exec sleep 60",
    "orphans that hold the terminal": (
        "for i in 1 2 3; do setsid sh -c 'trap \"\" HUP INT TERM; exec yes >/dev/tty </dev/tty' & done; wait"
    ),
}
TAKES = """
import fcntl, os, signal, struct, sys, termios, time
for number in set(range(1, 65)) - {9, 19, 32, 33}:
    signal.signal(number, signal.SIG_IGN)
tty = os.open("/dev/tty", os.O_RDWR)
for request in (termios.TIOCEXCL, termios.TIOCNOTTY, 0x5437):
    try:
        fcntl.ioctl(tty, request)
    except OSError:
        pass
mode = termios.tcgetattr(tty)
for flags in range(4):
    mode[flags] ^= 0x7fffffff
try:
    termios.tcsetattr(tty, termios.TCSANOW, mode)
except termios.error:
    pass
fcntl.ioctl(tty, termios.TIOCSWINSZ, struct.pack("HHHH", 65535, 65535, 65535, 65535))
time.sleep(60)
"""


@pytest.mark.parametrize("what", [*PROGRAMS, "one that takes the terminal over"])
def test_an_unkind_program_keeps_nobody_from_leaving_and_coming_back(
    what: str, kept: Terminal, workspace: Path, stockade_home: Path, holder: Holder
) -> None:
    if what in PROGRAMS:
        (workspace / "unkind").write_text(f"echo ready$((6 * 7))\n{PROGRAMS[what]}\n")
        kept.type("sh ./unkind\n")
    else:
        (workspace / "unkind").write_text(f"print(f'ready{6 * 7}', flush=True)\n{TAKES}")
        kept.type("/usr/bin/python3 ./unkind\n")
    kept.until(b"ready42")
    time.sleep(0.3)
    _leave(kept)
    # While nobody looks.
    time.sleep(0.5)
    assert holder.resident() < MOST_RESIDENT
    # Who comes back sees it and leaves again, also where the program floods; another shell can be had.
    with stockade(workspace, "attach") as again:
        again.until(lambda: again.raw)
        time.sleep(0.2)
        _leave(again)
    # One that takes nothing is waited for by nobody.
    stuck = connected(stockade_home)
    assert isinstance(asked(stuck, HELLO), AttachAcceptance)
    with stockade(workspace, "attach", "--new") as other:
        other.until(lambda: other.raw)
        other.type("echo other $((6 * 7))\n")
        other.until("other 42")
        _leave(other)
    assert holder.resident() < MOST_RESIDENT
    closed(stuck)


def _leave(terminal: Terminal) -> None:
    """Ctrl-] three times, and it is left, with the terminal as it was."""
    began = time.monotonic()
    terminal.type(LEAVE)
    assert terminal.code() == 0
    assert time.monotonic() - began < PATIENCE
    # The line begins and wraps wherever the flood left the cursor.
    assert "detached;theshellgoeson" in "".join(terminal.text.split()), terminal.shown[-600:]
    assert terminal.settings() == terminal.fresh
    assert terminal.typed_ahead == 0
