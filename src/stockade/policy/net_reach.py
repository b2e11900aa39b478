"""What rules of `net` let a program reach beyond hosts that they name, in words."""

from __future__ import annotations

from collections.abc import Iterable

from stockade.policy.net_names import ANY_HOST


def reach_text(rules: Iterable[str]) -> str:
    """Say that the rules let a program reach every public host, and on which ports; empty if they do not.

    The rules are in their one spelling, and not parsed: those of a receipt may come from a later version.

    >>> reach_text(["*:443", "!ads.example", "api.example:22"])
    'net = "*:443": the program may reach any public host on port 443'
    """
    found = {text: ports for text in rules if (ports := _ports_of_any_host(text))}
    if not found:
        return ""
    ports = ",".join(dict.fromkeys(port for ports in found.values() for port in ports.split(",")))
    several = "s" if "," in ports or "-" in ports else ""
    written = ", ".join(f'"{text}"' for text in found)
    return f"net = {written}: the program may reach any public host on port{several} {ports}"


def _ports_of_any_host(text: str) -> str:
    """Return the ports of a rule about every host; empty for any other rule."""
    host, _, ports = text.removeprefix("tcp://").removeprefix("udp://").partition(":")
    return (ports or "80,443") if host == ANY_HOST else ""
