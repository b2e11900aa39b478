"""A private environment with file workers and their endpoints, for one test: it takes some 50 ms.

    @pytest.fixture
    def files(tmp_path):
        yield from living_files(tmp_path)

`files.http` calls the endpoints without a server in between, `files.sh` runs a
command inside, and `files.run` awaits anything in the loop of the sandbox.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import httpx
import msgspec
from litestar import Litestar
from litestar.params import FromPath

from stockade import AsyncSandbox, Policy
from stockade.resolve.environment import Environment, IdMaps
from stockade.sandbox.file_worker import FileWorker, FileWorkers
from stockade.sandbox.private_tree import PrivateTree
from stockade.server.execd.files import file_routes
from stockade.server.wire.errors import error_response
from support.means import applies

Value = TypeVar("Value")
BOUNDARY = "part-of-a-test"


class LivingFiles:
    """The sandbox, its workers and its endpoints, in an event loop of their own thread."""

    def __init__(self, directory: Path, *, overlay: bool = False, before: str = "") -> None:
        """Make the tree, run the script `before` in its workspace, and open the sandbox.

        With `overlay`, /workspace is copy-on-write, as in an isolated session.
        """
        self.tree = PrivateTree.make(str(directory / "tree"))
        self.workspace = directory / "tree" / "workspace"
        subprocess.run(["sh", "-ec", before], cwd=self.workspace, check=True)
        self._overlay = overlay
        self.ids = IdMaps.of_caller()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        try:
            self.run(self._open())
        except BaseException:
            self._stop()
            raise

    async def _open(self) -> None:
        mounts = self.tree.mounts()
        if self._overlay:
            mounts = tuple(
                msgspec.structs.replace(mount, access="overlay") if mount.path == "/workspace" else mount
                for mount in mounts
            )
        environment = Environment(mounts=mounts, ids=self.ids)
        self.box = AsyncSandbox(Policy(backend="native"), on_exit="discard", _environment=environment)
        await self.box.open()
        self.workers = FileWorkers(self.box)

        async def own() -> FileWorker:
            return await self.workers.of()

        async def identity(uid: FromPath[int], gid: FromPath[int]) -> FileWorker:
            return await self.workers.of(uid, gid)

        self.app = Litestar(
            [file_routes("/", own), file_routes("/as/{uid:int}/{gid:int}", identity)],
            exception_handlers={Exception: error_response},
            openapi_config=None,
            request_max_body_size=None,
        )

    def run(self, steps: Coroutine[Any, Any, Value]) -> Value:
        """Await something in the sandbox's loop."""
        return asyncio.run_coroutine_threadsafe(steps, self._loop).result(60)

    def worker(self, uid: int | None = None, gid: int | None = None) -> FileWorker:
        """The worker of an identity."""
        return self.run(self.workers.of(uid, gid))

    def sh(self, script: str, *, uid: int | None = None) -> str:
        """Run a script inside and return what it printed."""
        box: Any = self.box if uid is None else self.box._run_as(uid, uid)
        result = self.run(box.run(["sh", "-c", script]))
        assert result.ok, result.stderr
        return str(result.text)

    def http(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Call an endpoint."""

        async def call() -> httpx.Response:
            app: Any = self.app  # httpx and Litestar have types of their own for the same thing
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://files.example.com") as client:
                return await client.request(method, path, **options)

        return self.run(call())

    def upload(
        self, *files: tuple[dict[str, Any], bytes], prefix: str = "", **options: Any
    ) -> httpx.Response:
        """Upload files as the published SDK does: chunked, without a length."""

        async def body() -> AsyncIterator[bytes]:
            for metadata, content in files:
                yield part("metadata", json.dumps(metadata).encode())
                yield part("file", content)
            yield f"--{BOUNDARY}--\r\n".encode()

        headers = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}
        return self.http("POST", f"{prefix}/files/upload", content=body(), headers=headers, **options)

    def several_ids(self) -> None:
        """Go on only if the sandbox has more than one user."""
        applies(self.ids.several, f"the sandbox has one id only: {self.ids.reason}")

    def close(self) -> None:
        """End everything."""

        async def end() -> None:
            await self.workers.close()
            await self.box.close()
            await self._loop.shutdown_default_executor()

        try:
            self.run(end())
        finally:
            self._stop()
            self.tree.remove()

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def part(name: str, content: bytes, *, filename: str = "x") -> bytes:
    """One part of a multipart body."""
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"; filename="{filename}"\r\n\r\n'
    return head.encode() + content + b"\r\n"


def living_files(directory: Path, *, overlay: bool = False, before: str = "") -> Iterator[LivingFiles]:
    """Yield the files of a new sandbox, for a fixture."""
    living = LivingFiles(directory, overlay=overlay, before=before)
    try:
        yield living
    finally:
        living.close()
