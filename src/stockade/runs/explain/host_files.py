"""Tell a person which argument of a failed program names a file of the host that the policy does not show.

No program and no model may read these hints: they tell which files exist.
"""

from __future__ import annotations

import os
import shlex

from stockade.gate import client
from stockade.linux.path_lookup import covers
from stockade.resolve.paths.policy_paths import OWN
from stockade.resolve.resolved import ResolvedPolicy
from stockade.resolve.toolchain.needs import shown_by
from stockade.runs.explain.not_started import denied_by, is_secret, is_shown
from stockade.runs.explain.ran_and_failed import WRITERS, paths_named

#: Entries of /etc that are made for the sandbox.
MADE = ("passwd", "group", "hostname", "hosts", "resolv.conf", "nsswitch.conf")


def hint(program: client.Program, resolved: ResolvedPolicy) -> str:
    """Return a hint about the first argument that names something hidden; empty if none does."""
    return _denied(program, resolved) or _unseen(program, resolved) or _unshown_directory(program, resolved)


def _unseen(program: client.Program, resolved: ResolvedPolicy) -> str:
    """Return a hint about an argument that names a file of the host which the policy does not show."""
    for path in paths_named(program):
        try:
            real = os.path.realpath(path)
        except OSError:  # a link in /proc that may not be read
            continue
        if is_secret(real, resolved):
            continue  # a hint must not reveal that it exists
        if os.path.lexists(path) and not _is_there(path, resolved):
            fix = f"`--read {shlex.quote(path)}`, or put it into the workspace"
            if os.path.dirname(path) == "/":
                fix = f"`--read` what you need of it, such as `--read {shlex.quote(path)}/NAME`"
            return f"{path} exists on the host, but the policy does not show it: {fix}"
    return ""


def _denied(program: client.Program, resolved: ResolvedPolicy) -> str:
    """Return a hint about an argument that names a file which a clause of the policy hides."""
    for path in paths_named(program, plain=True) if resolved.denied else ():
        try:
            real = os.path.realpath(path)
        except OSError:
            continue
        clause = "" if is_secret(real, resolved) else denied_by(path, real, resolved)
        if clause and os.path.lexists(path):
            return f"{path} is hidden by {clause}"
    return ""


def _unshown_directory(program: client.Program, resolved: ResolvedPolicy) -> str:
    """Return a hint about a directory of the host in which a program cannot make its last argument."""
    paths = paths_named(program)
    if os.path.basename(program.argv[0]) not in WRITERS or not paths:
        return ""
    path = os.path.dirname(paths[-1])
    secret = is_secret(path, resolved) or is_secret(os.path.realpath(path), resolved)
    if secret or not os.path.isdir(path) or _is_there(path, resolved):
        return ""
    fix = "write to the workspace, the home or /tmp"
    if os.access(path, os.W_OK):
        fix += f"; `--write {shlex.quote(path)}` makes it writable for real"
    return f"{path} exists on the host, but the policy does not show it: {fix}"


def _is_there(path: str, resolved: ResolvedPolicy) -> bool:
    """Whether the path exists inside."""
    if is_shown(path, resolved) or any(covers(tree, path) for tree in OWN):
        return True
    made = [f"/etc/{name}" for name in MADE]
    private = [resolved.caller.home, "/tmp", "/var/tmp", *made]
    known = [*private, *shown_by(resolved.profile), *(grant.path for grant in resolved.grants)]
    known += [] if resolved.workspace is None else [resolved.workspace.path]
    return any(covers(path, place) for place in known)
