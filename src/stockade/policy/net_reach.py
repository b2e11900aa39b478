"""What rules of `net` let a program reach beyond hosts that they name, in words."""

from __future__ import annotations

from collections.abc import Iterable

from stockade.policy.net_names import ANY_HOST

#: How a rule about every host, or every address of a family, is written; with ports, and `::/0` without.
_EVERY_HOST = (ANY_HOST, "0.0.0.0/0", "[::/0]", "::/0")


def reach_text(rules: Iterable[str]) -> str:
    """Say that the rules let a program reach every public host, and on which ports; empty if they do not.

    The rules are in their one spelling, and not parsed: those of a receipt may come from a later version.

    >>> reach_text(["*:443", "!ads.example", "api.example:22"])
    'net = "*:443": the program may reach any public host on port 443'
    """
    found = {text: ports for text in rules if (ports := _ports_of_any_host(text))}
    if not found:
        return ""
    every = {port for ports in found.values() for port in ports.split(",")}
    ports = ",".join(sorted(every, key=lambda port: port.partition("-")[0].zfill(5)))
    several = "s" if "," in ports or "-" in ports else ""
    written = ", ".join(f'"{text}"' for text in found)
    return f"net = {written}: the program may reach any public host on port{several} {ports}"


def _ports_of_any_host(text: str) -> str:
    """Return the ports of a rule about every host, or every address; empty for any other rule."""
    place = text.removeprefix("tcp://").removeprefix("udp://")
    for host in _EVERY_HOST:
        if place == host:
            return "80,443"
        if place.startswith(f"{host}:"):
            return place.removeprefix(f"{host}:")
    return ""
