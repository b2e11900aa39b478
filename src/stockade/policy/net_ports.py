"""Ports of rules: how they are written, and sets of them as ranges."""

from __future__ import annotations

from collections.abc import Iterable

from stockade.policy.net_errors import NetRuleError

#: Each port needs two listeners in the sandbox, and one message carries the descriptors of them all.
MOST_PORTS = 64
#: The ports of an allowing rule without ports, and of a deny rule without ports.
WEB_PORTS = ((80, 80), (443, 443))
ALL_PORTS = ((1, 65535),)
_SERVICES = {"http": "80", "https": "443", "ssh": "22"}

#: Inclusive, sorted, and merged where they touch.
Ranges = tuple[tuple[int, int], ...]


def parse_ports(text: str) -> Ranges:
    """Parse ports such as `443`, `80,443` and `8000-8010`."""
    found = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        low = _port(first, part)
        high = _port(last, part) if dash else low
        if high < low:
            raise NetRuleError(f"the ports {part} are the wrong way round", f"write {high}-{low}")
        found.append((low, high))
    return merged(found)


def _port(text: str, part: str) -> int:
    if text.isascii() and text.isdigit() and len(text) <= 5 and 1 <= int(text) <= 65535:
        return int(text)
    hint = "write a port from 1 to 65535, several as 80,443 or 8000-8010"
    if text.lower() in _SERVICES:
        hint = f"write {_SERVICES[text.lower()]}"
    elif text == "*":
        hint = f"name the ports, at most {MOST_PORTS}; without ports a rule allows 80 and 443"
    raise NetRuleError(f"{part!r} is not a port" if part else "the port is missing", hint)


def merged(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Return the same ports as sorted ranges that do not touch."""
    found: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if found and low <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(found[-1][1], high)
        else:
            found.append((low, high))
    return tuple(found)


def without(ranges: Iterable[tuple[int, int]], gone: Iterable[tuple[int, int]]) -> Ranges:
    """Return the ports of `ranges` that are not in `gone`."""
    left = list(merged(ranges))
    for low, high in merged(gone):
        kept = []
        for first, last in left:
            kept += [(first, min(last, low - 1))] if first < low else []
            kept += [(max(first, high + 1), last)] if last > high else []
        left = kept
    return tuple(left)


def has_port(ranges: Ranges, port: int) -> bool:
    """Whether a port is in one of the ranges."""
    return any(low <= port <= high for low, high in ranges)


def ports_text(ranges: Ranges) -> str:
    """Return ports as a rule writes them."""
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in ranges)
