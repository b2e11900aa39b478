"""Continue, snapshot, commit or read the workspace of a sandbox."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import msgspec

from stockade.errors import SetupError, StockadeError, one_line
from stockade.policy import Policy
from stockade.result import Outcome, Result, describe_lost
from stockade.runs.io.eventloop import Events
from stockade.runs.prepare import RunPreparation
from stockade.workspace.metadata import WorkspaceLock
from stockade.workspace.overlay import has_snapshots

if TYPE_CHECKING:
    from stockade.resolve.resolved import ResolvedPolicy
    from stockade.sandbox.workspace import Workspace
    from stockade.workspace.commit import Commit
    from stockade.workspace.files.files import Files


def open_workspace(workspace: Workspace | str | None) -> Workspace | None:
    """Return the workspace to continue; a string is its id, or the beginning of it."""
    if not isinstance(workspace, str):
        return workspace
    from stockade.sandbox.workspace import Workspace as Known

    return Known.open(workspace.removeprefix("@"))


def snapshot_before(prepared: RunPreparation, prefix: str) -> None:
    """Take a snapshot before the first run in a sandbox that already holds the workspace's lock."""
    from stockade.sandbox.workspace import Workspace

    if prepared.layer is not None:
        Workspace(prepared.layer.path, _held_lock).snapshot(prefix=prefix)


def _held_lock() -> contextlib.AbstractContextManager[WorkspaceLock]:
    """Return the lock that a sandbox in which nothing runs already holds."""
    return contextlib.nullcontext(WorkspaceLock(living=True))


def commit_and_close(prepared: RunPreparation) -> Commit | None:
    """Commit the changes of an ended sandbox and close its workspace; remove one without changes."""
    from stockade.sandbox.workspace import Workspace

    layer = prepared.layer
    if layer is None or not layer.is_mine:
        prepared.close(discard=False)
        return None
    gone = False
    try:
        if layer.bring_last():
            raise SetupError(
                f"nothing was committed, because of {describe_lost(layer.lost)}",
                stage="workspace",
                hint=f"`stockade diff {layer.id}` shows the others",
            )
        layer.changes()
        layer.note()
        done = Workspace(layer.path, _held_lock).commit()
        gone = layer.is_unchanged() and not has_snapshots(layer.path)
        return msgspec.structs.replace(done, closed=gone)
    finally:
        prepared.close(discard=gone, earlier=True)


def files_of(workspace: Workspace, let_go: Callable[[], None]) -> Files:
    """Return the files that a sandbox would see in a kept workspace.

    This starts a sandbox, so that the kernel mounts the same overlay as for every program, and ends it
    again: an open descriptor keeps the overlay and the lock. `let_go` is called before the lock is released.
    """
    from stockade.runs.io.eventloop import drive
    from stockade.runs.launch import launch
    from stockade.runs.prepare import prepare
    from stockade.workspace.files.files import Files
    from stockade.workspace.files.sandbox_paths import Roots

    prepared = prepare(Policy(toolchain=False), living=True, workspace=workspace)
    with contextlib.ExitStack() as undo:
        try:
            with Events() as events:
                box = drive(launch(prepared, events), events)
                try:
                    root, overlay = box.roots()
                    os.close(root)
                    undo.callback(os.close, overlay)
                finally:
                    drive(box.closed(events), events)
            assert prepared.layer is not None
            lock = prepared.layer.stay_locked()
            undo.callback(os.close, lock)
        finally:
            prepared.close(discard=False)
        uid, gid = os.geteuid(), os.getegid()
        roots = Roots(root=None, workspace=overlay, path=workspace.path, home="", uid=uid, gid=gid)
        undo.pop_all()

    def closed() -> None:
        try:
            let_go()
        finally:
            os.close(lock)

    return Files(roots, closed)


def living_files(descriptors: tuple[int, ...], resolved: ResolvedPolicy, home: str) -> Files:
    """Return the files behind a gate's descriptors, which they now own: the root and the overlay.

    A sandbox without a root of its own has none; only its workspace is accessible.
    """
    from stockade.workspace.files.files import Files
    from stockade.workspace.files.sandbox_paths import Roots

    root, *overlay = descriptors or (None,)
    workspace = resolved.workspace
    if workspace is None:
        for descriptor in overlay:  # of a private environment, whose files are reached from the root
            os.close(descriptor)
        overlay = []
    behind: int | None = overlay[0] if overlay else None
    writable = True
    if workspace is not None and workspace.access != "overlay":
        # Mounts over parts of the host's directory disappear with the sandbox.
        over = _any_below((grant.path for grant in resolved.grants), workspace.path)
        kept = resolved.protected or resolved.repositories.kept
        writable = workspace.access == "write" and not over and not kept
        if not _any_below(resolved.denied, workspace.path):
            behind = os.dup(workspace.fd)
    return Files(
        Roots(
            root=root,
            workspace=behind,
            path="" if workspace is None else workspace.path,
            home=home,
            uid=os.geteuid(),
            gid=os.getegid(),
            writable=writable,
        )
    )


def _any_below(paths: Iterable[str], directory: str) -> bool:
    return any(path.startswith(f"{directory}/") for path in paths)


def with_commit(result: Result, prepared: RunPreparation) -> Result:
    """Commit a run's changes and add that to its result; not if the run was cut short, perhaps halfway."""
    replace = msgspec.structs.replace
    if result.outcome != Outcome.EXITED:
        why = f"nothing was committed, because the run did not finish: {result.outcome}"
        return replace(result, commit_error=why if result.changes else "")
    if result.lost:
        return replace(result, commit_error=f"nothing was committed, because of {describe_lost(result.lost)}")
    try:
        done = commit_and_close(prepared)
    except StockadeError as error:
        why = f"{error.message}\n{error.hint}" if error.hint else one_line(error.message)
        return replace(result, commit_error=why)
    gone = done is None or done.closed
    return replace(result, committed=done, workspace_id="" if gone else result.workspace_id)
