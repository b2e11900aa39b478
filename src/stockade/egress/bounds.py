"""The bounds of an egress process in number and time."""

from __future__ import annotations

from typing import Any, NamedTuple


class EgressBounds(NamedTuple):
    """The bounds of an egress process; the first message may name them."""

    connections: int = 1024
    #: Seconds without a byte in either direction after which a connection ends.
    idle: float = 900.0
    #: Seconds in which a client must have sent its TLS hello or first HTTP head.
    hello: float = 20.0
    #: Seconds to resolve and connect.
    dial: float = 30.0
    #: Seconds in which a client must have sent its next DNS query over TCP.
    query: float = 10.0
    #: Flows of datagrams at once, and seconds without a datagram in either direction after which one ends.
    flows: int = 512
    flow_idle: float = 120.0


def bounds_of(message: dict[str, Any]) -> EgressBounds:
    """Return the bounds that the first message names, and the usual ones for the others."""
    known = {
        name: message[name] for name in EgressBounds._fields if isinstance(message.get(name), int | float)
    }
    return EgressBounds(**known)
