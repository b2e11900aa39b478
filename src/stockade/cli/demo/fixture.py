"""The directory of one demo, which holds everything that the demo touches and is removed with it.

The demo uses nothing of the user's: the home, the key in it, the project and
Stockade's own state are made for it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from stockade.inside import demo_agent

PRICE = '''"""What a basket costs."""


def total(prices, discount=0):
    """The sum of the prices, less a discount in percent."""
    return sum(prices) - discount
'''
CHECKS = """from shop.price import total

assert total([2, 3]) == 5
assert total([100], discount=20) == 80
assert total([50], discount=10) == 45
"""
NOTES = "the neighbour's notes\n"
FILES = {
    "project/shop/price.py": PRICE,
    "project/test_price.py": CHECKS,
    "project/.git/HEAD": "ref: refs/heads/main\n",
    "project/.git/config": "[core]\n\trepositoryformatversion = 0\n\tbare = false\n",
    "neighbour/notes.txt": NOTES,
}
DIRECTORIES = ("project/.git/hooks", "project/.git/objects", "project/.git/refs/heads", "home/.ssh", "agent")
KEY = "home/.ssh/id_ed25519"


class DemoFixture:
    """The demo's directory and listener, and what they show from outside the sandbox."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.project, self.agent = root / "project", root / "agent" / "agent.py"
        self.key = root / KEY
        #: The text of the key. It is random: if it turns up anywhere, the key was read.
        self.secret = os.urandom(18).hex()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.setblocking(False)
        # A silent listener proves something only if it can hear.
        socket.create_connection(self.listener.getsockname(), 2).close()
        self.hears = self.calls() == 1
        self._build()

    @property
    def port(self) -> int:
        return int(self.listener.getsockname()[1])

    def _build(self) -> None:
        for name in DIRECTORIES:
            (self.root / name).mkdir(parents=True, exist_ok=True)
        for name, text in FILES.items():
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        self.key.write_text(f"-----BEGIN DECOY KEY-----\n{self.secret}\n-----END DECOY KEY-----\n")
        self.key.chmod(0o600)
        shutil.copyfile(demo_agent.__file__, self.agent)

    def calls(self) -> int:
        """Return how many connections have reached the listener since the last call."""
        count = 0
        with contextlib.suppress(BlockingIOError):
            while True:
                self.listener.accept()[0].close()
                count += 1
        return count

    def processes(self) -> list[int]:
        """Return the processes of this machine whose command line names the agent."""
        mark = os.fsencode(self.agent)
        found = []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if mark in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                    found.append(int(pid))
        return found


@contextlib.contextmanager
def ground() -> Iterator[DemoFixture]:
    """Make the demo's directory, use it as the home of everything that this process runs, and remove it."""
    root = Path(os.path.realpath(tempfile.mkdtemp(prefix="stockade-demo-")))
    before = {name: os.environ.get(name) for name in ("HOME", "STOCKADE_HOME")}
    try:
        os.environ |= {"HOME": str(root / "home"), "STOCKADE_HOME": str(root / "state")}
        fixture = DemoFixture(root)
        try:
            yield fixture
        finally:
            fixture.listener.close()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        _forget(root)


def _forget(root: Path) -> None:
    """Remove everything, including what an interruption left and this process's entries in the register."""
    if "stockade.sandbox.sandbox" in sys.modules:
        from stockade.runs import idle_cgroups
        from stockade.runs.register import register
        from stockade.sandbox.workspace import Workspace

        for workspace in Workspace.list(str(root / "state")):
            workspace.discard()  # overlayfs leaves a work directory that rmtree cannot remove
        idle_cgroups.shutdown()
        register.shutdown()
    shutil.rmtree(root)
