"""Sandboxes that go on with a workspace, and what becomes of it at the end.

A policy must fit the layer that it runs over: the same directory, as an
overlay, and nothing denied that an earlier run has made itself.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from stockade.errors import PolicyError, SetupError
from stockade.policy import Policy, Resolved, WorkspaceRule
from stockade.policy.resolve import Grant
from stockade.policy.values import literal, show
from stockade.workspace.layers import Layer, has_snapshots, lost
from stockade.workspace.record import Hold

if TYPE_CHECKING:
    from stockade.sandbox.launch import Prepared
    from stockade.workspace.commit import Commit
    from stockade.workspace.files import Files
    from stockade.workspace.workspace import Workspace


def opened(workspace: Workspace | str | None) -> Workspace | None:
    """The workspace that is to be continued; text is its id, or the beginning of it."""
    if not isinstance(workspace, str):
        return workspace
    from stockade.workspace.workspace import Workspace as Known

    return Known.open(workspace.removeprefix("@"))


def laid(policy: Policy, workspace: Workspace, home: str) -> Policy:
    """The policy for a sandbox that goes on with a workspace, which may leave out where that is."""
    if os.path.dirname(workspace.layer) != f"{home}/workspaces":
        raise PolicyError(
            f"workspace {workspace.id} is kept in {workspace.layer}, and Stockade's state is in {home}",
            hint="set STOCKADE_HOME to the state in which it was made",
        )
    if policy.limits.disk is not None:
        raise PolicyError(
            f"limits.disk = {policy.limits.disk}: a workspace that is continued cannot be limited",
            hint="leave one of the two out",
        )
    if policy.workspace is None:
        return msgspec.structs.replace(policy, workspace=WorkspaceRule(path=literal(workspace.path)))
    if policy.workspace.mode != "overlay":
        raise PolicyError(
            f"workspace.mode = {show(policy.workspace.mode)}: workspace {workspace.id} is an overlay",
            hint='write mode = "overlay", or leave workspace out of the policy',
        )
    return policy


def check_tree(resolved: Resolved, workspace: Workspace) -> None:
    """Refuse a policy whose workspace is another directory."""
    found = "" if resolved.workspace is None else resolved.workspace.path
    if found != workspace.path:
        raise PolicyError(
            f"workspace = {show(found)}: workspace {workspace.id} is of {workspace.path}",
            hint="leave workspace out of the policy, or write that path",
        )


def refuse_shown(layer: Layer, resolved: Resolved, workspace: Grant) -> None:
    """Refuse to deny what an earlier run made itself: a mask hides the host's files, not the layer's."""
    tree = workspace.path + "/"
    for path in resolved.denied:
        if path.startswith(tree) and layer.own(path.removeprefix(tree)):
            raise PolicyError(
                f"deny = {show(path)}: an earlier run of workspace {layer.id} made or changed it",
                hint="leave the clause out, or remove the file in a run without it, or start a new workspace",
            )


def snapshot_before(prepared: Prepared, prefix: str) -> None:
    """Keep the changes as they are before a sandbox starts that already holds their lock."""
    from stockade.workspace.workspace import Workspace

    if prepared.layer is not None:
        Workspace(prepared.layer.path, _ours).snapshot(prefix=prefix)


def _ours() -> contextlib.AbstractContextManager[Hold]:
    """The lock is held already, by a sandbox in which nothing runs."""
    return contextlib.nullcontext(Hold(living=True))


def commit_and_close(prepared: Prepared) -> Commit | None:
    """Take the changes of a sandbox that has ended over, and let go of it. One with none left is removed."""
    from stockade.workspace.workspace import Workspace

    layer = prepared.layer
    if layer is None or not layer.is_mine:
        prepared.close(discard=False)
        return None
    gone = False
    try:
        if layer.bring_last():
            raise SetupError(
                f"nothing was committed, because of {lost(layer.lost)}",
                stage="workspace",
                hint=f"`stockade diff {layer.id}` shows the others",
            )
        layer.changes()
        layer.note()
        done = Workspace(layer.path, _ours).commit()
        gone = not layer.changes() and not has_snapshots(layer.path)
        return msgspec.structs.replace(done, closed=gone)
    finally:
        prepared.close(discard=gone, earlier=True)


def files_of(workspace: Workspace, let_go: Callable[[], None]) -> Files:
    """The files that a sandbox would see in a kept workspace.

    One is started, so that the kernel lays the changes over the tree as it does for every program, and
    ended again: its overlay stays by its descriptor, and with it the lock. `let_go` is called before the
    lock is given back.
    """
    from stockade.sandbox.launch import launch, prepare
    from stockade.sandbox.steps import Events, drive
    from stockade.workspace.files import Files
    from stockade.workspace.place import Roots

    prepared = prepare(Policy(), living=True, workspace=workspace)
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
