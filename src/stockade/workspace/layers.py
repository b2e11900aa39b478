"""The layer that receives a run's changes to its workspace.

A layer is a directory `workspaces/ID` of the state, private to the caller and
invisible inside: `upper` holds what changed in the kernel's own overlay
format, `work` is the kernel's. Nothing here touches the host's tree.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Sequence
from typing import Literal

import msgspec

from stockade import state
from stockade.errors import SetupError, StockadeError
from stockade.policy.model import PROTECT
from stockade.workspace import descend, record
from stockade.workspace.walk import Found, Walk, is_whiteout, walk

#: How deep changes are listed after a run: below that, a directory stands for what is in it.
DEEPEST = 100
#: How many lost changes are named in words.
SHOWN_LOST = 10


class Change(msgspec.Struct, frozen=True):
    """One path that a run changed, relative to the workspace."""

    path: str
    kind: Literal["added", "modified", "deleted"]


class Lost(msgspec.Struct, frozen=True):
    """A change that could not be kept when its sandbox ended, with everything in it; and why."""

    path: str
    why: str


def lost(changes: Sequence[Lost]) -> str:
    """What was lost, in words."""
    named = ", ".join(f"{one.path} ({one.why})" for one in changes[:SHOWN_LOST])
    more = f" and {len(changes) - SHOWN_LOST} more" if len(changes) > SHOWN_LOST else ""
    return f"changes that could not be kept when the sandbox ended: {named}{more}"


def change(found: Found) -> Change:
    """The change as users see it; the workspace itself is a dot."""
    return Change(found.path or ".", found.kind)


class Layer:
    """One layer, held open by descriptors while a sandbox uses it."""

    def __init__(
        self,
        home: str,
        lower: int,
        lower_path: str,
        id: str,
        protect: Sequence[str] = PROTECT,
        *,
        continued: bool = False,
    ) -> None:
        self.id = id
        self.path = f"{state.ensure(home)}/workspaces/{self.id}"
        self.lower = lower
        #: Whether an earlier sandbox made it: what is in it is not this one's to remove unasked.
        self.continued = continued
        self._owner = os.getpid()
        self._seen: record.Seen = {}
        self._found: Walk | None = None
        #: Bytes of the files in it, as `changes` last found them.
        self.written = 0
        #: The changes of a sandbox that keeps them in its private memory, and those that were lost with it.
        self._live = -1
        self.lost: tuple[Lost, ...] = ()
        #: Whether that memory is an image in the layer, which outlives this process.
        self.has_image = False
        self._open: list[int] = []
        if continued:
            self._enter(lower_path, protect)
            return
        try:
            for name in ("", "/upper", "/work"):
                os.makedirs(self.path + name, mode=0o700)
            like = os.fstat(lower)
            # The merged root shows the upper directory's owner and mode.
            os.chmod(f"{self.path}/upper", stat.S_IMODE(like.st_mode))
            if os.geteuid() == 0:
                os.chown(f"{self.path}/upper", like.st_uid, like.st_gid)
            # Last: a layer without it was only begun, and nothing was ever done in it.
            record.write(self.path, lower_path, like.st_ino, protect)
            self._hold()
            self._open.append(record.lock(self.path, self.id))
        except OSError as error:
            with contextlib.suppress(OSError):
                self.discard()
            raise SetupError(
                f"cannot keep the workspace's changes in {self.path}: {error.strerror}",
                stage="workspace",
                errno=error.errno or 0,
                hint="free some space, or set STOCKADE_HOME to a directory elsewhere",
            ) from None

    def _hold(self) -> None:
        for name in ("upper", "work"):
            self._open.append(os.open(f"{self.path}/{name}", descend.DIRECTORY))

    def _enter(self, lower_path: str, protect: Sequence[str]) -> None:
        """Go on with a layer that is there: as it was left, over the directory that it was made over."""
        from stockade.workspace import image, journal

        lock = record.lock(self.path, self.id)
        try:
            known = record.read(self.path)
            found = os.fstat(self.lower).st_ino
            if known.tree != lower_path or (known.inode and known.inode != found):
                raise SetupError(
                    f"{known.tree} is not the directory any more that workspace {self.id} was made over",
                    stage="workspace",
                    hint=f"move it back; `stockade diff {self.id}` shows the changes",
                )
            image.recover(self.path)
            journal.recover(self.path, self.lower)
            descend.remove_doomed(lock)
            record.protect_too(self.path, protect)
            self._hold()
            self._open.append(lock)
        except OSError as error:
            self._release()
            os.close(lock)
            raise SetupError(
                f"workspace {self.id} cannot be continued: {error.strerror} ({error.filename!r})",
                stage="workspace",
                errno=error.errno or 0,
                hint=f"what was changed is in {self.path}/upper",
            ) from None
        except BaseException:
            self._release()
            os.close(lock)
            raise

    @property
    def descriptors(self) -> tuple[int, int]:
        """The upper and the work directory."""
        upper, work, _ = self._open
        return upper, work

    @property
    def is_mine(self) -> bool:
        """Whether this process holds it, and is no forked copy."""
        return bool(self._open) and self._owner == os.getpid()

    def make_image(self, size: int) -> int:
        """Let the sandbox write to a file system in the layer; its mount is the caller's to close."""
        from stockade.workspace import image

        mount = image.make(self.path, size)
        self.has_image = True
        return mount

    def adopt(self, live: int) -> None:
        """The changes are in this directory, in a sandbox's private memory, until they are brought here."""
        try:
            self._live = os.open(f"/proc/self/fd/{live}", descend.DIRECTORY & ~os.O_NOFOLLOW)
        finally:
            os.close(live)

    def is_full(self) -> bool:
        """Whether the private memory that the changes are in has no room left."""
        if self._live < 0:
            return False
        room = os.fstatvfs(self._live)
        return room.f_bavail == 0 or room.f_favail == 0

    def bring(self) -> None:
        """Copy the changes that are in a living sandbox's private memory to the layer: all, or nothing."""
        if self._live < 0:
            return
        try:
            self._bring(None)
        except OSError as error:
            raise SetupError(
                f"the changes cannot be kept in {self.path}: {error.strerror}",
                stage="workspace",
                errno=error.errno or 0,
                hint="free some space there: what was changed in this sandbox is lost when it ends",
            ) from error

    def bring_last(self) -> tuple[Lost, ...]:
        """Copy the changes of a sandbox that has ended: they are in the layer alone from then on.

        Never fails: what cannot be kept is gone, and is the result.
        """
        if self._live < 0:
            return self.lost
        left_out: list[tuple[str, str]] = []
        try:
            if self.has_image:
                from stockade.workspace import image

                left_out = image.bring(self.path, self._live)
                image.remove(self.path)
            else:
                self._bring(left_out)
        except OSError as error:
            words = error.strerror or str(error)
            still = f"; they are still in {self.path}/image: free some space" if self.has_image else ""
            left_out = [(".", words + still)]
        live, self._live = self._live, -1
        os.close(live)
        self.lost = tuple(Lost(path, why) for path, why in left_out)
        if self.lost:
            with contextlib.suppress(OSError):  # the same full disk, say; whoever has ended it is told
                record.lose(self.path, left_out)
        return self.lost

    def _bring(self, left_out: list[tuple[str, str]] | None) -> None:
        from stockade.workspace.snapshots import replace

        with descend.reached(self._open[2], "") as top:
            replace(top, self._live, left_out)
        os.close(self._open[0])
        self._open[0] = os.open(f"{self.path}/upper", descend.DIRECTORY)

    def changes(self) -> list[Change]:
        """What differs from the host's tree, found by walking the changes only."""
        try:
            seen = walk(self._upper, self.lower, deepest=DEEPEST)
        except OSError as error:
            raise unlisted(self.path, error) from error
        # A file with several names is one.
        sizes = {one.after.st_ino: _size(one.after) for one in seen.found if one.after is not None}
        self.written = sum(sizes.values())
        self._seen, self._found = _there(seen), seen
        return sorted(map(change, seen.found), key=lambda one: one.path)

    def own(self, path: str) -> bool:
        """Whether the layer itself has something at a path of the workspace: no mask below it hides that."""
        parent, name = descend.split(path)
        try:
            with descend.reached(self._upper, parent, own=True) as directory:
                found = os.stat(name, dir_fd=directory, follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except PermissionError:
            return True  # what cannot be looked at may be anything
        return not is_whiteout(found)

    @property
    def _upper(self) -> int:
        return self._open[0] if self._live < 0 else self._live

    def note(self) -> None:
        """Write down what the host has where the changes are, so that a commit knows if that was replaced."""
        if self._seen and self.is_mine:
            _remember(self.path, self._seen)

    def stay_locked(self) -> int:
        """A descriptor that keeps the layer from everybody else also when it is closed here."""
        return os.dup(self._open[2])

    def close(self) -> None:
        """Let go of the layer, which stays."""
        try:
            if self.is_mine:
                self.bring_last()
            self.note()
            if self._found is not None and self.is_mine:
                keep_bases(self.path, self._found, self.lower)
        finally:
            self._release()

    def _release(self) -> None:
        if self._live >= 0:
            os.close(self._live)
            self._live = -1
        while self._open:
            os.close(self._open.pop())

    def discard(self) -> None:
        """Forget every change and remove the layer; it is not a forked child's to remove."""
        lock = self._open[2:]
        for descriptor in self._open[:2]:  # removing takes descriptors, and there may be few
            os.close(descriptor)
        self._open = lock
        try:
            if self._owner == os.getpid():
                remove(self.path)
        finally:
            self._release()


def note(layer: str, found: Walk) -> None:
    """Write down what the host has where a locked layer has changes, as `Layer.note` does."""
    if there := _there(found):
        _remember(layer, there)


def keep_bases(layer: str, found: Walk, lower: int) -> None:
    """Keep what the program started from where it changed files, so that a commit can merge."""
    if any(one.kind == "modified" for one in found.found):
        from stockade.workspace import bases

        bases.keep(layer, found, lower)


def _there(found: Walk) -> record.Seen:
    there = {one.path: one.before for one in found.found if one.before is not None} | found.merged
    return {os.fsencode(path): (info.st_ino, 0) for path, info in there.items()}


def _remember(layer: str, there: record.Seen) -> None:
    known = record.seen(layer)
    # What was seen first is what the changes are based on, and what a commit left is its own.
    record.remember(layer, {path: at for path, at in there.items() if path not in known})


def is_unchanged(layer: str, upper: int, lower: int) -> bool:
    """Whether there is nothing in a layer that anybody could miss."""
    return not (walk(upper, lower, deepest=DEEPEST).found or has_snapshots(layer))


def has_snapshots(layer: str) -> bool:
    """Whether an earlier state of a layer is kept in which there was something."""
    try:
        kept = [name for name in os.listdir(f"{layer}/snapshots") if not name.startswith(".")]
        return any(os.listdir(f"{layer}/snapshots/{name}/upper") for name in kept)
    except FileNotFoundError:
        return False
    except PermissionError:
        return True  # a program has closed the top of its tree


def _size(info: os.stat_result) -> int:
    return info.st_size if stat.S_ISREG(info.st_mode) else 0


def remove(layer: str) -> None:
    """Remove a layer that the caller has locked, and what others left of theirs when they were killed.

    It loses its name first: half of a layer would say that the other half was never changed, or deleted.
    """
    parent, name = os.path.split(layer)
    try:
        place = os.open(parent, descend.DIRECTORY)
    except FileNotFoundError:
        return
    try:
        doomed = f"{descend.REMOVED}{name}"
        with contextlib.suppress(FileNotFoundError):
            os.rename(name, doomed, src_dir_fd=place, dst_dir_fd=place)
            descend.remove(place, doomed)
        for left in os.listdir(place):
            if left.startswith(descend.REMOVED):
                # One that is in use is being removed by its owner.
                with contextlib.suppress(StockadeError), record.held(f"{parent}/{left}", left):
                    descend.remove(place, left)
    finally:
        os.close(place)


def unlisted(layer: str, error: OSError) -> SetupError:
    """What to raise where a layer cannot be read."""
    return SetupError(
        f"the changes in {layer} cannot be listed: {error.strerror}",
        stage="workspace",
        errno=error.errno or 0,
        hint="they are kept there",
    )
