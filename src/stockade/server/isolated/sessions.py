"""All isolated sessions of one sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import resource
from typing import TYPE_CHECKING

import msgspec

from stockade.errors import SetupError, StockadeError
from stockade.server.isolated.session import IsolatedSession
from stockade.server.isolated.session_request import SessionSpec
from stockade.server.isolated.session_sandbox import SandboxGround, SessionSandbox
from stockade.server.record import new_id
from stockade.server.tally import TALLY, LayerMeter, TallyReport, create_outcome
from stockade.server.wire.errors import LIMIT_EXCEEDED, ApiError, create_error

if TYPE_CHECKING:
    from stockade.server.supervisor.supervisor import SandboxSupervisor

SESSION_NOT_FOUND = "SESSION_NOT_FOUND"
#: How many sessions a sandbox can have, if its supervisor may have enough open files: each takes about 16,
#: and everything else fits into 512.
MOST_SESSIONS, FILES_OF_SESSION, OTHER_FILES = 1024, 16, 512
#: The paths of file calls of a session.
FILE_CALL = re.compile(r"/execd/v1/isolated/session/([^/]+)/(?:files|directories)(?:/|$)")

_log = logging.getLogger("stockade.server")


def most_sessions() -> int:
    """Return how many sessions this supervisor can hold."""
    open_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(1, min(MOST_SESSIONS, (open_files - OTHER_FILES) // FILES_OF_SESSION))


class IsolatedSessions:
    """The sessions by their ids. Whatever ends one removes everything of it."""

    def __init__(self, supervisor: SandboxSupervisor) -> None:
        """Keep the sessions of a supervisor's sandbox."""
        self._supervisor = supervisor
        self._sessions: dict[str, IsolatedSession] = {}
        #: Ends of sessions that are going on: the loop keeps only weak references to tasks.
        self._endings: set[asyncio.Task[None]] = set()
        self._closed = False
        self._meter = LayerMeter()

    @property
    def logs(self) -> str:
        """Where files without a name go."""
        return os.path.join(self._supervisor.path, "logs")

    def ground(self) -> SandboxGround:
        """Return what the sessions of this sandbox have in common, as it is now."""
        supervisor = self._supervisor
        return SandboxGround(
            policy=supervisor.policy,
            environment=supervisor.environment,
            trees=supervisor.tree.descriptors,
            writable_paths=supervisor.config.writable_paths,
            variables=supervisor.env,
            upper_max_bytes=supervisor.config.upper_max_bytes,
            within=supervisor.box.cgroup_parents,
            network=supervisor.box.network_namespace,
            agent=supervisor.record.id,
        )

    def all(self) -> list[tuple[str, IsolatedSession]]:
        """Return every session with its id, the oldest first."""
        return list(self._sessions.items())

    def get(self, id: str) -> IsolatedSession:
        """Return a session, or refuse an id that is none."""
        found = self._sessions.get(id)
        if found is None:
            raise ApiError(404, SESSION_NOT_FOUND, f"there is no session {id!r:.100}")
        return found

    def use_by(self, path: str) -> contextlib.AbstractContextManager[None]:
        """Keep the session of a file call in use until its answer is sent: a transfer may take long."""
        found = FILE_CALL.match(path)
        session = self._sessions.get(found[1]) if found else None
        return contextlib.nullcontext() if session is None else session.in_use()

    async def create(self, spec: SessionSpec) -> IsolatedSession:
        """Make a session; when this returns, its shell has run something."""
        try:
            session = await self._create(spec)
        except Exception as error:
            found = create_error(error)
            TALLY.note_session(create_outcome(found.status))
            raise (found if isinstance(error, SetupError) else error) from None
        TALLY.note_session("created")
        return session

    async def _create(self, spec: SessionSpec) -> IsolatedSession:
        if len(self._sessions) >= (most := most_sessions()):
            words = f"the sandbox has {most} isolated sessions already"
            raise ApiError(429, LIMIT_EXCEEDED, words)
        id = new_id()
        sandbox = await self._open(spec, id)
        if self._closed:
            await sandbox.close()
            raise ApiError(409, "SANDBOX_NOT_RUNNING", "the sandbox is ending")
        session = IsolatedSession(id, spec, sandbox, self.logs, self._expire)
        self._sessions[id] = session
        self._supervisor.boxes.add(sandbox.box)
        return session

    async def _open(self, spec: SessionSpec, id: str) -> SessionSandbox:
        # Variables that clients have set for later commands reach later sessions too.
        ground = self.ground()
        variables = {**ground.variables, **await self._supervisor.variables.added()}
        ground = msgspec.structs.replace(ground, variables=variables)
        return await SessionSandbox.open(spec, ground, f"{self._supervisor.box.name[:8]}/{id}")

    async def reset(self, session: IsolatedSession) -> None:
        """Empty the layers of a session: it goes on in a new sandbox. See `replace_sandbox`."""
        boxes, old = self._supervisor.boxes, session.sandbox.box
        await session.replace_sandbox(lambda: self._open(session.spec, session.id))
        boxes.discard(old)
        boxes.add(session.sandbox.box)

    async def remove(self, id: str) -> None:
        """End a session and remove everything of it."""
        session, boxes = self.get(id), self._supervisor.boxes
        del self._sessions[id]
        boxes.discard(session.sandbox.box)
        try:
            await session.close()
        finally:
            boxes.discard(session.sandbox.box)  # a reset may have put another one in its place meanwhile

    def _expire(self, session: IsolatedSession) -> None:
        """End a session that nobody has used for its idle time; while the sandbox is paused, nobody could."""
        if self._supervisor.record.state != "Running":
            session.restart_clock()
            return
        task = asyncio.ensure_future(self._remove_expired(session))
        self._endings.add(task)
        task.add_done_callback(self._endings.discard)

    async def _remove_expired(self, session: IsolatedSession) -> None:
        if self._sessions.get(session.id) is not session:
            return
        try:
            await self.remove(session.id)
        except StockadeError:
            _log.exception("session %s did not end cleanly", session.id)

    async def report(self) -> TallyReport:
        """Tell what has happened in this sandbox, and what the layers of its sessions take."""
        living = [session for session in self._sessions.values() if session.status == "active"]
        layers = [workspace.layer for session in living for workspace in session.sandbox.overlays().values()]
        return TallyReport(TALLY, len(living), await self._meter.measure(layers))

    async def close(self) -> None:
        """End every session."""
        self._closed = True
        await asyncio.gather(*(self.remove(id) for id in list(self._sessions)), *self._endings)
