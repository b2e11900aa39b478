"""Listeners of the supervisor on the loopback address of a living sandbox."""

from __future__ import annotations

from stockade.gate.network import open_listener
from stockade.sandbox.sandbox import SandboxBase


def listen_inside(sandbox: SandboxBase, port: int) -> int:
    """Return a descriptor that listens on a port of 127.0.0.1 inside; it does not block.

    Programs of the sandbox can connect to it, and to nothing else by it.
    """
    box, _ = sandbox._require_open()
    return open_listener(box.connection.resident, box.network_fd, port)
