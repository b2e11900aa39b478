"""Makes one system call by its number: NUMBER ARGUMENTS, a JSON list of numbers, texts and {"bytes": hex}."""

import ctypes
import json
import os
import sys

from common import say, syscall


def pointer(argument):
    if isinstance(argument, dict):
        return ctypes.create_string_buffer(bytes.fromhex(argument["bytes"]), len(argument["bytes"]) // 2)
    return argument.encode() if isinstance(argument, str) else argument


def main():
    own = os.getpid()
    value, answer = syscall(int(sys.argv[1]), *(pointer(a) for a in json.loads(sys.argv[2])))
    if os.getpid() != own or (value == 0 and "forks" in sys.argv):
        os._exit(0)  # the child of a clone that worked
    say(answer)


main()
