"""Which projects' policy files the user trusts: their exact bytes, and what their paths mean.

One file in the state directory has a record for each trusted policy file, by
the path at which it was found (not by where a link there leads, or a project
could borrow another one's trust by linking to its file). A record has the
SHA-256 of the file and, for each path that the policy grants, the real name
and the kind of what is there. If a path has another real name later, because a
link on the way was added or changed, the file is no longer trusted. A path
that is absent later grants nothing, and stays trusted for when it comes back.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import msgspec

from stockade import state as places
from stockade.errors import PolicyError, SetupError, one_line
from stockade.linux.path_lookup import Lookup
from stockade.policy.values import render
from stockade.resolve.discovery import Project, Written

FILE = "trust"


class TrustedPath(msgspec.Struct, frozen=True, array_like=True):
    """What one path of a policy named when the user trusted it. Names are bytes: not every path is text."""

    key: str
    path: bytes
    name: bytes
    kind: str

    def __str__(self) -> str:
        name = os.fsdecode(self.name)
        return f"{name}, which is absent" if self.kind == "absent" else f"the {self.kind} {name}"


class TrustRecord(msgspec.Struct, frozen=True, array_like=True):
    """The trust in one policy file."""

    hash: str
    #: None for a record of an earlier version, which did not have them.
    paths: tuple[TrustedPath, ...] | None


def trusted(project: Project, found: Mapping[Written, Lookup], state: str) -> bool:
    """Whether the user trusts these bytes at this path; PolicyError if the paths in them mean others now.

    `found` is what the paths of the resulting policy name now.
    """
    agreed = recorded(state).get(project.path)
    if agreed is None or agreed.hash != project.hash:
        return False
    hint = f"read it and check its paths; if you agree, run: stockade trust {project.path}"
    if agreed.paths is None:
        raise PolicyError(
            f"{project.path} was trusted by an earlier version of Stockade, which did not record what its "
            "paths mean",
            hint=hint,
        )
    if changed := differences(agreed.paths, trusted_paths(project, found)):
        raise PolicyError(
            f"{project.path} is no longer trusted, because its paths mean something else now:\n"
            + "\n".join(changed),
            hint=hint,
        )
    return True


def is_agreed_workspace(project: Project, directory: str, state: str) -> bool:
    """Whether the user has trusted this file, as it is or as it was, with this directory as its workspace.

    A changed file may go on to name the same directory: running there needs no trust in its bytes either.
    """
    agreed = recorded(state).get(project.path)
    workspaces = [one for one in agreed.paths or () if one.key == "workspace"] if agreed is not None else []
    return any(one.name == os.fsencode(directory) for one in workspaces)


def trusted_paths(project: Project, found: Mapping[Written, Lookup]) -> tuple[TrustedPath, ...]:
    """What the paths of the project's file name now, for those that are in `found`."""
    words = []
    for key, path in project.paths:
        if (lookup := found.get((key, path))) is not None:
            # Of a pattern only the directories before it are looked up.
            kind = "pattern" if key == "exec" and "*" in path else lookup.kind
            words.append(TrustedPath(key, os.fsencode(path), os.fsencode(lookup.name), kind))
    return tuple(words)


def differences(agreed: tuple[TrustedPath, ...], now: tuple[TrustedPath, ...]) -> list[str]:
    """Describe the paths that mean something else than when the user trusted them."""
    before = {(one.key, one.path): one for one in agreed}
    words = []
    for one in now:
        had = before.get((one.key, one.path))
        if had is None or had.name != one.name or (had.kind != one.kind and one.kind != "absent"):
            was = "" if had is None else f"was {had}, and "
            words.append(one_line(f"{one.key} = {render(os.fsdecode(one.path))} {was}is now {one}"))
    return words


def recorded(state: str) -> dict[str, TrustRecord]:
    """Read every record of trust, by the path of its policy file."""
    path = os.path.join(state, FILE)
    try:
        places.check(state)
        with open(path, "rb") as file:
            data = file.read()
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise places.unusable(path, error) from None
    known = _decode_first_version(data)
    try:
        if known is None:
            known = msgspec.msgpack.decode(data, type=dict[bytes, TrustRecord])
    except msgspec.MsgspecError:
        raise SetupError(
            f"{path} is damaged",
            stage="state",
            hint="remove it, and run `stockade trust` for each project again",
        ) from None
    return {os.fsdecode(name): agreed for name, agreed in known.items()}


def _decode_first_version(data: bytes) -> dict[bytes, TrustRecord] | None:
    """Decode a file that was written before schema 3; None if it was written since."""
    import re

    if not re.fullmatch(rb"([0-9a-f]{64} /[^\0]*\0)*", data):
        return None
    return {record[65:]: TrustRecord(record[:64].decode(), None) for record in data.split(b"\0")[:-1]}


def record(project: Project, found: Mapping[Written, Lookup], state: str) -> TrustRecord:
    """Record trust in a project's policy as it is now, and in what its paths name now."""
    agreed = TrustRecord(project.hash, trusted_paths(project, found))
    _write_record(state, project.path, agreed)
    return agreed


def revoke(path: str, state: str) -> bool:
    """Remove the trust in a policy file; False if there was none."""
    if path not in recorded(state):
        return False
    _write_record(state, path, None)
    return True


def _write_record(state: str, path: str, agreed: TrustRecord | None) -> None:
    """Write one record, or remove it for None, under a lock."""
    import fcntl

    lock = os.open(places.ensure(state), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        known = recorded(state)
        if agreed is None:
            known.pop(path, None)
        else:
            known[path] = agreed
        target = os.path.join(state, FILE)
        with open(f"{target}.new", "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(
                msgspec.msgpack.encode({os.fsencode(name): one for name, one in sorted(known.items())})
            )
            file.flush()
            os.fsync(file.fileno())
        os.replace(f"{target}.new", target)
        os.fsync(lock)
    finally:
        os.close(lock)
