"""One sandbox of a pool, and whether another run may use it.

Between two runs the gate kills every process but itself, and the pool waits
until the kernel says that the gate has no child: every process inside descends
from one. Files in the private directories stay.
"""

from __future__ import annotations

import signal
import time

from stockade.errors import SetupError
from stockade.gate.operations import Plan
from stockade.policy.model import Reuse
from stockade.runs.launch import LaunchedSandbox
from stockade.sandbox.sandbox import Sandbox

#: For how many seconds to kill what a run left; if something is still there then, the whole sandbox ends.
PATIENCE = 0.5
AGAIN = 0.001


class PoolMember:
    """A sandbox and how much it has been used."""

    def __init__(self, box: Sandbox) -> None:
        self.box = box
        self.born = self.returned = time.monotonic()
        self.requests = 0

    def spent(self, reuse: Reuse | None) -> bool:
        """Whether no run may use it any more. A sandbox that was never used does not expire."""
        if not self.requests:
            return False
        now = time.monotonic()
        return (
            reuse is None
            or self.requests >= reuse.requests
            or now - self.born >= reuse.age
            or now - self.returned >= reuse.idle
        )

    def kill_leftovers(self) -> bool:
        """Kill what the last run has left; return whether nothing is left, and False if that is unknown."""
        try:
            return self._kill_until_empty()
        except (OSError, SetupError):
            return False

    def _kill_until_empty(self) -> bool:
        box, prepared = self.box._require_open()
        until = time.monotonic() + PATIENCE
        while (gate := _gate(box, prepared.plan)) > 0:
            left = _children(gate)
            if left == []:
                return True
            if left is None or time.monotonic() >= until:
                return False
            # The gate spares keepers: those of ended runs end by themselves.
            box.connection.signal(signal.SIGKILL, everything=True)
            time.sleep(AGAIN)
        return False


def _gate(box: LaunchedSandbox, plan: Plan) -> int:
    """Return the pid of the gate from which everything inside descends; -1 if there is none."""
    pid = box.number()
    # Without a pid namespace the first process is the warden, which adopts what the gate cannot; with a
    # helper it is the usher, and the helper is the usher's child.
    for _ in range(2 if plan.helped else plan.plain):
        below = _children(pid) if pid > 0 else None
        pid = below[0] if below is not None and len(below) == 1 else -1
    return pid


def _children(pid: int) -> list[int] | None:
    """Return the children of a process; None if unreadable. The list may have gaps, but [] means none."""
    try:
        with open(f"/proc/{pid}/task/{pid}/children", "rb", buffering=0) as file:
            return [int(word) for word in (file.read() or b"").split()]
    except OSError:
        return None
