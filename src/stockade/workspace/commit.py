"""Taking the changes of a workspace over into the host's tree.

Nothing of the layer itself ever appears in the tree: whoever still holds a
descriptor of a file in it could write to it there. Every file is copied into
a new inode, which lies ready in a staging directory until all of them do
(`journal` then moves them), without set-uid bits, leave for others to write,
foreign attributes and anything that is neither a file nor a directory nor a
link. Names of one file become names of one file.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Sequence

import msgspec

from stockade.errors import ConflictError, NotFoundError, SetupError, one_line
from stockade.policy.mounted import mounted_below
from stockade.workspace import bases, copying, descend, journal
from stockade.workspace.caution import Held, covers, held, leads_out
from stockade.workspace.conflicts import Judge
from stockade.workspace.descend import parents
from stockade.workspace.journal import Aside, Journal, Make, Put, Settle, Unlock, identity
from stockade.workspace.layers import Change, change
from stockade.workspace.rebase import Merge, lay, merges
from stockade.workspace.record import Record, Seen
from stockade.workspace.walk import FOREIGN, Found, Walk, counts

#: Told how many files of how many are staged.
Progress = Callable[[int, int], None]
#: Attributes that the kernel's overlay writes for itself.
OWN = tuple(f"user.overlay.{name}" for name in ("origin", "impure", "opaque", "nlink", "uuid", "upper"))
#: Group's and others' leave to write.
WRITERS = stat.S_IWGRP | stat.S_IWOTH


class Note(msgspec.Struct, frozen=True):
    """Something about a path that was not taken over as it was."""

    path: str
    what: str


class Commit(msgspec.Struct, frozen=True, kw_only=True):
    """What a commit did: the changes that are now the host's, and what is not."""

    workspace: str
    changes: tuple[Change, ...] = ()
    held: tuple[Held, ...] = ()
    notes: tuple[Note, ...] = ()
    closed: bool = False
    """Whether nothing was left, and the workspace is gone."""


class Job(msgspec.Struct):
    """One commit, from the choice of the changes to the journal."""

    id: str
    layer: str
    tree: str
    root: int
    upper: int
    record: Record
    seen: Seen
    walk: Walk
    notes: list[Note] = []
    held: list[Held] = []
    #: By the number of a file that was copied, and its mode there: where the copy lies.
    _names: dict[tuple[int, int], str] = {}

    def choose(self, paths: Sequence[str] | None, *, protect: Sequence[str], allow: bool) -> list[Found]:
        """The changes at and below the paths and the new directories they need, without what is held."""
        wanted = [one for one in self.walk.found if not self._moot(one)]
        for one in self.walk.found:
            if self._moot(one) and (paths is None or any(covers(path, one.path) for path in paths)):
                self._mode(one)
        if paths is not None:
            for path in paths:
                if not any(covers(path, one.path) for one in wanted):
                    raise NotFoundError(
                        f"{path!r} has not changed in workspace {self.id}",
                        hint=f"`stockade diff --name-only {self.id}` lists what has",
                    )
            named = {one.path for one in wanted if any(covers(path, one.path) for path in paths)}
            needed = {above for path in named for above in parents(path)}
            wanted = [
                one
                for one in wanted
                if one.path in named or (one.path in needed and (one.kind == "added" or "type" in one.what))
            ]
        return self._without_held(wanted, protect, allow)

    def _without_held(self, wanted: list[Found], protect: Sequence[str], allow: bool) -> list[Found]:
        refused: dict[str, Held] = {}
        for one in wanted:
            above = next((refused[path] for path in parents(one.path) if path in refused), None)
            if above is not None:
                refused[one.path] = msgspec.structs.replace(above, path=one.path)
                continue
            reason = held(one, protect, allow_exec_config=allow, repository=self._repository)
            if reason is not None:
                refused[one.path] = reason
        self.held += refused.values()
        left = [one for one in wanted if one.path not in refused]
        # A new directory that would be empty only because of what is held back is left out as well.
        hollow = {above for path in refused for above in parents(path)}
        kept = (one for one in left if not _new_directory(one) or one.path not in hollow)
        full = {above for one in kept for above in parents(one.path)}
        empty = {one.path for one in left if _new_directory(one)} & hollow - full
        return [one for one in left if one.path not in empty]

    def _repository(self, path: str) -> bool:
        for tree, own in ((self.upper, True), (self.root, False)):
            with contextlib.suppress(OSError), descend.listed(tree, path, own=own) as directory:
                if descend.look(directory, "HEAD") is not None:
                    return True
        return False

    def check(self, chosen: list[Found], force: tuple[str, ...], *, merge: bool) -> list[Found]:
        """Refuse what cannot be done before anything is; with `merge`, the changes are put on the host's."""
        inner = [point.removeprefix(self.tree).lstrip("/") for point in mounted_below(self.tree)]
        for one in chosen:
            if over := [at for at in inner if covers(at, one.path) or (_takes(one) and covers(one.path, at))]:
                raise SetupError(
                    f"{one.path} is behind what is mounted at {self.tree}/{over[0]}",
                    stage="commit",
                    hint=f"`umount {self.tree}/{over[0]}` first, or leave the path out: the change is not of "
                    "what is mounted there",
                )
            if one.deep:
                raise SetupError(
                    f"{one.path[:80]}... has directories too deep in one another to be committed",
                    stage="commit",
                    hint="commit what is beside it by naming paths",
                )
        judge = Judge(self.root, self.record, self.seen)
        found = judge.conflicts(chosen, self.walk, force)
        merged: list[Merge] = []
        if found and merge:
            merged, found = merges(self.layer, self.root, self.upper, chosen, found)
        if found:
            raise ConflictError(
                "the host's files are not what the program saw:\n"
                + "\n".join(f"{one_line(one.path)}: {one.reason}" for one in found),
                paths=tuple(one.path for one in found),
                hint="compare them; --force PATH overwrites what the host has there"
                + ("" if merge else ", --merge puts changes to different lines together"),
            )
        self.notes += [Note(one.found.path, "merged with what the host has changed in it") for one in merged]
        laid = {one.found.path: lay(self.layer, self.upper, one) for one in merged}
        return [laid.get(one.path, one) for one in chosen]

    def plan(self, chosen: list[Found]) -> list[journal.Step]:
        """The steps, in an order in which each can be taken when those before it are."""
        steps: list[journal.Step] = []
        settle: dict[str, Settle] = {}
        locked: dict[str, int] = {}
        made: set[str] = set()
        for slot, one in enumerate(chosen):
            path, name = os.fsencode(one.path), f"{slot}"
            if one.before is not None and (one.after is None or "type" in one.what):
                then = "" if one.after is None else "/" if stat.S_ISDIR(one.after.st_mode) else name
                steps.append(Aside(path, f"old-{name}", identity(one.before), then))
            if one.after is not None and stat.S_ISDIR(one.after.st_mode):
                new = one.kind == "added" or "type" in one.what
                if new:
                    steps.append(Make(path))
                    made.add(one.path)
                else:
                    assert one.before is not None
                    locked[one.path] = stat.S_IMODE(one.before.st_mode)
                settle[one.path] = self._settled(one, new)
            elif one.after is not None:
                replaced = one.before if "type" not in one.what else None
                if replaced is None:
                    steps.append(Put(path, name, None))
                else:
                    steps.append(Put(path, name, identity(replaced), f"old-{name}"))
            if one.path and (parent := descend.split(one.path)[0]) not in made:
                self._permitted(parent, settle, locked)
        unlock = [Unlock(os.fsencode(path), locked[path]) for path in sorted(locked)]
        return [*unlock, *steps, *(settle[path] for path in sorted(settle, reverse=True))]

    def _permitted(self, path: str, settle: dict[str, Settle], locked: dict[str, int]) -> None:
        """See to it that the caller can change a directory of the host, or refuse by its name."""
        with descend.reached(self.root, path) as node:
            info = os.fstat(node)
            if info.st_dev != os.fstat(self.root).st_dev:
                raise SetupError(f"{path or self.tree} is on another file system", stage="commit")
            if os.geteuid() == 0 or os.access(f"/proc/self/fd/{node}", os.W_OK | os.X_OK):
                return
            if info.st_uid != os.geteuid() or not path:
                raise SetupError(
                    f"{path or self.tree} cannot be written by you", stage="commit", errno=errno.EACCES
                )
        locked[path] = stat.S_IMODE(info.st_mode)
        settle.setdefault(path, Settle(os.fsencode(path), stat.S_IMODE(info.st_mode)))

    def _settled(self, one: Found, new: bool) -> Settle:
        assert one.after is not None
        allowed = self._mode(one)
        if new or "attributes" in one.what:
            with descend.listed(self.upper, one.path, own=True) as directory:
                for name in os.listxattr(directory):
                    if name in FOREIGN:
                        raise _foreign(one.path, name)
                    if name not in OWN:
                        self.notes.append(Note(one.path, f"attribute {name} dropped"))
        if not new:
            return Settle(os.fsencode(one.path), allowed)
        times = one.after.st_atime_ns, one.after.st_mtime_ns
        return Settle(os.fsencode(one.path), allowed, (one.after.st_uid, one.after.st_gid), times)

    def _nearest(self, path: str) -> os.stat_result | None:
        known = [above for above in parents(path) if above in self.walk.merged]
        return self.walk.merged[known[-1]] if known else None

    def _mode(self, one: Found) -> int:
        """The mode that a path gets, with a note for every bit that is not taken over."""
        assert one.after is not None
        mode, allowed = stat.S_IMODE(one.after.st_mode), self._allowed(one)
        for bit, words in (
            (stat.S_ISUID, "set-uid bit taken away"),
            (stat.S_ISGID, "set-gid bit taken away"),
            (stat.S_IWGRP, "leave for its group to write taken away"),
            (stat.S_IWOTH, "leave for everybody to write taken away"),
        ):
            if mode & bit and not allowed & bit:
                self.notes.append(Note(one.path, words))
        return allowed

    def _allowed(self, one: Found) -> int:
        assert one.after is not None
        mode = stat.S_IMODE(one.after.st_mode)
        same = one.before if "type" not in one.what else None
        # Nobody may write who could not before; to what is new, those whom the caller lets by its umask.
        writers = WRITERS & (~umask() if same is None else same.st_mode)
        allowed = mode & 0o1777 & ~(WRITERS & ~writers)
        if stat.S_ISDIR(one.after.st_mode):
            # A directory keeps the group bit that the host gave it, or that it would inherit there.
            like = same or self._nearest(one.path)
            allowed |= mode & like.st_mode & stat.S_ISGID if like is not None else 0
        return allowed

    def _moot(self, one: Found) -> bool:
        """Whether a file differs only in bits that no commit takes over."""
        if one.what != ("mode",) or one.before is None or one.after is None:
            return False
        return not stat.S_ISDIR(one.after.st_mode) and stat.S_IMODE(one.before.st_mode) == self._allowed(one)

    def stage(self, staging: int, chosen: list[Found], progress: Progress | None) -> None:
        """Copy everything new into the staging directory, and make it last."""
        files = [
            (f"{slot}", one)
            for slot, one in enumerate(chosen)
            if one.after is not None and not stat.S_ISDIR(one.after.st_mode)
        ]
        for number, (slot, one) in enumerate(files):
            if progress is not None:
                progress(number, len(files))
            parent, name = descend.split(one.path)
            with descend.listed(self.upper, parent, own=True) as source:
                assert one.after is not None
                if stat.S_ISLNK(one.after.st_mode):
                    self._link(one, source, name, staging, slot)
                else:
                    self._file(one, source, name, staging, slot, len(files) <= journal.MANY)
        if len(files) > journal.MANY:
            journal.everything(staging)
        directory = os.open(f"/proc/self/fd/{staging}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def _link(self, one: Found, source: int, name: str, staging: int, slot: str) -> None:
        assert one.after is not None
        target = os.readlink(name, dir_fd=source)
        if leads_out(one.path, target):
            self.notes.append(Note(one.path, f"a link that leads out of the workspace, to {target}"))
        os.symlink(target, slot, dir_fd=staging)
        if os.geteuid() == 0:
            os.chown(slot, one.after.st_uid, one.after.st_gid, dir_fd=staging, follow_symlinks=False)
        times = one.after.st_atime_ns, one.after.st_mtime_ns
        os.utime(slot, ns=times, dir_fd=staging, follow_symlinks=False)

    def _file(self, one: Found, source: int, name: str, staging: int, slot: str, sync: bool) -> None:
        assert one.after is not None
        path, wanted, mode = one.path, one.after, self._mode(one)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with descend.content(source, name, own=True) as old:
            info = os.fstat(old)
            if not self._again(info, mode, staging, slot):
                new = os.open(slot, flags, 0o600, dir_fd=staging)
                try:
                    copying.content(old, new, info.st_size)
                    self._attributes(path, old, new)
                    if os.geteuid() == 0:
                        os.fchown(new, info.st_uid, info.st_gid)
                    os.fchmod(new, mode)
                    os.utime(new, ns=(wanted.st_atime_ns, wanted.st_mtime_ns))
                    if sync:
                        os.fsync(new)
                finally:
                    os.close(new)
                self._names[info.st_ino, mode] = slot
            if identity(info) != identity(wanted) or identity(os.fstat(old)) != identity(wanted):
                raise SetupError(
                    f"{path} changed while it was copied", stage="commit", hint="end what writes to it"
                )

    def _again(self, info: os.stat_result, mode: int, staging: int, slot: str) -> bool:
        """Give a copy that lies ready another name, if it is of the same file: it is paid once."""
        ready = self._names.get((info.st_ino, mode)) if info.st_nlink > 1 else None
        if ready is None:
            return False
        try:
            os.link(ready, slot, src_dir_fd=staging, dst_dir_fd=staging, follow_symlinks=False)
        except OSError:  # no more names on this file system
            return False
        return True

    def _attributes(self, path: str, old: int, new: int) -> None:
        for name in os.listxattr(old):
            if name in FOREIGN:
                raise _foreign(path, name)
            if name in OWN:
                continue
            taken = counts(name)
            try:
                if taken:
                    os.setxattr(new, name, os.getxattr(old, name))
            except OSError:
                taken = False
            if not taken:
                self.notes.append(Note(path, f"attribute {name} dropped"))


def umask() -> int:
    """What this process takes from the modes of new files. To read it otherwise is to change it."""
    with open("/proc/self/status", "rb") as file:
        return next(int(line.split()[1], 8) for line in file if line.startswith(b"Umask:"))


def _new_directory(one: Found) -> bool:
    return one.kind == "added" and one.after is not None and stat.S_ISDIR(one.after.st_mode)


def _takes(one: Found) -> bool:
    """Whether what the host has there goes."""
    return one.kind == "deleted" or "type" in one.what


def _foreign(path: str, name: str) -> SetupError:
    return SetupError(
        f"{path} has the attribute {name}, which no layer of Stockade's has",
        stage="commit",
        hint="discard it",
    )


def commit(
    job: Job,
    paths: Sequence[str] | None,
    *,
    force: tuple[str, ...],
    protect: Sequence[str],
    allow_exec_config: bool,
    merge: bool,
    progress: Progress | None,
    sure: Callable[[], None],
) -> Commit:
    """Take changes over; the caller holds the workspace's lock and has recovered its journal.

    `sure` raises if what was copied may not be how the workspace was at one moment.
    """
    chosen = job.choose(paths, protect=protect, allow=allow_exec_config)
    chosen = job.check(chosen, force, merge=merge)
    if chosen:
        steps = job.plan(chosen)
        name = f".stockade-commit-{job.id}-{os.urandom(4).hex()}"
        plan = Journal("staging", os.fstat(job.root).st_ino, name)
        journal.write(job.layer, plan)
        try:
            os.mkdir(name, 0o700, dir_fd=job.root)
            with descend.reached(job.root, name) as staging:
                job.stage(staging, chosen, progress)
                inode = os.fstat(staging).st_ino
            sure()
        except BaseException:
            journal.clean(job.layer, job.root, plan)
            raise
        ready = msgspec.structs.replace(plan, state="commit", inode=inode, steps=tuple(steps))
        journal.write(job.layer, ready)
        job.notes += [Note(path, what) for path, what in journal.apply(job.layer, job.root, ready)]
        bases.drop(job.layer, [one.path for one in chosen])
    return Commit(
        workspace=job.id,
        changes=tuple(map(change, chosen)),
        held=tuple(job.held),
        notes=tuple(job.notes),
        closed=len(chosen) == sum(not job._moot(one) for one in job.walk.found),
    )
