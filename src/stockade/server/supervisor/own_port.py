"""Rules that keep sandboxes from the server's own port, whatever else their policies allow.

A deny rule wins over every other. So these hold also where the configuration allows a server on this
machine, or a request names an address that is this machine's.
"""

from __future__ import annotations

from stockade.server.config import ServerConfig


def own_port_denials(config: ServerConfig) -> tuple[str, ...]:
    """Return deny rules for the server's port on all addresses that lead to the server.

    The addresses of a server that others reach cannot be listed: the machine may get another address
    later, and one that a router translates is on none of its interfaces. Its port is denied on every host.
    """
    port = config.address[1]
    if config.is_local:
        return (f"!127.0.0.0/8:{port}", f"![::1]:{port}")
    return (f"!0.0.0.0/0:{port}", f"![::/0]:{port}")
