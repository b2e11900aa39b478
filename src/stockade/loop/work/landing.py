"""Landing: an attempt's changes become the project's, once, by a journalled commit."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence

import msgspec

from stockade.errors import NotFoundError, SetupError
from stockade.linux.plain_text import clean_line
from stockade.loop.events import DiffStat, HeldFile
from stockade.loop.record import LoopError
from stockade.policy.model import PROTECT, Policy
from stockade.policy.values import literal, quote_protected
from stockade.sandbox.sandbox import run
from stockade.sandbox.workspace import Workspace
from stockade.workspace.holdback.holdback import covers

#: Why a judge's file waits for a person.
JUDGES = "it judges the next attempts"
#: How long git may take.
GIT_SECONDS = 120
#: git without anything of the repository's or the user's configuration that starts a program.
GIT = (
    "git", "-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=false", "-c", "commit.gpgsign=false",
    "-c", "core.quotePath=false", "-c", "gc.auto=0",
)  # fmt: skip


class LandedChanges(msgspec.Struct, frozen=True):
    """What a landing brought into the project, and what it left for a person."""

    paths: tuple[str, ...]
    held: tuple[HeldFile, ...]


def open_workspace(id: str) -> Workspace | None:
    """Return a workspace, after the recovery of a commit that was interrupted; None if it is gone."""
    try:
        return Workspace.open(id)
    except NotFoundError:
        return None


def land(
    workspace: Workspace | None, withheld: Sequence[str] = (), digest: str | None = None
) -> LandedChanges:
    """Commit the changes, merged with those of the project; raises `ConflictError` and does nothing.

    With a `digest`, nothing but the state of that digest is committed: the error then names no path.
    The files in `withheld` are held back, as those are that tools of the host obey. What the commit applied
    leaves the workspace, so that nothing can apply it again; a workspace that is gone has landed before.
    """
    if workspace is None:
        return LandedChanges((), ())
    protect = (*workspace.record.rules.protect, *map(quote_protected, withheld))
    done = workspace.commit(merge=True, protect=protect, expect=digest)
    if not done.closed:
        workspace.compact()
    own = {one.path for one in done.held if any(covers(path, one.path) for path in withheld)}
    return LandedChanges(
        tuple(change.path for change in done.changes),
        tuple(
            HeldFile(one.path, JUDGES if one.path in own else clean_line(f"{one.reason}: {one.detail}"))
            for one in done.held
        ),
    )


def measure(workspace: Workspace) -> tuple[DiffStat, str]:
    """Return the size of a workspace's changes, and the digest of their state."""
    found = workspace.diff()
    if not found.digest:
        raise SetupError(f"a sandbox uses the workspace {workspace.id}", stage="workspace")
    return DiffStat(len(found), found.added, found.removed), found.digest


def check_repository(project: str) -> None:
    """Refuse `--git-commit` in a directory that is no git repository."""
    if not os.path.lexists(f"{project}/.git"):
        raise LoopError(
            f"--git-commit: {project} is not the top of a git repository",
            hint="run `git init` there, or leave --git-commit out",
        )


def git_commit(project: str, paths: Sequence[str], message: str, mark: str) -> str:
    """Commit these paths of the project to git, in a sandbox, and return the commit's id.

    If one of the last commits has the line `mark` already, it was made before a crash: its id is returned.
    Files that git ignores are left out; "" is returned if nothing is left to commit.
    """
    policy = Policy(
        workspace={"path": literal(project), "mode": "rw"},
        protect=[name for name in PROTECT if os.path.lexists(f"{project}/{name}")],
        unprotect=[".git"],
    )

    def git(*words: str, input: bytes = b"", check: bool = True) -> subprocess.CompletedProcess[bytes]:
        done = run([*GIT, *words], policy, input=input, timeout=GIT_SECONDS, name="loop git")
        if check and not done.ok:
            last = done.stderr_text.strip().splitlines()[-1:] or [done.reason]
            raise LoopError(
                f"git {words[1 if words[0].startswith('-') else 0]} failed: {clean_line(last[0][:300])}",
                hint="the changes are in the project; commit them by hand",
            )
        return subprocess.CompletedProcess(words, done.exit_code, done.stdout, done.stderr)

    known = git("log", "-n", "50", "--format=%H", "--fixed-strings", f"--grep={mark}", check=False)
    if known.returncode == 0 and known.stdout.strip():
        return known.stdout.decode().split()[0]
    # Files as git sees them: without those that it ignores, and each file of a removed directory.
    status = git("status", "--porcelain=v1", "-z", "--no-renames", "--untracked-files=all").stdout
    landed = set(map(os.fsencode, paths))
    changed = [entry[3:] for entry in status.split(b"\0") if entry]
    chosen = b"\0".join(path for path in changed if _covered(path, landed))
    if not chosen:
        return ""
    listed = ("--pathspec-from-file=-", "--pathspec-file-nul")
    git("--literal-pathspecs", "add", "--all", *listed, input=chosen)
    # Only these paths: what the user has staged stays staged.
    words = ("commit", "--no-verify", "--quiet", "--only", "-m", message)
    git("--literal-pathspecs", *words, *listed, input=chosen)
    return git("rev-parse", "HEAD").stdout.decode().strip()


def _covered(path: bytes, landed: set[bytes]) -> bool:
    """Whether a path or a directory above it has landed."""
    while path:
        if path in landed:
            return True
        path = path.rpartition(b"/")[0]
    return False
