"""The network namespaces of this process's living sandboxes, and who may join them."""

from __future__ import annotations

import errno
import os

from stockade.errors import SetupError
from stockade.gate import client

#: By inode number, each with the pidfd of a sandbox in it: the resident that made the namespace.
_networks: dict[tuple[int, int], client.Resident] = {}


def is_used(network: int) -> bool:
    """Whether a living sandbox is in it. The resident makes them ahead: no launch may get one twice."""
    return any(network == other for other, _ in tuple(_networks))


def enter(network: int, pidfd: int, resident: client.Resident) -> None:
    """Note that a sandbox lives in it."""
    _networks[network, pidfd] = resident


def leave(network: int, pidfd: int) -> None:
    """Note that the sandbox has ended."""
    _networks.pop((network, pidfd), None)


def launch_joined(plan: bytes, descriptors: tuple[int, ...], network: int) -> client.Connection:
    """Begin a sandbox in the network namespace of a living one, through the resident that made it.

    No other resident has a right over it, unless the caller is root.
    """
    number = os.fstat(network).st_ino
    resident = next((one for (other, _), one in tuple(_networks.items()) if other == number), None)
    try:
        if resident is not None:
            return resident.launch(plan, (*descriptors, network))
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ECONNRESET, errno.EBADF, errno.ENOTCONN):
            raise
    raise SetupError(
        "nothing was run: the sandbox whose network it joins has ended, or its gate has",
        stage="network",
        hint="open that sandbox again first",
    )
