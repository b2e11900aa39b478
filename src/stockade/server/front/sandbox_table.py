"""The sandboxes that the server knows: those whose directories it finds, and who watches over each.

The supervisors own everything that changes; the table reads their records. It learns of a supervisor's death
from a pidfd. A sandbox whose supervisor died without removing it is `Failed` until someone deletes it, or it
expires.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os

import msgspec

from stockade.errors import StockadeError
from stockade.runs.register import register, sandbox_record
from stockade.sandbox.private_tree import remove_layers
from stockade.server.directory import DirectoryState, look_at, remove_directory, survey
from stockade.server.front.upstream import Upstream
from stockade.server.record import ServerRecord, is_id, now, open_directory, read_record
from stockade.server.wire.errors import ApiError

#: Seconds between two looks for sandboxes whose supervisor is dead and whose time is over.
HOUSEKEEPING = 30.0
#: Seconds between two looks at sandboxes that are not open yet, and the longest wait for them.
UNOPENED, SETTLING = 0.1, 10.0
NOT_FOUND = "SANDBOX_NOT_FOUND"
DEAD = "the sandbox's supervisor has died: delete the sandbox"

_log = logging.getLogger("stockade.server")


class KnownSandbox:
    """One sandbox as the server sees it."""

    def __init__(self, record: ServerRecord, directory: int, *, lives: bool) -> None:
        self.record = record
        self.directory = directory
        self.lives = lives
        self.upstream = Upstream(directory)
        self.pidfd = -1
        #: The removal of what a dead supervisor left, once it has begun.
        self.removal: asyncio.Task[None] | None = None

    def refresh(self) -> ServerRecord:
        """Read the record again, and return it with the state that the server knows of."""
        self.record = read_record(self.directory) or self.record
        if self.lives:
            return self.record
        return msgspec.structs.replace(self.record, state="Failed", reason="SUPERVISOR_DIED")

    def close(self) -> None:
        """Close the connections and descriptors."""
        self.upstream.close()
        for descriptor in (self.pidfd, self.directory):
            if descriptor >= 0:
                os.close(descriptor)
        self.pidfd = self.directory = -1


class SandboxTable:
    """All sandboxes of the server, by id."""

    def __init__(self, root: str, home: str) -> None:
        self.root = root
        #: The state directory.
        self.home = home
        self._known: dict[str, KnownSandbox] = {}
        self._housekeeper: asyncio.Task[None] | None = None
        #: Sandboxes that someone has begun to make and that are not open yet.
        self._unopened: set[str] = set()
        self._finder: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Find the sandboxes that an earlier server has left, and sweep what it left half done."""
        for id, found in survey(self.root).items():
            if not self._add_found(id, found):
                self.look_for(id)
        self._housekeeper = asyncio.create_task(self._keep_house())

    def look_for(self, id: str) -> None:
        """Add a sandbox as soon as it is open: its create was not waited for, and may have failed."""
        self._unopened.add(id)
        if self._finder is None or self._finder.done():
            self._finder = asyncio.create_task(self._find_unopened())

    def _add_found(self, id: str, found: DirectoryState) -> bool:
        """Add a sandbox that an earlier server has made; False if it is not open yet."""
        if found.record is not None:
            with contextlib.suppress(FileNotFoundError):  # it has ended meanwhile
                self._add(id, found.record, open_directory(os.path.join(self.root, id)), lives=found.lives)
        return found.record is not None

    async def _find_unopened(self) -> None:
        while self._unopened:
            await asyncio.sleep(UNOPENED)
            for id in tuple(self._unopened):
                found = look_at(self.root, id)
                if found is None or self._add_found(id, found):
                    self._unopened.discard(id)

    async def settle(self) -> None:
        """Wait until every sandbox that was not waited for is known or gone, but not for ever."""
        if self._finder is not None and not self._finder.done():
            await asyncio.wait([self._finder], timeout=SETTLING)

    def stop(self) -> None:
        """Forget all sandboxes; they live on."""
        for task in (self._housekeeper, self._finder):
            if task is not None:
                task.cancel()
        for id in list(self._known):
            self.forget(id)

    def discover(self, id: str) -> KnownSandbox:
        """Add a sandbox that has just been made."""
        directory, record = -1, None
        with contextlib.suppress(FileNotFoundError):
            directory = open_directory(os.path.join(self.root, id))
            record = read_record(directory)
        if record is None:
            if directory >= 0:
                os.close(directory)
            raise ApiError(500, "RUNTIME_ERROR", "the sandbox ended as soon as it had begun")
        return self._add(id, record, directory, lives=True)

    def find(self, owner: str, id: str) -> KnownSandbox:
        """Return a client's sandbox; those of others do not exist for it."""
        known = self._known.get(id) if is_id(id) else None
        if known is None or known.record.owner != owner:
            raise ApiError(404, NOT_FOUND, "there is no such sandbox")
        return known

    def any(self, id: str) -> KnownSandbox | None:
        """Return a sandbox, whoever owns it."""
        return self._known.get(id)

    def all(self) -> list[KnownSandbox]:
        """Return every sandbox."""
        return list(self._known.values())

    def of_owner(self, owner: str) -> list[KnownSandbox]:
        """Return a client's sandboxes, newest first."""
        mine = [one for one in self._known.values() if one.record.owner == owner]
        return sorted(mine, key=lambda one: (one.record.created_at, one.record.id), reverse=True)

    def living(self, owner: str, id: str) -> KnownSandbox:
        """Return a client's sandbox whose supervisor can answer."""
        known = self.find(owner, id)
        if not known.lives:
            raise ApiError(409, "SANDBOX_NOT_RUNNING", DEAD)
        return known

    async def remove(self, known: KnownSandbox) -> None:
        """Remove what a dead supervisor left of its sandbox; several calls at the same time are one."""
        if known.removal is None:
            known.removal = asyncio.create_task(self._remove(known))
        await asyncio.shield(known.removal)

    async def _remove(self, known: KnownSandbox) -> None:
        try:
            await asyncio.to_thread(self._clean_up, known.record.id)
        except BaseException:
            known.removal = None  # it can be tried again
            raise
        self.forget(known.record.id)

    def _clean_up(self, id: str) -> None:
        register.sweep(self.home)
        # The sweep keeps what sessions have changed; nobody can commit it any more.
        remove_layers(self.home, os.path.join(self.root, id))
        remove_directory(self.root, id)

    def _add(self, id: str, record: ServerRecord, directory: int, *, lives: bool) -> KnownSandbox:
        known = self._known[id] = KnownSandbox(record, directory, lives=lives)
        if lives:
            with contextlib.suppress(OSError):
                known.pidfd = os.pidfd_open(record.supervisor)
            if sandbox_record.born(record.supervisor) != record.supervisor_born or known.pidfd < 0:
                self._gone(id)
            else:
                asyncio.get_running_loop().add_reader(known.pidfd, self._gone, id)
        return known

    def _gone(self, id: str) -> None:
        """React to the end of a supervisor."""
        known = self._known.get(id)
        if known is None:
            return
        if known.pidfd >= 0:
            asyncio.get_running_loop().remove_reader(known.pidfd)
        known.lives = False
        known.upstream.close()
        if not os.path.lexists(os.path.join(self.root, id)):
            self.forget(id)

    def forget(self, id: str) -> None:
        """Drop a sandbox that has ended."""
        known = self._known.pop(id, None)
        if known is not None:
            if known.pidfd >= 0:
                asyncio.get_running_loop().remove_reader(known.pidfd)
            known.close()

    async def _keep_house(self) -> None:
        while True:
            for known in list(self._known.values()):
                if known.lives:
                    continue
                at = known.refresh().expires_at  # its supervisor may have moved it before it died
                if at is not None and at <= now():
                    try:
                        await self.remove(known)
                    except (OSError, StockadeError):
                        _log.exception("sandbox %s cannot be removed", known.record.id)
            await asyncio.sleep(HOUSEKEEPING)
