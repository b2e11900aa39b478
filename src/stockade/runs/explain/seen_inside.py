"""Explain a command that was not started without a look at the host's files.

These are the words for programs and models: the reader may have named the path, and an answer that depends on
the host's files would tell which of them exist. So everything here comes from the kernel's answer inside and
from the words of the command. `not_started` says more to a person who asked for it.
"""

from __future__ import annotations

import errno
import os
import shlex

from stockade.gate import client, wire
from stockade.result import Outcome, Verdict

BUILTINS = (
    ".", "alias", "bg", "cd", "declare", "eval", "exec", "export", "fg", "for", "function", "if", "jobs",
    "let", "local", "read", "set", "shift", "shopt", "source", "trap", "type", "ulimit", "umask", "unset",
    "while",
)  # fmt: skip
NO_COMMAND = "there is no such command inside"
TOO_LONG = "the arguments and the environment are too long: pass them in a file, or on standard input"


def explain(reply: wire.Reply, program: client.Program) -> Verdict:
    """Return the verdict on a command that never ran, from the kernel's answer alone."""
    why, name = os.strerror(reply.error), program.argv[0]
    if reply.text == "cwd":
        reason = f"the sandbox has no directory {os.path.normpath(program.cwd)}: {why}"
        return Verdict(
            Outcome.SETUP_FAILED, 125, reason, "make it first, or name a directory that exists inside"
        )
    if reply.text == "user":
        return _no_user(reply.error, *program.ids)
    if reply.text != "command":
        return Verdict(Outcome.SETUP_FAILED, 125, f"the command was not started: {reply.text}: {why}")
    if reply.error == errno.ENOENT:
        in_path = f"check the name; inside, PATH is {program.env.get('PATH', '')}"
        reason, hint = mistake(name) or (
            f"{NO_COMMAND}, or not the interpreter or loader that it names",
            "check the path" if "/" in name else in_path,
        )
        return Verdict(Outcome.SETUP_FAILED, 127, f"{name}: {reason}", hint)
    reason = f"{name}: cannot be executed inside: {why}"
    if reply.error in (errno.EACCES, errno.EPERM):
        return Verdict(Outcome.DENIED, 126, reason, "`ls -l` inside shows whether it is an executable file")
    if reply.error == errno.ENOEXEC:
        hint = "it is no program for this machine, or a script without a first line such as #!/bin/sh"
        return Verdict(Outcome.DENIED, 126, reason, hint)
    hint = TOO_LONG if reply.error == errno.E2BIG else "check the path"
    return Verdict(Outcome.SETUP_FAILED, 125, reason, hint)


def mistake(name: str) -> tuple[str, str] | None:
    """Explain a name that is no command by its looks: the reason and a hint; None if it looks like one."""
    if " " in name:
        words = " ".join(shlex.quote(word) for word in name.split())
        return (
            f"{NO_COMMAND}: it is one word with spaces in it",
            f"write separate words: stockade run -- {words}; or use a shell: -- sh -c {shlex.quote(name)}",
        )
    if name in BUILTINS:
        return (
            f"{NO_COMMAND}: it is built into the shell",
            f"run it in a shell: stockade run -- sh -c '{name} ...'",
        )
    if name.startswith("-"):
        return (
            f"{NO_COMMAND}: it looks like an option",
            "Stockade's own options come before --, the command after it: stockade run OPTIONS -- COMMAND",
        )
    return None


def _no_user(error: int, uid: int, gid: int) -> Verdict:
    if error == errno.EINVAL:
        reason = f"no such id inside: the sandbox does not have both the user {uid} and the group {gid}"
        hint = "use 0, or another id that the sandbox maps: see the first step of its plan"
    else:
        reason = f"no program of this sandbox can run as user {uid} and group {gid}: {os.strerror(error)}"
        hint = "leave the user out: programs run as the one that the sandbox has"
    return Verdict(Outcome.SETUP_FAILED, 125, reason, hint)
