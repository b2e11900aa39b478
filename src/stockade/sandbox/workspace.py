"""`Workspace`: the changes of a run, to read, commit or discard.

A process that changes the layer or the host's tree holds the workspace's lock,
and so does a sandbox that lives in the workspace; `Sandbox.workspace` freezes
the sandbox instead. An interrupted commit is recovered before anything else.
"""

from __future__ import annotations

import builtins
import contextlib
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import msgspec

import stockade
from stockade import state
from stockade.errors import ConflictError, NotFoundError, PolicyError, SetupError, StockadeError
from stockade.result import Change
from stockade.state.spool import spool
from stockade.workspace import disk_image, journal, metadata
from stockade.workspace.commit import Commit, CommitJob, Note, Progress, commit
from stockade.workspace.diff.layer_walk import LayerWalk, WalkBudget, changed, walk
from stockade.workspace.overlay import Changes, change, has_snapshots, keep_bases, note, remove

TYPE_CHECKING = False
if TYPE_CHECKING:
    from stockade.workspace.diff.change_details import ChangeDetail, Mark

#: Opens a context in which no other process changes the workspace.
Alone = Callable[[], AbstractContextManager[metadata.WorkspaceLock]]
#: How deep a walk goes. It reaches each directory from the top, so the cost grows with the depth.
DEEPEST = 1000


class Workspace:
    """The changes of one run, kept apart from the host's tree.

    >>> import stockade, tempfile
    >>> with tempfile.TemporaryDirectory(prefix="tree-") as tree:
    ...     result = stockade.run(["touch", "new"], stockade.Policy(workspace=tree))
    ...     workspace = stockade.Workspace.open(result.workspace_id)
    ...     [change.path for change in workspace.changes()]
    ...     done = workspace.commit()
    ...     os.listdir(tree), done.closed
    ['new']
    (['new'], True)
    """

    def __init__(self, layer: str, alone: Alone | None = None) -> None:
        """Open the workspace of a layer; `alone` replaces its lock."""
        self.id = os.path.basename(layer)
        self.layer = layer
        self.record = metadata.read(layer)
        self.path = self.record.tree
        self.recovered = ""
        #: A weak reference: when the user drops the files, the workspace is free again.
        self._files: weakref.ref[stockade.workspace.Files] | None = None
        self._alone: Alone = alone or self._at_rest
        #: For reading only: a sandbox of another process goes on working meanwhile.
        self._steady: Alone = alone or (lambda: contextlib.nullcontext(metadata.WorkspaceLock()))
        self._looked_at: Alone = alone or self._at_rest_or_in_use

    def __repr__(self) -> str:
        return f"<Workspace {self.id} of {self.path}>"

    @classmethod
    def open(cls, id: str, home: str | None = None) -> Workspace:
        """Open the workspace with that id, or the only one whose id begins with it."""
        from stockade.state.ids import SHORTENED, matching

        found = matching(id, names(home))
        if len(found) != 1:
            several = f"{id!r} begins the id of {len(found)} workspaces: {', '.join(found)}"
            raise NotFoundError(
                several if found else f"there is no workspace {id!r}",
                hint=f"`stockade workspaces` lists them; {SHORTENED}",
            )
        workspace = cls(os.path.join(_place(home), found[0]))
        workspace.recover()
        return workspace

    @classmethod
    def list(cls, home: str | None = None) -> builtins.list[Workspace]:
        """Return every kept workspace, the last changed one first."""
        found = []
        for name in names(home):
            # Skip a workspace that is being removed or whose record is damaged; `names` still lists it.
            with contextlib.suppress(SetupError, OSError):
                workspace = cls(os.path.join(_place(home), name))
                found.append((workspace.changed, workspace))
        return [workspace for _, workspace in sorted(found, key=lambda pair: pair[0], reverse=True)]

    @property
    def changed(self) -> float:
        """When its top directories last changed, in seconds; a sandbox changes them at its start and end."""
        return max(os.stat(f"{self.layer}{name}").st_mtime for name in ("", "/upper"))

    def in_use(self) -> bool:
        """Whether a sandbox or a commit uses it now."""
        try:
            with metadata.held(self.layer, self.id, shared=True):
                return False
        except SetupError:
            return True

    @contextlib.contextmanager
    def _at_rest(self, *, shared: bool = False) -> Iterator[metadata.WorkspaceLock]:
        """Hold the lock, and wait until a sandbox whose supervisor was killed is really dead."""
        from stockade.runs.register import register

        with metadata.held(self.layer, self.id, shared=shared) as hold:
            register.put_to_rest(os.path.dirname(os.path.dirname(self.layer)), self.id)
            yield hold

    @contextlib.contextmanager
    def _at_rest_or_in_use(self) -> Iterator[metadata.WorkspaceLock]:
        """Hold a shared lock; while a sandbox or a commit has the workspace, yield one marked `living`."""
        with contextlib.ExitStack() as stack:
            try:
                hold = stack.enter_context(self._at_rest(shared=True))
            except NotFoundError:
                raise
            # It is in use, or the register cannot be swept, for example on a read-only disk.
            except (SetupError, OSError):
                hold = metadata.WorkspaceLock(living=True)
            yield hold

    def recover(self) -> str:
        """Finish or undo an interrupted commit, and return which."""
        if disk_image.is_left(self.layer):
            # A sandbox that lives in the workspace uses the image; then leave it.
            with contextlib.suppress(metadata.InUseError), self._alone() as hold:
                self._recover(hold)
        if journal.read(self.layer) is not None:
            with self._alone() as hold:
                self._recover(hold)
        return self.recovered

    def _recover(self, hold: metadata.WorkspaceLock) -> None:
        if not hold.living:
            disk_image.recover(self.layer)
        if journal.read(self.layer) is None:
            return
        with self._tree() as root, self._trying("recovered"):
            self.recovered = journal.recover(self.layer, root) or self.recovered

    @property
    def files(self) -> stockade.workspace.Files:
        """The files as a sandbox would see them, to read and write without one.

        They lock the workspace until you close them: `with workspace.files as files: ...`
        """
        from stockade.sandbox.workspace_lifecycle import files_of

        known = None if self._files is None else self._files()
        if known is None or known.is_closed:
            owner = os.getpid()
            known = files_of(self, lambda: self._note() if os.getpid() == owner else None)
            self._files = weakref.ref(known)
        return known

    def _note(self) -> None:
        """Record the host's state of paths that were changed without a sandbox."""
        with contextlib.suppress(StockadeError), self._job() as job:
            note(self.layer, job.walk)
            keep_bases(self.layer, job.walk.found, job.root)

    def changes(self) -> Changes:
        """List what differs from the host's tree; the list's `cut` says if there is more than it holds."""
        with self._steady(), self._job() as job:
            found = Changes(map(change, job.walk.found))
            found.sort(key=lambda one: one.path)
            found.cut = job.walk.cut
            return found

    def count_changes(self) -> tuple[int, str]:
        """Count the changes without keeping a list; also return why the count is incomplete, or ""."""
        budget = WalkBudget()
        with self._steady(), self._trees() as (root, upper):
            return sum(1 for _ in changed(upper, root, budget, deepest=DEEPEST)), budget.cut

    def diff(self, paths: Sequence[str] | None = None, *, patch: bool = False) -> stockade.workspace.Diff:
        """Compare file by file and line by line; with `patch` also make a patch for `git apply`."""
        from stockade.workspace.diff.diff import compare

        wanted = self.relative(paths)
        with (
            self._looked_at() as hold,
            self._job(None if hold.living else metadata.epoch(self.layer, begin=True), wanted) as job,
            self._trying("compared"),
        ):
            screening = job.screening
            held = screening.refused(self.record.rules, nearby=True)
            runs = screening.runs
            found = compare(job.root, job.upper, job.walk, wanted, held=held, runs=runs, patch=patch)
            return msgspec.structs.replace(found, digest=job.digest)

    def commit(
        self,
        paths: Sequence[str] | None = None,
        *,
        force: Sequence[str] = (),
        allow_exec_config: bool = False,
        allow: Sequence[str] = (),
        protect: Sequence[str] | None = None,
        keep: bool = False,
        merge: bool = False,
        expect: str | None = None,
        progress: Progress | None = None,
    ) -> Commit:
        """Commit the changes, or those at and below some paths, to the host's tree.

        It holds back paths that the policy protects (or `protect`), files that the host's tools run or
        obey unless `allow_exec_config` or a pattern of `allow` covers them, and anything that is not a
        file, a directory or a link. If a path of the host has changed since the run, a `ConflictError` is
        raised and nothing is done, unless `force` names the path; with `merge`, changes to different lines
        of a text are combined. With `expect`, the `digest` of a diff, it also fails if the workspace has
        changed since that diff. If the commit is killed at any moment, the tree is as before or as after.
        A workspace with no changes left is removed, unless `keep` is set, it has snapshots, or a sandbox
        lives in it.
        """
        rules = self.record.rules
        rules = msgspec.structs.replace(
            rules,
            protect=rules.protect if protect is None else protect,
            allow=(*rules.allow, *(self.relative(allow) or ())),
            allow_exec_config=allow_exec_config or rules.allow_exec_config,
        )
        if expect == "":
            raise PolicyError(
                'expect = "": the diff has no digest, because a sandbox used the workspace when it was made',
                hint="close the sandbox and make another diff",
            )
        with self._alone() as hold:
            living = hold.living
            self._refuse(living and expect is not None, "compared with an earlier diff")
            # A merge writes to the layer first, and a mounted overlay does not expect changes below it.
            self._refuse(living and merge, "merged")
            self._recover(hold)
            wanted = self.relative(paths)
            with (
                self._job(None if expect is None else metadata.epoch(self.layer), wanted) as job,
                self._trying("committed"),
            ):
                if job.walk.cut:
                    raise too_much_to_commit(self.id, job.walk.cut)
                if expect not in (None, job.digest):
                    raise ConflictError(
                        f"workspace {self.id} has changed since `stockade diff` showed it",
                        hint=f"`stockade diff {self.id}` shows it as it is now; "
                        f"`stockade commit {self.id} --unseen` commits it all the same",
                    )
                done = commit(
                    job,
                    wanted,
                    force=tuple(self.relative(force) or ()),
                    rules=rules,
                    merge=merge,
                    progress=progress,
                    sure=hold.sure,
                )
                if missing := metadata.lost_changes(self.layer):
                    notes = spool(Note)
                    notes.extend(done.notes)
                    notes.extend(
                        Note(path, f"was not kept when its run ended: {why}") for path, why in missing
                    )
                    done = msgspec.structs.replace(done, notes=notes.settled())
                if done.closed and (keep or living or has_snapshots(self.layer)):
                    return msgspec.structs.replace(done, closed=False)
                if done.closed:
                    remove(self.layer)
                return done

    def discard(self) -> None:
        """Discard every change and remove the workspace."""
        with self._alone() as hold, self._trying("discarded"):
            self._refuse(hold.living, "discarded")
            if os.path.isdir(self.path):
                self._recover(hold)
            remove(self.layer)

    def snapshot(self, name: str | None = None, *, prefix: str = "") -> stockade.workspace.Snapshot:
        """Save the present changes to come back to; without a name the snapshot gets the next number.

        It copies what changed, or less if the file system can share blocks.
        """
        from stockade.workspace import snapshots

        with self._alone() as hold, self._trying("copied"):
            self._recover(hold)
            return snapshots.take(self.layer, name, prefix, sure=hold.sure)

    def snapshots(self) -> builtins.list[stockade.workspace.Snapshot]:
        """Return every snapshot, the oldest first."""
        from stockade.workspace import snapshots

        with self._trying("listed"):
            return snapshots.known(self.layer)

    def restore(self, name: str) -> None:
        """Go back to the changes of a snapshot. Later changes are lost."""
        from stockade.workspace import snapshots

        with self._alone() as hold, self._trying("restored"):
            self._refuse(hold.living, "restored")
            self._recover(hold)
            snapshots.restore(self.layer, name)

    def drop(self, name: str) -> None:
        """Remove a snapshot."""
        from stockade.workspace import snapshots

        with self._alone(), self._trying("changed"):
            snapshots.drop(self.layer, name)

    def fork(self, n: int = 1) -> builtins.list[Workspace]:
        """Make `n` new workspaces that begin with the same changes; snapshots stay with this one."""
        from stockade.workspace import snapshots

        with self._alone() as hold, self._trying("copied"):
            self._recover(hold)
            place = os.path.dirname(self.layer)
            return [Workspace(f"{place}/{id}") for id in snapshots.fork(self.layer, n, sure=hold.sure)]

    def merge(self, *others: Workspace) -> builtins.list[Change]:
        """Merge the changes of other workspaces of the same tree into this one; return the new ones.

        If two of them changed a path differently, a `ConflictError` is raised and nothing is done. The
        others stay as they are.
        """
        from stockade.workspace.merge import merge

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
                for one, job in zip((self, *others), jobs, strict=True):
                    if job.walk.cut:
                        forget = f"`stockade discard {one.id}` removes it"
                        raise _too_much(one.id, "merged", job.walk.cut, forget)
                return merge.merge(jobs[0], jobs[1:], [hold.sure for hold in holds])

    def rebase(self) -> builtins.list[str]:
        """Combine the changes with those that the host's text files have had since; return these files.

        As `commit` does it with `merge`, but nothing reaches the host. A `ConflictError` is raised if both
        sides changed the same lines.
        """
        with self._alone() as hold:
            self._refuse(hold.living, "rebased")
            self._recover(hold)
            with self._job() as job, self._trying("rebased"):
                if job.walk.cut:
                    raise too_much_to_commit(self.id, job.walk.cut)
                chosen = job.choose(None, self.record.rules, job.screening)
                job.check(chosen, (), merge=True)
                return sorted(one.path for one in chosen.replaced.values())

    def revert(self, matches: Callable[[str], bool]) -> builtins.list[Change]:
        """Take back the changes at the paths for which `matches` is true; return them.

        These paths, relative to the workspace, are then as the host has them, whatever the program did there
        or to a directory above.
        """
        from stockade.workspace.merge.revert import revert

        with self._alone() as hold:
            self._refuse(hold.living, "reverted")
            self._recover(hold)
            with self._job() as job, self._trying("reverted"):
                if job.walk.cut:
                    forget = f"`stockade discard {self.id}` removes it"
                    raise _too_much(self.id, "reverted", job.walk.cut, forget)
                return revert(job, matches, hold.sure)

    def compact(self) -> None:
        """Forget what the program wrote and the host has by now: later changes there are the host's alone."""
        from stockade.workspace.merge.revert import rebuild

        with self._alone() as hold:
            self._refuse(hold.living, "compacted")
            self._recover(hold)
            with self._job() as job, self._trying("compacted"):
                if not job.walk.cut:
                    rebuild(job, list(job.walk.found), hold.sure)

    def _refuse(self, living: bool, what: str) -> None:
        if living:
            raise SetupError(
                f"workspace {self.id} cannot be {what} while a sandbox lives in it",
                stage="workspace",
                hint="close the sandbox first",
            )

    def relative(self, paths: Sequence[str] | None) -> builtins.list[str] | None:
        """Return paths relative to the workspace; absolute ones must lie in it."""
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
                hint=f"its changes are in {self.layer}/upper; `stockade discard {self.id}` removes them",
            ) from None
        try:
            # A process that can replace a part of the path with a link must not choose where changes go.
            if os.readlink(f"/proc/self/fd/{root}") != self.path:
                raise NotFoundError(
                    f"the path {self.path} of workspace {self.id} now leads through a link to another place",
                    hint="remove the link, or move the tree back",
                )
            yield root
        finally:
            os.close(root)

    @contextlib.contextmanager
    def _job(self, epoch: str | None = None, paths: Sequence[str] | None = None) -> Iterator[CommitJob]:
        """Yield the changes and what is needed to work on them; with an epoch also the layer's digest.

        If they are too many for one list, yield those at and below the paths.
        """
        with self._trees() as (root, upper):
            found, digest = self._walk(upper, root, epoch, None)
            if found.cut and paths and "" not in paths:
                found, digest = self._walk(upper, root, epoch, paths)
            seen = metadata.seen(self.layer)
            yield CommitJob(self.id, self.layer, self.path, root, upper, self.record, seen, found, digest)

    @contextlib.contextmanager
    def _trees(self) -> Iterator[tuple[int, int]]:
        """Open the host's tree and the layer's, and yield their descriptors."""
        with self._tree() as root, self._trying("listed"):
            upper = os.open(f"{self.layer}/upper", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                yield root, upper
            finally:
                os.close(upper)

    def _walk(
        self, upper: int, root: int, epoch: str | None, paths: Sequence[str] | None
    ) -> tuple[LayerWalk, str]:
        """Return the changes and, with an epoch, the digest of what the walk read."""
        if epoch is None:
            return walk(upper, root, deepest=DEEPEST, paths=paths), ""
        from stockade.workspace.fingerprint import Fingerprint

        mark = Fingerprint(upper, epoch)
        return walk(upper, root, deepest=DEEPEST, paths=paths, fingerprint=mark), mark.digest()

    @contextlib.contextmanager
    def _trying(self, what: str) -> Iterator[None]:
        try:
            yield
        except StockadeError:
            raise
        except OSError as error:
            about = f" ({error.filename!r})" if error.filename is not None else ""
            raise SetupError(
                f"workspace {self.id} cannot be {what}: {error.strerror}{about}",
                stage="workspace",
                errno=error.errno or 0,
                hint=f"its changes are kept in {self.layer}",
            ) from error


def details_of(workspace: Workspace) -> list[ChangeDetail]:
    """List the changes with their sizes, and what a commit does with each; sorted by path."""
    from stockade.workspace.diff.change_details import details

    with workspace._steady(), workspace._job() as job, workspace._trying("listed"):
        screening = job.screening
        verdicts = screening.refused(workspace.record.rules, nearby=True)
        return sorted(details(job.walk.found, verdicts, screening), key=lambda one: one.path)


def marks_of(workspace: Workspace) -> dict[str, Mark]:
    """Return a mark for each change; it differs once a run has written or replaced the path."""
    from stockade.workspace.diff.change_details import mark

    with workspace._steady(), workspace._trees() as (root, upper):
        found = changed(upper, root, WalkBudget(), deepest=DEEPEST)
        return {one.path or ".": mark(one.after) for one in found}


@contextlib.contextmanager
def steady_upper(workspace: Workspace) -> Iterator[int]:
    """Yield the top directory of the layer; a sandbox of this process that lives in it is frozen."""
    with workspace._steady(), workspace._trees() as (_, upper):
        yield upper


@contextlib.contextmanager
def frozen(workspace: Workspace) -> Iterator[Workspace]:
    """Freeze the sandbox that lives in a workspace, and yield the workspace for a child of this process.

    The child cannot freeze the sandbox itself, and need not.
    """
    with workspace._alone() as hold:
        lock = metadata.WorkspaceLock(living=hold.living)
        yield Workspace(workspace.layer, lambda: contextlib.nullcontext(lock))


def too_much_to_commit(id: str, cut: str) -> SetupError:
    """Return the error for a workspace with too many changes to list: what cannot be shown never lands."""
    parts = f"`stockade diff {id} PATH` shows a part of them, `stockade commit {id} PATH` commits it"
    return _too_much(id, "committed", cut, f"{parts}; `stockade discard {id}` removes everything")


def _too_much(id: str, what: str, cut: str, hint: str) -> SetupError:
    words = f"workspace {id} has more changes than can be {what} at once: {cut}"
    return SetupError(words, stage="workspace", hint=hint)


def _place(home: str | None) -> str:
    if home is None:
        from stockade.linux.user import Caller

        caller = Caller.current()
        home = state.state_dir(caller.environ, caller.home)
    return os.path.join(home, "workspaces")


def names(home: str | None = None) -> builtins.list[str]:
    """Return every id, also of damaged workspaces."""
    place = _place(home)
    try:
        state.check(os.path.dirname(place))
        return sorted(name for name in os.listdir(place) if not name.startswith("."))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise state.unusable(place, error) from None
