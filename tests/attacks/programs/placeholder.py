"""Sends its key, or what it has instead, in a list of requests, and says what comes back.

Each request is [HOST, TEXT, PIECES, PAUSE] with a PORT or without: TEXT is an HTTP/1.1 request in which {KEY}
stands for the key, and {BASIC} for "user:KEY" in base64. PIECES are the sizes in which it is written. The
verdict has the whole answer to each, or the name of the error.
"""

import base64
import contextlib
import json
import os
import socket
import ssl
import sys
import time

from common import say

#: Of a longer answer only the end is said besides.
MOST = 1 << 20
TLS_PORTS = (443, 8443)


def key():
    return os.environ.get("API_KEY") or sys.argv[2]


def exchange(host, text, pieces, pause, port=443):
    context = ssl.create_default_context(cafile=os.environ.get("SSL_CERT_FILE") or sys.argv[3])
    basic = base64.b64encode(f"user:{key()}".encode()).decode()
    data = text.replace("{KEY}", key()).replace("{BASIC}", basic).encode("latin-1")
    try:
        with contextlib.ExitStack() as stack:
            end = stack.enter_context(socket.create_connection((host, port), 10))
            if port in TLS_PORTS:
                end = stack.enter_context(context.wrap_socket(end, server_hostname=host))
            for size in pieces:
                end.sendall(data[:size])
                data = data[size:]
                time.sleep(pause)
            end.sendall(data)
            found = []
            while more := end.recv(65536):
                found.append(more)
            text = b"".join(found).decode("latin-1")
            return text if len(text) <= MOST else text[:MOST] + text[-100:]
    except OSError as error:
        return type(error).__name__


def main():
    say([exchange(*one) for one in json.loads(sys.argv[1])])


main()
