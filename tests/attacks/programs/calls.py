"""Makes many system calls by their numbers, each in a child: a JSON list of [NUMBER, ARGUMENTS]."""

import ctypes
import json
import os
import sys

from common import say, syscall


def pointer(argument):
    if isinstance(argument, dict):
        return ctypes.create_string_buffer(bytes.fromhex(argument["bytes"]), len(argument["bytes"]) // 2)
    return argument.encode() if isinstance(argument, str) else argument


def answer(number, arguments):
    """What the kernel answers; only the first line counts, because a clone that works answers twice."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.write(writing, syscall(number, *map(pointer, arguments))[1].encode() + b"\n")
        os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with open(reading, encoding="ascii") as said:
        return said.readline().strip() or "died"


say([answer(number, arguments) for number, arguments in json.loads(sys.argv[1])])
