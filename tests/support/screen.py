"""Running a command as if somebody sat at a terminal."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from collections.abc import Mapping, Sequence
from pathlib import Path

STOCKADE = str(Path(sys.executable).with_name("stockade"))


def seen(
    command: Sequence[str],
    *,
    columns: int = 80,
    environ: Mapping[str, str] | None = None,
    typed: bytes = b"",
    cwd: Path | None = None,
) -> tuple[int, str]:
    """The exit code and what the screen was sent, of both streams."""
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    clean = {
        name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")
    }
    with subprocess.Popen(
        command,
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        cwd=cwd,
        env={**clean, "TERM": "xterm", **(environ or {})},
        start_new_session=True,
    ) as process:
        os.close(terminal)
        os.write(controller, typed)
        sent = b""
        # Linux answers EIO when the last one has closed its end.
        with contextlib.suppress(OSError):
            while part := os.read(controller, 1 << 16):
                sent += part
        os.close(controller)
    return process.returncode, sent.decode("utf-8", "replace").replace("\r\n", "\n")
