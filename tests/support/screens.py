"""A terminal with a command on it, as a user has it: keys go in, a screen comes out.

The screen is drawn by an emulator that also answers what programs ask a
terminal. The inner end stays open here, so that its settings can be looked
at also when nobody else has it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyte

STOCKADE = str(Path(sys.executable).with_name("stockade"))
#: Stands in no output.
END = b"\x1b]7;the-end-of-this-test\x07"
#: Far more than a busy machine takes: nothing that passes waits for so long.
PATIENCE = 60.0


class _Screen(pyte.Screen):
    """One that answers, and does not stumble over requests that only newer terminals know."""

    def __init__(self, columns: int, lines: int, answer: Callable[[bytes], None]) -> None:
        super().__init__(columns, lines)
        self._answer = answer

    def draw(self, data: str) -> None:
        # pyte drops what follows a control character that it does not know; a terminal goes on.
        super().draw("".join(filter(str.isprintable, data)))

    def write_process_input(self, data: str) -> None:
        self._answer(data.encode())

    def select_graphic_rendition(self, *attributes: int, private: bool = False) -> None:
        if not private:
            super().select_graphic_rendition(*attributes)

    def report_device_status(self, mode: int = 0, *_: int, private: bool = False) -> None:
        if not private:
            super().report_device_status(mode)


class Terminal:
    """One command and its terminal. Used in a `with` statement; what still runs then is hung up."""

    def __init__(
        self,
        command: Sequence[str],
        cwd: Path,
        *,
        environment: dict[str, str] | None = None,
        size: tuple[int, int] = (24, 80),
        **streams: Any,
    ) -> None:
        self.shown = b""
        self._size = size
        self._outer, self.inner = os.openpty()
        self.resize(*size)
        #: Its settings before anybody has used it.
        self.fresh = self.settings()
        self.screen = _Screen(size[1], size[0], self._answer)
        self._stream = pyte.ByteStream(self.screen)
        given = {"stdin": self.inner, "stdout": self.inner, "stderr": self.inner} | streams
        self.process = subprocess.Popen(
            ["setsid", "--ctty", *command],
            cwd=cwd,
            env={**os.environ, "TERM": "xterm-256color", "NO_COLOR": "1", **(environment or {})},
            **given,
        )

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.hang_up()
        try:
            self.process.wait(PATIENCE)
        finally:
            self.process.kill()
            self.process.wait()

    def hang_up(self) -> None:
        """Close both ends: who has it as its terminal gets SIGHUP."""
        if self._outer >= 0:
            os.close(self._outer)
            os.close(self.inner)
            self._outer = -1

    def type(self, keys: bytes | str) -> None:
        os.write(self._outer, keys.encode() if isinstance(keys, str) else keys)

    def _answer(self, data: bytes) -> None:
        """As an emulator does it: an answer that nobody takes is lost."""
        if select.select([], [self._outer], [], 0)[1]:
            self.type(data)

    def resize(self, lines: int, columns: int) -> None:
        fcntl.ioctl(self._outer, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def settings(self) -> list[Any]:
        return termios.tcgetattr(self.inner)

    @property
    def raw(self) -> bool:
        """Whether Ctrl-C is a key like any other; at the prompt of a shell it is not."""
        return not self.settings()[3] & termios.ISIG

    @property
    def typed_ahead(self) -> int:
        """How much the next program would read."""
        mode = self.settings()
        mode[3] &= ~termios.ICANON
        termios.tcsetattr(self.inner, termios.TCSANOW, mode)
        return int.from_bytes(fcntl.ioctl(self.inner, termios.FIONREAD, bytes(4)), sys.byteorder)

    @property
    def text(self) -> str:
        """What stands on the screen."""
        return "\n".join(line.rstrip() for line in self.screen.display)

    def until(self, wanted: str | bytes | Callable[[], bool]) -> None:
        """Wait until something stands on the screen (text), was sent (bytes), or holds."""
        end = time.monotonic() + PATIENCE
        while not self._is(wanted):
            if time.monotonic() > end:
                raise AssertionError(f"waited in vain for {wanted!r}:\n{self.text}\n{self.shown[-2000:]!r}")
            self._look(0.05)

    def _is(self, wanted: str | bytes | Callable[[], bool]) -> bool:
        if callable(wanted):
            return wanted()
        return wanted in self.shown if isinstance(wanted, bytes) else wanted in self.text

    def _look(self, seconds: float) -> bool:
        if not select.select([self._outer], [], [], seconds)[0]:
            return False
        data = os.read(self._outer, 65536)
        self.shown += data
        self._stream.feed(data)
        return True

    def code(self) -> int:
        """The exit code, once it has ended and all that it showed has been seen."""
        self.until(lambda: self.process.poll() is not None)
        self._read_to_the_end()
        return self.process.wait()

    def _read_to_the_end(self) -> None:
        """Read all that was written: the kernel passes it on in time, and our mark after it."""
        marked = False
        if select.select([], [self.inner], [], 0)[1]:
            with contextlib.suppress(OSError):  # it was hung up
                marked = os.write(self.inner, END) == len(END)
        data, end = b"", time.monotonic() + PATIENCE
        while END not in data and time.monotonic() < end:
            if select.select([self._outer], [], [], 0.1)[0]:
                data += os.read(self._outer, 65536)
            elif not marked:
                break
        data = data.replace(END, b"")
        self.shown += data
        self._stream.feed(data)

    def kill(self, number: signal.Signals) -> None:
        self.process.send_signal(number)


def stockade(cwd: Path, *arguments: str, **options: Any) -> Terminal:
    """The command on a terminal of its own, from which no shell could wake it."""
    return Terminal([STOCKADE, *arguments], cwd, **options)


def shell(cwd: Path, **options: Any) -> Terminal:
    """A shell of the host on a terminal, in which $S is the command."""
    environment = {"S": STOCKADE, "PS1": "host$ ", "INPUTRC": "/dev/null"}
    terminal = Terminal(["bash", "--norc", "--noprofile", "-i"], cwd, environment=environment, **options)
    terminal.until("host$")
    return terminal
