"""Addresses and networks: how they are written, and which ranges are special.

Some ranges of addresses are special: private, loopback, link-local, and so on. Some addresses of IPv6 have an
address of IPv4 in them, which then counts.
"""

from __future__ import annotations

import _socket as socket  # socket itself would also load selectors
from typing import NamedTuple

MOST_ADDRESS = 45


class AddressRange(NamedTuple):
    """A range of addresses, as numbers."""

    bits: int
    start: int
    prefix: int

    def contains(self, other: AddressRange) -> bool:
        """Whether every address of the other is in this one."""
        shift = self.bits - self.prefix
        same = self.bits == other.bits and self.prefix <= other.prefix
        return same and self.start >> shift == other.start >> shift


def parse_address(text: str) -> AddressRange | None:
    """Return the address that `text` writes in the usual form; None for any other text."""
    if len(text) > MOST_ADDRESS or not text.isascii() or "\0" in text:
        return None
    family, bits = (socket.AF_INET6, 128) if ":" in text else (socket.AF_INET, 32)
    if bits == 32 and any(part.startswith("0") and part != "0" for part in text.split(".")):
        return None  # some programs take 010 for ten, others for eight
    try:
        return AddressRange(bits, int.from_bytes(socket.inet_pton(family, text), "big"), bits)
    except OSError:
        return None


def parse_network(text: str) -> AddressRange | None:
    """Return the address or network that `text` writes, also one with bits after its prefix."""
    head, slash, digits = text.partition("/")
    address = parse_address(head)
    if address is None or not slash:
        return address
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 3 and str(int(digits)) == digits):
        return None
    return AddressRange(address.bits, address.start, int(digits)) if int(digits) <= address.bits else None


def network_text(network: AddressRange) -> str:
    """Return an address or a network as text, in its one spelling."""
    family = socket.AF_INET if network.bits == 32 else socket.AF_INET6
    text = socket.inet_ntop(family, network.start.to_bytes(network.bits // 8, "big"))
    return text if network.prefix == network.bits else f"{text}/{network.prefix}"


#: IPv4 addresses in the form of IPv6.
MAPPED = AddressRange(128, 0xFFFF << 32, 96)
_TEREDO = AddressRange(128, 0x2001 << 112, 32)
#: Ranges whose addresses have an IPv4 address in them, and where it begins.
_EMBEDDING = (
    (MAPPED, 96),
    (AddressRange(128, 0, 96), 96),
    (AddressRange(128, 0xFFFF << 48, 96), 96),
    (AddressRange(128, 0x64FF9B << 96, 96), 96),
    (AddressRange(128, 0x2002 << 112, 16), 16),
)
#: By range, why an address in it is refused. The smallest range that has an address counts.
_SPECIAL = (
    ("0.0.0.0/8", "unspecified"),
    ("10.0.0.0/8", "private"),
    ("100.64.0.0/10", "private"),
    ("100.100.100.200", "metadata"),
    ("127.0.0.0/8", "loopback"),
    ("168.63.129.16", "metadata"),
    ("169.254.0.0/16", "link-local"),
    ("169.254.169.254", "metadata"),
    ("169.254.170.2", "metadata"),
    ("169.254.170.23", "metadata"),
    ("172.16.0.0/12", "private"),
    ("192.0.0.0/24", "reserved"),
    ("192.0.0.192", "metadata"),
    ("192.0.2.0/24", "reserved"),
    ("192.88.99.0/24", "translated (6to4)"),
    ("192.168.0.0/16", "private"),
    ("198.18.0.0/15", "reserved"),
    ("198.51.100.0/24", "reserved"),
    ("203.0.113.0/24", "reserved"),
    ("224.0.0.0/4", "multicast"),
    ("240.0.0.0/4", "reserved"),
    # Only 2000::/3 is in use for hosts of the internet.
    ("::/3", "reserved"),
    ("4000::/2", "reserved"),
    ("8000::/1", "reserved"),
    ("::/96", "translated (IPv4-compatible)"),
    ("::", "unspecified"),
    ("::1", "loopback"),
    ("::ffff:0:0/96", "translated (mapped)"),
    ("::ffff:0:0:0/96", "translated (SIIT)"),
    ("64:ff9b::/96", "translated (NAT64)"),
    ("64:ff9b:1::/48", "translated (NAT64)"),
    ("2001::/23", "reserved"),
    ("2001::/32", "translated (Teredo)"),
    ("2001:db8::/32", "reserved"),
    ("2002::/16", "translated (6to4)"),
    ("3fff::/20", "reserved"),
    ("fc00::/7", "private"),
    ("fd00:ec2::254", "metadata"),
    ("fd00:ec2::23", "metadata"),
    ("fd20:ce::254", "metadata"),
    ("fe80::/10", "link-local"),
    ("fec0::/10", "private"),
    ("ff00::/8", "multicast"),
)
#: The same as numbers, the smallest first.
_RANGES = sorted(
    ((network, reason) for text, reason in _SPECIAL if (network := parse_network(text)) is not None),
    key=lambda row: -row[0].prefix,
)


def special_range(network: AddressRange) -> tuple[AddressRange, str] | None:
    """Return the smallest special range that has all of a network, and why it is one; None if none has."""
    embedded = embedded_ipv4(network)
    if embedded is not None:
        inner, offset = embedded
        found = special_range(inner)
        if found is not None:
            # The part of the range of translated addresses that stands for the special range.
            return AddressRange(128, network.start, offset + found[0].prefix if offset else 128), found[1]
    return next((row for row in _RANGES if row[0].contains(network)), None)


def embedded_ipv4(network: AddressRange) -> tuple[AddressRange, int] | None:
    """Return the IPv4 addresses that a network of IPv6 stands for, and where they begin in its addresses."""
    if network.bits != 128:
        return None
    for around, offset in _EMBEDDING:
        # :: and ::1 are addresses of their own.
        if around.contains(network) and network.start > 1 and network.prefix > offset:
            prefix = min(network.prefix - offset, 32)
            return AddressRange(32, network.start >> (96 - offset) & 0xFFFFFFFF, prefix), offset
    if _TEREDO.contains(network) and network.prefix == 128:
        return AddressRange(32, ~network.start & 0xFFFFFFFF, 32), 0
    return None


def unmapped(address: AddressRange) -> AddressRange:
    """Return the IPv4 address that a mapped one is for the kernel; any other address as it is."""
    if MAPPED.contains(address):
        return AddressRange(32, address.start & 0xFFFFFFFF, 32)
    return address


def forbidden_address(ip: str) -> str:
    """Say why an address that a name resolved to is refused, unless a rule names it; empty if it is not.

    >>> [forbidden_address(ip) for ip in ("169.254.169.254", "64:ff9b::a00:1", "1.1.1.1")]
    ['metadata', 'private', '']
    """
    address = parse_address(ip)
    if address is None:
        return "not an address"
    found = special_range(address)
    return found[1] if found is not None else ""
