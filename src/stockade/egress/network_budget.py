"""What a sandbox may use of the network in its life: connections, requests, bytes up and bytes down.

Each has a limit for all hosts together and one for each single host, by the name that the program asked for,
or by the address if it asked for none. A connection counts when it is about to be dialled, a request before
it leaves. Bytes count when they are taken from the side that sent them, so never more than the limit are
passed on. Nothing is given back: bytes that were taken and never arrived count too.

Another egress process can take over while connections are under way. Then each process gets half of what is
left, because neither could ask the other before each byte.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

#: What is counted; `limits` has a limit of the same name, and one for each host with `host_` before it.
KINDS = ("connections", "requests", "upload", "download")
#: The clauses of a policy that limit it.
CLAUSES = (*KINDS, *(f"host_{kind}" for kind in KINDS))
#: How many hosts are counted for themselves; with limits for each host, others are refused.
MOST_HOSTS = 4096
#: The most bytes of what was spent when another process takes over.
SPENT_SIZE = 2 * 1024 * 1024
_NO_LIMIT = 1 << 62


class NetworkBudget:
    """What all connections of one sandbox have used, and may use."""

    def __init__(self, limits: Mapping[str, Any]) -> None:
        self._limits = {name: limits[name] for name in CLAUSES if isinstance(limits.get(name), int)}
        self._by_host = any(name.startswith("host_") for name in self._limits)
        self._spent = [0] * len(KINDS)
        self._hosts: dict[str, list[int]] = {}
        self._handed_over = False

    def of_host(self, host: str) -> HostBudget | None:
        """Return the budget of a connection to a host; None if the policy has no such limits."""
        if not self._limits:
            return None
        spent = self._hosts.get(host) if self._by_host else []
        if spent is None and len(self._hosts) < MOST_HOSTS and not self._handed_over:
            spent = self._hosts[host] = [0] * len(KINDS)
        return HostBudget(self._limits, self._spent, spent)

    def hand_over(self, *, busy: bool) -> bytes:
        """Return what was spent, for `take_over` in another process.

        A process that still has connections keeps half of what is left for itself, and has nothing for hosts
        that it has not met.
        """
        self._handed_over = True
        both = [(self._spent, ""), *((spent, "host_") for spent in self._hosts.values())]
        told = [list(spent) for spent, _ in both]
        if busy:
            for copy, (spent, prefix) in zip(told, both, strict=True):
                for number, kind in enumerate(KINDS):
                    left = max(0, self._limits.get(prefix + kind, 0) - spent[number])
                    copy[number] += left // 2
                    spent[number] += left - left // 2
        return json.dumps([told[0], dict(zip(self._hosts, told[1:], strict=True))]).encode()

    def take_over(self, written: bytes) -> None:
        """Begin with what another process has spent. What is no such text counts as everything."""
        try:
            spent, hosts = json.loads(written)
            self._spent[:] = _numbers(spent)
            found = {str(host)[:300]: _numbers(one) for host, one in list(hosts.items())[:MOST_HOSTS]}
            self._hosts.update(found)
        except (ValueError, TypeError, AttributeError, RecursionError):
            self._spent[:] = [_NO_LIMIT] * len(KINDS)


def _numbers(found: Any) -> list[int]:
    if not isinstance(found, list) or len(found) != len(KINDS) or not all(type(one) is int for one in found):
        raise ValueError
    return [min(max(0, one), _NO_LIMIT) for one in found]


class HostBudget:
    """The budget of one connection: what is left for its host, and for all hosts."""

    __slots__ = ("_all", "_host", "_limits")

    def __init__(self, limits: Mapping[str, int], all_hosts: list[int], host: list[int] | None) -> None:
        self._limits, self._all, self._host = limits, all_hosts, host

    def left(self, kind: str) -> int:
        """Return how much may still be taken."""
        number = KINDS.index(kind)
        least = self._limits.get(kind, _NO_LIMIT) - self._all[number]
        if self._host is None:
            return 0
        if self._host:
            least = min(least, self._limits.get(f"host_{kind}", _NO_LIMIT) - self._host[number])
        return max(0, least)

    def spend(self, kind: str, amount: int = 1) -> bool:
        """Take an amount, or nothing if less is left; return whether it was taken."""
        if amount > self.left(kind):
            return False
        number = KINDS.index(kind)
        self._all[number] += amount
        if self._host:
            self._host[number] += amount
        return True

    def spend_request(self) -> str:
        """Count a request; return the clause that refuses it, or nothing."""
        return "" if self.spend("requests") else self.refusal("requests")

    def refusal(self, kind: str) -> str:
        """Return the clause by which no more can be taken: the one with less left."""
        number = KINDS.index(kind)
        if self._host is None:
            return f"limits.host_{kind}"
        left = self._limits.get(kind, _NO_LIMIT) - self._all[number]
        by_host = (
            self._limits.get(f"host_{kind}", _NO_LIMIT) - self._host[number] if self._host else _NO_LIMIT
        )
        return f"limits.host_{kind}" if by_host < left else f"limits.{kind}"

    def exhausted(self) -> str:
        """Return the clause that leaves nothing for a further connection; empty if each leaves something."""
        needed = ("connections", "upload", "download")  # requests are refused one by one
        return next((self.refusal(kind) for kind in needed if not self.left(kind)), "")
