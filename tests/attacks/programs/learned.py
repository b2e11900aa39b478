"""Ask for everything in ways that might get a secret into a learned policy; print what could be read."""

import contextlib
import json
import os
import sys

home, workspace, data, writable = sys.argv[1:5]
secret = os.path.join(home, ".ssh", "id_rsa")
found = {}


def read(name, path):
    try:
        with open(path, "rb") as file:
            found[name] = file.read(100).decode("utf-8", "replace")
    except OSError as error:
        found[name] = type(error).__name__


def names(path):
    try:
        return sorted(os.listdir(path))
    except OSError:
        return []


# A link that the program makes where it may write for real, for the next run to follow.
with contextlib.suppress(OSError):
    os.symlink(os.path.dirname(secret), os.path.join(writable, "later"))
read("itself", secret)
read("through the repository's link", os.path.join(workspace, "docs", "id_rsa"))
read("through a link of its own", os.path.join(writable, "later", "id_rsa"))
read("around a corner", os.path.join(home, "notes", "..", ".ssh", "id_rsa"))
read("through /proc", "/proc/self/root" + secret)
read("in settings", os.path.join(home, ".config", "tool", "token"))
read("beside harmless files", os.path.join(data, ".env"))
read("under a harmless name", os.path.join(data, "innocent"))
read("with strict permissions", os.path.join(data, "private"))
# Directories to list, and enough files in each that a careless summary would name the directory.
for tree in ("/", "/etc", "/home", "/root", home, os.path.dirname(home), os.path.join(home, ".ssh"), data):
    names(tree)
for number in range(40):
    read("", os.path.join(home, f"file-{number}"))
    read("", os.path.join(data, f"file-{number}"))
    for tree in (home, data):
        read("", os.path.join(tree, f"absent-{number}-" + "x" * 200))
read("", os.path.join(data, 'x"]\nnet = "open"\nread = ["/'))
for name in (".ssh", "id_rsa", "cat", "ssh", "../../.ssh/id_rsa"):
    print(f"sh: 1: {name}: not found", file=sys.stderr)
found.pop("", None)
print(json.dumps(found))
