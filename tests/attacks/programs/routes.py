"""Asks NETLINK_ROUTE for every interface, and for a new one."""

import errno
import socket
import struct

from common import say

RTM_NEWLINK, RTM_GETLINK = 16, 18
REQUEST, DUMP, ACK, CREATE = 1, 0x300, 4, 0x400
IFLA_IFNAME, IFLA_LINKINFO, IFLA_INFO_KIND = 3, 18, 1


def attribute(kind, content):
    return struct.pack("=HH", 4 + len(content), kind) + content.ljust(len(content) + 3 & ~3, b"\0")


def message(kind, flags, attributes=b""):
    body = struct.pack("=BxHiII", 0, 0, 0, 0, 0) + attributes
    return struct.pack("=IHHII", 16 + len(body), kind, flags, 1, 0) + body


def names(end):
    end.send(message(RTM_GETLINK, REQUEST | DUMP))
    found = []
    while True:
        data = end.recv(1 << 20)
        while data:
            length, kind = struct.unpack_from("=IH", data)
            if kind == 3:
                return sorted(found)
            rest = data[32:length]
            while rest:
                size, what = struct.unpack_from("=HH", rest)
                if what == IFLA_IFNAME:
                    found.append(rest[4:size].rstrip(b"\0").decode())
                rest = rest[size + 3 & ~3 :]
            data = data[length + 3 & ~3 :]


def main():
    end = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
    verdict = {"names": names(end)}
    kind = attribute(IFLA_LINKINFO, attribute(IFLA_INFO_KIND, b"dummy"))
    for what, flags, content in (
        ("up", 0, attribute(IFLA_IFNAME, b"lo\0")),
        ("add", CREATE, attribute(IFLA_IFNAME, b"evil0\0") + kind),
    ):
        end.send(message(RTM_NEWLINK, REQUEST | ACK | flags, content))
        answer = -struct.unpack_from("=i", end.recv(65536), 16)[0]
        verdict[what] = errno.errorcode[answer] if answer else "ok"
    say(verdict)


main()
