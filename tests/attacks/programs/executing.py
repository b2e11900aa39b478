"""Executes a program that nobody listed: DIRECTORY... Says for each way whether it ran, or the error."""

import ctypes
import errno
import mmap
import os
import shutil
import sys

from common import say

SOURCE = "/bin/true"
MFD_EXEC, MFD_NOEXEC_SEAL = 0x10, 0x8
AT_EMPTY_PATH = 0x1000
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]


def attempt(function, *arguments):
    """Runs it in a child, which is replaced by the program or says why not."""
    reader, writer = os.pipe()  # close-on-exec: silence means that the program ran
    child = os.fork()
    if child == 0:
        try:
            function(*arguments)
        except OSError as error:
            os.write(writer, errno.errorcode[error.errno].encode())
        os._exit(99)
    os.close(writer)
    answer = os.read(reader, 64).decode()
    os.close(reader)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return answer or ("ran" if status == 0 else f"ended with {status}")


def execveat(file):
    words = (ctypes.c_char_p * 2)(b"true", None)
    if libc.syscall(322, file, b"", words, words, AT_EMPTY_PATH) < 0:
        raise OSError(ctypes.get_errno(), "execveat")


def memory(flags, execute):
    file = os.memfd_create("x", flags)
    with open(SOURCE, "rb") as source:
        os.write(file, source.read())
    if execute == "exec":
        os.execve(f"/proc/self/fd/{file}", ["true"], {})
    if execute == "fexec":
        os.execve(file, ["true"], {})
    execveat(file)


def secret():
    """Memory that even the kernel does not see; there is no other way to fill it."""
    file = libc.syscall(447, 0)
    if file < 0:
        raise OSError(ctypes.get_errno(), "memfd_secret")
    os.ftruncate(file, 1 << 20)
    place = libc.mmap(None, 1 << 20, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, file, 0)
    with open(SOURCE, "rb") as source:
        content = source.read()
    ctypes.memmove(place, content, len(content))
    execveat(file)


def unsealed():
    file = os.memfd_create("x", MFD_NOEXEC_SEAL)
    os.fchmod(file, 0o755)
    os._exit(0)


def copied(directory):
    path = f"{directory}/copied"
    shutil.copy(SOURCE, path)
    os.chmod(path, 0o755)
    os.execve(path, [path], {})


def linked(directory):
    path = f"{directory}/linked-{os.getpid()}"
    shutil.copy(SOURCE, f"{directory}/target")
    os.symlink(f"{directory}/target", path)
    os.execve(path, [path], {})


def unnamed(directory):
    file = os.open(directory, os.O_TMPFILE | os.O_RDWR, 0o755)
    with open(SOURCE, "rb") as source:
        os.write(file, source.read())
    again = os.open(f"/proc/self/fd/{file}", os.O_RDONLY)
    os.close(file)
    execveat(again)


def script(directory):
    path = f"{directory}/script"
    with open(path, "w") as file:
        file.write("#!/bin/sh\nexit 0\n")
    os.chmod(path, 0o755)
    os.execve(path, [path], {})


def loaded(directory):
    """The dynamic loader maps what it starts, executable."""
    path = f"{directory}/loaded"
    shutil.copy(SOURCE, path)
    with open("/proc/self/maps") as maps:
        loader = next(line.split()[-1] for line in maps if "/ld-" in line)
    os.execve(loader, [loader, path], {})


def mapped(directory):
    path = f"{directory}/mapped"
    shutil.copy(SOURCE, path)
    file = os.open(path, os.O_RDONLY)
    if libc.mmap(None, 4096, mmap.PROT_READ | mmap.PROT_EXEC, mmap.MAP_PRIVATE, file, 0) in (None, 2**64 - 1):
        raise OSError(ctypes.get_errno(), "mmap")
    os._exit(0)


def remapped(directory):
    """First mapped to be read, then made executable."""
    path = f"{directory}/remapped"
    shutil.copy(SOURCE, path)
    file = os.open(path, os.O_RDONLY)
    place = libc.mmap(None, 4096, mmap.PROT_READ, mmap.MAP_PRIVATE, file, 0)
    if libc.mprotect(ctypes.c_void_p(place), 4096, mmap.PROT_READ | mmap.PROT_EXEC):
        raise OSError(ctypes.get_errno(), "mprotect")
    os._exit(0)


verdict = {
    f"memory file, {word}, {way}": attempt(memory, flags, way)
    for word, flags in (("plain", 0), ("executable", MFD_EXEC), ("closed on exec", 1))
    for way in ("exec", "fexec", "execveat")
}
verdict["secret memory file"] = attempt(secret)
verdict["sealed memory file, unsealed"] = attempt(unsealed)
verdict["sealed memory file"] = attempt(memory, MFD_NOEXEC_SEAL, "fexec")
for place in sys.argv[1:]:
    if os.path.isfile(place):
        verdict[place] = attempt(os.execv, place, [place])
        continue
    for way in (copied, linked, unnamed, script, loaded, mapped, remapped):
        verdict[f"{way.__name__} in {place}"] = attempt(way, place)
say(verdict)
