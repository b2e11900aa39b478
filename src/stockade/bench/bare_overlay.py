"""Run a command on a bare overlay of the kernel: what overlayfs costs without a sandbox around it.

`python -m stockade.bench.bare_overlay TREE LAYER MEMORY COMMAND...` mounts the
overlay over TREE, with the options of Stockade's own; changes go to LAYER, or
with options for a tmpfs in MEMORY to one that is mounted there. The mounts are
in a user and a mount namespace of this process alone, as Stockade's are, so
the host sees none of them, and an ordinary user needs no rights.
"""

from __future__ import annotations

import ctypes
import os
import sys

_NEWNS, _NEWUSER = 0x20000, 0x10000000
_NOSUID, _NODEV, _RECURSIVE, _PRIVATE = 0x2, 0x4, 0x4000, 0x40000


def main() -> None:
    """Mount the overlay, and become the command."""
    tree, layer, memory, *command = sys.argv[1:]
    _enter_namespaces()
    if memory:
        _mount("tmpfs", layer, _NOSUID | _NODEV, memory)
    parts = {"lowerdir": tree}
    for option, name in (("upperdir", "upper"), ("workdir", "work")):
        os.mkdir(f"{layer}/{name}")
        parts[option] = f"{layer}/{name}"
    # By descriptor: overlayfs would split a path at ':' and ','.
    held = [f"{option}=/proc/self/fd/{os.open(path, os.O_PATH)}" for option, path in parts.items()]
    _mount("overlay", tree, _NOSUID | _NODEV, ",".join([*held, "userxattr"]))
    os.execv(command[0], command)


def _enter_namespaces() -> None:
    """Make the namespaces, in which we have the same ids as before."""
    uid, gid = os.geteuid(), os.getegid()
    if ctypes.CDLL(None, use_errno=True).unshare(_NEWUSER | _NEWNS):
        raise _failed("cannot make a user and a mount namespace")
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
            file.write(text)
    _mount("none", "/", _RECURSIVE | _PRIVATE)


def _mount(kind: str, target: str, flags: int, options: str = "") -> None:
    words = (os.fsencode(word) for word in (kind, target, kind))
    if ctypes.CDLL(None, use_errno=True).mount(*words, ctypes.c_ulong(flags), options.encode()):
        raise _failed(f"cannot mount {kind} on {target}")


def _failed(what: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{what}: {os.strerror(number)}")


if __name__ == "__main__":
    main()
