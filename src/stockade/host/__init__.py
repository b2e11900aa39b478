"""What this machine can do, found out by trying it.

The gate tries features in short-lived children of its own, so nothing depends on the size or the threads of
the calling Python; only cgroups and bubblewrap are tried from here. The answers are kept in memory and on
disk (see `probe_cache`), so that `stockade run` does not spend 20 ms on what was true a second ago.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterable, Mapping

import msgspec

from stockade.host import probe_cache
from stockade.host.capabilities import (
    CGROUP_PROBES,
    ELSEWHERE,
    GATE_PROBES,
    HELPER_PROBES,
    LIBSECCOMP,
    PROBES,
    Host,
    Probe,
)

__all__ = ["CGROUP_PROBES", "GATE_PROBES", "HELPER_PROBES", "PROBES", "Host", "Probe", "host", "probe"]

_SYSCTLS = (
    "user.max_user_namespaces",
    "kernel.unprivileged_userns_clone",
    "kernel.apparmor_restrict_unprivileged_userns",
)
_MARKS = {"/.dockerenv": "docker", "/run/.containerenv": "podman"}

#: The gate gives each probe 2 s; a gate that takes longer is stuck itself.
_SECONDS_PER_PROBE = 2.5

# Needs no lock: two threads that probe at the same time find the same.
_known: dict[int, Host] = {}


def host(*, fresh: bool = False, helpers: bool = False) -> Host:
    """Return this machine, from memory or the disk unless `fresh`.

    `helpers` also tries programs that can make a sandbox, such as bubblewrap. That takes longer than all the
    rest, and is not needed where the first backend works.
    """
    uid = _uid()
    known = _known.get(uid)
    if fresh or known is None or (helpers and not known.probes.keys() >= set(HELPER_PROBES)):
        _known[uid] = _load_or_probe(fresh, PROBES if helpers else GATE_PROBES + CGROUP_PROBES)
    return _known[uid]


def probe(names: Iterable[str] = PROBES) -> dict[str, Probe]:
    """Run the named probes now.

    >>> probe(["seccomp"])["seccomp"].ok
    True
    """
    return _probe(tuple(names), facts(), {})


def facts() -> Host:
    """Return what can be read about this machine without trying anything."""
    # Without a version, as in "openbsd7": it decides nothing.
    system = next((known for known in ELSEWHERE if sys.platform.startswith(known)), sys.platform)
    about = _kernel()
    return Host(
        system=system,
        kernel=about[0],
        machine=about[1],
        uid=_uid(),
        container=next((kind for mark, kind in _MARKS.items() if os.path.exists(mark)), ""),
        sysctls={name: probe_cache.read("/proc/sys/" + name.replace(".", "/")) for name in _SYSCTLS},
    )


def _uid() -> int:
    return os.geteuid() if hasattr(os, "geteuid") else -1  # Windows has none


def _kernel() -> tuple[str, str]:
    """Return the kernel's release and the machine's architecture."""
    if hasattr(os, "uname"):
        about = os.uname()
        return about.release, about.machine
    import platform

    return platform.release(), platform.machine()


def _load_or_probe(fresh: bool, wanted: tuple[str, ...]) -> Host:
    found = facts()
    if found.system in ELSEWHERE:
        from stockade.host import other_systems

        return msgspec.structs.replace(found, probes=other_systems.probe(found.system))
    if found.system != "linux":
        return msgspec.structs.replace(found, probes=_probe(wanted, found, {}))
    from stockade.gate import executable

    file = probe_cache.path(os.environ, os.path.expanduser("~"), found.uid)
    key = probe_cache.key(found, executable(), _helpers() if "bwrap" in wanted else None)
    kept = None if fresh else probe_cache.load(file, key)
    known = kept.probes if kept else {}
    again = tuple(name for name in wanted if name not in known or _may_change(known[name]))
    if kept and not again:
        return kept
    probes = known | _probe(again, found, known)
    result = msgspec.structs.replace(found, probes=probes)
    if not kept or result != kept:
        probe_cache.save(file, key, result)
    return result


def _helpers() -> str:
    from stockade.host import bubblewrap

    return bubblewrap.fingerprint(os.environ)


def _may_change(known: Probe) -> bool:
    # A refusal may have been lifted since (an AppArmor profile leaves no trace in the key), so it is
    # tried again; what the kernel lacks, or exempts root from, stays so until the next boot.
    # A helper that fails reports no errno, only words.
    return not known.ok and (known.errno not in (0, errno.ENOSYS) or " fails: " in known.detail)


def _probe(names: tuple[str, ...], found: Host, known: Mapping[str, Probe]) -> dict[str, Probe]:
    """Run probes; an answer that is the same as in `known` keeps its explanation."""
    from stockade.host import cgroup_probe
    from stockade.linux import cgroups

    gate = ""
    places = cgroups.CgroupParents()
    ours = tuple(name for name in names if name in CGROUP_PROBES)
    if found.system != "linux":
        answers = {name: (False, errno.ENOSYS, name) for name in names}
    else:
        from stockade.gate import executable

        gate = executable()
        helped = tuple(name for name in names if name in HELPER_PROBES)
        others = tuple(name for name in names if name not in (*ours, *helped))
        answers = _ask(gate, others) if others else {}
        if answers.get("seccomp", (False,))[0] and not _libseccomp():
            answers["seccomp"] = (False, errno.ENOENT, LIBSECCOMP)
        if helped:
            from stockade.host import bubblewrap

            answers |= bubblewrap.probe(gate, os.environ)
        if ours:
            places = cgroups.places()
            answers |= cgroup_probe.probe(ours, places)
            lacking = [name for name in ours if not answers[name][0]]
            scoped = cgroup_probe.probe_in_scope(lacking, os.environ) if lacking else {}
            answers |= {name: answer for name, answer in scoped.items() if answer[0]}
    result = {}
    for name in names:
        ok, number, detail = answers.get(name, (False, errno.ETIMEDOUT, "no answer"))
        before = known.get(name)
        if before and (before.ok, before.errno, before.detail) == (ok, number, detail):
            result[name] = before
            continue
        reason = fix = ""
        if not ok:
            from stockade.host.advice import explain

            reason, fix = explain(name, number, detail, found, gate, places)
        result[name] = Probe(ok=ok, errno=number, detail=detail, reason=reason, fix=fix)
    return result


def _libseccomp() -> bool:
    """Whether the library is there that knows the numbers of system calls: without it there is no filter."""
    try:
        import pyseccomp  # noqa: F401  (it looks for the library when it is loaded)
    except (ImportError, OSError, RuntimeError):
        return False
    return True


def _ask(gate: str, names: tuple[str, ...]) -> dict[str, tuple[bool, int, str]]:
    import subprocess

    try:
        output = subprocess.run(
            [gate, "probe", *names],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={},
            timeout=_SECONDS_PER_PROBE * len(names),
            check=False,
        ).stdout
    except subprocess.TimeoutExpired as late:
        output = late.stdout or b""
    except OSError as error:
        return dict.fromkeys(names, (False, error.errno or errno.EIO, f"run {gate}"))
    answers = {}
    for line in output.decode(errors="replace").splitlines():
        match line.split("\t"):
            case [name, verdict, number, detail]:
                answers[name] = (verdict == "ok", int(number), detail)
    return answers
