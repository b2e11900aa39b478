"""A system that has a Python, a shell and nothing else, from files of this one.

No compiler, no package manager and none of our sources: what runs in it runs with what it installed there.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

#: Parts of the standard library that nothing here imports, and that are most of it.
LEFT_OUT = shutil.ignore_patterns(
    "__pycache__", "test", "tests", "idlelib", "tkinter", "lib2to3", "ensurepip", "config-*", "site-packages",
    "dist-packages",
)  # fmt: skip

#: What every manylinux wheel may expect: parts of the C library that are packages of no system by themselves.
MANYLINUX = ("libpthread.so.0", "libdl.so.2", "librt.so.1", "libm.so.6", "libgcc_s.so.1")

PATH = "/usr/bin:/bin:/usr/sbin:/sbin"

MOUNT = """
set -e
busybox mount --bind "$0" "$0"
cd "$0"
busybox mount -t proc proc proc
busybox mount --rbind /dev dev
"""
#: Becomes a command in a root directory, as in a machine of its own: the way of container engines.
PIVOT = """
busybox pivot_root . old
exec busybox chroot . /bin/busybox sh -c 'umount -l /old; exec "$@"' sh "$@"
"""
#: The way of old, after which the kernel refuses user namespaces.
CHROOT = """
exec busybox chroot . "$@"
"""


def make(root: Path, busybox: str) -> Path:
    """Fill a directory."""
    for name in ("proc", "sys", "dev", "old", "tmp", "root", "etc", "bin", "sbin"):
        (root / name).mkdir(parents=True)
    (root / "tmp").chmod(0o1777)
    (root / "etc/passwd").write_text("root:x:0:0::/root:/bin/sh\nada:x:1000:1000::/tmp:/bin/sh\n")
    (root / "etc/group").write_text("root:x:0:\nada:x:1000:\n")
    shutil.copy(busybox, root / "bin/busybox")
    for name in ("sh", "true", "id", "ls", "cat"):
        (root / "bin" / name).symlink_to("busybox")
    python = Path(sys.executable).resolve()
    library = Path(sysconfig.get_path("stdlib"))
    shutil.copytree(library, _in(root, library), ignore=LEFT_OUT, symlinks=True)
    shutil.copy(python, _in(root, python))
    shutil.copy("/sbin/ldconfig", root / "sbin/ldconfig")
    for file in [python, *library.glob("lib-dynload/*.so")]:
        add_libraries(root, file)
    for name in MANYLINUX:
        add_library(root, name)
    return root


def add_libraries(root: Path, file: Path) -> None:
    """Copy what an ELF file loads from the system, with the loader."""
    shown = subprocess.run(["ldd", str(file)], capture_output=True, text=True, check=True).stdout
    for word in shown.split():
        if word.startswith("/") and not _in(root, Path(word)).exists():
            shutil.copy(word, _in(root, Path(word)))


def add_library(root: Path, name: str) -> None:
    """Copy one shared library of the system, as its package would bring it."""
    listed = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=True).stdout
    path = next(line.rpartition(" ")[2] for line in listed.splitlines() if line.split()[0] == name)
    shutil.copy(path, _in(root, Path(path)))
    add_libraries(root, Path(path))


def command(root: Path, *argv: str, chroot: bool = False) -> list[str]:
    """Return the command line that runs a command there; the mounts that it needs go with it."""
    script = MOUNT + (CHROOT if chroot else PIVOT)
    return ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, str(root), *argv]


def _in(root: Path, path: Path) -> Path:
    place = root / path.relative_to("/")
    place.parent.mkdir(parents=True, exist_ok=True)
    return place
