"""Takes memory until it is stopped or has what it wanted: KIND BYTES. Says how much it got.

With "born" each piece is taken by a process of its own, which keeps it.
"""

import ctypes
import mmap
import os
import signal
import sys

from common import say, syscall

PIECE = 4 << 20
SHM = {"x86_64": (29, 30), "aarch64": (194, 196)}[os.uname().machine]


def touch(memory, size):
    ctypes.memset(memory, 1, size)


def heap(held):
    held.append(bytearray(b"\1") * PIECE)


def file_in(directory):
    def piece(held):
        with open(f"{directory}/piece-{len(held)}", "wb", buffering=0) as file:
            file.write(b"\1" * PIECE)
        held.append(file.name)

    return piece


def memfd(held):
    descriptor = os.memfd_create("piece")
    os.write(descriptor, b"\1" * PIECE)
    held.append(descriptor)


def sysv(held):
    number = syscall(SHM[0], 0, PIECE, 0o1600)[0]
    memory, _ = syscall(SHM[1], number, 0, 0)
    touch(memory & (1 << 64) - 1, PIECE)
    held.append(number)


def shared(held):
    memory = mmap.mmap(-1, PIECE, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
    memory.write(b"\1" * PIECE)
    held.append(memory)


def born(held):
    reader, writer = os.pipe()
    if os.fork() == 0:
        heap(held)
        os.write(writer, b"1")
        signal.pause()
    os.close(writer)
    os.read(reader, 1)
    held.append(reader)


WAYS = {
    "heap": heap, "tmp": file_in("/tmp"), "shm": file_in("/dev/shm"), "memfd": memfd, "sysv": sysv,
    "shared": shared, "born": born,
}  # fmt: skip


def main():
    kind, most = sys.argv[1], int(sys.argv[2])
    held = []
    print("begun", flush=True)
    while len(held) * PIECE < most:
        WAYS[kind](held)
    say({"got": len(held) * PIECE})
    if kind == "born":
        os.killpg(0, signal.SIGKILL)


main()
