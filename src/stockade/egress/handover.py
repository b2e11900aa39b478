"""What an egress process takes over from the one before it: names, and what was spent of the budgets.

The names, and after them what was spent of the network's budget, go to a file in memory: there can be more of
them than a message has room for. How long each is, and what was spent of the budget for names, is in the
message.
"""

from __future__ import annotations

import os
from typing import Any

from stockade.egress.decoders.dns import NameBudget
from stockade.egress.names import WRITTEN_SIZE, SyntheticNames
from stockade.egress.network_budget import SPENT_SIZE, NetworkBudget

_WRITE_SIZE = 1024 * 1024


class Inheritance:
    """What outlives one egress process of a sandbox."""

    def __init__(self, message: dict[str, Any]) -> None:
        self.names = SyntheticNames()
        self.name_budget = NameBudget(spent=_spent(message))
        self.limits = NetworkBudget(message.get("limits", {}))

    def read(self, descriptor: int, message: dict[str, Any]) -> None:
        """Begin with what another process has written, which is not trusted, and close the file."""
        self.names.read(os.pread(descriptor, min(message["names"], WRITTEN_SIZE), 0))
        self.limits.take_over(os.pread(descriptor, min(message["spent"], SPENT_SIZE), WRITTEN_SIZE))
        os.close(descriptor)

    def write(self, descriptor: int, *, busy: bool) -> dict[str, object]:
        """Write everything for another process, and return what its first message says of it.

        `busy` means that connections are under way here, which go on spending.
        """
        written = self.names.written()
        _write_all(descriptor, written, 0)
        spent = self.limits.hand_over(busy=busy)
        _write_all(descriptor, spent, WRITTEN_SIZE)
        return {"names": len(written), "budget": self.name_budget.spent, "spent": len(spent)}


def _spent(message: dict[str, Any]) -> tuple[int, int]:
    """Return what another egress process of this sandbox has spent of the budget for names."""
    names, long = message.get("budget", (0, 0))
    return max(0, int(names)), max(0, int(long))


def _write_all(descriptor: int, data: bytes, offset: int) -> None:
    at = 0
    while at < len(data):
        at += os.pwrite(descriptor, data[at : at + _WRITE_SIZE], offset + at)
