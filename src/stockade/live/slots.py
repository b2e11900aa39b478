"""One sandbox of a pool, and whether another run may have it.

Between two runs every process but the gate is killed, and that is believed
when the kernel says that the gate has no child: whatever lives inside descends
from one. What was written to the private directories stays.
"""

from __future__ import annotations

import signal
import time

from stockade.errors import SetupError
from stockade.policy.model import Reuse
from stockade.sandbox.launch import Box
from stockade.sandbox.sandbox import Sandbox

#: How long whatever a run left is killed; what is still there then ends with the whole sandbox.
PATIENCE = 0.5
AGAIN = 0.001


class Slot:
    """A sandbox, and how much it was used."""

    def __init__(self, box: Sandbox) -> None:
        self.box = box
        self.born = self.returned = time.monotonic()
        self.requests = 0

    def spent(self, reuse: Reuse | None) -> bool:
        """Whether it may not be used any more. One that was never used waits for as long as it takes."""
        if not self.requests:
            return False
        now = time.monotonic()
        return (
            reuse is None
            or self.requests >= reuse.requests
            or now - self.born >= reuse.age
            or now - self.returned >= reuse.idle
        )

    def emptied(self) -> bool:
        """Kill what the last run has left; whether nothing is. What cannot be found out counts as no."""
        try:
            return self._emptied()
        except (OSError, SetupError):
            return False

    def _emptied(self) -> bool:
        box, prepared = self.box._opened()
        until = time.monotonic() + PATIENCE
        while (gate := _gate(box, plain=prepared.plan.plain)) > 0:
            left = _children(gate)
            if left == []:
                return True
            if left is None or time.monotonic() >= until:
                return False
            # Keepers are spared: those of runs that are over end by themselves.
            box.connection.signal(signal.SIGKILL, everything=True)
            time.sleep(AGAIN)
        return False


def _gate(box: Box, *, plain: bool) -> int:
    """The number of the gate, of which all inside are descendants; -1 if there is none."""
    first = box.number()
    if not plain or first < 0:
        return first
    # Without a pid namespace the first process is its warden, which adopts what the gate cannot.
    below = _children(first)
    return below[0] if below is not None and len(below) == 1 else -1


def _children(pid: int) -> list[int] | None:
    """Those of a process, in which not one is left out if there is none; None where that cannot be read."""
    try:
        with open(f"/proc/{pid}/task/{pid}/children", "rb", buffering=0) as file:
            return [int(word) for word in (file.read() or b"").split()]
    except OSError:
        return None
