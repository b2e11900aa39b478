"""Check that a policy fits the workspace that a sandbox continues.

It must name the same directory, as an overlay, and must not deny a path that an earlier run made or changed.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import msgspec

from stockade.errors import PolicyError
from stockade.policy import Policy, WorkspaceRule
from stockade.policy.values import literal, show
from stockade.resolve.paths.hidden_paths import matches
from stockade.resolve.resolved import Grant, ResolvedPolicy
from stockade.workspace.overlay import OverlayLayer

if TYPE_CHECKING:
    from stockade.sandbox.workspace import Workspace


def fit_policy(policy: Policy, workspace: Workspace, home: str) -> Policy:
    """Return the policy for a sandbox that continues a workspace, with that workspace if it names none."""
    if os.path.dirname(workspace.layer) != f"{home}/workspaces":
        raise PolicyError(
            f"workspace {workspace.id} is kept in {workspace.layer}, and the state directory is {home}",
            hint="set STOCKADE_HOME to the state directory in which the workspace was made",
        )
    if policy.limits.disk is not None:
        raise PolicyError(
            f"limits.disk = {policy.limits.disk}: Stockade cannot limit a workspace that a run continues",
            hint="leave limits.disk out, or start a new workspace",
        )
    if policy.workspace is None:
        return msgspec.structs.replace(policy, workspace=WorkspaceRule(path=literal(workspace.path)))
    if policy.workspace.mode != "overlay":
        raise PolicyError(
            f"workspace.mode = {show(policy.workspace.mode)}: workspace {workspace.id} is an overlay",
            hint='use `--mode overlay` (workspace.mode = "overlay"), or leave both out',
        )
    return policy


def check_tree(resolved: ResolvedPolicy, workspace: Workspace) -> None:
    """Refuse a policy whose workspace is another directory."""
    path = "" if resolved.workspace is None else resolved.workspace.path
    if path != workspace.path:
        raise PolicyError(
            f"workspace = {show(path)}: workspace {workspace.id} belongs to {workspace.path}",
            hint=f"leave `workspace` out of the policy, or write {workspace.path}",
        )


def refuse_shown(layer: OverlayLayer, resolved: ResolvedPolicy, workspace: Grant) -> None:
    """Refuse to deny what an earlier run made: a mask hides the host's files, not those of the layer."""
    tree = workspace.path + "/"
    written = dict(resolved.hidden.written)
    if resolved.hidden.matched:
        written |= matches(resolved.hidden, workspace.path, layer.descriptors[0], resolved.caller)
    for path, clause in written.items():
        if path.startswith(tree) and layer.own(path.removeprefix(tree)):
            raise PolicyError(
                f"deny = {show(clause)}: an earlier run of workspace {layer.id} made or changed {path}",
                hint="leave the clause out, or remove the file in a run without it, or start a new workspace",
            )
