"""Tries to change the network of its namespace, or to have one of its own. Says how the kernel answered."""

import ctypes
import errno
import os
import socket
import struct

from common import opened, say

NEWADDR, DELADDR, NEWROUTE, DELROUTE, NEWLINK = 20, 21, 24, 25, 16
REQUEST, ACK, CREATE = 1, 4, 0x400
CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
libc = ctypes.CDLL(None, use_errno=True)


def attribute(kind, content):
    return struct.pack("=HH", 4 + len(content), kind) + content


def netlink(kind, flags, body):
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as end:
        end.send(struct.pack("=IHHII", 16 + len(body), kind, REQUEST | ACK | flags, 1, 0) + body)
        answer = -struct.unpack_from("=i", end.recv(65536), 16)[0]
    return errno.errorcode[answer] if answer else "ok"


def route(family, prefix, table, kind, to=b""):
    """A route over lo; table 255 is the local one, kind 2 means "this machine", kind 7 "unreachable"."""
    body = struct.pack("=BBBBBBBBI", family, prefix, 0, 0, table, 4, 254, kind, 0)
    return body + (attribute(1, to) if to else b"") + attribute(4, struct.pack("=i", 1))


def address(family, packed):
    return struct.pack("=BBBBi", family, len(packed) * 8, 0, 0, 1) + attribute(2, packed)


def unshared(flags):
    if libc.unshare(flags):
        raise OSError(ctypes.get_errno(), "")


def in_a_child(act):
    child = os.fork()
    if child == 0:
        try:
            act()
            os._exit(0)
        except OSError as error:
            os._exit(error.errno)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return errno.errorcode[code] if code else "ok"


V4, V6 = socket.AF_INET, socket.AF_INET6
say(
    {
        "add a route": netlink(NEWROUTE, CREATE, route(V4, 32, 255, 2, bytes([203, 0, 113, 77]))),
        "remove the route of IPv4": netlink(DELROUTE, 0, route(V4, 0, 255, 2)),
        "remove the route of IPv6": netlink(DELROUTE, 0, route(V6, 0, 255, 2)),
        "add an address": netlink(NEWADDR, CREATE, address(V4, bytes([203, 0, 113, 78]))),
        "remove an address": netlink(DELADDR, 0, address(V4, bytes([198, 18, 0, 2]))),
        "take the device down": netlink(NEWLINK, 0, struct.pack("=BxHiII", 0, 0, 1, 0, 1)),
        "a network of its own": in_a_child(lambda: unshared(CLONE_NEWNET)),
        "users and a network of its own": in_a_child(lambda: unshared(CLONE_NEWUSER | CLONE_NEWNET)),
        "allow low ports": opened("/proc/sys/net/ipv4/ip_unprivileged_port_start", os.O_WRONLY),
        "allow binding anywhere": opened("/proc/sys/net/ipv4/ip_nonlocal_bind", os.O_WRONLY),
        "let pings out": opened("/proc/sys/net/ipv4/ping_group_range", os.O_WRONLY),
    }
)
