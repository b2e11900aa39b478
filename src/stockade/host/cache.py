"""What was found out, kept until something it depends on changes.

One file per user in the state directory. The key holds whatever may change
an answer without a new boot: the gate itself, the settings involved, and what
encloses this process (a container shares the host's boot id and often its
home), its cgroups among it. A cache that cannot be read, trusted or written is no cache, never a
failure: the walls are proven at every start anyway.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import msgspec

from stockade.errors import StockadeError
from stockade.host.cgroups import membership
from stockade.host.model import CGROUP_PROBES, HELPER_PROBES, PROBES, Host

_CONFINEMENT = ("NoNewPrivs:", "Seccomp:", "Seccomp_filters:", "CapEff:", "CapBnd:")
_HERE = "cgroups"
_HELPERS = "helpers"


class _Saved(msgspec.Struct, frozen=True):
    key: dict[str, str]
    host: Host


def read(path: str) -> str:
    """A small file's text without the line end, "" where there is none."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""


def key(facts: Host, gate: str, helpers: str | None = None) -> dict[str, str]:
    """Everything the answers depend on; `helpers` are the programs that were found, if anybody looked."""
    status = read("/proc/self/status").splitlines()
    try:
        built = os.stat(gate)
        namespace = os.readlink("/proc/self/ns/user")
    except OSError:
        return {}
    return {
        "boot": read("/proc/sys/kernel/random/boot_id"),
        "kernel": facts.kernel,
        "uid": str(facts.uid),
        "gate": f"{gate} {built.st_mtime_ns} {built.st_size}",
        "probes": " ".join(PROBES),
        "confinement": " ".join(line for line in status if line.startswith(_CONFINEMENT)),
        "label": read("/proc/self/attr/current").rstrip("\0"),
        "namespace": namespace,
        "container": facts.container,
        _HERE: membership(),
        **({} if helpers is None else {_HELPERS: helpers}),
        **facts.sysctls,
    }


def path(environ: Mapping[str, str], home: str, uid: int) -> str:
    """Where the answers for this user are kept."""
    from stockade.state import CACHE, state_dir

    return os.path.join(state_dir(environ, home), CACHE, f"host-{uid}.json")


def load(file: str, wanted: Mapping[str, str]) -> Host | None:
    """The host as it was saved under exactly this key, in a directory that nobody else could write to.

    From another cgroup everything holds but what was found out about cgroups; and what was found out about
    helpers is for those who ask with a key that names them.
    """
    from stockade.state import check

    try:
        check(os.path.dirname(os.path.dirname(file)))
        with open(file, "rb") as stream:
            saved = msgspec.json.decode(stream.read(), type=_Saved)
    except (OSError, StockadeError, msgspec.MsgspecError, UnicodeDecodeError):
        return None
    apart = {_HERE: "", _HELPERS: ""}
    if not wanted or {**saved.key, **apart} != {**wanted, **apart}:
        return None
    stale = (
        *(CGROUP_PROBES if saved.key.get(_HERE) != wanted.get(_HERE) else ()),
        *(HELPER_PROBES if saved.key.get(_HELPERS) != wanted.get(_HELPERS) else ()),
    )
    if not stale:
        return saved.host
    probes = {name: known for name, known in saved.host.probes.items() if name not in stale}
    return msgspec.structs.replace(saved.host, probes=probes)


def save(file: str, wanted: dict[str, str], host: Host) -> None:
    """Keep the host for the next start, if the state directory can be written."""
    from stockade.state import cache, ensure

    if not wanted:
        return
    fresh = f"{file}.{os.getpid()}"
    try:
        cache(ensure(os.path.dirname(os.path.dirname(file))))
        with open(fresh, "wb", opener=_private) as stream:
            stream.write(msgspec.json.encode(_Saved(key=wanted, host=host)))
        os.replace(fresh, file)
    except (OSError, StockadeError):
        if os.path.lexists(fresh):
            os.unlink(fresh)


def _private(name: str, flags: int) -> int:
    return os.open(name, flags | os.O_NOFOLLOW, 0o600)
