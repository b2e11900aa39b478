"""Looks for a file under every name it could have: WHAT DIRECTORY NAME [SECONDS]. Says what it read."""

import contextlib
import ctypes
import os
import sys
import time

from common import say, syscall, tried

WORD = "the secret"


def read(path, directory=None):
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK, dir_fd=directory)
    try:
        return os.read(file, 4096).decode("utf-8", "replace")
    finally:
        os.close(file)


def names(root, name):
    """Other spellings of the same path, each with the directory it counts from."""
    above, last = os.path.split(os.path.join(root, name))
    inner = os.path.basename(above)
    here = os.open(above, os.O_RDONLY | os.O_DIRECTORY)
    top = os.open("/", os.O_PATH)
    os.chdir(above)
    return {
        "plain": (f"{above}/{last}", None),
        "slashes": (f"//{above}//./{last}", None),
        "up and down": (f"{above}/../{inner}/{last}", None),
        "relative": (last, None),
        "by descriptor": (last, here),
        "by descriptor path": (f"/proc/self/fd/{here}/{last}", None),
        "from the top": (f"{above}/{last}".lstrip("/"), top),
        "process root": (f"/proc/self/root{above}/{last}", None),
        "gate's root": (f"/proc/1/root{above}/{last}", None),
        "process cwd": (f"/proc/self/cwd/{last}", None),
        "thread": (f"/proc/thread-self/root{above}/{last}", None),
        "slash behind": (f"{above}/{last}/", None),
        "link in the workspace": (f"{root}/link", None),
        "link of a link": (f"{root}/link2", None),
    }


def search(root, name):
    found = {}
    for word, (path, directory) in names(root, name).items():
        try:
            found[word] = read(path, directory)
        except OSError as error:
            found[word] = error.strerror
    return found


def calls(root, name):
    """Every call that names a file, on the name itself."""
    path = os.path.join(root, name)
    spare = f"/tmp/spare-{os.getpid()}"
    scratch = ctypes.create_string_buffer(4096)
    raw = path.encode()
    found = {
        "stat": tried(os.stat, path),
        "lstat": tried(os.lstat, path),
        "open-path": tried(lambda: os.close(os.open(path, os.O_PATH | os.O_NOFOLLOW))),
        "write": tried(lambda: os.close(os.open(path, os.O_WRONLY))),
        "truncate": tried(os.truncate, path, 0),
        "readlink": tried(os.readlink, path),
        "statfs": tried(os.statvfs, path),
        "chdir": tried(os.chdir, path),
        "listdir": tried(os.listdir, path),
        "chmod": tried(os.chmod, path, 0o666),
        "chown": tried(os.chown, path, os.getuid(), os.getgid()),
        "utime": tried(os.utime, path),
        "getxattr": tried(os.getxattr, path, "user.x"),
        "setxattr": tried(os.setxattr, path, "user.x", b"x"),
        "link": tried(os.link, path, spare),
        "rename": tried(os.rename, path, f"{path}.moved"),
        "execute": tried(os.execv, path, [path]),
        "unlink": tried(os.unlink, path),
        "rmdir": tried(os.rmdir, path),
        "statx": syscall(332, -100, ctypes.c_char_p(raw), 0, 0xFFF, scratch)[1],
        "openat2": syscall(437, -100, ctypes.c_char_p(raw), (ctypes.c_uint64 * 3)(), 24)[1],
        "watch": syscall(254, syscall(294, 0)[0], ctypes.c_char_p(raw), 2)[1],
        "listed": "ok" if os.path.basename(path) in os.listdir(os.path.dirname(path)) else "ENOENT",
    }
    if os.path.lexists(spare):
        os.unlink(spare)
    return found


def move(root, name):
    """Takes the directory above to another place, by renaming or copying, and looks there."""
    above, last = os.path.split(os.path.join(root, name))
    there = os.path.join(root, "elsewhere")
    answer = tried(os.rename, above, there)
    os.system(f"cp -a '{above}' '{there}' 2>/dev/null; mv '{above}' '{there}-moved' 2>/dev/null")
    seen = [answer]
    for place in (there, f"{there}-moved", above):
        try:
            seen.append(read(os.path.join(place, last)))
        except OSError as error:
            seen.append(error.strerror)
    return seen


def again(root, name):
    """Removes the directory above, makes it again, and removes what it makes in place of the file."""
    above, last = os.path.split(os.path.join(root, name))
    os.system(f"rm -rf '{above}'")
    os.mkdir(above)
    first = tried(read, os.path.join(above, last))
    with open(os.path.join(above, last), "w") as file:
        file.write("mine")
    own = read(os.path.join(above, last))
    os.unlink(os.path.join(above, last))
    second = tried(read, os.path.join(above, last))
    os.rmdir(above)
    return [first, own, second, tried(read, os.path.join(above, last))]


def marks(root, name):
    """Writes the overlay's own marks on directories that it may change, to lead it elsewhere."""
    above, last = os.path.split(os.path.join(root, name))
    fresh = os.path.join(root, "fresh")
    os.mkdir(fresh)
    with open(os.path.join(above, "to copy the directory up"), "w"):
        pass
    seen = set()
    relative = os.path.relpath(above, root)
    for word, value in (
        ("redirect", f"/{relative}"), ("redirect", relative), ("opaque", "n"), ("opaque", "x"),
        ("origin", ""), ("metacopy", ""), ("whiteout", ""), ("impure", "y"), ("upper", ""),
    ):  # fmt: skip
        for place in (fresh, above, root):
            for prefix in ("user.overlay", "trusted.overlay", "user.overlay.overlay"):
                tried(os.setxattr, place, f"{prefix}.{word}", value.encode())
                tried(os.removexattr, place, f"{prefix}.opaque")
            for path in (os.path.join(place, last), os.path.join(root, name)):
                seen.add(tried(read, path))
    return sorted(seen)


def exchange(root, name):
    """Swaps the directory above with one of its own, and leaves whiteouts of its own."""
    above, last = os.path.split(os.path.join(root, name))
    mine = os.path.join(root, "mine")
    os.mkdir(mine)
    seen = set()
    for flags in (1, 2, 4):
        syscall(316, -100, ctypes.c_char_p(above.encode()), -100, ctypes.c_char_p(mine.encode()), flags)
        for place in (mine, above):
            seen.add(tried(read, os.path.join(place, last)))
    return sorted(seen)


def watch(root, name, seconds):
    """Looks again and again while the host works on the file."""
    path = os.path.join(root, name)
    above = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY)
    tries = seen = 0
    end = time.monotonic() + float(seconds)
    while time.monotonic() < end:
        for where, directory in ((path, None), (os.path.basename(path), above)):
            tries += 1
            with contextlib.suppress(OSError):
                seen += WORD in read(where, directory)
        seen += os.path.basename(path) in os.listdir(above)
    return [tries > 100, seen]


ways = {
    "search": search, "calls": calls, "move": move, "again": again, "marks": marks, "exchange": exchange,
    "watch": watch,
}  # fmt: skip
say(ways[sys.argv[1]](*sys.argv[2:]))
