"""Small root file systems to make images from."""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import tarfile
from pathlib import Path

from support.means import need, need_program

TOOLS = ("sh", "ls", "cat", "id", "echo", "pwd", "stat", "touch", "head", "true")


def busybox_root(place: Path) -> Path:
    """A root whose only program is busybox, without libraries."""
    program = need_program("busybox")
    said = subprocess.run(["ldd", program], capture_output=True, text=True, check=False)
    need(
        said.returncode != 0 or "statically" in said.stdout, "busybox needs libraries: install busybox-static"
    )
    for name in ("bin", "etc", "usr/share", "home/somebody"):
        (place / name).mkdir(parents=True)
    shutil.copy(program, place / "bin/busybox")
    for name in TOOLS:
        (place / "bin" / name).symlink_to("busybox")
    (place / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\ngames:x:5:60:games:/:/bin/sh\n")
    (place / "etc/group").write_text("root:x:0:\n")
    (place / "etc/hosts").write_text("203.0.113.1 the-images-own\n")
    (place / "etc/resolv.conf").write_text("nameserver 203.0.113.1\n")
    (place / "etc/conf.d").mkdir()
    (place / "etc/conf.d/own").write_text("content\n")
    (place / "usr/share/mark").write_text("of the image\n")
    return place


def host_root(place: Path) -> Path:
    """A root with a shell of the host and the libraries that it needs."""
    for name in ("sh", "cat"):
        program = os.path.realpath(need_program(name))
        said = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
        for path in (program, *re.findall(r"(/\S+)", said)):
            copy = place / os.path.realpath(path)[1:]
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copy)
            named = place / path[1:]
            if not named.exists():
                named.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, named)
        (place / "bin").mkdir(exist_ok=True)
        if not (place / "bin" / name).exists():
            shutil.copy(program, place / "bin" / name)
    return place


def archive(
    path: Path, entries: list[tarfile.TarInfo | tuple[tarfile.TarInfo, bytes]], mode: str = "w"
) -> str:
    """A tar archive of these entries, as they are."""
    with tarfile.open(path, mode) as made:  # type: ignore[call-overload]
        for entry in entries:
            info, content = entry if isinstance(entry, tuple) else (entry, b"")
            if content:
                info.size = len(content)
            made.addfile(info, io.BytesIO(content) if content else None)
    return str(path)


def entry(name: str, kind: bytes = tarfile.REGTYPE, target: str = "", mode: int = 0o755) -> tarfile.TarInfo:
    """The header of one entry."""
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode = kind, target, mode
    return info
