"""What each clause of a policy says, in words: for the schema that editors read, and for docs/policy.md.

Names, defaults and allowed words are the model's; only what the model cannot
know stands here.
"""

from __future__ import annotations

from typing import NamedTuple

from stockade.controls import Control

#: How times and sizes may be written.
TIME = 'seconds, or "250ms", "30s", "5m", "1h"'
SIZE = 'bytes, or "64K", "10M", "1G"'
A_TIME, A_SIZE = "a time", "a size"


class Clause(NamedTuple):
    """One clause: what may be written, what that means, and the control that keeps it."""

    form: str
    says: str
    control: Control | None = None


CLAUSES: dict[str, Clause] = {
    "profile": Clause("", "the named starting point", Control.FILES),
    "read": Clause("paths", "visible, read-only; `?` at the end: where it exists", Control.FILES),
    "write": Clause("paths", "visible, and writable for real", Control.FILES),
    "deny": Clause("paths", "hidden, also inside what is shown", Control.DENY),
    "protect": Clause("relative paths", "in the workspace, and must not change", Control.PROTECT),
    "exec": Clause("patterns", "the only files that may be executed", Control.EXEC),
    "net": Clause('`[]` or `"open"`', "none, or the host's network, all of it", Control.NETWORK_NONE),
    "env": Clause("a table", "variables that are set inside", Control.ENVIRONMENT),
    "pass_env": Clause("names", "variables of yours that are passed on", Control.ENVIRONMENT),
    "image": Clause("", "the root file system", Control.FILES),
    "toolchain": Clause(
        "true, false, or commands",
        "whether the install that the command belongs to is shown; or further commands whose installs are",
        Control.FILES,
    ),
    "delegate": Clause(
        "true or false",
        "whether the program may ask for further sandboxes, none of which has more than it has itself",
        Control.FILES,
    ),
    "backend": Clause(
        '`"auto"`, `"native"`, `"bwrap"`, `"landlock"`, or a list of names; those of other systems start '
        "nothing",
        "who raises the walls; a named one is used or the run is refused; a list is by preference",
    ),
    "accept": Clause("controls", "may be weaker where the host cannot do better"),
    "workspace": Clause("a path or a table", "the directory that commands work in"),
    "workspace.path": Clause("a path", "appears inside at the same path as outside", Control.FILES),
    "workspace.mode": Clause("", "changes are kept aside, real, or refused", Control.WORKSPACE_OVERLAY),
    "workspace.durable": Clause(
        "true or false", "changes survive a killed supervisor also under `limits.disk`, or the run is refused"
    ),
    "limits": Clause("a table", "what the sandbox may use up"),
    "limits.memory": Clause(A_SIZE, "memory of the whole sandbox", Control.LIMITS_MEMORY),
    "limits.tasks": Clause("a number", "processes and threads at once", Control.LIMITS_TASKS),
    "limits.cpu": Clause("a number", "cores", Control.LIMITS_CPU),
    "limits.cpu_time": Clause(A_TIME, "on processors, of the whole sandbox", Control.LIMITS_CPU_TIME),
    "limits.wall": Clause(A_TIME, "from start to end", Control.LIMITS_WALL),
    "limits.output": Clause(
        A_SIZE, "of a stream kept in memory; the rest goes to a file", Control.LIMITS_OUTPUT
    ),
    "limits.files": Clause("a number", "open descriptors of one process", Control.LIMITS_FILES),
    "limits.disk": Clause(
        A_SIZE,
        "changes, private `/tmp`, `/dev/shm` and home together",
        Control.LIMITS_DISK,
    ),
    "syscalls": Clause("a table", "system calls beyond or below the built-in list", Control.SYSCALLS),
    "syscalls.allow": Clause("names", "calls that the built-in list leaves out", Control.SYSCALLS),
    "syscalls.deny": Clause("names", "further calls that are refused", Control.SYSCALLS),
    "reuse": Clause("a table", "a pool may use a sandbox for several runs, one after another"),
    "reuse.requests": Clause("a number", "runs of one sandbox"),
    "reuse.age": Clause(A_TIME, "from when it was opened; then it takes no more runs"),
    "reuse.idle": Clause(A_TIME, "that it waits after a run before it is ended"),
}

CONTROLS: dict[Control, str] = {
    Control.FILES: "no file but the profile's, the grants' and private memory",
    Control.DENY: "the named paths do not exist inside",
    Control.PROTECT: "the named paths of the workspace do not change on the host",
    Control.EXEC: "execve takes the listed files only",
    Control.WORKSPACE_OVERLAY: "changes go to a layer beside the workspace",
    Control.NETWORK_NONE: "a loopback of its own, and nothing else",
    Control.PROCESSES: "sees, signals and traces its own processes only",
    Control.IPC: "no shared memory, queues or sockets of the host",
    Control.SYSCALLS: "the calls of an allowlist only",
    Control.PRIVILEGES: "no capability, and none to be gained",
    Control.ENVIRONMENT: "no variable of yours that was not named",
    Control.DEVICES: "null, zero, full, random, urandom, tty, terminals of its own",
    Control.TERMINAL: "no terminal of yours, no typing into one",
    Control.LIMITS_MEMORY: "so much memory, all processes together",
    Control.LIMITS_TASKS: "so many processes and threads",
    Control.LIMITS_CPU: "so many cores",
    Control.LIMITS_CPU_TIME: "so much processor time, all processes together",
    Control.LIMITS_WALL: "so much time, then the end",
    Control.LIMITS_OUTPUT: "so much output kept in memory",
    Control.LIMITS_FILES: "so many descriptors for each process",
    Control.LIMITS_DISK: "so many bytes and files",
    Control.CLEANUP: "everything inside ends with the run and with its supervisor",
}


def description(name: str) -> str:
    """One clause for an editor: what it says, and how a time or a size is written."""
    clause = CLAUSES[name]
    form = {A_TIME: f": {TIME}", A_SIZE: f": {SIZE}"}.get(clause.form, "")
    return clause.says.replace("`", "") + form
