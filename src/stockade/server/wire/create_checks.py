"""What a request for a sandbox may say: resources, labels, extensions, platforms; and what is refused, and
why.
"""

from __future__ import annotations

import os
import re
from typing import Any

import msgspec

from stockade.server.record import ServerRecord
from stockade.server.wire.errors import NOT_SUPPORTED, ApiError
from stockade.server.wire.lifecycle import CreateRequest, PlatformSpec
from stockade.server.wire.network import NetworkPolicySpec, NetworkRule, checked_policy
from stockade.server.wire.request_policy import NO_DISK_LIMIT, RequestPolicy

INVALID = "SANDBOX::INVALID_PARAMETER"
#: Keys that belong to the system.
RESERVED = "opensandbox.io/"
#: The extension that moves the expiry with each access, and its bounds in seconds.
RENEW, LEAST_RENEW, MOST_RENEW = "access.renew.extend.seconds", 300, 86400
#: The largest record of a sandbox, in bytes, apart from what changes of its network add later.
LARGEST_RECORD = 256 << 10
#: Multipliers of resource quantities, as Kubernetes writes them.
UNITS = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
UNITS |= {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40, "Pi": 1 << 50}
#: The names of processors in requests, by the machine's own.
ARCHITECTURES = {"x86_64": ("amd64", "x86_64"), "aarch64": ("arm64", "aarch64")}

_QUANTITY = re.compile(r"([0-9]{1,30}(?:\.[0-9]{1,30})?)([A-Za-z]*)")
_LABEL = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
_PREFIX = re.compile(r"[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?")


def invalid(field: str, words: str) -> ApiError:
    """Return the refusal of a field."""
    return ApiError(400, INVALID, f"{field}: {words}")


def refuse_later(request: CreateRequest) -> None:
    """Refuse what this version does not have."""
    named: dict[str, object] = {
        "snapshotId": request.snapshot_id,
        "templateId": request.template_id,
        "volumes": request.volumes,
    }
    named["lifecycle"] = request.lifecycle
    named["credentialProxy"] = (
        request.credential_proxy if (request.credential_proxy or {}).get("enabled") else None
    )
    for field, value in named.items():
        if value:
            raise ApiError(501, NOT_SUPPORTED, f"{field}: this version does not have it")


def limits_of(resources: dict[str, str] | None) -> dict[str, Any]:
    """Return the limits of a policy for `resourceLimits`."""
    found: dict[str, Any] = {}
    for name, text in (resources or {}).items():
        field = f"resourceLimits.{name}"
        if name == "cpu":
            found["cpu"] = _cores(field, text)
        elif name == "memory":
            found[name] = _bytes(field, text)
        elif name == "disk":
            raise invalid(field, NO_DISK_LIMIT)
        elif name == "gpu":
            raise invalid(
                field, "sandboxes have no GPU: their devices are hidden, so the limit cannot be kept"
            )
        else:
            raise invalid(field, "there is no such limit: known are cpu and memory")
    return found


def request_policy(policy: RequestPolicy | None) -> RequestPolicy:
    """Check the clauses of a policy that a request for a sandbox has."""
    if policy is not None and "disk" in policy.limits:
        raise invalid("policy.limits.disk", NO_DISK_LIMIT)
    return policy or RequestPolicy()


def _cores(field: str, text: str) -> float:
    match = _QUANTITY.fullmatch(text)
    if match is None or match[2] not in ("", "m"):
        raise invalid(field, f"{text!r} is not a number of cores, such as 2, 0.5 or 500m")
    cores = float(match[1]) / (1000 if match[2] else 1)
    if not 0.01 <= cores <= 4096:
        raise invalid(field, "must be from 10m to 4096 cores")
    return cores


def _bytes(field: str, text: str) -> int:
    match = _QUANTITY.fullmatch(text)
    if match is None or match[2] not in UNITS:
        raise invalid(field, f"{text!r} is not a size, such as 512Mi or 2Gi")
    size = int(float(match[1]) * UNITS[match[2]])
    if not 2 << 20 <= size < 1 << 60:
        raise invalid(field, "must be at least 2Mi, and less than an exbibyte")
    return size


def check_metadata(metadata: dict[str, str], field: str = "metadata") -> dict[str, str]:
    """Check labels: keys and values as Kubernetes has them, none of the system's own."""
    for key, value in metadata.items():
        prefix, slash, name = key.rpartition("/")
        if key.startswith(RESERVED):
            raise invalid(field, f"keys that begin with {RESERVED} are reserved")
        if not _LABEL.fullmatch(name) or (slash and not _PREFIX.fullmatch(prefix)):
            raise invalid(field, f"{key[:80]!r} is not a key: letters, digits, . _ - and at most 63 of them")
        if value and not _LABEL.fullmatch(value):
            raise invalid(field, f"the value of {key} must be at most 63 letters, digits, . _ -")
    return metadata


def check_size(record: ServerRecord) -> None:
    """Refuse what makes a record large: the server reads it for every answer about the sandbox."""
    if len(msgspec.json.encode(record)) > LARGEST_RECORD:
        words = f"take more than {LARGEST_RECORD >> 10} KiB together"
        raise invalid("env, entrypoint, metadata, extensions, networkPolicy", words)


def merge_metadata(before: dict[str, str], patch: dict[str, str | None]) -> dict[str, str]:
    """Apply a JSON merge patch: null deletes."""
    check_metadata({key: value or "" for key, value in patch.items()})
    merged = {**before, **{key: value for key, value in patch.items() if value is not None}}
    return {key: value for key, value in merged.items() if key not in patch or patch[key] is not None}


def environment(env: dict[str, str | None] | None) -> dict[str, str]:
    """Check the variables of a request."""
    found = {}
    for name, value in (env or {}).items():
        if not name or "=" in name or "\0" in name or "\0" in (value or ""):
            raise invalid("env", f"{name[:80]!r} cannot be a variable")
        found[name] = value or ""
    return found


def renew_seconds(extensions: dict[str, str]) -> int:
    """Return by how much each access moves the expiry; 0 if it does not."""
    text = extensions.get(RENEW)
    if text is None:
        return 0
    if not text.isdecimal() or len(text) > 9 or not LEAST_RENEW <= int(text) <= MOST_RENEW:
        raise invalid(f"extensions.{RENEW}", f"must be a whole number from {LEAST_RENEW} to {MOST_RENEW}")
    return int(text)


def platform(spec: PlatformSpec | None) -> dict[str, str]:
    """Check the platform that a client wants against this machine."""
    if spec is None:
        return {}
    if spec.os != "linux":
        raise invalid("platform.os", f"sandboxes are Linux, not {spec.os[:40]!r}")
    machine = os.uname().machine
    if spec.arch is not None and spec.arch not in ARCHITECTURES.get(machine, (machine,)):
        raise invalid("platform.arch", f"this machine is {machine}, not {spec.arch[:40]!r}")
    return {"os": spec.os} | ({"arch": spec.arch} if spec.arch else {})


def network(spec: NetworkPolicySpec | None) -> tuple[NetworkRule, ...] | None:
    """Check the network policy that a client wants; None for the server's own, also if it says nothing."""
    if spec is None or (not spec.default_action and not spec.egress):
        return None
    return checked_policy(spec, "networkPolicy")
