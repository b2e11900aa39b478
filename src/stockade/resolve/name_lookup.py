"""How names are looked up inside a sandbox with network rules: its /etc/resolv.conf.

The egress answers, on whatever address a program asks. The host's search domains and `ndots` are kept, so
that short names mean the same inside as outside.
"""

from __future__ import annotations

import os
import re

#: The egress answers on any address; this one is in a range that no host has.
NAMESERVER = "198.18.0.1"
HOST_FILE = "/etc/resolv.conf"
#: How much of the host's file is read, and what the C library uses of it.
MOST_BYTES = 1 << 16
MOST_DOMAINS, MOST_SEARCH, MOST_DOTS = 6, 256, 15
_DOMAIN = re.compile(
    r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?(\.[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?)*"
)


def resolv_conf(file: str = HOST_FILE) -> bytes:
    """Return the content of /etc/resolv.conf inside, with the search domains and `ndots` of the host's."""
    domains, dots = _settings(_first_bytes(file))
    lines = [f"nameserver {NAMESERVER}"]
    if domains:
        lines.append(f"search {' '.join(domains)}")
    # A refused name is answered at once: nothing is gained by asking twice.
    lines.append(f"options timeout:5 attempts:2{f' ndots:{dots}' if dots != 1 else ''}")
    return "\n".join(lines).encode() + b"\n"


def _settings(text: str) -> tuple[list[str], int]:
    """Return the search domains and `ndots` of a resolv.conf, as the C library understands it."""
    domains: list[str] = []
    dots = 1
    for line in text.splitlines():
        words = line.split()
        if words[:1] in (["search"], ["domain"]):
            domains = words[1:] if words[0] == "search" else words[1:2]  # the last such line counts
        elif words[:1] == ["options"]:
            for word in words[1:]:
                name, _, number = word.partition(":")
                if name == "ndots" and number.isascii() and number.isdigit() and len(number) < 4:
                    dots = min(int(number), MOST_DOTS)
    valid = [one for one in (domain.rstrip(".") for domain in domains) if _DOMAIN.fullmatch(one)]
    while len(" ".join(valid)) > MOST_SEARCH:
        valid.pop()
    return valid[:MOST_DOMAINS], dots


def _first_bytes(file: str) -> str:
    try:
        # Not blocking, in case something has put a FIFO there.
        with open(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as opened:
            return (opened.read(MOST_BYTES) or b"").decode("ascii", "replace")
    except OSError:
        return ""
