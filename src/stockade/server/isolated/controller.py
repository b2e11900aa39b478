"""The endpoints of isolated sessions: `/v1/isolated/…` of a sandbox's execd plane."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from litestar import Controller, Request, Response, delete, get, post
from litestar.openapi import ResponseSpec
from litestar.response import Stream

from stockade._version import __version__
from stockade.errors import StockadeError
from stockade.sandbox.file_worker import FileWorker
from stockade.server.isolated import changes
from stockade.server.isolated.background_run import BackgroundRun, RunStatus
from stockade.server.isolated.capabilities import IsolationCapabilities, capabilities, unavailable
from stockade.server.isolated.layer_archive import file_pieces
from stockade.server.isolated.session import IsolatedRunEnd, IsolatedSession
from stockade.server.isolated.session_request import (
    CommitRequest,
    CreateSession,
    InvalidFieldError,
    RunRequest,
    SessionSpec,
    as_requested,
    checked_run,
    session_spec,
)
from stockade.server.isolated.with_ids import TooLargeError
from stockade.server.supervisor.supervisor import SandboxSupervisor
from stockade.server.wire.errors import CONFLICT, INVALID_REQUEST, NOT_FOUND, TOO_LARGE, ApiError, api_error
from stockade.server.wire.events import EventResponse, EventStream
from stockade.server.wire.line_endings import line_rule

if TYPE_CHECKING:
    from stockade.linux.id_maps import IdMaps
    from stockade.sandbox.workspace import Workspace

CURSOR = "EXECD-ISOLATED-TAIL-CURSOR"
ARCHIVE, PATCH_TYPE = "application/gzip", "text/x-diff"


class CreatedSession(msgspec.Struct, frozen=True):
    """The answer of `POST /v1/isolated/session`."""

    session_id: str
    created_at: datetime


class SessionSummary(msgspec.Struct, frozen=True, omit_defaults=True):
    """One session of `GET /v1/isolated/sessions`."""

    session_id: str
    status: Literal["active", "dead"]
    created_at: datetime
    last_run_at: datetime
    idle_remaining_seconds: int | None = None


class SessionDescription(SessionSpec, frozen=True, kw_only=True, omit_defaults=True):
    """The answer of `GET /v1/isolated/session/{id}`: its state, and the request in effect."""

    session_id: str
    status: Literal["active", "dead"]
    created_at: datetime
    last_run_at: datetime
    idle_remaining_seconds: int | None = None


class SessionList(msgspec.Struct, frozen=True):
    """The answer of `GET /v1/isolated/sessions`."""

    sessions: list[SessionSummary]


class StartedRun(msgspec.Struct, frozen=True):
    """The answer to a background run."""

    session_id: str
    run_id: str
    started_at: datetime


class RunList(msgspec.Struct, frozen=True):
    """The background runs of a session."""

    runs: list[RunStatus]


class ChangeLists(msgspec.Struct, frozen=True):
    """The answer of `GET diff?format=json`."""

    overlays: tuple[changes.OverlayChanges, ...]


class CommitAnswer(msgspec.Struct, frozen=True):
    """The answer of `POST commit`."""

    overlays: tuple[changes.CommittedOverlay, ...]
    reset: bool


class IsolatedController(Controller):
    """Isolated sessions of one sandbox."""

    path = "/v1/isolated"
    tags = ("isolated sessions",)

    @get("/capabilities")
    async def capabilities(self, supervisor: SandboxSupervisor) -> IsolationCapabilities:
        """Say what isolated sessions can do here, by the evidence of a run in this sandbox."""
        try:
            result = await supervisor.box.run(["true"], timeout=10)
        except StockadeError as error:
            return unavailable(api_error(error).message, __version__)
        ids = supervisor.isolated.ground().environment.ids
        return capabilities(result.controls, __version__, identities=ids.several)

    @post("/session", status_code=201)
    async def create(self, supervisor: SandboxSupervisor, data: CreateSession) -> CreatedSession:
        """Make a session. Its shell has run a command when the answer arrives."""
        spec = session_spec(data, supervisor.config.idle_timeout)
        try:
            session = await supervisor.isolated.create(spec)
        except InvalidFieldError as error:
            raise as_requested(data, error) from None
        return CreatedSession(session.id, session.created_at)

    @get("/sessions")
    async def sessions(self, supervisor: SandboxSupervisor) -> SessionList:
        """List the sessions of the sandbox, the oldest first."""
        return SessionList([_summary(session) for _, session in supervisor.isolated.all()])

    @get("/session/{session_id:str}")
    async def session(self, supervisor: SandboxSupervisor, session_id: str) -> SessionDescription:
        """Describe a session: its state, and the request in effect."""
        session = supervisor.isolated.get(session_id)
        summary, spec = msgspec.structs.asdict(_summary(session)), msgspec.structs.asdict(session.spec)
        return SessionDescription(**summary, **spec)

    @delete("/session/{session_id:str}", status_code=200)
    async def remove(self, supervisor: SandboxSupervisor, session_id: str) -> Response[bytes]:
        """End a session and remove everything of it."""
        await supervisor.isolated.remove(session_id)
        return Response(b"", media_type="text/plain")

    @post(
        "/session/{session_id:str}/run",
        status_code=200,
        responses={202: ResponseSpec(StartedRun, description="the run goes on in the background")},
    )
    async def run(
        self,
        request: Request[Any, Any, Any],
        supervisor: SandboxSupervisor,
        session_id: str,
        data: RunRequest,
    ) -> Response[Any]:
        """Run code in the session's shell and stream its output, or start it in the background."""
        wanted, session = checked_run(data), supervisor.isolated.get(session_id)
        if wanted.background:
            run = await session.start_background(wanted)
            started = StartedRun(session.id, run.id, run.started_at)
            return Response(started, status_code=202, media_type="application/json")
        agent = request.headers.get("user-agent", "")
        rule = line_rule(agent, supervisor.record.extensions, supervisor.config.line_endings)
        stream = EventStream(rule)
        run_id, task = session.start(wanted, stream.stdout, stream.stderr)
        stream.init(run_id)
        task.add_done_callback(lambda done: _tell_end(stream, done))
        return EventResponse(stream, task.cancel)

    @get("/session/{session_id:str}/runs")
    async def runs(self, supervisor: SandboxSupervisor, session_id: str) -> RunList:
        """List the background runs of a session, the oldest first."""
        session = _looked_at(supervisor, session_id)
        return RunList([run.status for run in session.runs.values()])

    @get("/session/{session_id:str}/runs/{run_id:str}")
    async def run_status(self, supervisor: SandboxSupervisor, session_id: str, run_id: str) -> RunStatus:
        """Say whether a background run goes on, and how it ended."""
        return _background(_looked_at(supervisor, session_id), run_id).status

    @get("/session/{session_id:str}/runs/{run_id:str}/logs")
    async def run_logs(
        self, supervisor: SandboxSupervisor, session_id: str, run_id: str, cursor: int = 0
    ) -> Response[bytes]:
        """Return what a background run has printed from a byte on; the header says where to go on."""
        if cursor < 0:
            raise ApiError(400, INVALID_REQUEST, "cursor: must not be negative")
        page = _background(_looked_at(supervisor, session_id), run_id).logs(cursor)
        headers = {CURSOR: str(page.cursor)}
        return Response(page.data, media_type="text/plain", headers=headers)

    @delete("/session/{session_id:str}/runs/{run_id:str}", status_code=200)
    async def interrupt(self, supervisor: SandboxSupervisor, session_id: str, run_id: str) -> Response[bytes]:
        """Interrupt a run, in the foreground (by the id of its `init` event) or in the background."""
        if not supervisor.isolated.get(session_id).interrupt(run_id):
            raise _unknown_run(run_id)
        return Response(b"", media_type="text/plain")

    @get("/session/{session_id:str}/diff")
    async def diff(
        self,
        supervisor: SandboxSupervisor,
        session_id: str,
        format: Literal["tar", "json", "patch"] = "tar",
        path: str | None = None,
    ) -> Response[Any] | Stream:
        """Return the session's changes: its layers as tar.gz, a list of changed paths, or a patch."""
        session, most = supervisor.isolated.get(session_id), supervisor.config.diff_max_bytes
        async with session.steady():
            overlays = changes.kept_overlays(session.spec, session.sandbox.overlays(), path)
            return await _diff(overlays, session.sandbox.ids, format, most, supervisor.isolated.logs)

    @post("/session/{session_id:str}/commit", status_code=200)
    async def commit(
        self, supervisor: SandboxSupervisor, session_id: str, data: CommitRequest | None = None
    ) -> CommitAnswer:
        """Commit the session's changes to the sandbox's own files."""
        wanted = data or CommitRequest()
        session = supervisor.isolated.get(session_id)
        async with session.turn(), session.steady():
            overlays = changes.kept_overlays(session.spec, session.sandbox.overlays(), wanted.path)
            overwrite = wanted.strategy == "overwrite"
            try:
                done = await asyncio.to_thread(changes.commit, overlays, overwrite=overwrite)
            except changes.CommitConflictError as error:
                raise ConflictAnswer(error) from None
            if wanted.reset_upper_after:
                await supervisor.isolated.reset(session)
        return CommitAnswer(done, wanted.reset_upper_after)

    @post("/session/{session_id:str}/reset", status_code=200)
    async def reset(self, supervisor: SandboxSupervisor, session_id: str) -> Response[bytes]:
        """Drop the session's changes. Its shell keeps its state; a dead session gets a new shell."""
        session = supervisor.isolated.get(session_id)
        async with session.turn(), session.steady():
            await supervisor.isolated.reset(session)
        return Response(b"", media_type="text/plain")


class ConflictAnswer(ApiError):
    """The answer to a commit that was refused: it also lists the paths."""

    def __init__(self, error: changes.CommitConflictError) -> None:
        super().__init__(409, CONFLICT, error.message)
        self._conflicts, self._committed = error.paths, error.committed

    @property
    def body(self) -> bytes:
        """The body of the answer."""
        return msgspec.json.encode(
            {
                "code": self.code,
                "message": self.message,
                "conflicts": self._conflicts,
                "committed": self._committed,
            }
        )


async def _diff(
    overlays: Mapping[str, Workspace], ids: IdMaps, format: str, most: int, logs: str
) -> Response[Any] | Stream:
    """Return changes in one of the three forms."""
    with _too_large():
        if format == "json":
            found = await asyncio.to_thread(changes.change_lists, overlays)
            return Response(ChangeLists(found), media_type="application/json")
        if format == "patch":
            made = await asyncio.to_thread(changes.patch, overlays, most)
            return Response(made, media_type=PATCH_TYPE)
        file = await asyncio.to_thread(changes.archive, overlays, ids, most, logs)
    return Stream(file_pieces(file), media_type=ARCHIVE)


async def session_worker(supervisor: SandboxSupervisor, session_id: str) -> FileWorker:
    """Return what makes the file calls of a session."""
    return await supervisor.isolated.get(session_id).file_worker()


def _summary(session: IsolatedSession) -> SessionSummary:
    return SessionSummary(
        session_id=session.id,
        status=session.status,
        created_at=session.created_at,
        last_run_at=session.last_run_at,
        idle_remaining_seconds=session.idle_remaining,
    )


def _looked_at(supervisor: SandboxSupervisor, session_id: str) -> IsolatedSession:
    """Return a session whose background runs have ended if its shell has."""
    session = supervisor.isolated.get(session_id)
    session.check()
    return session


def _background(session: IsolatedSession, run_id: str) -> BackgroundRun:
    found = session.runs.get(run_id)
    if found is None:
        raise _unknown_run(run_id)
    return found


def _unknown_run(run_id: str) -> ApiError:
    return ApiError(404, NOT_FOUND, f"the session has no run {run_id!r:.100}")


def _tell_end(stream: EventStream, task: asyncio.Task[IsolatedRunEnd]) -> None:
    """Add the terminal event of a run to its stream."""
    if task.cancelled():
        stream.error("Interrupted", "the run was interrupted")
    elif (error := task.exception()) is not None:
        stream.error("SessionError", api_error(error).message)
    elif (end := task.result()).ename:
        stream.error(end.ename, end.evalue, end.traceback)
    else:
        stream.complete(end.milliseconds)


@contextlib.contextmanager
def _too_large() -> Iterator[None]:
    """Answer 413 if the changes are more than the server sends."""
    try:
        yield
    except TooLargeError as error:
        raise ApiError(413, TOO_LARGE, error.message) from None
