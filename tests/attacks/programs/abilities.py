"""Tries everything that it is told to try, and says what it could do: WHAT, as JSON."""

import json
import os
import socket
import stat
import sys

from common import opened, say, syscall, tried


def append(path):
    with open(path, "ab", buffering=0) as file:
        file.write(b"+")


def make(directory):
    with open(f"{directory}/made", "xb", buffering=0) as file:
        file.write(b"made")


def make_directory(path):
    os.mkdir(path)
    make(path)


def spawn(path):
    null = os.open("/dev/null", os.O_RDWR)
    actions = [(os.POSIX_SPAWN_DUP2, null, number) for number in (1, 2)]
    try:
        os.waitpid(os.posix_spawn(path, [path], {}, file_actions=actions), 0)
    finally:
        os.close(null)


def spawn_made(source):
    path = f"{os.environ.get('TMPDIR', '/tmp')}/made"
    with open(source, "rb") as file, open(path, "xb") as copy:
        copy.write(file.read())
    os.chmod(path, 0o755)
    spawn(path)


def connect(address):
    if isinstance(address, list):
        family, kind, address = socket.AF_INET, socket.SOCK_STREAM, tuple(address)
    else:
        family, kind, address = socket.AF_UNIX, socket.SOCK_DGRAM, address.replace("@", "\0")
    with socket.socket(family, kind) as end:
        end.settimeout(5)
        end.connect(address)
        if kind == socket.SOCK_STREAM and not end.recv(1):
            raise OSError(104, "closed")


def asks():
    """Whether there is somebody to ask for sandboxes."""
    number = int(os.environ.get("STOCKADE_DELEGATE", "99,99").split(",")[0])
    if not stat.S_ISFIFO(os.fstat(number).st_mode):
        raise OSError(9, "no pipe")


def main():
    what = json.loads(sys.argv[1])
    found = {}
    for path in what["look"]:
        found[f"stat {path}"] = tried(os.lstat, path)
        found[f"read {path}"] = opened(path)
    for path in what["list"]:
        names = []
        tried(lambda place=path, into=names: into.extend(os.listdir(place)))
        found |= {f"see {path}/{name}": "ok" for name in names}
    for path in what["execute"]:
        found[f"execute {path}"] = tried(spawn, path)
    found["execute what it made"] = tried(spawn_made, what["made"])
    for address in what["connect"]:
        found[f"connect {address}"] = tried(connect, address)
    for name, number in what["calls"].items():
        # Nothing is asked of the call that it could do: whether it exists is the question.
        answer = syscall(number, 0, 0)[1]
        found[f"call {name}"] = answer if answer in ("ENOSYS", "EPERM") else "ok"
    found["delegate"] = tried(asks)
    # From here on it changes things. What lands on the host is for the host to see.
    for path in what["write"]:
        tried(append, path)
    for path in what["make"]:
        tried(make, path)
    for path in what["make_directory"]:
        tried(make_directory, path)
    for path in what["remove"]:
        tried(os.unlink, path)
    say(
        {"can": sorted(name for name, answer in found.items() if answer == "ok"), "environ": dict(os.environ)}
    )


main()
