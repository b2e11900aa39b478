"""The application of a supervisor: the endpoints of one sandbox below `/execd` and `/egress`, and `/control`.

The zygote builds it once; each supervisor that it forks puts its own sandbox into it.
"""

from __future__ import annotations

from typing import Any

from litestar import Controller, Litestar, Response, Router, get
from litestar.datastructures import State
from litestar.di import Provide
from litestar.openapi import OpenAPIConfig
from litestar.params import FromPath
from litestar.types import ControllerRouterHandler

from stockade.sandbox.file_worker import FileWorker
from stockade.server.execd.files import MOST_UPLOADED, file_routes
from stockade.server.execd.routes import (
    BashSessionController,
    CodeController,
    CommandController,
    MetricsController,
)
from stockade.server.isolated.controller import IsolatedController, session_worker
from stockade.server.supervisor.control import ControlController
from stockade.server.supervisor.network_policy import NetworkPolicy, PolicyController
from stockade.server.supervisor.supervisor import SandboxSupervisor
from stockade.server.wire.asgi import AsgiReceive, AsgiScope, AsgiSend
from stockade.server.wire.errors import NOT_SUPPORTED, ApiError, error_response
from stockade.server.wire.identity import require_ids

#: The planes of a sandbox by the port that clients ask for.
PLANES = {"44772": "/execd", "18080": "/egress"}
#: How long the body of a request may be, unless its endpoint says otherwise: it is in memory as a whole.
LONGEST_BODY = 16 << 20
#: What clients may ask for and this version does not have.
LATER = ("/execd/pty", "/egress/credential-vault")


class PingController(Controller):
    """Whether the sandbox answers."""

    @get("/ping")
    async def ping(self) -> Response[bytes]:
        """Answer as soon as the sandbox can run commands."""
        return Response(b"", status_code=200, media_type="text/plain")


async def _own_worker(supervisor: SandboxSupervisor) -> FileWorker:
    """Return the worker with the rights of root inside."""
    return await supervisor.workers.of()


async def _worker_of(supervisor: SandboxSupervisor, uid: FromPath[int], gid: FromPath[int]) -> FileWorker:
    """Return the worker with the rights of a user inside."""
    require_ids(supervisor.environment.ids, uid, gid)
    return await supervisor.workers.of(uid, gid)


#: The endpoints of the execd plane.
CONTROLLERS: list[ControllerRouterHandler] = [
    PingController,
    file_routes("/", _own_worker),
    file_routes("/v1/filesystem/{uid:int}/{gid:int}", _worker_of),
    IsolatedController,
    file_routes("/v1/isolated/session/{session_id:str}", session_worker),
    CommandController,
    BashSessionController,
    CodeController,
    MetricsController,
]
#: The endpoints of the egress plane.
EGRESS_CONTROLLERS: list[ControllerRouterHandler] = [PingController, PolicyController]


def _network(state: State) -> NetworkPolicy:
    return _supervisor(state).network


def _supervisor(state: State) -> SandboxSupervisor:
    found: SandboxSupervisor = state.supervisor
    return found


class SupervisorApp:
    """The application, with what every request into a sandbox has in common."""

    def __init__(self, openapi: OpenAPIConfig | None = None) -> None:
        """Build the application; one that is to be described also gets the framework's description."""
        self.litestar = Litestar(
            [
                Router("/execd", route_handlers=CONTROLLERS),
                Router("/egress", route_handlers=EGRESS_CONTROLLERS),
                *([] if openapi else [ControlController]),
            ],
            dependencies={
                "supervisor": Provide(_supervisor, sync_to_thread=False),
                "network": Provide(_network, sync_to_thread=False),
            },
            exception_handlers={Exception: error_response},
            openapi_config=openapi,
            request_max_body_size=LONGEST_BODY,
        )

    def serve(self, supervisor: SandboxSupervisor) -> None:
        """Serve this sandbox."""
        self.litestar.state.supervisor = supervisor
        self.litestar.state[MOST_UPLOADED] = supervisor.config.max_upload_bytes

    async def __call__(self, scope: AsgiScope, receive: AsgiReceive, send: AsgiSend) -> None:
        """Serve one request; one into the sandbox counts as an access, and needs the sandbox to run."""
        path: str = scope["path"]
        if scope["type"] == "http" and not path.startswith("/control"):
            try:
                supervisor = _supervisor(self.litestar.state)
                supervisor.require_running()
                supervisor.touch()
                if path.startswith(LATER):
                    raise ApiError(501, NOT_SUPPORTED, "this version does not have this endpoint")
            except ApiError as error:
                await send_error(send, error)
                return
            with supervisor.isolated.use_by(path):
                await self.litestar(scope, receive, send)
            return
        await self.litestar(scope, receive, send)


async def send_error(send: AsgiSend, error: ApiError) -> None:
    """Answer a request with an error, outside the framework."""
    body = error.body
    headers: Any = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(name.lower().encode(), value.encode()) for name, value in error.headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
