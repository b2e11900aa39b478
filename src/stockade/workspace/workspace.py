"""`Workspace`: the changes of a run, to be looked at, committed or discarded.

Whoever changes the layer or the host's tree holds the workspace's lock, and
so does a sandbox that lives in it; through `Sandbox.workspace` the layer is
held still instead. A commit that was interrupted is brought to an end before
anything else is done.
"""

from __future__ import annotations

import builtins
import contextlib
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import msgspec

from stockade import state
from stockade.errors import NotFoundError, PolicyError, SetupError, StockadeError
from stockade.policy.model import PROTECT
from stockade.workspace import image, journal, record
from stockade.workspace.commit import Commit, Job, Note, Progress, commit
from stockade.workspace.layers import Change, change, has_snapshots, keep_bases, note, remove
from stockade.workspace.walk import walk

if TYPE_CHECKING:
    from stockade.workspace.diff import Diff
    from stockade.workspace.files import Files
    from stockade.workspace.snapshots import Snapshot

#: Keeps everybody else off a workspace meanwhile.
Alone = Callable[[], AbstractContextManager[record.Hold]]
#: How deep a layer is looked at. Each directory is reached from the top, so it costs as much as it is deep.
DEEPEST = 1000


class Workspace:
    """The changes of one run, kept aside from the host's tree.

    >>> import stockade, tempfile
    >>> with tempfile.TemporaryDirectory(prefix="tree-") as tree:
    ...     result = stockade.run(["touch", "new"], stockade.Policy(workspace=tree))
    ...     workspace = stockade.Workspace.open(result.workspace)
    ...     [change.path for change in workspace.changes()]
    ...     done = workspace.commit()
    ...     os.listdir(tree), done.closed
    ['new']
    (['new'], True)
    """

    def __init__(self, layer: str, alone: Alone | None = None) -> None:
        """The workspace of a layer; `alone` keeps others off it, instead of its lock."""
        self.id = os.path.basename(layer)
        self.layer = layer
        self.record = record.read(layer)
        self.path = self.record.tree
        self.recovered = ""
        #: Not kept alive here: whoever lets go of it gives the workspace back.
        self._files: weakref.ref[Files] | None = None
        self._alone: Alone = alone or self._at_rest
        #: For whoever only reads: another process's sandbox goes on working meanwhile.
        self._steady: Alone = alone or (lambda: contextlib.nullcontext(record.Hold()))

    @classmethod
    def open(cls, id: str, home: str | None = None) -> Workspace:
        """The workspace with that id, or the only one whose id begins so."""
        names = _names(home)
        found = [name for name in names if name == id] or [
            name for name in names if id and name.startswith(id)
        ]
        if len(found) != 1:
            several = f"{id!r} begins the id of {len(found)} workspaces: {', '.join(found)}"
            raise NotFoundError(
                several if found else f"there is no workspace {id!r}",
                hint="`stockade workspaces` lists them",
            )
        workspace = cls(os.path.join(_place(home), found[0]))
        workspace.recover()
        return workspace

    @classmethod
    def list(cls, home: str | None = None) -> builtins.list[Workspace]:
        """Every workspace that is kept, the last changed one first."""
        found = []
        for name in _names(home):
            # One that is being removed, or whose record is damaged, can only be told by its name.
            with contextlib.suppress(SetupError, OSError):
                workspace = cls(os.path.join(_place(home), name))
                found.append((workspace.changed, workspace))
        return [workspace for _, workspace in sorted(found, key=lambda pair: pair[0], reverse=True)]

    @property
    def changed(self) -> float:
        """When something last changed at the top of it, in seconds; a sandbox opens and ends there."""
        return max(os.stat(f"{self.layer}{name}").st_mtime for name in ("", "/upper"))

    def in_use(self) -> bool:
        """Whether a sandbox or a commit has it now."""
        try:
            with record.held(self.layer, self.id):
                return False
        except SetupError:
            return True

    @contextlib.contextmanager
    def _at_rest(self) -> Iterator[record.Hold]:
        """Nobody else has it, and what still dies in it after its supervisor was killed is dead."""
        from stockade.sandbox import register

        with record.held(self.layer, self.id) as hold:
            register.put_to_rest(os.path.dirname(os.path.dirname(self.layer)), self.id)
            yield hold

    def recover(self) -> str:
        """Bring an interrupted commit to an end; the result says to which."""
        if image.is_left(self.layer):
            # A sandbox that lives in it uses the image.
            with contextlib.suppress(record.InUseError), self._alone() as hold:
                self._recover(hold)
        if journal.read(self.layer) is not None:
            with self._alone() as hold:
                self._recover(hold)
        return self.recovered

    def _recover(self, hold: record.Hold) -> None:
        if not hold.living:
            image.recover(self.layer)
        if journal.read(self.layer) is None:
            return
        with self._tree() as root, self._trying("recovered"):
            self.recovered = journal.recover(self.layer, root) or self.recovered

    @property
    def files(self) -> Files:
        """The files in it as a sandbox would see them, to be read and written without one.

        Nobody else has the workspace until they are closed: `with workspace.files as files: ...`
        """
        from stockade.sandbox.continued import files_of

        known = None if self._files is None else self._files()
        if known is None or known.is_closed:
            owner = os.getpid()
            known = files_of(self, lambda: self._note() if os.getpid() == owner else None)
            self._files = weakref.ref(known)
        return known

    def _note(self) -> None:
        """Write down what the host has where something was changed without a sandbox."""
        with contextlib.suppress(StockadeError), self._job() as job:
            note(self.layer, job.walk)
            keep_bases(self.layer, job.walk, job.root)

    def changes(self) -> builtins.list[Change]:
        """What differs from the host's tree."""
        with self._steady(), self._job() as job:
            return sorted(map(change, job.walk.found), key=lambda one: one.path)

    def diff(self, paths: Sequence[str] | None = None, *, patch: bool = False) -> Diff:
        """What differs, file by file and line by line; with `patch` also as `git apply` takes it."""
        from stockade.workspace.diff import compare

        with self._steady(), self._job() as job, self._trying("compared"):
            return compare(job.root, job.upper, job.walk, self.relative(paths), patch=patch)

    def commit(
        self,
        paths: Sequence[str] | None = None,
        *,
        force: Sequence[str] = (),
        allow_exec_config: bool = False,
        protect: Sequence[str] | None = None,
        keep: bool = False,
        merge: bool = False,
        progress: Progress | None = None,
    ) -> Commit:
        """Take the changes, or those at and below some paths, over into the host's tree.

        Held back are paths that the policy protects (or those given), files that the host's tools run
        or obey unless `allow_exec_config`, and what is neither a file nor a directory nor a link. A
        path of the host that has changed since is a `ConflictError` and nothing is done, unless `force`
        names it; with `merge`, changes to different lines of a text are taken over together. Killed at
        any moment, the tree is as before or as after. A workspace of which nothing is left is removed,
        unless `keep`, or it has snapshots, or a sandbox lives in it.
        """
        if protect is None:
            recorded = self.record.protect
            protect = PROTECT if recorded is None else [os.fsdecode(path) for path in recorded]
        with self._alone() as hold:
            living = hold.living
            # What is merged is written to the layer first, which a living overlay does not expect.
            self._refuse(living and merge, "merged")
            self._recover(hold)
            with self._job() as job, self._trying("committed"):
                done = commit(
                    job,
                    self.relative(paths),
                    force=tuple(self.relative(force) or ()),
                    protect=protect,
                    allow_exec_config=allow_exec_config,
                    merge=merge,
                    progress=progress,
                    sure=hold.sure,
                )
                missing = [
                    Note(path, f"was not kept when its run ended: {why}")
                    for path, why in record.lost(self.layer)
                ]
                done = msgspec.structs.replace(done, notes=(*done.notes, *missing))
                if done.closed and (keep or living or has_snapshots(self.layer)):
                    return msgspec.structs.replace(done, closed=False)
                if done.closed:
                    remove(self.layer)
                return done

    def discard(self) -> None:
        """Forget every change and remove the workspace."""
        with self._alone() as hold, self._trying("discarded"):
            self._refuse(hold.living, "discarded")
            if os.path.isdir(self.path):
                self._recover(hold)
            remove(self.layer)

    def snapshot(self, name: str | None = None, *, prefix: str = "") -> Snapshot:
        """Keep the changes as they are now, to come back to; without a name it gets the next number.

        It costs what changed, or less where the file system can share blocks.
        """
        from stockade.workspace import snapshots

        with self._alone() as hold, self._trying("copied"):
            self._recover(hold)
            return snapshots.take(self.layer, name, prefix, sure=hold.sure)

    def snapshots(self) -> builtins.list[Snapshot]:
        """Every snapshot, the oldest first."""
        from stockade.workspace import snapshots

        with self._trying("listed"):
            return snapshots.known(self.layer)

    def restore(self, name: str) -> None:
        """Put the changes back as they were when the snapshot was taken. Those since then are gone."""
        from stockade.workspace import snapshots

        with self._alone() as hold, self._trying("restored"):
            self._refuse(hold.living, "restored")
            self._recover(hold)
            snapshots.restore(self.layer, name)

    def drop(self, name: str) -> None:
        """Forget a snapshot."""
        from stockade.workspace import snapshots

        with self._alone(), self._trying("changed"):
            snapshots.drop(self.layer, name)

    def fork(self, n: int = 1) -> builtins.list[Workspace]:
        """Workspaces of their own that begin with the same changes; snapshots stay with this one."""
        from stockade.workspace import snapshots

        with self._alone() as hold, self._trying("copied"):
            self._recover(hold)
            place = os.path.dirname(self.layer)
            return [Workspace(f"{place}/{id}") for id in snapshots.fork(self.layer, n, sure=hold.sure)]

    def merge(self, *others: Workspace) -> builtins.list[Change]:
        """Take the changes of other workspaces of the same tree over; the result are those that were new.

        What two of them changed to different results is a `ConflictError`, and nothing is done. The
        others stay as they are.
        """
        from stockade.workspace import merge

        with contextlib.ExitStack() as stack:
            holds = [stack.enter_context(self._alone())]
            self._refuse(holds[0].living, "merged into")
            for other in others:
                merge.check_other(self, other)
                holds.append(stack.enter_context(other._alone()))
            with self._trying("merged"):
                for one, hold in zip((self, *others), holds, strict=True):
                    one._recover(hold)
                jobs = [stack.enter_context(one._job()) for one in (self, *others)]
                return merge.merge(jobs[0], jobs[1:], [hold.sure for hold in holds])

    def _refuse(self, living: bool, what: str) -> None:
        if living:
            raise SetupError(
                f"workspace {self.id} cannot be {what} while a sandbox lives in it",
                stage="workspace",
                hint="close the sandbox first",
            )

    def relative(self, paths: Sequence[str] | None) -> builtins.list[str] | None:
        """Paths as the workspace counts them; absolute ones must be in it."""
        return None if paths is None else [self._relative(os.fspath(path)) for path in paths]

    def _relative(self, path: str) -> str:
        inside = os.path.relpath(path, self.path) if path.startswith("/") else os.path.normpath(path)
        if inside.split("/")[0] == "..":
            raise PolicyError(f"{path!r} is not in the workspace {self.path}", hint="name paths below it")
        return "" if inside == "." else inside

    @contextlib.contextmanager
    def _tree(self) -> Iterator[int]:
        try:
            root = os.open(self.path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise NotFoundError(
                f"the tree of workspace {self.id}, {self.path}, cannot be opened: {error.strerror}",
                hint=f"its changes are in {self.layer}/upper; `stockade discard {self.id}` forgets them",
            ) from None
        try:
            # Whoever could put a link on the way must not choose where changes go.
            if os.readlink(f"/proc/self/fd/{root}") != self.path:
                raise NotFoundError(f"a link on the way to {self.path} leads elsewhere since it was opened")
            yield root
        finally:
            os.close(root)

    @contextlib.contextmanager
    def _job(self) -> Iterator[Job]:
        with self._tree() as root, self._trying("listed"):
            upper = os.open(f"{self.layer}/upper", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                seen = record.seen(self.layer)
                found = walk(upper, root, deepest=DEEPEST)
                yield Job(self.id, self.layer, self.path, root, upper, self.record, seen, found)
            finally:
                os.close(upper)

    @contextlib.contextmanager
    def _trying(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            about = f" ({error.filename!r})" if error.filename is not None else ""
            raise SetupError(
                f"workspace {self.id} cannot be {what}: {error.strerror}{about}",
                stage="workspace",
                errno=error.errno or 0,
                hint=f"its changes are kept in {self.layer}",
            ) from error


def _place(home: str | None) -> str:
    if home is None:
        from stockade.policy import Caller

        caller = Caller.current()
        home = state.state_dir(caller.environ, caller.home)
    return os.path.join(home, "workspaces")


def _names(home: str | None) -> builtins.list[str]:
    place = _place(home)
    try:
        state.check(os.path.dirname(place))
        return sorted(name for name in os.listdir(place) if not name.startswith("."))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise state.unusable(place, error) from None
