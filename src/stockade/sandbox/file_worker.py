"""File calls of a supervisor in the name of users inside its sandbox.

`FileWorkers` has worker processes for the few identities that were used last;
`FileWorker` is one identity. A call waits for a free process of its identity,
and starts one if there are fewer than `MOST_PROCESSES`. A process that died
is replaced at the next call. Everything here belongs to one event loop.
"""

from __future__ import annotations

import _socket as socket
import asyncio
import builtins
import collections
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from stockade.errors import PolicyError, SetupError, TimeoutError
from stockade.gate.operations import Op, Privileges
from stockade.sandbox.async_sandbox import AsyncSandbox
from stockade.sandbox.file_worker_calls import FileFacts
from stockade.sandbox.file_worker_channel import MOST_DESCRIPTORS, WorkerFailure, receive_message, send
from stockade.sandbox.file_worker_process import (
    WorkerIdentity,
    WorkerWalls,
    filter_program,
    fork_worker,
    kill_worker,
    observe_worker,
)
from stockade.workspace.files.atomic_write import UnfinishedFile
from stockade.workspace.files.identity_files import Permission
from stockade.workspace.files.inside_names import HIGHEST_ID

#: How many processes one identity has at most, and how many identities keep theirs.
MOST_PROCESSES = 3
MOST_IDENTITIES = 4
#: How many new files one call handles.
MOST_AT_ONCE = MOST_DESCRIPTORS
#: How long a call may take: more than the removal of a large tree.
CALL_SECONDS = 120.0
#: How long a worker may take to get ready; a few milliseconds are usual.
START_SECONDS = 10.0


class _WorkerAnswer(msgspec.Struct, frozen=True, array_like=True):
    """What a worker sends: the value of the call, or a `WorkerFailure`."""

    failed: bool
    value: msgspec.Raw


_answers = msgspec.msgpack.Decoder(_WorkerAnswer)
_facts = msgspec.msgpack.Decoder(list[FileFacts])


class NewFile(NamedTuple):
    """A file that has no content at its path yet, open for writing."""

    path: str
    descriptor: int
    unfinished: UnfinishedFile


class FileWorkers:
    """The file workers of one living sandbox. `close` it before the sandbox.

    `start` is where relative paths begin; without it, where commands start.
    """

    def __init__(self, box: AsyncSandbox, *, start: str = "") -> None:
        self._box = box
        self._start = start
        self._walls: WorkerWalls | None = None
        self._descriptors: list[int] = []
        #: The least recently used first.
        self._workers: collections.OrderedDict[WorkerIdentity, FileWorker] = collections.OrderedDict()
        self._opening = asyncio.Lock()
        self._ends: set[asyncio.Future[None]] = set()
        self._closed = False

    async def of(self, uid: int | None = None, gid: int | None = None) -> FileWorker:
        """Return the worker for these ids inside; without ids, for the sandbox's own user."""
        if self._closed:
            raise SetupError("the files of this sandbox are closed", stage="files")
        for name, id in (("uid", uid), ("gid", gid)):
            if id is not None and not 0 <= id <= HIGHEST_ID:
                raise PolicyError(f"{name} = {id}: must be a number from 0 to {HIGHEST_ID}")
        identity = WorkerIdentity(uid, gid)
        worker = self._workers.get(identity)
        if worker is None:
            worker = self._workers[identity] = FileWorker(self, identity)
        self._workers.move_to_end(identity)
        while len(self._workers) > MOST_IDENTITIES:
            _, oldest = self._workers.popitem(last=False)
            oldest.retire()
        return worker

    async def close(self) -> None:
        """End every worker and wait until they are gone; harmless when repeated."""
        self._closed = True
        while self._workers:
            self._workers.popitem()[1].retire(at_once=True)
        while self._ends:
            await asyncio.wait(self._ends)
        async with self._opening:
            while self._descriptors:
                os.close(self._descriptors.pop())

    async def fork(self, identity: WorkerIdentity) -> WorkerProcess:
        """Start one process."""
        walls = await self._open_walls()
        # In the loop's own thread: the kernel ends the process together with the thread that forked it.
        return WorkerProcess(*fork_worker(walls, identity), self._end)

    def observe(self, process: WorkerProcess, identity: WorkerIdentity) -> None:
        """Check that a process that says it is ready has given up its rights."""
        assert self._walls is not None
        observe_worker(process.pid, self._walls, identity)

    def _end(self, process: WorkerProcess) -> None:
        """Kill a process, and wait for it in a thread."""
        ending = asyncio.get_running_loop().run_in_executor(None, kill_worker, process.pid)
        self._ends.add(ending)
        ending.add_done_callback(self._ends.discard)

    async def _open_walls(self) -> WorkerWalls:
        async with self._opening:
            if self._closed:
                raise SetupError("the files of this sandbox are closed", stage="files")
            if self._walls is None:
                self._walls = await asyncio.to_thread(self._make_walls)
            return self._walls

    def _make_walls(self) -> WorkerWalls:
        box, prepared = self._box._require_open()
        if prepared.plan.plain:
            raise SetupError(
                "the sandbox has no files of its own", stage="files", hint="use a backend with namespaces"
            )
        compiled = filter_program(prepared.state)
        self._descriptors += box.roots()
        namespace = -1
        if box.user_fd >= 0:
            namespace = os.dup(box.user_fd)
            self._descriptors.append(namespace)
        return WorkerWalls(
            namespace=namespace,
            root=self._descriptors[0],
            capabilities=_kept_capabilities(prepared.plan.ops),
            filter=compiled,
            start=self._start or prepared.resolved.start or prepared.home,
            home=prepared.home,
        )


def _kept_capabilities(operations: Sequence[Op]) -> int:
    """Return the mask of the capabilities that programs of a plan have."""
    return next((operation.keep for operation in operations if isinstance(operation, Privileges)), 0)


class FileWorker:
    """File calls with the rights of one user inside. Paths are as a program there would write them."""

    def __init__(self, workers: FileWorkers, identity: WorkerIdentity) -> None:
        self._workers = workers
        self._identity = identity
        self._idle: list[WorkerProcess] = []
        self._room = asyncio.Semaphore(MOST_PROCESSES)
        self._busy: set[WorkerProcess] = set()
        self._retired = False

    def __repr__(self) -> str:
        return f"<FileWorker of {self._identity}: {len(self._busy)} busy, {len(self._idle)} idle>"

    def retire(self, *, at_once: bool = False) -> None:
        """Keep no idle processes from now on; `at_once` ends also those that are busy."""
        self._retired = True
        while self._idle:
            self._idle.pop().end()
        if at_once:
            for process in tuple(self._busy):
                process.end()

    async def info(self, paths: Sequence[str]) -> list[FileFacts]:
        """Describe files; for links, the links themselves. One that is missing is a `NotFoundError`."""
        return _facts.decode((await self._ask("info", _bytes(paths)))[0])

    async def open(self, path: str) -> int:
        """Open a regular file for reading, without blocking; the caller owns the descriptor."""
        return (await self.call_for_descriptors("open", os.fsencode(path)))[1][0]

    async def begin(self, items: Sequence[tuple[str, Permission]]) -> list[NewFile]:
        """Open up to `MOST_AT_ONCE` files for new content, which the caller writes; see `finish`.

        The caller closes the descriptors. If one file cannot be opened, none is.
        """
        values, handed = await self.call_for_descriptors("begin", _permissions(items))
        return [
            NewFile(path, file, UnfinishedFile(*value))
            for (path, _), file, value in zip(items, handed, values, strict=True)
        ]

    async def finish(self, new: Sequence[NewFile]) -> None:
        """Put files that `begin` opened at their paths, one after the other."""
        await self._with_new("finish", new)

    async def discard(self, new: Sequence[NewFile]) -> None:
        """Forget files that `begin` opened."""
        # Others have no name, and go with their last descriptor.
        await self._with_new("discard", [file for file in new if file.unfinished.temporary])

    async def _with_new(self, name: str, new: Sequence[NewFile]) -> None:
        for first in range(0, len(new), MOST_AT_ONCE):
            some = new[first : first + MOST_AT_ONCE]
            items = [(os.fsencode(file.path), file.unfinished) for file in some]
            await self.call(name, items, descriptors=tuple(file.descriptor for file in some))

    async def remove_files(self, paths: Sequence[str]) -> None:
        """Remove files; missing ones are no error, directories are."""
        await self.call("remove_files", _bytes(paths))

    async def remove_directories(self, paths: Sequence[str]) -> None:
        """Remove directories with everything in them; missing ones are no error."""
        await self.call("remove_directories", _bytes(paths))

    async def move(self, pairs: Sequence[tuple[str, str]]) -> None:
        """Move files or directories; an existing target is an error, missing directories are made."""
        await self.call("move", [_bytes(pair) for pair in pairs])

    async def set_permissions(self, items: Sequence[tuple[str, Permission]]) -> None:
        """Change modes, owners and groups."""
        await self.call("set_permissions", _permissions(items))

    async def make_directories(self, items: Sequence[tuple[str, Permission]]) -> None:
        """Make directories, and those above them; existing ones stay as they are."""
        await self.call("make_directories", _permissions(items))

    async def replace(self, items: Sequence[tuple[str, str, str]]) -> list[int]:
        """Replace a text by another in files; return how often in each."""
        given = [(os.fsencode(path), old.encode(), new.encode()) for path, old, new in items]
        counts: list[int] = await self.call("replace", given)
        return counts

    async def search(self, path: str, pattern: str) -> list[FileFacts]:
        """Find files below a directory by base name, or by path if the pattern has a `/`."""
        return _facts.decode((await self._ask("search", os.fsencode(path), os.fsencode(pattern)))[0])

    async def list_directory(self, path: str, depth: int) -> list[FileFacts]:
        """List a directory, and those in it up to a depth."""
        return _facts.decode((await self._ask("list", os.fsencode(path), depth))[0])

    async def call(self, name: str, *arguments: object, descriptors: tuple[int, ...] = ()) -> Any:
        """Run a registered function in a worker (`worker_call`) and return its value."""
        value, handed = await self.call_for_descriptors(name, *arguments, descriptors=descriptors)
        for descriptor in handed:
            os.close(descriptor)
        return value

    async def call_for_descriptors(
        self, name: str, *arguments: object, descriptors: tuple[int, ...] = ()
    ) -> tuple[Any, tuple[int, ...]]:
        """Run a registered function, and return its value and descriptors, which the caller owns."""
        value, handed = await self._ask(name, *arguments, descriptors=descriptors)
        return msgspec.msgpack.decode(value), handed

    async def _ask(
        self, name: str, *arguments: object, descriptors: tuple[int, ...] = ()
    ) -> tuple[msgspec.Raw, tuple[int, ...]]:
        message = msgspec.msgpack.encode((name, *arguments))
        await self._room.acquire()
        process, asked = await self._send(message, descriptors)
        try:
            async with asyncio.timeout(CALL_SECONDS):
                received, handed = await asked
        except builtins.TimeoutError:
            process.end()
            raise TimeoutError(
                f"the file call took longer than {CALL_SECONDS:g} s", hint="let a command inside do it"
            ) from None
        answer = _answers.decode(received)
        if answer.failed:
            raise msgspec.msgpack.decode(answer.value, type=WorkerFailure).error()
        return answer.value, handed

    async def _send(
        self, message: bytes, descriptors: tuple[int, ...]
    ) -> tuple[WorkerProcess, asyncio.Future[tuple[bytes, tuple[int, ...]]]]:
        """Hand a request to a process; a call that nobody waits for goes on, and keeps its process."""
        try:
            while True:
                process = await self._free_process()
                try:
                    asked = process.ask(message, descriptors, functools.partial(self._done, process))
                except (BrokenPipeError, ConnectionResetError):  # it has died since its last call
                    process.end()
                    continue
                self._busy.add(process)
                return process, asked
        except BaseException:
            self._room.release()
            raise

    async def _free_process(self) -> WorkerProcess:
        while self._idle:
            process = self._idle.pop()
            if not process.ended:
                return process
        process = await self._workers.fork(self._identity)
        try:
            async with asyncio.timeout(START_SECONDS):
                await process.ready()
            self._workers.observe(process, self._identity)
        except builtins.TimeoutError:
            process.end()
            raise SetupError("the file worker did not get ready", stage="files") from None
        except BaseException:
            process.end()
            raise
        return process

    def _done(self, process: WorkerProcess) -> None:
        self._busy.discard(process)
        self._room.release()
        if self._retired:
            process.end()
        elif not process.ended:
            self._idle.append(process)


class WorkerProcess:
    """The supervisor's end of one worker process, which has at most one request at a time."""

    def __init__(self, pid: int, end: socket.socket, on_end: Callable[[WorkerProcess], None]) -> None:
        self.pid = pid
        self.ended = False
        self._socket = end
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._answer: asyncio.Future[tuple[bytes, tuple[int, ...]]] = self._loop.create_future()
        self._on_answer: Callable[[], None] = _nothing
        end.setblocking(False)
        self._loop.add_reader(end.fileno(), self._receive)

    async def ready(self) -> None:
        """Wait until it has given up its rights; raise the reason if it could not."""
        message, _ = await self._answer
        failure = msgspec.msgpack.decode(message, type=WorkerFailure | None)
        if failure is not None:
            raise failure.error()

    def ask(
        self, message: bytes, descriptors: tuple[int, ...], on_answer: Callable[[], None]
    ) -> asyncio.Future[tuple[bytes, tuple[int, ...]]]:
        """Send a request and return what becomes its answer; `on_answer` is called when that has come.

        A process that has died is a `BrokenPipeError`.
        """
        if self.ended:
            raise BrokenPipeError
        send(self._socket, message, descriptors)
        self._answer, self._on_answer = self._loop.create_future(), on_answer
        return self._answer

    def _receive(self) -> None:
        try:
            received = receive_message(self._socket)
        except BlockingIOError:
            return
        except OSError as error:  # too many open files: the answer is lost, the worker is well
            if not self._answer.done():
                self._answer.set_exception(error)
            self._free()
            return
        if received is None:
            self.end()
            return
        if self._answer.done():  # nobody waits for it any more
            for descriptor in received[1]:
                os.close(descriptor)
        else:
            self._answer.set_result(received)
        self._free()

    def end(self) -> None:
        """Kill it; a request that it has not answered fails."""
        if self.ended:
            return
        self.ended = True
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        if not self._answer.done():
            self._answer.set_exception(SetupError("the file worker ended before it answered", stage="files"))
        self._on_end(self)
        self._free()

    def _free(self) -> None:
        on_answer, self._on_answer = self._on_answer, _nothing
        on_answer()


def _nothing() -> None:
    """Stand for a callback that is not needed."""


def _bytes(paths: Sequence[str]) -> list[bytes]:
    return [os.fsencode(path) for path in paths]


def _permissions(items: Sequence[tuple[str, Permission]]) -> list[tuple[bytes, Permission]]:
    return [(os.fsencode(path), permission) for path, permission in items]
