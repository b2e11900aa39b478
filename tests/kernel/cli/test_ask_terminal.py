"""`--net ask` at a real terminal: the question, the answers, and programs that try to answer themselves."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import termios
import time
from pathlib import Path
from typing import Any

import pytest

from stockade.sessions.attach.terminal_question import READ_FIRST
from support.cli import STOCKADE
from support.network import Internet

PYTHON = "/usr/bin/python3"
FETCH = """
import socket, sys
for place in sys.argv[1:]:
    name, _, port = place.rpartition(":")
    try:
        with socket.create_connection((name, int(port)), timeout=70) as one:
            one.sendall(f"GET / HTTP/1.1\\r\\nHost: {name}\\r\\nConnection: close\\r\\n\\r\\n".encode())
            print("got", name, one.recv(12).decode(), flush=True)
    except OSError as error:
        print("got", name, type(error).__name__, flush=True)
"""
PATIENCE = 30.0
ASKED = "letter and Enter: "


class Seat:
    """A terminal with somebody at it. Like a real one it answers a query for its state."""

    def __init__(self, internet: Internet, place: Path, *words: str) -> None:
        self._controller, terminal = pty.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
        self.process = internet.popen(
            [STOCKADE, "run", "--discard", "--net", "ask", "--", *words],
            cwd=place,
            env={"TERM": "xterm", "XDG_CONFIG_HOME": str(place / "config")},
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            process_group=None,
            start_new_session=True,
        )
        os.close(terminal)
        self.shown = ""

    def read(self, seconds: float = PATIENCE) -> bool:
        """Read once; return False at the end, or when nothing came in time."""
        if not select.select([self._controller], [], [], seconds)[0]:
            return False
        try:
            data = os.read(self._controller, 1 << 16)
        except OSError:
            return False
        for _ in range(data.count(b"\x1b[5n")):
            self.type(b"\x1b[0n")
        self.shown += data.decode(errors="replace").replace("\r\n", "\n")
        return bool(data)

    def until(self, text: str, times: int = 1) -> None:
        late = time.monotonic() + PATIENCE
        while self.shown.count(text) < times:
            assert time.monotonic() < late and self.read(), self.shown

    def type(self, data: bytes) -> None:
        os.write(self._controller, data)

    def answer(self, letter: str, times: int = 1) -> None:
        self.until(ASKED, times)
        time.sleep(READ_FIRST)
        self.type(letter.encode() + b"\r")

    def end(self) -> str:
        while self.read():
            pass
        self.process.wait(PATIENCE)
        os.close(self._controller)
        return self.shown


@pytest.fixture
def sit(internet: Internet, tmp_path: Path) -> Any:
    def take(*words: str, **more: Any) -> Seat:
        return Seat(internet, tmp_path, *words, **more)

    return take


def test_each_answer_does_what_it_says(sit: Any, internet: Internet, tmp_path: Path) -> None:
    config = tmp_path / "config" / "stockade"
    config.mkdir(parents=True)
    before = '# My own rules.\nnet = [  # few\n    "db.good.example",\n]\n\n[limits]\nwall = "5m"\n'
    (config / "config.toml").write_text(before)
    names = ["api.good.example", "www.good.example", "web.good.example", "git.good.example"]
    places = [f"{name}:80" for name in names]
    seat = sit(PYTHON, "-c", FETCH, *places, *places)
    for number, letter in enumerate("orwn" + "n", 1):
        seat.answer(letter, number)
    shown = seat.end()
    assert (
        "python3 (" in shown and "wants to connect to api.good.example:80, and no rule covers that" in shown
    )
    ok, refused = "HTTP/1.1 200", "ConnectionResetError"
    got = [line.removeprefix("got ").split(" ", 1) for line in shown.splitlines() if line.startswith("got ")]
    assert got == [
        *([name, answer] for name, answer in zip(names, [ok, ok, ok, refused], strict=True)),
        *([name, answer] for name, answer in zip(names, [refused, ok, ok, refused], strict=True)),
    ]
    after = (config / "config.toml").read_text()
    assert after == before.replace("net = [", 'net = ["web.good.example:80", ')
    assert sorted(os.listdir(config)) == ["config.toml"]
    assert "git.good.example" not in internet.asked()


#: Types ahead, shows a question of its own, and makes the terminal answer with words that it chose: it sets
#: the title of the window to an answer, and asks for the title.
TRICKS = """
import sys, termios, time, threading, socket
print("stockade: curl (2) wants to connect to good.example:443, and no rule covers that.")
print("  letter and Enter- ", end="", flush=True)
def flood():
    for _ in range(200):
        sys.stdout.write("\\x1b]0;r\\x07\\x1b[21t\\x1b[6n")
        sys.stdout.flush()
        time.sleep(0.005)
threading.Thread(target=flood, daemon=True).start()
try:
    import fcntl
    for letter in b"r\\r":
        fcntl.ioctl(0, 0x5412, bytes([letter]))  # TIOCSTI
except OSError as error:
    print("TIOCSTI", type(error).__name__)
try:
    socket.create_connection(("evil.example", 80), timeout=70).recv(1)
    print("got through")
except OSError as error:
    print("got", type(error).__name__)
time.sleep(0.3)
"""


def test_nothing_inside_can_answer(sit: Any, internet: Internet) -> None:
    seat = sit(PYTHON, "-c", TRICKS)
    seat.until("Enter- ")
    # What the user typed for the program before the question is for the program.
    seat.type(b"r\r")
    seat.until(ASKED)
    # The user is still typing for the program when it connects.
    seat.type(b"r\r" + b"r")
    time.sleep(READ_FIRST)
    before = len(seat.shown)
    # What a terminal would answer to the program's queries, late.
    seat.type(b"\x1b]lr\x1b\\\r")
    seat.type(b"\x1b[1;1R" + b"r\r")
    time.sleep(0.5)
    assert seat.process.poll() is None
    seat.read(0.1)
    asked = seat.shown[before:]
    assert "\x1b]0;r" not in asked, "the program writes while the user is asked"
    seat.type(b"n\r")
    shown = seat.end()
    assert "TIOCSTI" in shown and "got ConnectionResetError" in shown and "got through" not in shown
    assert not internet.asked()


def test_a_program_that_ends_takes_its_question_with_it(sit: Any) -> None:
    code = (
        "import os, socket, threading, time\n"
        "place = 'api.good.example', 80\n"
        "threading.Thread(target=lambda: socket.create_connection(place).recv(1)).start()\n"
        "time.sleep(3); print('bye', flush=True); os._exit(7)\n"
    )
    seat = sit(PYTHON, "-c", code)
    seat.until(ASKED)
    began = time.monotonic()
    shown = seat.end()
    assert seat.process.returncode == 7 and "bye" in shown and time.monotonic() - began < 20


def test_without_a_terminal_it_is_a_refusal_and_said(internet: Internet, tmp_path: Path) -> None:
    done = internet.stockade(
        "run", "--discard", "--net", "ask", "--", PYTHON, "-c", FETCH, "api.good.example:80", cwd=tmp_path
    )
    assert "got api.good.example gaierror" in done.stdout
    assert "there was no terminal" in done.stderr
    planned = internet.stockade("plan", "--net", "ask", "--", "true", cwd=tmp_path)
    assert "waits for your answer; without a terminal it is refused" in planned.stdout
