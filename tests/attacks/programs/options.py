"""Joins multicast groups and sets obscure options of sockets, by raw numbers. Says what came of it."""

import ctypes
import os
import socket
import struct

from common import say, syscall

X86 = {"ioctl": 16, "setsockopt": 54, "getsockopt": 55, "vmsplice": 278, "tee": 276}
ARM = {"ioctl": 29, "setsockopt": 208, "getsockopt": 209, "vmsplice": 75, "tee": 77}
CALLS = {"x86_64": X86, "aarch64": ARM}[os.uname().machine]
IP, IPV6, TCP, UDP = 0, 41, 6, 17
HIGH = 1 << 32  # the kernel does not look at it
LOOPBACK = 1
ONE = struct.pack("=i", 1)
STREAMS = ("SO_ZEROCOPY", "TCP_ULP")


def four(last):
    return socket.inet_aton(f"239.9.9.{last}")


def six(last):
    return socket.inet_pton(socket.AF_INET6, f"ff15::{last}")


def address(family, last):
    """A struct sockaddr_storage with a group in it."""
    if family == socket.AF_INET:
        return struct.pack("=HH4s", family, 0, four(last)).ljust(128, b"\0")
    return struct.pack("=HHI16s", family, 0, 0, six(last)).ljust(128, b"\0")


def group(family, last, source=False):
    storage = struct.pack("=I4x", LOOPBACK) + address(family, last)
    return storage + (address(family, 77) if source else b"")


JOINS = {
    "IP_ADD_MEMBERSHIP": (IP, 35, four(1) + bytes(4) + struct.pack("=i", LOOPBACK)),
    "IP_ADD_MEMBERSHIP, high": (IP | HIGH, 35 | HIGH, four(2) + bytes(4) + struct.pack("=i", LOOPBACK)),
    "IP_ADD_SOURCE_MEMBERSHIP": (
        IP,
        39,
        four(3) + 2 * socket.inet_aton("127.0.0.1"),
    ),
    "MCAST_JOIN_GROUP": (IP, 42, group(socket.AF_INET, 4)),
    "MCAST_JOIN_SOURCE_GROUP": (IP, 46, group(socket.AF_INET, 5, source=True)),
    "IPV6_JOIN_GROUP": (IPV6, 20, six(1) + struct.pack("=I", LOOPBACK)),
    "IPV6_JOIN_GROUP, high": (IPV6 | HIGH, 20 | HIGH, six(2) + struct.pack("=I", LOOPBACK)),
    "MCAST_JOIN_GROUP, 6": (IPV6, 42, group(socket.AF_INET6, 4)),
    "MCAST_JOIN_SOURCE_GROUP, 6": (IPV6, 46, group(socket.AF_INET6, 5, source=True)),
}
OPTIONS = {
    "UDP_CORK": (UDP, 1, ONE),
    "UDP_CORK, high": (UDP | HIGH, 1 | HIGH, ONE),
    "IPV6_MTU": (IPV6, 24, struct.pack("=i", 1280)),
    "IPV6_HOPOPTS": (IPV6, 54, bytes(8)),
    "IP_OPTIONS": (IP, 4, bytes(4)),
    "SO_ZEROCOPY": (1, 60, ONE),
    "TCP_ULP": (TCP, 31, b"tls\0"),
    "IP_TTL": (IP, 2, struct.pack("=i", 9)),  # harmless
}


def set_option(name, level, option, value):
    family = socket.AF_INET6 if level & 0xFFFFFFFF == IPV6 else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM if name in STREAMS else socket.SOCK_DGRAM) as end:
        held = ctypes.create_string_buffer(value, len(value))
        return syscall(CALLS["setsockopt"], end.fileno(), level, option, held, len(value))[1]


def read_option(level, option):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
        held, size = ctypes.create_string_buffer(bytes(256), 256), ctypes.c_int(256)
        return syscall(CALLS["getsockopt"], end.fileno(), level, option, held, ctypes.byref(size))[1]


def ask_device(request):
    """What a driver, a bridge or a VLAN answers about the loopback device."""
    wanted = ctypes.create_string_buffer(struct.pack("=I", 10), 256)  # ETHTOOL_GLINK
    asked = ctypes.create_string_buffer(struct.pack("=16sQ16x", b"lo", ctypes.addressof(wanted)), 40)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
        return syscall(CALLS["ioctl"], end.fileno(), request | HIGH, asked)[1]


def open_socket(*arguments):
    try:
        socket.socket(*arguments).close()
    except OSError as error:
        return os.strerror(error.errno)
    return "ok"


say(
    {
        "joins": {name: set_option(name, *words) for name, words in JOINS.items()},
        "options": {name: set_option(name, *words) for name, words in OPTIONS.items()},
        "read": {"IP_MSFILTER": read_option(IP, 41 | HIGH), "MCAST_MSFILTER": read_option(IP, 48)},
        "calls": {name: syscall(CALLS[name], -1, 0, 0, 0)[1] for name in ("vmsplice", "tee")},
        "devices": {"SIOCETHTOOL": ask_device(0x8946), "SIOCGIFBR": ask_device(0x8940)},
        "UDP-Lite": open_socket(socket.AF_INET, socket.SOCK_DGRAM, 136),
        "UDP": open_socket(socket.AF_INET, socket.SOCK_DGRAM, 17),
    }
)
