"""The endpoints of directories: list, make and remove them."""

from __future__ import annotations

from typing import Any

from litestar import Controller, Request, Response, delete, get, post
from litestar.di import NamedDependency
from litestar.params import FromQuery, JSONBody, SkipValidation

from stockade.sandbox.file_worker import FileWorker
from stockade.server.execd.file_bodies import FileInfoBody, PermissionBody, Query, bounded, nothing

#: How long a body in JSON may be.
LONGEST_BODY = 8 << 20

Worker = NamedDependency[SkipValidation[FileWorker]]


class DirectoriesController(Controller):
    """Calls about directories."""

    path = "/directories"

    @get("/list")
    async def list_directory(
        self,
        request: Request[Any, Any, Any],
        worker: Worker,
        path: FromQuery[str] = "",
        depth: FromQuery[str] = "",
    ) -> list[FileInfoBody]:
        """List a directory, and with `depth` those in it; links are listed and not entered."""
        query = Query(request)
        depth_number = query.number("depth", 0)
        with bounded():
            found = await worker.list_directory(
                query.one("path"), 1 if depth_number is None else depth_number
            )
        return [FileInfoBody.of(facts) for facts in found]

    @post("/", status_code=200, request_max_body_size=LONGEST_BODY)
    async def make(self, worker: Worker, data: JSONBody[dict[str, PermissionBody]]) -> Response[bytes]:
        """Make directories, and those above them; existing ones stay as they are."""
        await worker.make_directories([(path, one.permission()) for path, one in data.items()])
        return nothing()

    @delete("/", status_code=200)
    async def remove(
        self, request: Request[Any, Any, Any], worker: Worker, path: FromQuery[list[str] | None] = None
    ) -> Response[bytes]:
        """Remove directories with everything in them; missing ones are no error."""
        await worker.remove_directories(Query(request).many("path"))
        return nothing()
