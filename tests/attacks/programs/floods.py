"""Floods the network with connections or questions, then says whether a good connection still works.

KIND NAME COUNT: half-open (connections that say nothing), hellos (that never end), later hellos (the same, on
a port where the server may speak first), heads (of requests that never end), later heads (of second
requests), names (questions for fresh names below NAME), refused (addresses that no rule names).
"""

import resource
import socket
import struct
import sys
import time

from common import say

KIND, NAME = sys.argv[1:3]
GET = f"GET / HTTP/1.1\r\nHost: {NAME}\r\nConnection: close\r\n\r\n".encode()
#: The beginning of a hello that claims to be 64,000 bytes long, in records.
HELLO = b"\x01\x00\xfa\x00\x03\x03" + bytes(48000)
RECORDS = b"".join(
    b"\x16\x03\x01" + struct.pack(">H", 16000) + HELLO[at : at + 16000] for at in range(0, 48000, 16000)
)
HEAD = f"GET / HTTP/1.1\r\nHost: {NAME}\r\n".encode() + b"X: " + b"y" * 60000

PORTS = {"later hellos": 8443, "heads": 80, "later heads": 80}
SENT = {
    "hellos": RECORDS,
    "later hellos": RECORDS,
    "heads": HEAD,
    "later heads": GET.replace(b"close", b"x") + HEAD,
}


def begin(address, port, count, data=b""):
    ends = []
    for _ in range(count):
        end = socket.socket()
        end.setblocking(False)
        end.connect_ex((address, port))
        ends.append(end)
    for end in ends:
        try:
            end.setblocking(True)
            end.settimeout(5)
            end.sendall(data)
        except OSError:
            pass
    return ends


def query(name):
    labels = b"".join(bytes([len(label)]) + label.encode() for label in name.split("."))
    return struct.pack(">HHHHHH", 7, 0x100, 1, 0, 0, 0) + labels + b"\0" + struct.pack(">HH", 1, 1)


def ask(count):
    """As fast as they are answered, so that none is lost."""
    answered = 0
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
        end.connect(("198.18.0.1", 53))
        end.settimeout(2)
        for number in range(0, count, 50):
            for each in range(number, number + 50):
                end.send(query(f"{each:07}{'x' * 50}.{'y' * 60}.{'z' * 60}.{NAME}"))
            for _ in range(50):
                answered += len(end.recv(512)) > 12
    return answered


def works():
    """Within a few seconds: the end of a thousand connections takes a moment."""
    for _ in range(20):
        try:
            with socket.create_connection((NAME, 80), 10) as end:
                end.sendall(GET)
                return end.recv(12) == b"HTTP/1.1 200"
        except OSError as error:
            found = str(error)
            time.sleep(0.2)
    return found


def main():
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    count = int(sys.argv[3])
    verdict = {}
    if KIND == "names":
        verdict["answered"] = ask(count)
    else:
        address = socket.getaddrinfo(NAME, None, socket.AF_INET)[0][4][0]
        where = ("203.0.113.9", 443) if KIND == "refused" else (address, PORTS.get(KIND, 443))
        ends = begin(*where, count, SENT.get(KIND, b""))
        verdict["begun"] = len(ends)
        # So that all of them are held at once.
        time.sleep(0.7)
        for end in ends:
            end.close()
    verdict["works"] = works() if KIND != "names" else True
    say(verdict)


main()
