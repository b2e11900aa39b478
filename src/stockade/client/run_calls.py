"""Calls that run something: commands, shells, code and isolated sessions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict
from urllib.parse import quote

import msgspec

from stockade.client.calls import ServerCall, content, decoded, execd_path, nothing, present
from stockade.client.event_stream import EventCollector, Handler
from stockade.client.values import BackgroundStatus, RemoteCodeResult, RemoteCommit, RemoteResult
from stockade.result import Change
from stockade.runs.options import refuse_unknown

if TYPE_CHECKING:
    import httpx

Mode = Literal["rw", "overlay", "ro"]
Profile = Literal["strict", "balanced"]


class RemoteRunOptions(TypedDict, total=False):
    """The options of a run in a sandbox of the server, as the library has them."""

    env: Mapping[str, str]
    cwd: str
    timeout: float
    on_stdout: Handler
    on_stderr: Handler


class SessionOptions(TypedDict, total=False):
    """The options of an isolated session. The server decides about those that you leave out."""

    #: What the session may do to its workspace: "rw", "overlay" or "ro".
    mode: Mode
    #: "strict" has a /tmp of its own, "balanced" the sandbox's.
    profile: Profile
    #: More directories, each as `{"path": …, "mode": …}`.
    overlays: Sequence[Mapping[str, Any]]
    extra_writable: Sequence[str]
    #: Each as `{"source": …, "dest": …, "readonly": …}`.
    binds: Sequence[Mapping[str, Any]]
    #: False: loopback only.
    share_net: bool
    env_passthrough: Mapping[str, Any]
    uid: int
    gid: int
    uid_mode: Literal["setpriv", "userns"]
    idle_timeout: int
    #: Clauses of its policy, within the sandbox's: `{"limits": {"tasks": 32}}`.
    policy: Mapping[str, Any]


class _Id(msgspec.Struct):
    id: str = ""
    session_id: str = ""
    run_id: str = ""


class _Note(msgspec.Struct):
    path: str
    what: str


class _Overlay(msgspec.Struct):
    """The changes of one directory, by paths relative to it."""

    path: str
    changes: list[Change] = []
    notes: list[_Note] = []

    def absolute(self) -> list[Change]:
        return [Change(f"{self.path}/{one.path}", one.kind) for one in self.changes]


class _Overlays(msgspec.Struct):
    overlays: list[_Overlay] = []

    def changes(self) -> tuple[Change, ...]:
        return tuple(change for one in self.overlays for change in one.absolute())

    def commit(self) -> RemoteCommit:
        notes = (f"{one.path}/{note.path}: {note.what}" for one in self.overlays for note in one.notes)
        return RemoteCommit(changes=self.changes(), notes=tuple(notes))


class LogPiece(msgspec.Struct, frozen=True):
    """A piece of what a background command printed, and where the next piece begins."""

    data: bytes
    cursor: int

    @property
    def text(self) -> str:
        """The piece as text; bytes that are not UTF-8 are replaced."""
        return self.data.decode("utf-8", "replace")


def collector(options: RemoteRunOptions) -> EventCollector:
    """Return the collector that calls the handlers of a run."""
    refuse_unknown("run", options, RemoteRunOptions.__optional_keys__)
    return EventCollector(options.get("on_stdout"), options.get("on_stderr"))


def command(
    sandbox: str, cmd: str | Sequence[str], options: RemoteRunOptions, events: EventCollector
) -> ServerCall[RemoteResult]:
    """Run a command: text is for the shell, a list is the words of the command itself."""
    body = _command(cmd, options)
    path = execd_path(sandbox, "command")
    return ServerCall(method="POST", path=path, json=body, read=lambda _: events.result())


def background(
    sandbox: str, cmd: str | Sequence[str], options: RemoteRunOptions, events: EventCollector
) -> ServerCall[str]:
    """Start a command in the background; return its id."""
    body = _command(cmd, options) | {"background": True}
    path = execd_path(sandbox, "command")
    return ServerCall(method="POST", path=path, json=body, read=lambda _: events.result().id)


def _command(cmd: str | Sequence[str], options: RemoteRunOptions) -> dict[str, Any]:
    words: dict[str, Any] = {"command": cmd} if isinstance(cmd, str) else {"argv": list(cmd)}
    return words | present(
        cwd=options.get("cwd"),
        envs=options.get("env"),
        timeout=_milliseconds(options.get("timeout")),
    )


def _milliseconds(seconds: float | None) -> int | None:
    # 0 would mean "no limit" on the wire.
    return None if seconds is None else max(1, math.ceil(seconds * 1000))


def command_status(sandbox: str, run: str) -> ServerCall[BackgroundStatus]:
    """Say how far a command is."""
    path = execd_path(sandbox, f"command/status/{quote(run, safe='')}")
    return ServerCall(method="GET", path=path, read=decoded(BackgroundStatus))


def command_logs(sandbox: str, run: str, cursor: int) -> ServerCall[LogPiece]:
    """Read what a background command has printed, from a byte on."""
    path = execd_path(sandbox, f"command/{quote(run, safe='')}/logs")
    return ServerCall(
        method="GET", path=path, query=[("cursor", cursor)], read=_piece("EXECD-COMMANDS-TAIL-CURSOR", cursor)
    )


def _piece(header: str, cursor: int) -> Any:
    def read(answer: httpx.Response) -> LogPiece:
        following = int(answer.headers.get(header) or cursor + len(answer.content))
        return LogPiece(answer.content, following)

    return read


def interrupt(sandbox: str, run: str) -> ServerCall[None]:
    """End a command."""
    return ServerCall(method="DELETE", path=execd_path(sandbox, "command"), query=[("id", run)], read=nothing)


def open_shell(sandbox: str, cwd: str | None) -> ServerCall[str]:
    """Start a shell that keeps its variables and directory; return its id."""
    return _opened("session_id", path=execd_path(sandbox, "session"), json=present(cwd=cwd))


def _opened(field: str, *, path: str, json: Any) -> ServerCall[str]:
    read = decoded(_Id)
    return ServerCall(
        method="POST", path=path, json=json, read=lambda answer: str(getattr(read(answer), field))
    )


def run_in_shell(
    sandbox: str, shell: str, code: str, options: RemoteRunOptions, events: EventCollector
) -> ServerCall[RemoteResult]:
    """Run a piece of shell code."""
    body = present(
        command=code, cwd=options.get("cwd"), timeout=_milliseconds(options.get("timeout")),
        envs=options.get("env"),
    )  # fmt: skip
    path = execd_path(sandbox, f"session/{quote(shell, safe='')}/run")
    return ServerCall(method="POST", path=path, json=body, read=lambda _: events.result())


def close_shell(sandbox: str, shell: str) -> ServerCall[None]:
    """End a shell."""
    path = execd_path(sandbox, f"session/{quote(shell, safe='')}")
    return ServerCall(method="DELETE", path=path, read=nothing)


def open_context(sandbox: str, language: str) -> ServerCall[str]:
    """Start an interpreter; return its id."""
    return _opened("id", path=execd_path(sandbox, "code/context"), json={"language": language})


def run_code(
    sandbox: str, context: str, language: str, code: str, events: EventCollector
) -> ServerCall[RemoteCodeResult]:
    """Run code in an interpreter."""
    body = {"code": code, "context": {"id": context, "language": language}}
    path = execd_path(sandbox, "code")
    return ServerCall(method="POST", path=path, json=body, read=lambda _: events.code_result())


def interrupt_code(sandbox: str, context: str) -> ServerCall[None]:
    """Interrupt what an interpreter runs; its variables stay."""
    return ServerCall(
        method="DELETE", path=execd_path(sandbox, "code"), query=[("id", context)], read=nothing
    )


def close_context(sandbox: str, context: str) -> ServerCall[None]:
    """End an interpreter."""
    path = execd_path(sandbox, f"code/contexts/{quote(context, safe='')}")
    return ServerCall(method="DELETE", path=path, read=nothing)


def session_prefix(session: str) -> str:
    """Return the path of an isolated session below the sandbox's endpoints."""
    return f"v1/isolated/session/{quote(session, safe='')}"


def open_session(sandbox: str, workspace: str | None, options: SessionOptions) -> ServerCall[str]:
    """Start an isolated session; return its id."""
    refuse_unknown("session", options, SessionOptions.__optional_keys__)
    fields: dict[str, Any] = dict(options)
    place = present(path=workspace, mode=fields.pop("mode", None))
    idle = fields.pop("idle_timeout", None)
    body = present(workspace=place or None, idle_timeout_seconds=idle, **fields)
    return _opened("session_id", path=execd_path(sandbox, "v1/isolated/session"), json=body)


def run_in_session(
    sandbox: str, session: str, code: str, options: RemoteRunOptions, events: EventCollector
) -> ServerCall[RemoteResult]:
    """Run a piece of shell code in an isolated session."""
    path = execd_path(sandbox, f"{session_prefix(session)}/run")
    return ServerCall(
        method="POST", path=path, json=_session_run(code, options), read=lambda _: events.result()
    )


def _session_run(code: str, options: RemoteRunOptions) -> dict[str, Any]:
    timeout = options.get("timeout")
    return present(
        code=code, envs=options.get("env"), timeout_seconds=None if timeout is None else math.ceil(timeout)
    )


def session_background(sandbox: str, session: str, code: str, options: RemoteRunOptions) -> ServerCall[str]:
    """Start a piece of shell code in the background of an isolated session; return the run's id."""
    path = execd_path(sandbox, f"{session_prefix(session)}/run")
    return _opened("run_id", path=path, json=_session_run(code, options) | {"background": True})


def session_run_status(sandbox: str, session: str, run: str) -> ServerCall[BackgroundStatus]:
    """Say how far a run in the background of an isolated session is."""
    path = execd_path(sandbox, f"{session_prefix(session)}/runs/{quote(run, safe='')}")
    return ServerCall(method="GET", path=path, read=decoded(BackgroundStatus))


def session_run_logs(sandbox: str, session: str, run: str, cursor: int) -> ServerCall[LogPiece]:
    """Read what a run in the background of an isolated session has printed."""
    path = execd_path(sandbox, f"{session_prefix(session)}/runs/{quote(run, safe='')}/logs")
    return ServerCall(
        method="GET", path=path, query=[("cursor", cursor)], read=_piece("EXECD-ISOLATED-TAIL-CURSOR", cursor)
    )


def interrupt_session_run(sandbox: str, session: str, run: str) -> ServerCall[None]:
    """End a run in the background of an isolated session."""
    path = execd_path(sandbox, f"{session_prefix(session)}/runs/{quote(run, safe='')}")
    return ServerCall(method="DELETE", path=path, read=nothing)


def close_session(sandbox: str, session: str) -> ServerCall[None]:
    """End an isolated session; what it did not commit is gone."""
    return ServerCall(method="DELETE", path=execd_path(sandbox, session_prefix(session)), read=nothing)


def changes(sandbox: str, session: str) -> ServerCall[tuple[Change, ...]]:
    """List what an isolated session changed."""
    read = decoded(_Overlays)
    path = execd_path(sandbox, f"{session_prefix(session)}/diff")
    return ServerCall(
        method="GET", path=path, query=[("format", "json")], read=lambda answer: read(answer).changes()
    )


def patch(sandbox: str, session: str) -> ServerCall[str]:
    """Show what an isolated session changed, as a patch."""
    path = execd_path(sandbox, f"{session_prefix(session)}/diff")
    return ServerCall(
        method="GET",
        path=path,
        query=[("format", "patch")],
        read=lambda answer: answer.content.decode("utf-8", "replace"),
    )


def archive(sandbox: str, session: str) -> ServerCall[bytes]:
    """Return what an isolated session changed, as a tar.gz."""
    return ServerCall(method="GET", path=execd_path(sandbox, f"{session_prefix(session)}/diff"), read=content)


def commit(sandbox: str, session: str, *, reset: bool | None) -> ServerCall[RemoteCommit]:
    """Write the changes of an isolated session to the sandbox's own directories."""
    path = execd_path(sandbox, f"{session_prefix(session)}/commit")
    body, read = present(reset_upper_after=reset), decoded(_Overlays)
    return ServerCall(method="POST", path=path, json=body, read=lambda answer: read(answer).commit())
