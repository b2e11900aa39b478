"""Synthetic addresses: one per name and family, stable for the life of a sandbox.

A program inside asks for a name and gets an address that stands for it; a connection to that address means
the name. Outside, the name is resolved when the connection is dialled. IPv4 addresses come from
198.18.0.0/15, which RFC 2544 sets aside for tests of networks, IPv6 addresses from a prefix of unique local
addresses. Both addresses of a name have the same number.
"""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address

from stockade.policy.net_errors import NetRuleError
from stockade.policy.net_names import MOST_NAME, normal_name

#: The most names of one sandbox.
NAMES = 65_536
#: The most characters of all names together: programs may ask for long names below a wildcard.
ROOM = 4 * 1024 * 1024
#: The most bytes of all names when another process takes them over.
WRITTEN_SIZE = ROOM + NAMES

_IPV4_BASE = int(IPv4Address("198.18.0.0"))
_IPV4_SIZE = 2**17
_IPV6_BASE = int(IPv6Address("fd00:5afe::"))
_IPV6_SIZE = 2**64
#: The network itself, the name server and the sandbox's own address.
_RESERVED = 3


class SyntheticNames:
    """The names of one sandbox and the addresses that stand for them."""

    def __init__(self, limit: int = NAMES, room: int = ROOM) -> None:
        self._limit, self._room = limit, room
        self._names: list[str] = []
        self._numbers: dict[str, int] = {}

    def addresses(self, name: str) -> tuple[str, str] | None:
        """Return the IPv4 and the IPv6 address of a name, new ones if needed; None if there are too many."""
        number = self._numbers.get(name)
        if number is None:
            if len(self._names) >= self._limit or len(name) > self._room:
                return None
            self._room -= len(name)
            number = self._numbers[name] = len(self._names)
            self._names.append(name)
        number += _RESERVED
        return str(IPv4Address(_IPV4_BASE + number)), str(IPv6Address(_IPV6_BASE + number))

    def name_of(self, address: str) -> str | None:
        """Return the name that an address stands for, or None."""
        number = _offset(address) - _RESERVED
        return self._names[number] or None if 0 <= number < len(self._names) else None

    def written(self) -> bytes:
        """Return the names in order, for `read` in the egress process that takes over."""
        return "\n".join(self._names).encode("ascii")

    def read(self, written: bytes) -> None:
        """Take over the names of another egress process, which is not trusted.

        The place of what is no name stays empty, so that the addresses of the others stay the same. What a
        name may reach is decided at each connection.
        """
        for number, line in enumerate(written.split(b"\n", self._limit)[: self._limit] if written else ()):
            name = _plain_name(line)
            if name in self._numbers or len(name) > self._room:
                name = ""
            self._names.append(name)
            if name:
                self._room -= len(name)
                self._numbers[name] = number


def _plain_name(line: bytes) -> str:
    """Return a name in its one spelling; empty for what is none."""
    if not line.isascii() or not 0 < len(line) <= MOST_NAME:
        return ""
    text = line.decode("ascii")
    try:
        return text if normal_name(text) == text else ""
    except NetRuleError:
        return ""


def is_synthetic(address: str) -> bool:
    """Whether an address lies in the ranges that stand for names, whether or not it stands for one yet."""
    return _offset(address) >= 0


def _offset(address: str) -> int:
    """The place of an address in its synthetic range; -1 if it lies in none."""
    try:
        if ":" in address:
            offset, size = int(IPv6Address(address)) - _IPV6_BASE, _IPV6_SIZE
        else:
            offset, size = int(IPv4Address(address)) - _IPV4_BASE, _IPV4_SIZE
    except ValueError:
        return -1
    return offset if 0 <= offset < size else -1
