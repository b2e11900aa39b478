"""Looks for the key of the sandbox's certificate authority, and for a way to replace its certificate."""

import os
import socket
import ssl
import sys

from common import say

PLACES = ("/run/stockade", "/etc/ssl", "/tmp", "/dev/shm", os.path.expanduser("~"))


def files():
    for place in PLACES:
        for folder, _, names in os.walk(place):
            for name in names:
                yield os.path.join(folder, name)


def has_key(path):
    try:
        with open(path, "rb") as file:
            return b"PRIVATE KEY" in file.read(1 << 22)
    except OSError:
        return False


def is_writable(path):
    try:
        os.close(os.open(path, os.O_WRONLY))
        return True
    except OSError:
        return False


def main():
    found = list(files())
    context = ssl.create_default_context()
    with context.wrap_socket(
        socket.create_connection((sys.argv[1], 443), 5), server_hostname=sys.argv[1]
    ) as end:
        issuer = str(end.getpeercert()["issuer"])
    keys = [path for path in found if has_key(path)]
    keys += [name for name, value in os.environ.items() if "PRIVATE KEY" in value]
    with open("/run/stockade/certificates/authority.pem") as file:
        authority = file.read()
    places = [path for path in found if path.startswith(("/run/stockade", "/etc"))]
    say({
        "keys": keys,
        "writable": [path for path in places if is_writable(path)],
        "issuer": issuer,
        "authority": authority,
    })  # fmt: skip


main()
