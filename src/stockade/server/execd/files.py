"""The endpoints of files: describe, read, write, move, change and find them.

They are the same for a sandbox, for one of its users and for an isolated
session: `file_routes` mounts them, and the worker decides whose rights and
which files.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from litestar import Controller, Request, Response, Router, delete, get, post
from litestar.di import NamedDependency, Provide
from litestar.params import FromQuery, JSONBody, SkipValidation
from litestar.response import Stream

from stockade.sandbox.file_worker import FileWorker
from stockade.sandbox.file_worker_channel import printable
from stockade.server.execd.directories import DirectoriesController
from stockade.server.execd.downloads import send_file, send_lines
from stockade.server.execd.file_bodies import (
    FileInfoBody,
    MoveBody,
    PermissionBody,
    Query,
    ReplaceBody,
    ReplacedBody,
    bounded,
    nothing,
)
from stockade.server.execd.uploads import MOST_BYTES, receive_upload
from stockade.server.wire.errors import INVALID_REQUEST, ApiError

#: How long a body with texts to replace may be, and any other body in JSON.
LONGEST_TEXTS = 64 << 20
LONGEST_BODY = 8 << 20
#: Where the application's state has the bytes that one upload may have.
MOST_UPLOADED = "most_upload_bytes"

Worker = NamedDependency[SkipValidation[FileWorker]]


class FilesController(Controller):
    """Calls about files."""

    path = "/files"

    @get("/info")
    async def info(
        self, request: Request[Any, Any, Any], worker: Worker, path: FromQuery[list[str] | None] = None
    ) -> dict[str, FileInfoBody]:
        """Describe files; the keys are the paths as they were sent."""
        paths = Query(request).many("path")
        found = await worker.info(paths)
        return {printable(path): FileInfoBody.of(facts) for path, facts in zip(paths, found, strict=True)}

    @get("/download")
    async def download(
        self,
        request: Request[Any, Any, Any],
        worker: Worker,
        path: FromQuery[str] = "",
        offset: FromQuery[str] = "",
        limit: FromQuery[str] = "",
    ) -> Response[bytes] | Stream:
        """Send a file, the bytes that `Range` names, or lines from `offset` (the first is 1)."""
        query, ranges = Query(request), request.headers.get("range", "")
        name, first, count = query.one("path"), query.number("offset", 1), query.number("limit", 1)
        if first is None and count is None:
            return await send_file(worker, name, ranges)
        if ranges:
            raise ApiError(400, INVALID_REQUEST, "Range: use either it or offset and limit")
        return await send_lines(worker, name, first or 1, count)

    @post("/upload", status_code=200, request_max_body_size=None)
    async def upload(self, request: Request[Any, Any, Any], worker: Worker) -> Response[bytes]:
        """Write files: parts `metadata` and `file` of a multipart body, by turns."""
        most = request.app.state.get(MOST_UPLOADED, MOST_BYTES)
        await receive_upload(worker, request.headers.get("content-type", ""), request.stream(), most)
        return nothing()

    @delete("/", status_code=200)
    async def remove(
        self, request: Request[Any, Any, Any], worker: Worker, path: FromQuery[list[str] | None] = None
    ) -> Response[bytes]:
        """Remove files; missing ones are no error, directories are."""
        await worker.remove_files(Query(request).many("path"))
        return nothing()

    @post("/mv", status_code=200, request_max_body_size=LONGEST_BODY)
    async def move(self, worker: Worker, data: JSONBody[list[MoveBody]]) -> Response[bytes]:
        """Move files or directories to places where nothing is yet."""
        with bounded():
            await worker.move([(one.src, one.dest) for one in data])
        return nothing()

    @post("/permissions", status_code=200, request_max_body_size=LONGEST_BODY)
    async def permissions(self, worker: Worker, data: JSONBody[dict[str, PermissionBody]]) -> Response[bytes]:
        """Change modes, owners and groups."""
        await worker.set_permissions([(path, one.permission()) for path, one in data.items()])
        return nothing()

    @post("/replace", status_code=200, request_max_body_size=LONGEST_TEXTS)
    async def replace(
        self, worker: Worker, data: JSONBody[dict[str, ReplaceBody]]
    ) -> dict[str, ReplacedBody]:
        """Replace a text in files, which keep their modes and owners."""
        for path, one in data.items():
            if not one.old:
                raise ApiError(400, INVALID_REQUEST, f"{path}: old must not be empty")
        with bounded():
            counts = await worker.replace([(path, one.old, one.new) for path, one in data.items()])
        return {path: ReplacedBody(count) for path, count in zip(data, counts, strict=True)}

    @get("/search")
    async def search(
        self,
        request: Request[Any, Any, Any],
        worker: Worker,
        path: FromQuery[str] = "",
        pattern: FromQuery[str] = "**",
    ) -> list[FileInfoBody]:
        """Find files by base name at any depth, or by path if the pattern has a `/`."""
        query = Query(request)
        with bounded():
            found = await worker.search(query.one("path"), query.one("pattern", "**"))
        return [FileInfoBody.of(facts) for facts in found]


def file_routes(path: str, find_worker: Callable[..., Awaitable[FileWorker]]) -> Router:
    """Return the endpoints of files and directories below a path.

    `find_worker` returns the worker for a request; like any dependency, it can ask for parameters of the
    path and for other dependencies by name.
    """
    return Router(
        path,
        route_handlers=[FilesController, DirectoriesController],
        dependencies={"worker": Provide(find_worker)},
    )
