"""A server that can be killed and started often: each is forked from a process that has its modules already.

Most of a server's start are imports. `LaunchedServer` is the tests' side; executed, this module is the
launcher.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support.server import ServerUnderTest

ENDED = "ended"


class _Lines:
    """What a server prints, up to the line that says that it has ended."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._ended = False

    def __iter__(self) -> Iterator[str]:
        while not self._ended and (line := self._stream.readline()):
            self._ended = line.strip() == ENDED
            if not self._ended:
                yield line

    def close(self) -> None:
        """Leave the stream to the next server."""


class _ForkedServer:
    """The process of one server, with the part of Popen that tests use."""

    def __init__(self, launcher: subprocess.Popen[str], port: int) -> None:
        assert launcher.stdin is not None and launcher.stdout is not None
        launcher.stdin.write(f"{port}\n")
        launcher.stdin.flush()
        self.pid = int(launcher.stdout.readline())
        self.stdout = _Lines(launcher.stdout)

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self, timeout: float | None = None) -> int:
        for _ in self.stdout:
            pass
        return 0


class LaunchedServer(ServerUnderTest):
    """`stockade serve`, forked."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.launcher = subprocess.Popen(
            [sys.executable, "-m", "support.server_launcher"],
            env={**self.environ, "PYTHONPATH": ":".join(sys.path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def popen(self) -> Any:
        return _ForkedServer(self.launcher, self.port)

    def close(self) -> None:
        """Delete every sandbox, then end the server and the launcher."""
        super().close()
        self.launcher.communicate(timeout=20)


def main() -> None:
    """Fork a server for each line, which has its port, and wait for its end."""
    from litestar import Litestar

    import stockade.server.process  # noqa: F401
    from stockade.cli import main as stockade_main

    Litestar([])  # loads what it finds of pydantic and attrs: half of a start

    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            os.close(0)
            os.open(os.devnull, os.O_RDONLY)
            print(os.getpid(), flush=True)
            os._exit(stockade_main(["serve", "--listen", f"127.0.0.1:{line.strip()}"]))
        os.waitpid(pid, 0)
        print(ENDED, flush=True)


if __name__ == "__main__":
    main()
