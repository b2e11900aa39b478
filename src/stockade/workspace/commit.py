"""Commit the changes of a workspace to the host's tree.

No inode of the layer ever appears in the tree: a process with an open
descriptor of a file in the layer could write to it there. A commit copies
every file into a new inode in a staging directory, and once all are there,
`journal` moves them into place. It drops set-uid bits, new write permission
for others (by mode or by access list), foreign attributes, and everything
that is neither a file nor a directory nor a link. Hard links to one file
stay hard links to one file.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator, Sequence

import msgspec

from stockade.errors import ConflictError, NotFoundError, SetupError, one_line, typed
from stockade.linux import dirwalk
from stockade.linux.mount_table import mounted_below
from stockade.result import Change
from stockade.state.spool import Spool, spool
from stockade.workspace import access_lists, journal, tree_copy
from stockade.workspace.access_lists import AccessList, HostLists, permissions
from stockade.workspace.diff.layer_walk import (
    FOREIGN,
    LISTS,
    FileStat,
    LayerWalk,
    PathDifference,
    is_program_attribute,
)
from stockade.workspace.holdback.holdback import HoldBack, covers, leads_out
from stockade.workspace.holdback.screening import Screening, Verdict, find_upwards
from stockade.workspace.journal import (
    Journal,
    MakeStep,
    PutStep,
    SetAsideStep,
    SettleStep,
    UnlockStep,
    identity,
)
from stockade.workspace.merge import bases, conflicts
from stockade.workspace.merge.conflicts import Judge
from stockade.workspace.merge.rebase import Merge, index_hint, merge_conflicts, without_refreshed, write_merge
from stockade.workspace.metadata import HostFileTable, Rules, WorkspaceRecord
from stockade.workspace.overlay import change

#: Receives the number of staged files and the total.
Progress = Callable[[int, int], None]
#: Attributes that overlayfs writes for its own use.
OWN = tuple(f"user.overlay.{name}" for name in ("origin", "impure", "opaque", "nlink", "uuid", "upper"))
#: How many of the dropped attributes of a path the notes name.
SHOWN_NAMES = 5
#: How many conflicts a message names.
SHOWN_CONFLICTS = 1000
#: Permission for the group and for others to write.
WRITERS = stat.S_IWGRP | stat.S_IWOTH


class Note(msgspec.Struct, frozen=True, gc=False):
    """A remark about a path that the commit did not apply exactly as it was."""

    path: str
    what: str


class Commit(msgspec.Struct, frozen=True, kw_only=True):
    """What a commit did: the changes that it applied, and those that it held back."""

    #: In JSON: `workspace`.
    workspace_id: str = msgspec.field(name="workspace")
    changes: Sequence[Change] = ()
    held: Sequence[HoldBack] = ()
    runs: Sequence[Note] = ()
    """The committed files that run at the user's next command, and how."""
    notes: Sequence[Note] = ()
    closed: bool = False
    """Whether nothing was left, so that the workspace was removed."""

    def __iter__(self) -> Iterator[Change]:
        return iter(self.changes)

    def __len__(self) -> int:
        return len(self.changes)

    def __repr__(self) -> str:
        held = f", {len(self.held)} held back" if self.held else ""
        closed = ", closed" if self.closed else ""
        return f"<Commit of {self.workspace_id}: {len(self)} applied{held}{closed}>"


def umask() -> int:
    """Return the umask of this process. The only system call for it would change it."""
    with open("/proc/self/status", "rb") as file:
        return next(int(line.split()[1], 8) for line in file if line.startswith(b"Umask:"))


class CommitSelection:
    """The changes to commit, each with its number among all changes."""

    def __init__(self, found: Sequence[PathDifference]) -> None:
        self._found = found
        self.marks = bytearray(len(found))
        #: By number, the changes that a merge has replaced.
        self.replaced: dict[int, PathDifference] = {}

    def __len__(self) -> int:
        return self.marks.count(1)

    def __iter__(self) -> Iterator[PathDifference]:
        return (one for _, one in self.numbered())

    def numbered(self) -> Iterator[tuple[int, PathDifference]]:
        """Iterate over the chosen changes with their numbers."""
        for at, one in enumerate(self._found):
            if self.marks[at]:
                yield at, self.replaced.get(at, one)


class _DirectoryModes:
    """The final modes of directories, by path: set when everything is in them."""

    def __init__(self) -> None:
        self._places: dict[str, int] = {}
        self._steps = journal.no_steps()

    def __contains__(self, path: str) -> bool:
        return path in self._places

    def add(self, path: str, step: SettleStep) -> None:
        self._places[path] = len(self._steps)
        self._steps.append(step)

    def inner_first(self) -> Iterator[journal.JournalStep]:
        for path in sorted(self._places, reverse=True):
            yield self._steps[self._places[path]]


class CommitJob(msgspec.Struct):
    """One commit, from the selection of changes to the journal."""

    id: str
    layer: str
    tree: str
    root: int
    upper: int
    record: WorkspaceRecord
    seen: HostFileTable
    walk: LayerWalk
    digest: str = ""
    """The digest of the layer, if requested."""
    notes: Spool[Note] = msgspec.field(default_factory=lambda: spool(Note))
    held: Spool[HoldBack] = msgspec.field(default_factory=lambda: spool(HoldBack))
    #: How many changes the commit omits without a hold-back: caches of compiled code.
    left_out: int = 0
    #: By inode number, mode and access list of a copied file: the slot of the copy.
    _names: dict[int | tuple[int, bytes], int] = {}
    #: By directory: the stat of the host's directory there, or of the nearest one above.
    _directories: dict[str, FileStat | None] = {}
    _umask: int = msgspec.field(default_factory=umask)

    @property
    def screening(self) -> Screening:
        """The screening of these changes."""
        return Screening(self.root, self.tree, self.upper, self.walk)

    def choose(self, paths: Sequence[str] | None, rules: Rules, screening: Screening) -> CommitSelection:
        """Select the changes at and below the paths and the new directories they need, minus hold-backs."""
        chosen = CommitSelection(self.walk.found)
        unknown = set(paths or ())
        needed: set[str] = set()
        for at, one in enumerate(self.walk.found):
            inside = paths is None or any(covers(path, one.path) for path in paths)
            if inside and self._has_no_effect(one):
                self._mode_with_notes(one)
            elif inside:
                chosen.marks[at] = 1
                unknown = {path for path in unknown if not covers(path, one.path)}
                dirwalk.add_above(needed, one.directory)
        if unknown:
            raise NotFoundError(
                f"{min(unknown)!r} has not changed in workspace {self.id}",
                hint=f"`stockade diff --name-only {self.id}` lists the changed paths",
            )
        if paths is not None:
            for at, one in enumerate(self.walk.found):
                if one.path in needed and (one.kind == "added" or "type" in one.what):
                    chosen.marks[at] = 1
        self._leave_out_held(chosen, screening.refused(rules))
        for unread in screening.unread:
            path, _, what = unread.partition(": ")
            self.notes.append(Note(path, what))
        return chosen

    def _leave_out_held(self, chosen: CommitSelection, verdicts: Sequence[Verdict]) -> None:
        hollow: set[str] = set()
        cached, caches = None, 0
        for at, (one, verdict) in enumerate(zip(self.walk.found, verdicts, strict=True)):
            if verdict:
                dirwalk.add_above(hollow, one.directory)
                if chosen.marks[at]:
                    chosen.marks[at] = 0
                    held = HoldBack(one.path, *verdict)  # type: ignore[arg-type]
                    if held.reason == "cache":
                        cached, caches = cached or held, caches + 1
                    else:
                        self.held.append(held)
        if not hollow:
            return
        # Leave out new directories as well that would be empty only because of hold-backs.
        full: set[str] = set()
        for one in chosen:
            if not _new_directory(one) or one.path not in hollow:
                dirwalk.add_above(full, one.directory)
        for at, one in chosen.numbered():
            if _new_directory(one) and one.path in hollow and one.path not in full:
                chosen.marks[at] = 0
                self.left_out += 1
        self.left_out += caches
        if cached is not None:
            self.notes.append(_without_caches(cached, caches - 1))

    def check(self, chosen: CommitSelection, force: tuple[str, ...], *, merge: bool) -> None:
        """Refuse an impossible commit before it begins; with `merge`, rebase the changes on the host's."""
        inner = [point.removeprefix(self.tree).lstrip("/") for point in mounted_below(self.tree)]
        for one in chosen:
            if over := [
                at for at in inner if covers(at, one.path) or (_removes(one) and covers(one.path, at))
            ]:
                raise SetupError(
                    f"{one.path} is hidden by the mount at {self.tree}/{over[0]}",
                    stage="commit",
                    hint=f"`umount {typed(f'{self.tree}/{over[0]}')}` first, or leave the path out: "
                    "the change does not belong to the mounted file system",
                )
            if one.deep:
                raise SetupError(
                    f"{one.path[:80]}... is nested too deeply to be committed",
                    stage="commit",
                    hint="name the other paths to commit them without it",
                )
        judge = Judge(self.root, self.record, self.seen)
        found = judge.conflicts(chosen, self.walk, force)
        found = without_refreshed(self.layer, self.root, chosen, found)
        merged: list[Merge] = []
        if found and merge:
            merged, found = merge_conflicts(self.layer, self.root, self.upper, chosen, found)
        if found:
            raise ConflictError(
                "the host's files have changed since the program saw them:\n"
                + "\n".join(f"{one_line(one.path)}: {one.reason}" for one in found[:SHOWN_CONFLICTS])
                + (f"\nand {len(found) - SHOWN_CONFLICTS} more" if len(found) > SHOWN_CONFLICTS else "")
                + ("; the check stopped there" if len(found) == conflicts.MOST else ""),
                paths=tuple(one.path for one in found),
                hint="compare them; --force PATH overwrites the host's version"
                + ("" if merge else ", --merge combines changes to different lines")
                + index_hint(found),
            )
        if merged:
            self.notes.extend(Note(one.found.path, "merged with the host's changes to it") for one in merged)
            rebased = {one.found.path: write_merge(self.layer, self.upper, one) for one in merged}
            chosen.replaced = {at: rebased[one.path] for at, one in chosen.numbered() if one.path in rebased}

    def plan(self, chosen: CommitSelection) -> Spool[journal.JournalStep]:
        """Return the steps in an order in which each can follow those before it."""
        steps = journal.no_steps()
        settle = _DirectoryModes()
        locked: dict[str, int] = {}
        made: set[str] = set()
        for slot, one in chosen.numbered():
            path, name = os.fsencode(one.path), f"{slot}"
            if one.before is not None and (one.after is None or "type" in one.what):
                then = "" if one.after is None else "/" if stat.S_ISDIR(one.after.st_mode) else name
                steps.append(SetAsideStep(path, f"old-{name}", identity(one.before), then))
            if one.after is not None and stat.S_ISDIR(one.after.st_mode):
                new = one.kind == "added" or "type" in one.what
                if new:
                    steps.append(MakeStep(path))
                    made.add(one.path)
                else:
                    assert one.before is not None
                    locked[one.path] = stat.S_IMODE(one.before.st_mode)
                settle.add(one.path, self._settle_step(one, new))
            elif one.after is not None:
                replaced = one.before if "type" not in one.what else None
                if replaced is None:
                    steps.append(PutStep(path, name, None))
                else:
                    steps.append(PutStep(path, name, identity(replaced), f"old-{name}"))
            if one.path and (parent := dirwalk.split(one.path)[0]) not in made:
                self._ensure_writable(parent, settle, locked)
        every = journal.no_steps()
        every.extend(UnlockStep(os.fsencode(path), locked[path]) for path in sorted(locked))
        for step in steps.encoded():
            every.append_encoded(step)
        every.extend(settle.inner_first())
        return every

    def _ensure_writable(self, path: str, settle: _DirectoryModes, locked: dict[str, int]) -> None:
        """Plan to unlock a directory of the host if the caller cannot write to it, or refuse by its name."""
        with dirwalk.reached(self.root, path) as node:
            info = os.fstat(node)
            if info.st_dev != os.fstat(self.root).st_dev:
                raise SetupError(f"{path or self.tree} is on another file system", stage="commit")
            if os.geteuid() == 0 or os.access(f"/proc/self/fd/{node}", os.W_OK | os.X_OK):
                return
            if info.st_uid != os.geteuid() or not path:
                raise SetupError(
                    f"you may not write to {path or self.tree}", stage="commit", errno=errno.EACCES
                )
        locked[path] = stat.S_IMODE(info.st_mode)
        if path not in settle:
            settle.add(path, SettleStep(os.fsencode(path), stat.S_IMODE(info.st_mode)))

    def _settle_step(self, one: PathDifference, new: bool) -> SettleStep:
        assert one.after is not None
        allowed = self._mode_with_notes(one)
        if new or "attributes" in one.what or "access" in one.what:
            with dirwalk.listed(self.upper, one.path, own=True) as directory:
                names = os.listxattr(directory)
                for name in names:
                    if name in FOREIGN:
                        raise _foreign(one.path, name)
                self._note_dropped(one.path or ".", [name for name in names if name not in OWN])
        if not new:
            return SettleStep(os.fsencode(one.path), allowed)
        times = one.after.st_atime_ns, one.after.st_mtime_ns
        return SettleStep(os.fsencode(one.path), allowed, (one.after.st_uid, one.after.st_gid), times)

    def _nearest(self, path: str) -> FileStat | None:
        """Return the stat of the host's directory that holds or would hold a path."""
        return find_upwards(dirwalk.split(path)[0], self._directories, self.walk.directory)

    def _mode_with_notes(self, one: PathDifference) -> int:
        """Return the mode that a path gets, and add a note for every bit that it loses."""
        assert one.after is not None
        mode, allowed, path = stat.S_IMODE(one.after.st_mode), self._allowed_mode(one), one.path or "."
        for bit, what in (
            (stat.S_ISUID, "set-uid bit"),
            (stat.S_ISGID, "set-gid bit"),
            (stat.S_IWGRP, "write permission for its group"),
            (stat.S_IWOTH, "write permission for everybody"),
        ):
            if mode & bit and not allowed & bit:
                self.notes.append(Note(path, f"{what} removed"))
        return allowed

    def _allowed_mode(self, one: PathDifference) -> int:
        assert one.after is not None
        mode = stat.S_IMODE(one.after.st_mode)
        same = one.before if "type" not in one.what else None
        # No one gains write permission to an existing file; for a new one, the caller's umask decides.
        writers = WRITERS & (~self._umask if same is None else same.st_mode)
        allowed = mode & 0o1777 & ~(WRITERS & ~writers)
        if stat.S_ISDIR(one.after.st_mode):
            # A directory keeps a set-gid bit that the host gave it, or that it would inherit there.
            like = same or self._nearest(one.path)
            allowed |= mode & like.st_mode & stat.S_ISGID if like is not None else 0
        return allowed

    def _has_no_effect(self, one: PathDifference) -> bool:
        """Return whether a file differs only in bits that no commit applies."""
        if one.what != ("mode",) or one.before is None or one.after is None:
            return False
        if stat.S_ISDIR(one.after.st_mode):
            return False
        return stat.S_IMODE(one.before.st_mode) == self._allowed_mode(one)

    def stage(self, staging: int, chosen: CommitSelection, progress: Progress | None) -> None:
        """Copy everything new into the staging directory and sync it to the disk."""
        count, lists = sum(map(_is_file, chosen)), HostLists(self.root, self.walk)
        files = ((slot, one) for slot, one in chosen.numbered() if _is_file(one))
        with dirwalk.Directories(self.upper, own=True) as sources:
            for number, (slot, one) in enumerate(files):
                if progress is not None:
                    progress(number, count)
                source = sources.listed(one.directory)
                assert one.after is not None
                if stat.S_ISLNK(one.after.st_mode):
                    self._copy_link(one, source, one.name, staging, f"{slot}")
                else:
                    self._copy_file(one, source, staging, slot, lists, sync=count <= journal.MANY)
        if count > journal.MANY:
            journal.sync_file_system(staging)
        directory = os.open(f"/proc/self/fd/{staging}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def _copy_link(self, one: PathDifference, source: int, name: str, staging: int, slot: str) -> None:
        assert one.after is not None
        target = os.readlink(name, dir_fd=source)
        if leads_out(one.path, target):
            self.notes.append(Note(one.path, f"a link out of the workspace, to {target}"))
        for place, clause in self.record.places:
            if covers(one.path, os.fsdecode(place)):
                words = f"a link to {target} now stands where {os.fsdecode(clause)} of the policy points"
                self.notes.append(Note(one.path, words))
        os.symlink(target, slot, dir_fd=staging)
        if os.geteuid() == 0:
            os.chown(slot, one.after.st_uid, one.after.st_gid, dir_fd=staging, follow_symlinks=False)
        times = one.after.st_atime_ns, one.after.st_mtime_ns
        os.utime(slot, ns=times, dir_fd=staging, follow_symlinks=False)

    def _copy_file(
        self, one: PathDifference, source: int, staging: int, number: int, lists: HostLists, *, sync: bool
    ) -> None:
        assert one.after is not None
        path, wanted, slot = one.path, one.after, f"{number}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with dirwalk.content(source, one.name, own=True) as old:
            info = os.fstat(old)
            granted = permissions(one, old, self._mode_with_notes(one), lists)
            self.notes.extend(Note(path, words) for words in granted.removed)
            mode, access = granted.mode, granted.access
            key = _key(info, mode, access)
            if not self._link_copy(info, key, staging, slot):
                new = os.open(slot, flags, 0o600, dir_fd=staging)
                try:
                    tree_copy.content(old, new, info.st_size)
                    self._attributes(path, old, new)
                    if access is not None:
                        mode = self._set_access_list(path, new, access, mode)
                    if os.geteuid() == 0:
                        os.fchown(new, info.st_uid, info.st_gid)
                    os.fchmod(new, mode)
                    os.utime(new, ns=(wanted.st_atime_ns, wanted.st_mtime_ns))
                    if sync:
                        os.fsync(new)
                finally:
                    os.close(new)
                if info.st_nlink > 1:
                    self._names[key] = number
            if identity(info) != identity(wanted) or identity(os.fstat(old)) != identity(wanted):
                raise SetupError(
                    f"{path} changed while it was copied",
                    stage="commit",
                    hint="stop the process that writes to it",
                )

    def _link_copy(self, info: os.stat_result, key: int | tuple[int, bytes], staging: int, slot: str) -> bool:
        """Hard-link an existing copy of the same file, so that each inode is copied once."""
        ready = self._names.get(key) if info.st_nlink > 1 else None
        if ready is None:
            return False
        try:
            os.link(f"{ready}", slot, src_dir_fd=staging, dst_dir_fd=staging, follow_symlinks=False)
        except OSError:  # the file system's limit of links is reached
            return False
        return True

    def _set_access_list(self, path: str, new: int, access: AccessList, mode: int) -> int:
        """Set the access list of a file and return the mode to set after it."""
        try:
            os.setxattr(new, access_lists.ACCESS, access.encode())
        except OSError:
            self._note_dropped(path, [access_lists.ACCESS])
            return access.mode_without(mode)
        return mode

    def _attributes(self, path: str, old: int, new: int) -> None:
        dropped = []
        for name in os.listxattr(old):
            if name in FOREIGN:
                raise _foreign(path, name)
            if name in OWN or name in LISTS:
                continue
            taken = is_program_attribute(name)
            try:
                if taken:
                    os.setxattr(new, name, os.getxattr(old, name))
            except OSError:
                taken = False
            if not taken:
                dropped.append(name)
        self._note_dropped(path, dropped)

    def _note_dropped(self, path: str, names: list[str]) -> None:
        """Note dropped attributes, but name only some: a program may have made very many."""
        self.notes.extend(Note(path, f"attribute {name} dropped") for name in names[:SHOWN_NAMES])
        if len(names) > SHOWN_NAMES:
            self.notes.append(Note(path, f"{len(names) - SHOWN_NAMES} more attributes dropped"))


def _key(info: os.stat_result, mode: int, access: AccessList | None) -> int | tuple[int, bytes]:
    """Return the key of a copy, which is the same for every name of the file that could share it."""
    number = info.st_ino << 12 | mode
    return number if access is None else (number, access.encode())


def _is_file(one: PathDifference) -> bool:
    """Return whether a change leaves something other than a directory."""
    return one.after is not None and not stat.S_ISDIR(one.after.st_mode)


def _without_caches(first: HoldBack, more: int) -> Note:
    """Return one note for all cache files that were left out."""
    from stockade.policy.holdback_table import CACHES

    others = f", and {more} more like it" if more else ""
    # No text of the program's stands in a command for the user to type.
    cache = next(one for one in CACHES if one.why == first.detail).patterns.rstrip("/")
    why = f"{first.detail}; --allow '**/{cache}' commits it"
    return Note(first.path, f"compiled code, left out{others}: {why}")


def _new_directory(one: PathDifference) -> bool:
    return one.kind == "added" and one.after is not None and stat.S_ISDIR(one.after.st_mode)


def _removes(one: PathDifference) -> bool:
    """Return whether a change removes what the host has there."""
    return one.kind == "deleted" or "type" in one.what


def _refuse_unchanged(job: CommitJob, paths: Sequence[str]) -> None:
    """Refuse a path that neither the workspace nor the host's tree has: it may be mistyped."""
    unknown = {path for path in paths if not os.path.lexists(os.path.join(job.tree, path))}
    for one in job.walk.found if unknown else ():
        unknown = {path for path in unknown if not covers(path, one.path)}
    if unknown:
        raise NotFoundError(
            f"{min(unknown)!r} has not changed in workspace {job.id}, so --force cannot apply to it",
            hint=f"`stockade diff --name-only {job.id}` lists the changed paths",
        )


def _foreign(path: str, name: str) -> SetupError:
    return SetupError(
        f"{path} has the attribute {name}, which Stockade never sets in a layer",
        stage="commit",
        hint="discard this change",
    )


def commit(
    job: CommitJob,
    paths: Sequence[str] | None,
    *,
    force: tuple[str, ...],
    rules: Rules,
    merge: bool,
    progress: Progress | None,
    sure: Callable[[], None],
) -> Commit:
    """Commit changes; the caller holds the workspace's lock and has recovered its journal.

    `sure` raises an error unless the copies show the workspace as it was at one moment.
    """
    _refuse_unchanged(job, force)
    screening = job.screening
    chosen = job.choose(paths, rules, screening)
    job.check(chosen, force, merge=merge)
    if len(chosen):
        steps = job.plan(chosen)
        name = f".stockade-commit-{job.id}-{os.urandom(4).hex()}"
        plan = Journal("staging", os.fstat(job.root).st_ino, name)
        journal.write(job.layer, plan)
        try:
            os.mkdir(name, 0o700, dir_fd=job.root)
            with dirwalk.reached(job.root, name) as staging:
                # The workspace's default access list is for new files at its top, not for the staging area.
                with contextlib.suppress(OSError):
                    os.removexattr(f"/proc/self/fd/{staging}", access_lists.HANDED_ON)
                job.stage(staging, chosen, progress)
                inode = os.fstat(staging).st_ino
            sure()
        except BaseException:
            journal.clean(job.layer, job.root, plan)
            raise
        ready = msgspec.structs.replace(plan, state="commit", inode=inode, steps=steps)
        journal.write(job.layer, ready)
        job.notes.extend(Note(path, what) for path, what in journal.apply(job.layer, job.root, ready))
        bases.drop(job.layer, (one.path for one in chosen))
    changes, runs = spool(Change), spool(Note)
    for one in chosen:
        changes.append(change(one))
        if how := screening.runs(one):
            runs.append(Note(one.path, how))
        if one.unsure:
            job.notes.append(
                Note(one.path, "committed without being compared, which would have taken too long")
            )
    return Commit(
        workspace_id=job.id,
        changes=changes.settled(),
        held=job.held.settled(),
        runs=runs.settled(),
        notes=job.notes.settled(),
        closed=not job.walk.partial
        and len(chosen) + job.left_out == sum(not job._has_no_effect(one) for one in job.walk.found),
    )
