"""What a program leaves in a workspace, what a commit makes of it, and the control: copied by hand."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import stockade
from stockade import Policy, Workspace


def worked(place: Path, script: str, *words: str, **clauses: object) -> Workspace:
    """A workspace in which a program has run; nothing is protected unless the clauses say so."""
    policy = Policy(workspace=str(place), **{"protect": [], **clauses})  # type: ignore[arg-type]
    result = stockade.run(["sh", "-ec", script, "sh", *words], policy, timeout=60)
    assert result.ok and result.workspace_id, result.stderr
    return Workspace.open(result.workspace_id)


def by_hand(workspace: Workspace) -> None:
    subprocess.run(["cp", "-a", f"{workspace.layer}/upper/.", workspace.path], check=True)


def sh(script: str, place: Path, **environ: str) -> None:
    """A command of the host's user, whatever it says."""
    subprocess.run(
        ["sh", "-c", script], cwd=place, env={**os.environ, **environ}, capture_output=True, check=False
    )


def held(workspace: Workspace) -> dict[str, str]:
    return {one.path: one.reason for one in workspace.commit(keep=True).held}
