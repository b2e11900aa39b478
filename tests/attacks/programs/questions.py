"""Asks DNS servers: a list of [SERVER, TRANSPORT, QUERY in hexadecimal]. Says the code of each answer.

Some at once. The code is a number, or "no answer".
"""

import json
import socket
import struct
import sys
from concurrent.futures import ThreadPoolExecutor

from common import say

SECONDS = 2
AT_ONCE = 8


def ask(server, transport, query):
    family = socket.AF_INET6 if ":" in server else socket.AF_INET
    kind = socket.SOCK_STREAM if transport == "tcp" else socket.SOCK_DGRAM
    with socket.socket(family, kind) as end:
        end.settimeout(SECONDS)
        try:
            end.connect((server, 53))
            if transport == "tcp":
                end.sendall(struct.pack(">H", len(query)) + query)
                answer = end.recv(1000)[2:]
            else:
                end.send(query)
                answer = end.recv(1000)
            return answer[3] & 15
        except (OSError, IndexError):
            return "no answer"


def main():
    with ThreadPoolExecutor(AT_ONCE) as workers:
        asked = json.loads(sys.argv[1])
        say(list(workers.map(lambda each: ask(each[0], each[1], bytes.fromhex(each[2])), asked)))


main()
