"""Options and protocols of sockets: what every program may set, and what a policy can open by name.

Whatever is in neither table is refused in every sandbox. `docs/security/kernel-surface.md` says why.
"""

from __future__ import annotations

SOL_SOCKET, IPPROTO_IP, IPPROTO_TCP, IPPROTO_UDP, IPPROTO_IPV6 = 1, 0, 6, 17, 41
SOL_NETLINK, SOL_TLS = 270, 282

#: By level: the options that every program may set. Some can only be read, as the kernel then says.
OPEN: dict[int, dict[str, int]] = {
    SOL_SOCKET: {
        "SO_DEBUG": 1, "SO_REUSEADDR": 2, "SO_TYPE": 3, "SO_ERROR": 4, "SO_DONTROUTE": 5, "SO_BROADCAST": 6,
        "SO_SNDBUF": 7, "SO_RCVBUF": 8, "SO_KEEPALIVE": 9, "SO_OOBINLINE": 10, "SO_NO_CHECK": 11,
        "SO_PRIORITY": 12, "SO_LINGER": 13, "SO_BSDCOMPAT": 14, "SO_REUSEPORT": 15, "SO_PASSCRED": 16,
        "SO_PEERCRED": 17, "SO_RCVLOWAT": 18, "SO_SNDLOWAT": 19, "SO_RCVTIMEO": 20, "SO_SNDTIMEO": 21,
        "SO_BINDTODEVICE": 25, "SO_DETACH_FILTER": 27, "SO_PEERNAME": 28, "SO_TIMESTAMP": 29,
        "SO_ACCEPTCONN": 30, "SO_PEERSEC": 31, "SO_SNDBUFFORCE": 32, "SO_RCVBUFFORCE": 33, "SO_PASSSEC": 34,
        "SO_TIMESTAMPNS": 35, "SO_MARK": 36, "SO_RXQ_OVFL": 40, "SO_BUSY_POLL": 46, "SO_MAX_PACING_RATE": 47,
        "SO_BPF_EXTENSIONS": 48, "SO_INCOMING_CPU": 49, "SO_BINDTOIFINDEX": 62, "SO_TIMESTAMP_NEW": 63,
        "SO_TIMESTAMPNS_NEW": 64, "SO_RCVTIMEO_NEW": 66, "SO_SNDTIMEO_NEW": 67, "SO_PASSPIDFD": 76,
        "SO_PASSRIGHTS": 83,
    },
    IPPROTO_IP: {
        "IP_TOS": 1, "IP_TTL": 2, "IP_HDRINCL": 3, "IP_PKTINFO": 8, "IP_PKTOPTIONS": 9, "IP_MTU_DISCOVER": 10,
        "IP_RECVERR": 11, "IP_RECVTTL": 12, "IP_RECVTOS": 13, "IP_MTU": 14, "IP_FREEBIND": 15,
        "IP_TRANSPARENT": 19, "IP_RECVORIGDSTADDR": 20, "IP_MINTTL": 21, "IP_BIND_ADDRESS_NO_PORT": 24,
        "IP_MULTICAST_IF": 32, "IP_MULTICAST_TTL": 33, "IP_MULTICAST_LOOP": 34, "IP_MULTICAST_ALL": 49,
        "IP_UNICAST_IF": 50, "IP_LOCAL_PORT_RANGE": 51,
    },
    IPPROTO_IPV6: {
        "IPV6_UNICAST_HOPS": 16, "IPV6_MULTICAST_IF": 17, "IPV6_MULTICAST_HOPS": 18,
        "IPV6_MULTICAST_LOOP": 19, "IPV6_MTU_DISCOVER": 23, "IPV6_RECVERR": 25, "IPV6_V6ONLY": 26,
        "IPV6_MULTICAST_ALL": 29, "IPV6_RECVPKTINFO": 49, "IPV6_PKTINFO": 50, "IPV6_RECVHOPLIMIT": 51,
        "IPV6_HOPLIMIT": 52, "IPV6_RECVPATHMTU": 60, "IPV6_PATHMTU": 61, "IPV6_DONTFRAG": 62,
        "IPV6_RECVTCLASS": 66, "IPV6_TCLASS": 67, "IPV6_AUTOFLOWLABEL": 70, "IPV6_ADDR_PREFERENCES": 72,
        "IPV6_MINHOPCOUNT": 73, "IPV6_RECVORIGDSTADDR": 74, "IPV6_TRANSPARENT": 75, "IPV6_UNICAST_IF": 76,
        "IPV6_FREEBIND": 78,
    },
    IPPROTO_TCP: {
        "TCP_NODELAY": 1, "TCP_MAXSEG": 2, "TCP_CORK": 3, "TCP_KEEPIDLE": 4, "TCP_KEEPINTVL": 5,
        "TCP_KEEPCNT": 6, "TCP_SYNCNT": 7, "TCP_LINGER2": 8, "TCP_DEFER_ACCEPT": 9, "TCP_WINDOW_CLAMP": 10,
        "TCP_INFO": 11, "TCP_QUICKACK": 12, "TCP_CONGESTION": 13, "TCP_THIN_LINEAR_TIMEOUTS": 16,
        "TCP_THIN_DUPACK": 17, "TCP_USER_TIMEOUT": 18, "TCP_FASTOPEN": 23, "TCP_NOTSENT_LOWAT": 25,
        "TCP_FASTOPEN_CONNECT": 30, "TCP_INQ": 36,
    },
    IPPROTO_UDP: {
        "UDP_NO_CHECK6_TX": 101, "UDP_NO_CHECK6_RX": 102, "UDP_SEGMENT": 103, "UDP_GRO": 104,
    },
    SOL_NETLINK: {
        "NETLINK_ADD_MEMBERSHIP": 1, "NETLINK_DROP_MEMBERSHIP": 2, "NETLINK_PKTINFO": 3,
        "NETLINK_BROADCAST_ERROR": 4, "NETLINK_NO_ENOBUFS": 5, "NETLINK_CAP_ACK": 10, "NETLINK_EXT_ACK": 11,
        "NETLINK_GET_STRICT_CHK": 12,
    },
}  # fmt: skip

#: The name by which a policy opens the joins of groups.
MULTICAST = "multicast"
#: IP_ADD_MEMBERSHIP, IP_MSFILTER and the rest of their kind, of each family: the kernel takes its lock of all
#: networks for each of them, before it looks at their arguments.
JOINS: dict[int, dict[str, int]] = {
    IPPROTO_IP: {
        "IP_ADD_MEMBERSHIP": 35, "IP_DROP_MEMBERSHIP": 36, "IP_UNBLOCK_SOURCE": 37, "IP_BLOCK_SOURCE": 38,
        "IP_ADD_SOURCE_MEMBERSHIP": 39, "IP_DROP_SOURCE_MEMBERSHIP": 40, "IP_MSFILTER": 41,
        "MCAST_JOIN_GROUP": 42, "MCAST_BLOCK_SOURCE": 43, "MCAST_UNBLOCK_SOURCE": 44, "MCAST_LEAVE_GROUP": 45,
        "MCAST_JOIN_SOURCE_GROUP": 46, "MCAST_LEAVE_SOURCE_GROUP": 47, "MCAST_MSFILTER": 48,
    },
    IPPROTO_IPV6: {
        "IPV6_JOIN_GROUP": 20, "IPV6_LEAVE_GROUP": 21, "MCAST_JOIN_GROUP": 42, "MCAST_BLOCK_SOURCE": 43,
        "MCAST_UNBLOCK_SOURCE": 44, "MCAST_LEAVE_GROUP": 45, "MCAST_JOIN_SOURCE_GROUP": 46,
        "MCAST_LEAVE_SOURCE_GROUP": 47, "MCAST_MSFILTER": 48,
    },
}  # fmt: skip

#: Closed until `syscalls.allow` names them: level and option of each.
CLOSED: dict[str, tuple[int, int]] = {
    "SO_PEEK_OFF": (SOL_SOCKET, 42),
    "SO_TIMESTAMPING": (SOL_SOCKET, 37),
    "SO_TIMESTAMPING_NEW": (SOL_SOCKET, 65),
    "SO_ZEROCOPY": (SOL_SOCKET, 60),
    "SO_TXTIME": (SOL_SOCKET, 61),
    "SO_RESERVE_MEM": (SOL_SOCKET, 73),
    "IP_OPTIONS": (IPPROTO_IP, 4),
    "IP_RECVOPTS": (IPPROTO_IP, 6),
    "IP_RETOPTS": (IPPROTO_IP, 7),
    "IP_CHECKSUM": (IPPROTO_IP, 23),
    "IP_RECVFRAGSIZE": (IPPROTO_IP, 25),
    "IP_RECVERR_RFC4884": (IPPROTO_IP, 26),
    "IPV6_MTU": (IPPROTO_IPV6, 24),
    "IPV6_RECVERR_RFC4884": (IPPROTO_IPV6, 31),
    "IPV6_FLOWINFO_SEND": (IPPROTO_IPV6, 33),
    "IPV6_RECVHOPOPTS": (IPPROTO_IPV6, 53),
    "IPV6_HOPOPTS": (IPPROTO_IPV6, 54),
    "IPV6_RTHDRDSTOPTS": (IPPROTO_IPV6, 55),
    "IPV6_RECVRTHDR": (IPPROTO_IPV6, 56),
    "IPV6_RTHDR": (IPPROTO_IPV6, 57),
    "IPV6_RECVDSTOPTS": (IPPROTO_IPV6, 58),
    "IPV6_DSTOPTS": (IPPROTO_IPV6, 59),
    "IPV6_RECVFRAGSIZE": (IPPROTO_IPV6, 77),
    "TCP_MD5SIG": (IPPROTO_TCP, 14),
    "TCP_SAVE_SYN": (IPPROTO_TCP, 27),
    "TCP_ULP": (IPPROTO_TCP, 31),
    "TCP_MD5SIG_EXT": (IPPROTO_TCP, 32),
    "TCP_FASTOPEN_KEY": (IPPROTO_TCP, 33),
    "TCP_FASTOPEN_NO_COOKIE": (IPPROTO_TCP, 34),
    "TCP_TX_DELAY": (IPPROTO_TCP, 37),
    "TLS_TX": (SOL_TLS, 1),
    "TLS_RX": (SOL_TLS, 2),
    "UDP_CORK": (IPPROTO_UDP, 1),
    "UDP_ENCAP": (IPPROTO_UDP, 100),
}

#: Refused whatever a policy says, with names for people who ask: level and option of each.
REFUSED: dict[str, tuple[int, int]] = {
    "SO_ATTACH_FILTER": (SOL_SOCKET, 26),
    "SO_LOCK_FILTER": (SOL_SOCKET, 44),
    "SO_ATTACH_BPF": (SOL_SOCKET, 50),
    "SO_ATTACH_REUSEPORT_CBPF": (SOL_SOCKET, 51),
    "SO_ATTACH_REUSEPORT_EBPF": (SOL_SOCKET, 52),
}

#: What the name of an option begins with that is in no table.
_NUMBERS = "setsockopt "
#: What `syscalls.allow` takes besides names of system calls.
NAMES = frozenset((MULTICAST, *CLOSED))


def opened(allow: tuple[str, ...]) -> dict[int, set[int]]:
    """Return the options that programs may set, by level, with what a policy opens by name."""
    found = {level: set(options.values()) for level, options in OPEN.items()}
    for level, option in (CLOSED[name] for name in allow if name in CLOSED):
        found.setdefault(level, set()).add(option)
    if MULTICAST in allow:
        for level, options in JOINS.items():
            found[level] |= set(options.values())
    return found


def name_of(level: int, option: int) -> str:
    """Return the name of an option, or its numbers if it is in no table."""
    for names in (OPEN.get(level, {}), JOINS.get(level, {})):
        for name, number in names.items():
            if number == option:
                return name
    for name, place in (CLOSED | REFUSED).items():
        if place == (level, option):
            return name
    return f"{_NUMBERS}{level}, {option}"


def is_option(name: str) -> bool:
    """Whether a name is that of an option of a socket."""
    return is_open(name) or bool(clause_for(name)) or name in REFUSED or name.startswith(_NUMBERS)


def is_open(name: str) -> bool:
    """Whether every program may set an option."""
    return any(name in options for options in OPEN.values())


def clause_for(name: str) -> str:
    """Return what `syscalls.allow` must name so that an option may be set; "" if no policy opens it."""
    if any(name in options for options in JOINS.values()):
        return MULTICAST
    return name if name in NAMES else ""
