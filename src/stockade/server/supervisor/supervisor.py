"""One sandbox of the server: its objects, its timeout, and how it ends.

Everything of a sandbox lives in its supervisor's process. The parts (commands, shells, code, files, isolated
sessions) hang their own objects on it and register in `closing` what must end with the sandbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from typing import Any

import msgspec

from stockade.errors import StockadeError
from stockade.resolve.environment import Environment, IdMaps
from stockade.runs.register import sandbox_record
from stockade.sandbox.async_sandbox import AsyncSandbox
from stockade.sandbox.file_worker import FileWorkers
from stockade.sandbox.observation import environ_of
from stockade.sandbox.private_tree import PrivateTree
from stockade.server.config import ServerConfig
from stockade.server.directory import LOGS, TREE, remove_directory
from stockade.server.execd.bash_sessions import BashSessions
from stockade.server.execd.code_contexts import CodeContexts
from stockade.server.execd.commands import CommandRequest, CommandTable
from stockade.server.execd.metrics import MetricsMeter
from stockade.server.execd.readiness import ReadinessListener
from stockade.server.execd.variables import SandboxVariables
from stockade.server.isolated.sessions import IsolatedSessions
from stockade.server.record import ServerRecord, now, write_record
from stockade.server.supervisor.network_policy import NetworkPolicy
from stockade.server.supervisor.sandbox_policy import (
    environment_of,
    is_placeholder,
    policy_of,
    root_directory,
)
from stockade.server.wire import create_checks
from stockade.server.wire.errors import CONFLICT, ApiError
from stockade.server.wire.line_endings import LineRule
from stockade.server.wire.network import NetworkRule

#: The longest that the timer sleeps at once: the clock may be set meanwhile.
LONGEST_SLEEP = 60.0
#: The least seconds by which an access must have moved the expiry before the record is written anew.
WORTH_WRITING = 1.0

_log = logging.getLogger("stockade.server")


class SandboxSupervisor:
    """The sandbox of this process, and what its endpoints share."""

    def __init__(
        self, record: ServerRecord, config: ServerConfig, root: str, directory: int, home: str
    ) -> None:
        self.record = record
        self.config = config
        #: The directory of all sandboxes, and a descriptor of this one's.
        self.root = root
        self.directory = directory
        self.policy = policy_of(record, config)
        #: The variables of every program inside.
        self.env = environment_of(record)
        self.tree = PrivateTree.make(os.path.join(self.path, TREE))
        #: The private environment that the sandbox and its isolated sessions have.
        image = root_directory(record.root, home)
        self.environment = Environment(self.tree.mounts(), IdMaps.of_caller(), image=image)
        self.box = AsyncSandbox(
            self.policy,
            name=record.id,
            on_exit="discard",
            who={"agent": record.id},  # its receipts are found by that
            _environment=self.environment,
        )
        self.network = NetworkPolicy(self)
        #: Every sandbox of this process: the main one and those of isolated sessions. `pause` stops them all.
        self.boxes: set[AsyncSandbox] = {self.box}
        #: Set by `open`: file calls, commands, bash sessions, code contexts, metrics, isolated sessions.
        self.workers: FileWorkers
        self.variables: SandboxVariables
        self.commands: CommandTable
        self.shells: BashSessions
        self.code: CodeContexts
        self.meter: MetricsMeter
        self.isolated: IsolatedSessions
        #: What ends with the sandbox, in reverse order.
        self.closing: list[Callable[[], Awaitable[None]]] = []
        #: Set when the sandbox has ended and its files are gone.
        self.ended = asyncio.Event()
        self._ending: asyncio.Task[None] | None = None
        self._timer: asyncio.Task[None] | None = None
        self._first: asyncio.Task[None] | None = None
        self._written_expiry = record.expires_at

    @property
    def path(self) -> str:
        """The directory of this sandbox."""
        return os.path.join(self.root, self.record.id)

    async def open(self) -> None:
        """Raise the walls."""
        await self.box.open()
        self._make_parts()
        gate = self.box.gate
        if gate is not None:
            asyncio.get_running_loop().add_reader(gate, self._box_ended, gate)

    def _make_parts(self) -> None:
        """Make what serves the endpoints, and register how it ends."""
        self.workers = FileWorkers(self.box, start=self.environment.start)

        async def open_file(path: str) -> int:
            return await (await self.workers.of()).open(path)

        self.variables = variables = SandboxVariables(environ_of(self.box), open_file)
        self.commands = CommandTable(self.box, variables, os.path.join(self.path, LOGS))
        self.shells = BashSessions(self.box, variables, self.commands)
        self.code = CodeContexts(self.box, variables)
        self.meter = MetricsMeter(self.box, self.boxes)
        readiness = ReadinessListener(self.box)
        self.isolated = IsolatedSessions(self)
        self.closing += [
            readiness.close,
            self.workers.close,
            self.commands.close,
            self.shells.close,
            self.code.close,
            self.isolated.close,
        ]

    def publish(self) -> None:
        """Write the first record, from which moment the sandbox exists, and start its timer."""
        pid = os.getpid()
        self._write(
            supervisor=pid,
            supervisor_born=sandbox_record.born(pid),
            where=sandbox_record.where(pid),
            register_id=self.box.id,
        )
        self._timer = asyncio.create_task(self._expire())
        if not is_placeholder(self.record.entrypoint):
            self._first = asyncio.create_task(self._start_entrypoint())

    async def _start_entrypoint(self) -> None:
        """Start the entrypoint as a command in the background; the sandbox lives on, however it ends."""
        request = CommandRequest(argv=list(self.record.entrypoint), background=True)
        try:
            await self.commands.start(request, LineRule.CUT)
        except (ApiError, StockadeError) as error:
            _log.warning("the entrypoint of %s did not start: %s", self.record.id, error)

    def touch(self) -> None:
        """Note an access through the sandbox's endpoints, which may move its expiry."""
        if not self.record.renew_seconds or self.record.expires_at is None:
            return
        later = now() + timedelta(seconds=self.record.renew_seconds)
        if later <= self.record.expires_at:
            return
        self.record = msgspec.structs.replace(self.record, expires_at=later)
        written = self._written_expiry
        if written is None or (later - written).total_seconds() >= WORTH_WRITING:
            self._note()

    def renew(self, expires_at: datetime) -> None:
        """Set the moment at which the sandbox ends."""
        if self.record.expires_at is None:
            raise ApiError(409, CONFLICT, "the sandbox has no expiry: it lives until it is deleted")
        if expires_at <= now():
            raise ApiError(400, "SANDBOX::INVALID_PARAMETER", "expiresAt: must be in the future")
        self._write(expires_at=expires_at)
        self._restart_timer()

    def patch_metadata(self, patch: dict[str, str | None]) -> None:
        """Change the sandbox's metadata by a JSON merge patch."""
        merged = create_checks.merge_metadata(self.record.metadata, patch)
        create_checks.check_size(msgspec.structs.replace(self.record, metadata=merged))
        self._write(metadata=merged)

    def set_network(self, rules: tuple[NetworkRule, ...]) -> None:
        """Note the rules of the network, which have changed."""
        self._write(network=rules)

    def pause(self) -> None:
        """Stop every process inside."""
        self._require("Running", "paused")
        self._switch("Paused", AsyncSandbox.pause, AsyncSandbox.resume)

    def resume(self) -> None:
        """Continue every process inside."""
        self._require("Paused", "resumed")
        self._switch("Running", AsyncSandbox.resume, AsyncSandbox.pause)

    def _switch(
        self, state: str, do: Callable[[AsyncSandbox], None], undo: Callable[[AsyncSandbox], None]
    ) -> None:
        """Stop or continue every process inside; undone if the record cannot say so."""
        boxes = [box for box in self.boxes if box.gate is not None]  # a session may be about to end
        for box in boxes:
            do(box)
        try:
            self._write(state=state, changed_at=now())
        except OSError:
            for box in boxes:
                undo(box)
            raise

    def require_running(self) -> None:
        """Refuse a call into a sandbox that is paused or about to end."""
        if self.record.state != "Running":
            raise ApiError(409, "SANDBOX_NOT_RUNNING", f"the sandbox is {self.record.state.lower()}")

    def _require(self, state: str, done: str) -> None:
        if self.record.state != state:
            words = f"the sandbox is {self.record.state.lower()}, so it cannot be {done}"
            raise ApiError(409, CONFLICT, words)

    async def end(self) -> None:
        """End the sandbox and remove everything of it; may be called again, and waits for the end."""
        if self._ending is None:
            self._ending = asyncio.create_task(self._end())
        await asyncio.shield(self._ending)

    async def _end(self) -> None:
        loop = asyncio.get_running_loop()
        if self.record.state == "Paused":
            with contextlib.suppress(StockadeError, OSError):  # a frozen sandbox ends all the same
                self.resume()
        self._note(state="Stopping", changed_at=now())
        if self._timer is not None:
            self._timer.cancel()
        if self.box.gate is not None:
            loop.remove_reader(self.box.gate)
        try:
            while self.closing:
                await self._attempt(self.closing.pop()())
            await self._attempt(self.box.close())
            self.tree.close()
            await loop.run_in_executor(None, remove_directory, self.root, self.record.id)
        finally:
            self.ended.set()

    async def _attempt(self, step: Awaitable[None]) -> None:
        """Do one step of the end; a failure is logged, and the next step follows."""
        try:
            await step
        except Exception:
            _log.exception("a part of sandbox %s did not end cleanly", self.record.id)

    def _box_ended(self, gate: int) -> None:
        """React to the end of the sandbox's first process, which `stockade kill` brings about."""
        asyncio.get_running_loop().remove_reader(gate)
        self.end_soon()

    def end_soon(self) -> None:
        """Begin to end the sandbox, from a callback that cannot wait for it."""
        if self._ending is None:
            self._ending = asyncio.create_task(self._end())

    async def _expire(self) -> None:
        while (at := self.record.expires_at) is None or (left := (at - now()).total_seconds()) > 0:
            await asyncio.sleep(LONGEST_SLEEP if at is None else min(left, LONGEST_SLEEP))
        self._timer = None
        await self.end()

    def _restart_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = asyncio.create_task(self._expire())

    def _write(self, **fields: Any) -> None:
        """Change the record, in the file first: what cannot be written does not happen."""
        record = msgspec.structs.replace(self.record, **fields)
        write_record(self.directory, record)
        self.record = record
        self._written_expiry = record.expires_at

    def _note(self, **fields: Any) -> None:
        """Change the record also if the disk is full: what happens anyway, and the end above all."""
        self.record = msgspec.structs.replace(self.record, **fields)
        try:
            self._write()
        except OSError as error:
            _log.warning("the record of sandbox %s cannot be written: %s", self.record.id, error.strerror)
