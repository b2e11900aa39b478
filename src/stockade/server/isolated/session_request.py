"""What a client asks for when it creates an isolated session, and what that means in effect.

The bodies are values of msgspec: unknown fields and wrong types are refused
with the name of the field. `session_spec` checks what types cannot say and
fills in the defaults. Both are pure: no path is looked at here.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Sequence
from typing import Literal

import msgspec

from stockade.errors import PolicyError
from stockade.server.wire.request_policy import RequestPolicy
from stockade.sessions.bash import NAME

Profile = Literal["strict", "balanced"]
Mode = Literal["rw", "overlay", "ro"]

#: The most mounts of one session: its workspace and its overlays together.
MOST_OVERLAYS = 16
#: The most paths of `extra_writable`, and the most binds.
MOST_PATHS = 64
#: The highest user or group id; the next one means "no id" to the kernel.
HIGHEST_ID = 65535
#: The longest idle timeout: a hundred years. The longest limit of a run: a year, as in policies.
LONGEST_IDLE, LONGEST_RUN = 100 * 366 * 86400, 366 * 86400
#: Directories that every sandbox has of its own.
OWN = ("/dev", "/etc", "/proc", "/sys")
#: Directories of the system, which is read-only, so that nothing can be put into it.
SYSTEM = ("/bin", "/lib", "/lib32", "/lib64", "/libx32", "/sbin", "/usr")
#: The longest path that the kernel takes, and the longest name in it.
LONGEST_PATH, LONGEST_NAME = 4095, 255

_OVERLAY = re.compile(r"overlays\[(\d+)\]")


class InvalidFieldError(PolicyError):
    """A field of a request that cannot be taken; the message begins with its name."""

    def __init__(self, field: str, problem: str) -> None:
        self.field, self.problem = field, problem
        super().__init__(f"{field}: {problem}")


class WorkspaceSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The directory that runs start in."""

    path: str
    mode: Mode | None = None


class OverlaySpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One directory of the session: real, read-only, or with a layer for its changes."""

    path: str
    mode: Mode | None = None
    #: With mode overlay: whether `diff` and `commit` see the changes.
    persist: bool | None = None


class BindSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A directory or file of the sandbox to show at another path of the session."""

    source: str
    dest: str | None = None
    readonly: bool | None = None


class EnvPassthrough(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which variables of the sandbox reach the session; those that look like secrets never do."""

    mode: Literal["deny", "allow"] = "deny"
    keys: tuple[str, ...] = ()


class CreateSession(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /v1/isolated/session`."""

    workspace: WorkspaceSpec | None = None
    overlays: tuple[OverlaySpec, ...] | None = None
    profile: Profile | None = None
    extra_writable: tuple[str, ...] | None = None
    binds: tuple[BindSpec, ...] | None = None
    share_net: bool | None = None
    env_passthrough: EnvPassthrough | None = None
    uid: int | None = None
    gid: int | None = None
    uid_mode: Literal["setpriv", "userns"] | None = None
    idle_timeout_seconds: int | None = None
    #: Beyond the contract: further limits and refused system calls.
    policy: RequestPolicy | None = None


class RunRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /v1/isolated/session/{id}/run`."""

    code: str
    envs: dict[str, str] | None = None
    timeout_seconds: int | None = None
    background: bool | None = None


class CommitRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /v1/isolated/session/{id}/commit`, which may be absent."""

    #: Whether the session goes on with empty layers.
    reset_upper_after: bool = False
    #: What to do about paths that the sandbox has changed too.
    strategy: Literal["refuse", "overwrite"] = "refuse"
    #: The overlay to commit; all if it is absent.
    path: str | None = None


class SessionSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """A session in effect: every default filled in. Its fields are what `GET session/{id}` echoes."""

    overlays: tuple[OverlaySpec, ...]
    profile: Profile
    share_net: bool
    env_passthrough: EnvPassthrough
    uid_mode: str
    idle_timeout_seconds: int
    #: Set if the session has one mount only.
    workspace: WorkspaceSpec | None = None
    extra_writable: tuple[str, ...] = ()
    binds: tuple[BindSpec, ...] = ()
    uid: int | None = None
    gid: int | None = None
    policy: RequestPolicy | None = None

    @property
    def directory(self) -> str:
        """Where runs start, and where relative paths of the file calls begin."""
        return self.overlays[0].path


def session_spec(request: CreateSession, idle_timeout: int) -> SessionSpec:
    """Check a request and return the session that it means; `idle_timeout` is the server's default."""
    overlays = _overlays(request)
    if request.uid is None and request.gid is not None:
        raise InvalidFieldError("gid", "needs a uid too")
    for field, number in (("uid", request.uid), ("gid", request.gid)):
        if number is not None and not 0 <= number <= HIGHEST_ID:
            raise InvalidFieldError(field, f"{number} is not an id from 0 to {HIGHEST_ID}")
    idle = idle_timeout if request.idle_timeout_seconds is None else request.idle_timeout_seconds
    if not 0 <= idle <= LONGEST_IDLE:
        raise InvalidFieldError("idle_timeout_seconds", f"{idle} is not a time from 0 (never) on")
    passthrough = request.env_passthrough or EnvPassthrough()
    for index, key in enumerate(passthrough.keys):
        if not key or "=" in key or "\0" in key:
            raise InvalidFieldError(f"env_passthrough.keys[{index}]", f"{key!r:.200} names no variable")
    writable, binds = request.extra_writable or (), request.binds or ()
    _check_others(overlays, writable, binds)
    first = overlays[0]
    return SessionSpec(
        overlays=overlays,
        profile=request.profile or "strict",
        share_net=request.share_net is not False,
        env_passthrough=passthrough,
        uid_mode=request.uid_mode or "setpriv",
        idle_timeout_seconds=idle,
        workspace=WorkspaceSpec(first.path, first.mode) if len(overlays) == 1 else None,
        extra_writable=writable,
        binds=tuple(BindSpec(one.source, one.dest or one.source, bool(one.readonly)) for one in binds),
        uid=request.uid,
        gid=request.gid,
        policy=request.policy,
    )


def as_requested(request: CreateSession, error: InvalidFieldError) -> InvalidFieldError:
    """Return an error about a mount of the session with the name that its field has in the request.

    A session counts its workspace as the first overlay; the request does not.
    """
    found = _OVERLAY.match(error.field)
    if found is None or request.workspace is None:
        return error
    index, rest = int(found[1]), error.field[found.end() :]
    return InvalidFieldError(f"overlays[{index - 1}]{rest}" if index else f"workspace{rest}", error.problem)


def _overlays(request: CreateSession) -> tuple[OverlaySpec, ...]:
    """Return the mounts in effect, the workspace first."""
    asked: list[tuple[str, OverlaySpec]] = []
    if (workspace := request.workspace) is not None:
        asked.append(("workspace", OverlaySpec(workspace.path, workspace.mode)))
    asked += [(f"overlays[{index}]", one) for index, one in enumerate(request.overlays or ())]
    if not asked:
        raise InvalidFieldError("workspace", "is missing: give a workspace, overlays or both")
    if len(asked) > MOST_OVERLAYS:
        raise InvalidFieldError("overlays", f"{len(asked)} mounts, more than {MOST_OVERLAYS}")
    found: dict[str, OverlaySpec] = {}
    for field, one in asked:
        path = clean_path(f"{field}.path", one.path)
        if path in found:
            raise InvalidFieldError(f"{field}.path", f"{path} is there twice")
        mode = one.mode or "overlay"
        if one.persist is not None and mode != "overlay":
            raise InvalidFieldError(f"{field}.persist", f"is only for mode overlay, not for {mode}")
        persist = one.persist is not False if mode == "overlay" else None
        found[path] = OverlaySpec(path, mode, persist)
    return tuple(found.values())


def _check_others(
    overlays: Sequence[OverlaySpec], writable: Sequence[str], binds: Sequence[BindSpec]
) -> None:
    """Refuse other mounts that are unclean, too many, or at the place of an earlier one."""
    for field, number in (("extra_writable", len(writable)), ("binds", len(binds))):
        if number > MOST_PATHS:
            raise InvalidFieldError(field, f"{number} of them, more than {MOST_PATHS}")
    taken = {one.path for one in overlays}
    places = [(f"extra_writable[{index}]", path) for index, path in enumerate(writable)]
    for index, bind in enumerate(binds):
        clean_path(f"binds[{index}].source", bind.source)
        field = f"binds[{index}].{'source' if bind.dest is None else 'dest'}"
        place = bind.source if bind.dest is None else bind.dest
        if any(place == tree or place.startswith(f"{tree}/") for tree in SYSTEM):
            raise InvalidFieldError(field, f"{place} lies in the system, which is read-only")
        places.append((field, place))
    for field, path in places:
        if clean_path(field, path) in taken:
            raise InvalidFieldError(field, f"{path} is already the place of another mount")
        taken.add(path)


def clean_path(field: str, path: str) -> str:
    """Return an absolute path in its one spelling, or refuse it: no dots, no empty parts."""
    if not path.startswith("/"):
        raise InvalidFieldError(field, f"{path!r:.200} is not an absolute path")
    if "\0" in path or path != posixpath.normpath(path) or path.startswith("//"):
        raise InvalidFieldError(field, f"{path!r:.200} is not clean: no `.`, `..`, NUL or slash too many")
    if path == "/":
        raise InvalidFieldError(field, "the root cannot be mounted")
    if any(path == own or path.startswith(f"{own}/") for own in OWN):
        raise InvalidFieldError(
            field,
            f"{path} cannot be mounted: every session has its own {', '.join(OWN)}; name another directory",
        )
    encoded = path.encode("utf-8", "surrogateescape")
    if len(encoded) > LONGEST_PATH or max(map(len, encoded.split(b"/"))) > LONGEST_NAME:
        raise InvalidFieldError(field, "is too long for a path")
    return path


def checked_run(request: RunRequest) -> RunRequest:
    """Check what types cannot say about a run, and return the request."""
    if not request.code.strip():
        raise InvalidFieldError("code", "is empty")
    for name, value in (request.envs or {}).items():
        if not NAME.fullmatch(name):
            raise InvalidFieldError("envs", f"{name!r:.200} cannot be the name of a shell variable")
        if "\0" in value:
            raise InvalidFieldError(f"envs.{name}", "contains a NUL byte")
    if "\0" in request.code:
        raise InvalidFieldError("code", "contains a NUL byte")
    if request.timeout_seconds is not None and not 0 <= request.timeout_seconds <= LONGEST_RUN:
        raise InvalidFieldError(
            "timeout_seconds", f"{request.timeout_seconds} is not a time from 0 (no limit) to {LONGEST_RUN}"
        )
    return request
