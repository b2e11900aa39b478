"""The layer that receives a run's changes to its workspace.

A layer is a directory `workspaces/ID` of the state, private to the caller and
invisible inside: `upper` holds the changes in the format of overlayfs, and
`work` belongs to the kernel. Nothing here touches the host's tree.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from stockade import state
from stockade.errors import SetupError, StockadeError
from stockade.linux import dirwalk
from stockade.policy.model import PROTECT
from stockade.result import Change, LostChange
from stockade.state.spool import Spool, spool
from stockade.workspace import metadata
from stockade.workspace.diff.layer_walk import (
    LayerWalk,
    PathDifference,
    WalkBudget,
    changed,
    is_whiteout,
    unpack,
)
from stockade.workspace.metadata import Rules

if TYPE_CHECKING:
    from stockade.linux.id_maps import IdMaps
    from stockade.workspace.tree_copy import OmittedPaths

#: How deep changes are listed after a run: below that, a directory stands for its contents.
DEEPEST = 100


class Changes(list[Change]):
    """The changes of a workspace. `cut` says why some are missing; it is empty if none are."""

    cut = ""


def what_keeps(changes: Sequence[LostChange]) -> str:
    """Return a hint for keeping such changes next time, or "" if there is no advice."""
    from stockade.workspace.tree_copy import DO_NOT_FIT, FULL

    reasons = {one.why for one in changes}
    words = []
    if any(os.strerror(number) in why for number in FULL for why in reasons):
        words.append("free some space in Stockade's state")
    if DO_NOT_FIT in reasons:
        words.append(
            "let the program set fewer or smaller attributes, or set STOCKADE_HOME to a directory elsewhere"
        )
    return f"{'; '.join(words)}; and run it again" if words else ""


def change(found: PathDifference) -> Change:
    """Return the change as users see it; the workspace itself is a dot."""
    return Change(found.path or ".", found.kind)


#: The rules of a layer without a known policy.
DEFAULT = Rules(protect=PROTECT)


class OverlayLayer:
    """One layer, held open by descriptors while a sandbox uses it."""

    def __init__(
        self,
        home: str,
        lower: int,
        lower_path: str,
        id: str,
        rules: Rules = DEFAULT,
        *,
        continued: bool = False,
        foreign: bool = False,
    ) -> None:
        """Make the layer, or go on in a `continued` one; with `foreign`, programs have several users."""
        self.id = id
        self.path = f"{state.ensure(home)}/workspaces/{self.id}"
        self.lower = lower
        #: Whether an earlier sandbox made it: this one must not remove its changes unasked.
        self.continued = continued
        self._owner = os.getpid()
        #: The host's files at the changes that `changes` last found.
        self._seen: Spool[tuple[bytes, int]] = spool(tuple)
        #: The modified files among the changes that `changes` last found.
        self._modified = spool(PathDifference)
        #: Bytes of the files in it, by the last call of `changes`; None if that did not find all.
        self.written: int | None = 0
        #: Why the last call of `changes` did not return all of them; empty if it did.
        self.cut = ""
        #: How many files it counted as changed without time to compare them.
        self.unsure = 0
        #: The changes of a sandbox that keeps them in private memory, and those that were lost with it.
        self._live = -1
        self.lost: tuple[LostChange, ...] = ()
        #: Whether that memory is an image in the layer, which outlives this process.
        self.has_image = False
        #: The ids of files that the caller may not read or make, if programs can have made such files.
        self._maps: IdMaps | None = None
        if foreign:
            from stockade.linux import foreign_files

            self._maps = foreign_files.maps()
        self._open: list[int] = []
        if continued:
            self._continue(lower_path, rules)
            return
        try:
            for name in ("", "/upper", "/work"):
                os.makedirs(self.path + name, mode=0o700)
            like = os.fstat(lower)
            # The merged root shows the upper directory's owner and mode.
            os.chmod(f"{self.path}/upper", stat.S_IMODE(like.st_mode))
            if os.geteuid() == 0:
                os.chown(f"{self.path}/upper", like.st_uid, like.st_gid)
            elif self._maps is not None and (like.st_uid, like.st_gid) != (os.geteuid(), os.getegid()):
                from stockade.linux import foreign_files

                foreign_files.copy_owner(self._maps, lower, f"{self.path}/upper")
            # The record comes last: a layer without one was never used.
            metadata.write(self.path, lower_path, like.st_ino, rules)
            self._open_directories()
            self._open.append(metadata.lock(self.path, self.id))
        except OSError as error:
            with contextlib.suppress(OSError):
                self.discard()
            raise SetupError(
                f"cannot keep the workspace's changes in {self.path}: {error.strerror}",
                stage="workspace",
                errno=error.errno or 0,
                hint="free some space, or set STOCKADE_HOME to a directory elsewhere",
            ) from None

    def _open_directories(self) -> None:
        for name in ("upper", "work"):
            self._open.append(self._open_directory(name))

    def _open_directory(self, name: str) -> int:
        try:
            return os.open(f"{self.path}/{name}", dirwalk.DIRECTORY)
        except PermissionError:
            if self._maps is None:
                raise
            return os.open(f"{self.path}/{name}", dirwalk.NODE | os.O_DIRECTORY)  # another user's inside

    def _continue(self, lower_path: str, rules: Rules) -> None:
        """Continue an existing layer over the same directory as before."""
        from stockade.workspace import disk_image, journal

        lock = metadata.lock(self.path, self.id)
        try:
            known = metadata.read(self.path)
            found = os.fstat(self.lower).st_ino
            if known.tree != lower_path or (known.inode and known.inode != found):
                raise SetupError(
                    f"{known.tree} is no longer the directory that workspace {self.id} was made over",
                    stage="workspace",
                    hint=f"move the directory back; `stockade diff {self.id}` shows the changes",
                )
            disk_image.recover(self.path)
            journal.recover(self.path, self.lower)
            dirwalk.remove_doomed(lock)
            metadata.narrow(self.path, rules)
            metadata.end_epoch(self.path)
            self._open_directories()
            self._open.append(lock)
        except OSError as error:
            self._release()
            os.close(lock)
            raise SetupError(
                f"workspace {self.id} cannot be continued: {error.strerror} ({error.filename!r})",
                stage="workspace",
                errno=error.errno or 0,
                hint=f"the changed files are in {self.path}/upper",
            ) from None
        except BaseException:
            self._release()
            os.close(lock)
            raise

    def note_places(self, places: Sequence[tuple[str, str]]) -> None:
        """Record the paths in the workspace that the policy's grants name, and the clause of each."""
        try:
            metadata.add_places(
                self.path, ((os.fsencode(path), os.fsencode(words)) for path, words in places)
            )
        except OSError as error:
            raise state.unusable(self.path, error) from None

    @property
    def descriptors(self) -> tuple[int, int]:
        """The descriptors of the upper and the work directory."""
        upper, work, _ = self._open
        return upper, work

    @property
    def is_mine(self) -> bool:
        """Whether this process holds the layer, rather than a forked child."""
        return bool(self._open) and self._owner == os.getpid()

    def make_image(self, size: int) -> int:
        """Make a file system in the layer for the sandbox to write to; the caller closes the mount."""
        from stockade.workspace import disk_image

        mount = disk_image.make(self.path, size)
        self.has_image = True
        return mount

    def adopt(self, live: int) -> None:
        """Use this directory in a sandbox's private memory for the changes, until they are copied here."""
        try:
            self._live = os.open(f"/proc/self/fd/{live}", dirwalk.DIRECTORY & ~os.O_NOFOLLOW)
        except PermissionError:
            if self._maps is None:
                os.close(live)
                raise
            self._live = live  # the directory of another user inside: a process that is root there reads it
        except BaseException:
            os.close(live)
            raise
        else:
            os.close(live)

    def is_full(self) -> bool:
        """Return whether the private memory with the changes has no room left."""
        if self._live < 0:
            return False
        room = os.fstatvfs(self._live)
        return room.f_bavail == 0 or room.f_favail == 0

    def bring(self) -> None:
        """Copy the changes from a live sandbox's private memory to the layer: all or nothing."""
        if self._live < 0:
            return
        from stockade.workspace.tree_copy import FULL

        try:
            self._replace_upper(None)
        except OSError as error:
            raise SetupError(
                f"cannot keep the changes in {self.path}: {error.strerror}",
                stage="workspace",
                errno=error.errno or 0,
                hint=("free some space there: " if error.errno in FULL else "")
                + "this sandbox's changes are lost when it ends",
            ) from error

    def bring_last(self) -> tuple[LostChange, ...]:
        """Copy the changes of an ended sandbox; from then on they are only in the layer.

        Never fails: it returns the changes that could not be kept and are lost.
        """
        if self._live < 0:
            return self.lost
        from stockade.workspace import tree_copy

        left_out: list[tuple[str, str]] = []
        try:
            if self.has_image:
                from stockade.workspace import disk_image

                left_out = disk_image.copy_changes(self.path, self._live).report()
                disk_image.remove(self.path)
            else:
                copied = tree_copy.OmittedPaths()
                self._replace_upper(copied)
                left_out = copied.report()
        except OSError as error:
            words = error.strerror or str(error)
            still = f"; they are still in {self.path}/image: free some space" if self.has_image else ""
            left_out = [(".", words + still)]
        live, self._live = self._live, -1
        os.close(live)
        self.lost = tuple(LostChange(path, why) for path, why in left_out)
        if self.lost:
            with contextlib.suppress(OSError):  # the same full disk, say; the caller reports them anyway
                metadata.record_lost(self.path, left_out)
        return self.lost

    def _replace_upper(self, left_out: OmittedPaths | None) -> None:
        from stockade.workspace.snapshots import replace

        with dirwalk.reached(self._open[2], "") as top:
            if not self._replace_as_root(top):
                replace(top, self._live, left_out)
        os.close(self._open[0])
        self._open[0] = self._open_directory("upper")

    def _replace_as_root(self, top: int) -> bool:
        """Do it as root of a user namespace, if programs can have made files of other ids."""
        live, maps = self._live, self._maps
        if maps is None:
            return False
        from stockade.linux.id_maps import as_root_inside
        from stockade.workspace.snapshots import replace

        return as_root_inside(maps, lambda: replace(top, live))

    def changes(self) -> Sequence[Change]:
        """Return the differences from the host's tree, by a walk of the layer; `cut` says if there are more.

        Never fails: a run has a result whatever its program did to the layer.
        """
        budget, merged, changes = WalkBudget(), dict[str, bytes](), list[Change]()
        several: set[int] = set()
        written = self.unsure = 0
        self._modified, self._seen = spool(PathDifference), spool(tuple)
        try:
            for one in changed(self._upper, self.lower, budget, deepest=DEEPEST, merged=merged):
                changes.append(change(one))
                self.unsure += one.unsure
                if one.was and one.now:
                    self._modified.append(one)
                if one.was:
                    self._seen.append((os.fsencode(one.path), _inode(one.was)))
                # Count a file with several names once.
                after = one.after
                if after is not None and stat.S_ISREG(after.st_mode) and after.st_ino not in several:
                    written += after.st_size
                    if after.st_nlink > 1:
                        several.add(after.st_ino)
            self._seen.extend(_merged_directories(merged, budget.cut))
        except OSError as error:
            budget.cut = f"cannot list the changes in {self.path}: {error.strerror}"
        self.cut = budget.cut
        self.written = None if self.cut else written
        changes.sort(key=lambda one: one.path)
        kept = spool(Change)
        try:
            kept.extend(changes)
        except OSError:  # on a full disk they stay in memory
            return tuple(changes)
        return kept.settled()

    def is_unchanged(self) -> bool:
        """Return whether nothing differs from the host's tree; unreadable parts count as different."""
        return not has_changes(self._upper, self.lower)

    def own(self, path: str) -> bool:
        """Return whether the layer itself has a path of the workspace: a mask below it does not hide that."""
        parent, name = dirwalk.split(path)
        try:
            with dirwalk.reached(self._upper, parent, own=True) as directory:
                found = os.stat(name, dir_fd=directory, follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except PermissionError:
            return True  # an unreadable entry may be anything
        return not is_whiteout(found)

    @property
    def _upper(self) -> int:
        return self._open[0] if self._live < 0 else self._live

    def note(self) -> None:
        """Record the host's files at the changes, so that a commit notices if one was replaced."""
        if self._seen and self.is_mine:
            _record_files(self.path, self._seen)

    def stay_locked(self) -> int:
        """Return a descriptor that keeps the layer locked even after it is closed here."""
        return os.dup(self._open[2])

    def close(self) -> None:
        """Close the layer and keep it on the disk."""
        try:
            if self.is_mine:
                self.bring_last()
            self.note()
            if self._modified and self.is_mine:
                keep_bases(self.path, self._modified, self.lower)
        finally:
            self._release()

    def _release(self) -> None:
        if self._live >= 0:
            os.close(self._live)
            self._live = -1
        while self._open:
            os.close(self._open.pop())

    def discard(self) -> None:
        """Discard every change and remove the layer, except in a forked child."""
        lock = self._open[2:]
        for descriptor in self._open[:2]:  # removing takes descriptors, and there may be few
            os.close(descriptor)
        self._open = lock
        try:
            if self._owner == os.getpid():
                remove(self.path)
        finally:
            self._release()


def note(layer: str, walk: LayerWalk) -> None:
    """Record the host's files at the changes of a locked layer, as `OverlayLayer.note` does."""
    changed = ((os.fsencode(one.path), _inode(one.was)) for one in walk.found if one.was)
    _record_files(layer, itertools.chain(changed, _merged_directories(walk.merged, walk.cut)))


def keep_bases(layer: str, found: Iterable[PathDifference], lower: int) -> None:
    """Keep the files that the program started from and changed, so that a commit can merge."""
    modified = (one for one in found if one.kind == "modified")
    if (first := next(modified, None)) is not None:
        from stockade.workspace.merge import bases

        bases.keep(layer, itertools.chain((first,), modified), lower)


def _inode(packed: bytes) -> int:
    info = unpack(packed)
    return 0 if info is None else info.st_ino


def _merged_directories(merged: dict[str, bytes], cut: str) -> Iterator[tuple[bytes, int]]:
    """Yield the host's directories that may contain changes, with their inode numbers."""
    for path, packed in merged.items():
        # An entry for the workspace itself says that the record is complete: other paths did not exist.
        if path or not cut:
            yield os.fsencode(path), _inode(packed)


def _record_files(layer: str, there: Iterable[tuple[bytes, int]]) -> None:
    known = metadata.seen(layer)
    # The first record is the one that the changes are based on; a commit's record is of its own files.
    metadata.remember(layer, ((path, (number, 0)) for path, number in there if path not in known))


def is_unchanged(layer: str, upper: int, lower: int) -> bool:
    """Return whether a layer has neither changes nor snapshots with content."""
    return not (has_changes(upper, lower) or has_snapshots(layer))


def has_changes(upper: int, lower: int) -> bool:
    """Return whether anything differs; unreadable parts count as different."""
    budget = WalkBudget()
    try:
        return next(changed(upper, lower, budget, deepest=DEEPEST), None) is not None or bool(budget.cut)
    except OSError:
        return True


def has_snapshots(layer: str) -> bool:
    """Return whether a layer has a snapshot that is not empty."""
    try:
        kept = [name for name in os.listdir(f"{layer}/snapshots") if not name.startswith(".")]
        return any(_has_entries(f"{layer}/snapshots/{name}/upper") for name in kept)
    except FileNotFoundError:
        return False
    except PermissionError:
        return True  # a program has made the top of its tree unreadable


def _has_entries(path: str) -> bool:
    with os.scandir(path) as entries:
        return next(entries, None) is not None


def _remove_tree(place: int, name: str) -> None:
    """Remove a directory. What other ids own takes another process, whose modules are loaded only then."""
    try:
        dirwalk.remove(place, name)
    except PermissionError:
        from stockade.linux import foreign_files

        foreign_files.remove(place, name)


def remove(layer: str) -> None:
    """Remove a layer that the caller has locked, and remains of layers whose removal was interrupted.

    It is renamed first: half a layer would look like a workspace with other changes.
    """
    parent, name = os.path.split(layer)
    try:
        place = os.open(parent, dirwalk.DIRECTORY)
    except FileNotFoundError:
        return
    try:
        doomed = f"{dirwalk.REMOVED}{name}"
        with contextlib.suppress(FileNotFoundError):
            os.rename(name, doomed, src_dir_fd=place, dst_dir_fd=place)
            _remove_tree(place, doomed)
        for left in os.listdir(place):
            if left.startswith(dirwalk.REMOVED):
                # A locked one is being removed by its owner.
                with contextlib.suppress(StockadeError), metadata.held(f"{parent}/{left}", left):
                    _remove_tree(place, left)
    finally:
        os.close(place)
