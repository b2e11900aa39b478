"""Where a command starts inside: in the directory where the user is, if the workspace has it.

The gate looks the name up inside the sandbox. If the sandbox lacks or hides the directory, the run is
refused: a command must not remove or write files in another directory than the user thinks.
"""

from __future__ import annotations

import os

from stockade.errors import PolicyError
from stockade.linux.path_lookup import covers, look_up
from stockade.linux.user import Caller
from stockade.policy import Policy
from stockade.policy.values import expand


def workspace_above(policy: Policy, caller: Caller) -> str:
    """Return the real name of the policy's workspace if it is above the user's directory; otherwise ""."""
    root = workspace_root(policy, caller) if caller.cwd else ""
    return root if root and root != caller.cwd and covers(root, caller.cwd) else ""


def workspace_root(policy: Policy, caller: Caller) -> str:
    """Return the real name of the policy's workspace; empty if it has none."""
    if policy.workspace is None:
        return ""
    path = policy.workspace.path
    clause = f"workspace = {path}"
    full = expand(path, clause, home=caller.home, cwd=caller.cwd, environ=caller.environ)
    return look_up(full).close().name


def inside(root: str, here: str, asked: str | None) -> str | None:
    """Return the directory that --cwd asks for, or else the user's; None for the workspace itself.

    `root` is the workspace if it is above the user's directory, `here`. A relative name counts from where the
    command would start without --cwd.
    """
    if asked == "":
        raise PolicyError("--cwd '': is empty", hint="name a directory: --cwd DIRECTORY")
    if not root:
        return asked
    return here if asked is None else os.path.join(here, asked)
