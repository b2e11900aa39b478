"""The changes of a session: read them as an archive, as a list or as a patch, and commit them.

Reading freezes the session for that moment. A commit changes the sandbox's
tree below a mounted overlay: what the kernel then shows of those paths in the
session is undefined in principle. In practice a committed path is also in the
layer, which wins. Changes of other paths in the tree become conflicts, as for
every workspace of Stockade.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import IO, TYPE_CHECKING

import msgspec

from stockade.errors import ConflictError, NotFoundError, PolicyError, SetupError
from stockade.linux import foreign_files
from stockade.sandbox.file_worker_channel import printable
from stockade.sandbox.workspace import steady_upper
from stockade.server.isolated.layer_archive import LayerArchive, end_archive
from stockade.server.isolated.with_ids import TooLargeError, with_ids

if TYPE_CHECKING:
    from stockade.linux.id_maps import IdMaps
    from stockade.sandbox.workspace import Workspace
    from stockade.server.isolated.session_request import SessionSpec
    from stockade.workspace.commit import Commit
    from stockade.workspace.diff.diff import FileDiff

#: How many conflicts a message names.
NAMED = 20


class ChangedPath(msgspec.Struct, frozen=True, omit_defaults=True):
    """One changed path of an overlay."""

    path: str
    kind: str
    type: str = ""
    old_path: str = ""
    old_mode: int | None = None
    mode: int | None = None
    size: int | None = None
    added_lines: int = 0
    removed_lines: int = 0
    binary: bool = False


class OverlayChanges(msgspec.Struct, frozen=True, omit_defaults=True):
    """The changes of one overlay, by paths relative to it."""

    path: str
    changes: tuple[ChangedPath, ...]
    #: Why some are missing.
    cut: str = ""


class CommitNote(msgspec.Struct, frozen=True):
    """A path that the commit did not apply exactly as it was, and why."""

    path: str
    what: str


class CommittedOverlay(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a commit did to one overlay."""

    path: str
    changes: tuple[ChangedPath, ...]
    notes: tuple[CommitNote, ...] = ()


class CommitConflictError(ConflictError):
    """The sandbox changed what the session changed too; `committed` are overlays that were done before."""

    def __init__(self, message: str, conflicts: Sequence[str], committed: Sequence[CommittedOverlay]) -> None:
        super().__init__(message, paths=tuple(conflicts))
        self.committed = tuple(committed)


def kept_overlays(
    spec: SessionSpec, overlays: Mapping[str, Workspace], path: str | None
) -> dict[str, Workspace]:
    """Return the overlays whose changes clients may read and commit: all, or the one with that path."""
    kept = [one.path for one in spec.overlays if one.mode == "overlay" and one.persist]
    if not kept:
        raise PolicyError(
            "the session keeps no changes: none of its mounts has mode overlay and persist = true"
        )
    if path is not None and path not in kept:
        raise PolicyError(f"path: the session keeps no changes of {path!r:.200}, only of {', '.join(kept)}")
    return {one: overlays[one] for one in kept if path in (None, one)}


def archive(overlays: Mapping[str, Workspace], ids: IdMaps, most: int, directory: str) -> IO[bytes]:
    """Return an unnamed file in the directory with the archive of the overlays' layers.

    Names are relative to the overlay; with several overlays they are relative to the root.
    """
    file = os.fdopen(os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600), "w+b")
    prefixes = {path: path.lstrip("/") if len(overlays) > 1 else "" for path in overlays}
    # The child of `with_ids` sees owners as programs inside do.
    seen = ids if foreign_files.maps() is None else None
    try:
        size = 0
        for path, workspace in overlays.items():
            size = with_ids(workspace, partial(_add_layer, file, seen, prefixes[path], most, size), int)
        end_archive(file)
        return file
    except BaseException:
        file.close()
        raise


def _add_layer(
    file: IO[bytes], ids: IdMaps | None, prefix: str, most: int, before: int, workspace: Workspace
) -> int:
    """Add a layer to an archive that holds so many bytes already; return how many it holds then."""
    with steady_upper(workspace) as upper:
        made = LayerArchive(file, ids, most, before)
        made.add_layer(upper, prefix)
        return made.close()


def change_lists(overlays: Mapping[str, Workspace]) -> tuple[OverlayChanges, ...]:
    """Return the changes of the overlays as values."""
    found = []
    for path, workspace in overlays.items():
        found.append(with_ids(workspace, partial(_change_list, path), OverlayChanges))
    return tuple(found)


def _change_list(path: str, workspace: Workspace) -> OverlayChanges:
    diff = workspace.diff()
    changes = tuple(sorted(map(_changed, diff.files), key=lambda one: one.path))
    return OverlayChanges(path, changes, diff.cut)


def patch(overlays: Mapping[str, Workspace], most: int) -> bytes:
    """Return a patch for `git apply` in the only overlay."""
    if len(overlays) > 1:
        raise PolicyError(f"path: a patch is for one directory: choose one of {', '.join(overlays)}")
    (workspace,) = overlays.values()
    try:
        made = with_ids(workspace, lambda one: one.diff(patch=True).patch, bytes)
    except SetupError as error:
        if error.stage != "diff":
            raise
        raise TooLargeError(error.message) from None
    if most and len(made) > most:
        raise TooLargeError(f"the patch takes {len(made)} bytes, more than the {most} that the server sends")
    return made


def commit(overlays: Mapping[str, Workspace], *, overwrite: bool) -> tuple[CommittedOverlay, ...]:
    """Commit the changes of each overlay to the sandbox's tree, one overlay after the other."""
    done: list[CommittedOverlay] = []
    for path, workspace in overlays.items():
        with contextlib.suppress(NotFoundError), _conflicts_named(path, done):
            done.append(with_ids(workspace, partial(_commit, path, overwrite), CommittedOverlay))
    return tuple(done)


def _commit(path: str, overwrite: bool, workspace: Workspace) -> CommittedOverlay:
    force = (workspace.path,) if overwrite else ()
    made = workspace.commit(force=force, allow_exec_config=True, protect=(), keep=True)
    return _committed(path, made)


@contextlib.contextmanager
def _conflicts_named(path: str, done: Sequence[CommittedOverlay]) -> Iterator[None]:
    """Turn a conflict into one that names paths of the session."""
    try:
        yield
    except ConflictError as error:
        conflicts = [printable(f"{path}/{one}") for one in error.paths]
        more = f" and {len(conflicts) - NAMED} more" if len(conflicts) > NAMED else ""
        message = (
            f"the sandbox has changed what the session changed too: {', '.join(conflicts[:NAMED])}{more}; "
            'commit with "strategy": "overwrite" to replace them'
        )
        raise CommitConflictError(message, conflicts, done) from None


def _changed(one: FileDiff) -> ChangedPath:
    return ChangedPath(
        path=printable(one.path),
        kind=one.kind,
        type=one.type,
        old_path=printable(one.was),
        old_mode=_digits(one.old_mode),
        mode=_digits(one.new_mode),
        size=None if one.kind == "deleted" else one.new_size,
        added_lines=one.added,
        removed_lines=one.removed,
        binary=one.binary,
    )


def _digits(mode: int | None) -> int | None:
    """Return a mode as the contract writes it: octal digits as a decimal number."""
    return None if mode is None else int(f"{mode & 0o7777:o}")


def _committed(path: str, made: Commit) -> CommittedOverlay:
    changes = tuple(ChangedPath(printable(one.path), one.kind) for one in made.changes)
    notes = [CommitNote(printable(one.path), printable(one.what)) for one in made.notes]
    notes += [CommitNote(printable(one.path), printable(f"was held back: {one.detail}")) for one in made.held]
    return CommittedOverlay(path, changes, tuple(notes))
