"""Cache the answers of probes until something that they depend on changes.

There is one file per user in the state directory. Its key contains everything that can change an answer
without a reboot: the gate itself, the sysctls involved, and what encloses this process, such as its cgroups
(a container shares the host's boot id and often its home). A cache that cannot be read, trusted or written is
ignored: the walls are checked at every start anyway.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import msgspec

from stockade.errors import StockadeError
from stockade.host.capabilities import CGROUP_PROBES, HELPER_PROBES, PROBES, Host
from stockade.linux.boot import boot_id
from stockade.linux.cgroups import membership

_CONFINEMENT = ("NoNewPrivs:", "Seccomp:", "Seccomp_filters:", "CapEff:", "CapBnd:")
_HERE = "cgroups"
_HELPERS = "helpers"


class _CacheFile(msgspec.Struct, frozen=True):
    key: dict[str, str]
    host: Host


def read(path: str) -> str:
    """Return the text of a small file without the line end; "" if it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""


def key(facts: Host, gate: str, helpers: str | None = None) -> dict[str, str]:
    """Return everything that the answers depend on; `helpers` identifies the helpers, if they were probed."""
    status = read("/proc/self/status").splitlines()
    limits = read("/proc/self/limits").splitlines()
    try:
        built = os.stat(gate)
        namespace = os.readlink("/proc/self/ns/user")
    except OSError:
        return {}
    return {
        "boot": boot_id(),
        "kernel": facts.kernel,
        "uid": str(facts.uid),
        "gate": f"{gate} {built.st_mtime_ns} {built.st_size}",
        "probes": " ".join(PROBES),
        "confinement": " ".join(line for line in status if line.startswith(_CONFINEMENT)),
        "label": read("/proc/self/attr/current").rstrip("\0"),
        "namespace": namespace,
        "container": facts.container,
        "locked": next((line for line in limits if line.startswith("Max locked")), ""),
        _HERE: membership(),
        **({} if helpers is None else {_HELPERS: helpers}),
        **facts.sysctls,
    }


def path(environ: Mapping[str, str], home: str, uid: int) -> str:
    """Return the path of the cache for this user."""
    from stockade.state import CACHE, state_dir

    return os.path.join(state_dir(environ, home), CACHE, f"host-{uid}.json")


def load(file: str, wanted: Mapping[str, str]) -> Host | None:
    """Return the host that was saved with this key, if no other user could write to its directory.

    If only the cgroup differs, the answers about cgroups are left out; likewise for those about helpers.
    """
    from stockade.state import check

    try:
        check(os.path.dirname(os.path.dirname(file)))
        with open(file, "rb") as stream:
            saved = msgspec.json.decode(stream.read(), type=_CacheFile)
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
    """Save the host for the next start, if the state directory can be written."""
    from stockade.state import cache, ensure

    if not wanted:
        return
    fresh = f"{file}.{os.getpid()}"
    try:
        cache(ensure(os.path.dirname(os.path.dirname(file))))
        with open(fresh, "wb", opener=_private) as stream:
            stream.write(msgspec.json.encode(_CacheFile(key=wanted, host=host)))
        os.replace(fresh, file)
    except (OSError, StockadeError):
        if os.path.lexists(fresh):
            os.unlink(fresh)


def _private(name: str, flags: int) -> int:
    return os.open(name, flags | os.O_NOFOLLOW, 0o600)
