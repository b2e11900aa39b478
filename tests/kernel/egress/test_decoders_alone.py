"""The decoders of the egress as in its template: the standard library alone, no import after the start."""

from __future__ import annotations

import ast
import subprocess
import sys

PROGRAM = """
import sys
before = set(sys.modules)
from stockade.egress.decoders.dns import NameServer
from stockade.egress.decoders.http_requests import RequestLines, RequestRefusedError
from stockade.egress.decoders.tls_hello import HelloError, HelloReader
print(sorted(name for name in set(sys.modules) - before if name.split(".")[0] not in sys.stdlib_module_names))
sys.meta_path.clear()

class NoNames:
    def lookup(self, name): return None
    def reverse(self, address): return None

for data in map(bytes.fromhex, sys.argv[1:]):
    NameServer(NoNames()).answer(data)
    lines = RequestLines(b"a.test", b":80")
    for read in (HelloReader().feed, lambda data: (lines.begin(data.split(b"\\r\\n")[0]), lines.check())):
        try:
            read(data)
        except (HelloError, RequestRefusedError) as error:
            str(error)
"""
QUERY = b"\0\1\1\0\0\1\0\0\0\0\0\0\1a\4test\0\0\1\0\1"
HELLO = b"\x16\3\1\0\x2d\1\0\0\x29\3\3" + bytes(33) + b"\0\2\x13\1\1\0"
REQUEST = b"POST / HTTP/1.1\r\nHost: a.test\r\nContent-Length: 5\r\n\r\nhello"


def test_the_decoders_load_the_standard_library_alone_and_nothing_later() -> None:
    corpus = [data.hex() for data in (QUERY, HELLO, REQUEST, REQUEST.replace(b"a.test", b"evil.test"))]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *corpus], capture_output=True, text=True, check=True, timeout=60
    )
    assert ast.literal_eval(done.stdout) == [
        "stockade",
        "stockade._version",
        "stockade.egress",
        "stockade.egress.decoders",
        "stockade.egress.decoders.dns",
        "stockade.egress.decoders.http_requests",
        "stockade.egress.decoders.tls_hello",
        "stockade.errors",
    ]
