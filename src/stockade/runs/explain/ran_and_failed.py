"""Hints about a program that ran and exited with an error that a wall may explain.

A hint rests on what the kernel counted, on what the policy shows and hides, or on what a well-known program
cannot do under any policy. It may not be the reason for the failure, but it is always true. Two hints rest on
what the program printed, and say so: the one about tasks, whose refusals RLIMIT_NPROC does not count, and the
guess that comes if there is nothing else to say.

Programs and models may read these hints, so nothing here looks at the host's files. `host_files` and
`printed` do, for a person who asks for it.
"""

from __future__ import annotations

import os
import re
import shlex

from stockade.gate import client, wire
from stockade.linux.path_lookup import covers
from stockade.policy.model import is_repository
from stockade.resolve.resolved import ResolvedPolicy
from stockade.resolve.toolchain.needs import shown_by

#: Programs that exit with 127 if they do not find a command.
SHELLS = ("sh", "bash", "dash", "zsh", "ksh", "busybox", "env")
TRACES = "no process inside may trace another (ptrace, perf), whatever the policy says: trace it outside"
BECOMES = "no process inside can become another user (set-uid programs have no effect): run it without"
MOUNTS = "no process inside can mount anything or make a namespace, whatever the policy says"
PACKETS = "no process inside can send or see raw packets, whatever the policy says"
#: Well-known programs that try what no policy allows.
NEVER = {
    **dict.fromkeys(("strace", "ltrace", "gdb", "lldb", "rr", "perf", "bpftrace", "py-spy"), TRACES),
    **dict.fromkeys(("sudo", "su", "doas", "pkexec", "runuser"), BECOMES),
    **dict.fromkeys(("mount", "umount", "unshare", "nsenter", "chroot", "bwrap"), MOUNTS),
    **dict.fromkeys(("ping", "traceroute", "tcpdump", "arping"), PACKETS),
}
#: Programs that write to their last argument.
WRITERS = (
    "chmod", "chown", "cp", "install", "ln", "mkdir", "mv", "rm", "rmdir", "tee", "touch", "truncate",
)  # fmt: skip
MOST_WORDS = 64
#: What shells, Python, Node, Go, Rust, Java and Ruby print if the kernel refuses them one more task.
NO_MORE_TASKS = re.compile(
    rb"\b(?:v?fork|clone|spawn|pthread_create|threads?)\b[^\n]{0,200}(?:temporarily unavailable|EAGAIN)"
    rb"|cannot fork|can't start new thread|failed to create new OS thread|unable to create native thread"
    rb"|fork.*BlockingIOError: \[Errno 11\]",
    re.IGNORECASE | re.DOTALL,
)
#: What programs print if they open their stdin or stdout again by a name, which a stage of a pipeline cannot.
NAMED_PIPE = re.compile(
    rb"/dev/(?:stdin|stdout|fd/\d+)\b[^\n]{0,80}Permission denied"
    rb"|Permission denied[^\n]{0,80}/dev/(?:stdin|stdout|fd/\d+)\b"
)
NO_NAMES = (
    "a stage of a pipeline cannot open a pipe to another stage by its name: let it read stdin and write "
    "stdout as they are, or in a shell `<&3`"
)
#: Words that `printed` has hints for.
LAST_WORDS = (
    b"No module named", b"not a git repository", b"tell me who you are",
    b"Read-only file system", b"ertificate", b"CERT", b"UnknownIssuer", b"certification path",
)  # fmt: skip
#: What programs print about an error that a wall gives, and that may have other reasons.
MAYBE_REFUSED = re.compile(
    rb"Permission denied|Operation not permitted|Read-only file system|Function not implemented"
    rb"|Protocol not (?:available|supported)|Address family not supported"
    rb"|Network is unreachable|name resolution|Could not resolve|Name or service not known"
    rb"|\b(?:EACCES|EPERM|EROFS|ENOSYS|ENOPROTOOPT|EPROTONOSUPPORT|EAFNOSUPPORT|ENETUNREACH|ENOTFOUND|EAI_AGAIN)\b"
)
#: How a hint begins that is only a guess.
GUESS = "a wall of the sandbox may have refused something (a guess from what the program printed): "
#: The longest command that a hint repeats.
MOST_COMMAND = 200
#: The exit code of git after "fatal:".
GIT_GAVE_UP = 128


def hints(
    code: int,
    reply: wire.Reply,
    program: client.Program,
    resolved: ResolvedPolicy,
    full: bool,
    last: bytes = b"",
    *,
    advise: bool = False,
) -> str:
    """Return the hints about what may explain an exit code.

    `full` says that limits.disk is used up; `last` is what the program printed last. With `advise` the hints
    also say what a look at the host's files finds.
    """
    found = [
        NEVER.get(os.path.basename(program.argv[0]), ""),
        _not_found(code, program),
        _network(reply, resolved),
        _disk(resolved) if full else "",
        _repository(code, program, resolved),
        (_host_files(program, resolved) if advise else "") or _unwritable(program, resolved),
        NO_NAMES if NAMED_PIPE.search(last) else "",
        *(_printed(last, program, resolved) if advise else ()),
        _renamed_directory(resolved) if b"cross-device link" in last else "",
    ]
    return "; ".join(filter(None, found)) or _guess(last, program)


def _host_files(program: client.Program, resolved: ResolvedPolicy) -> str:
    from stockade.runs.explain import host_files

    return host_files.hint(program, resolved)


def _guess(last: bytes, program: client.Program) -> str:
    """Return how to find out whether a wall is the reason, if what the program printed sounds like one."""
    if MAYBE_REFUSED.search(last) is None:
        return ""
    command = shlex.join(program.argv)
    command = command if len(command) <= MOST_COMMAND and command.isprintable() else "COMMAND"
    return f"{GUESS}`stockade explain -- {command}`, with the options of this run, shows what"


def no_more_tasks(printed: bytes, limit: int | None) -> str:
    """Return a hint if a program printed that it could not start another process or thread."""
    if limit is None or NO_MORE_TASKS.search(printed) is None:
        return ""
    return (
        f"the program printed that it could not start another process or thread, and the sandbox may have "
        f"{limit} at once: --limit tasks={2 * limit} (limits.tasks) allows more"
    )


def _printed(last: bytes, program: client.Program, resolved: ResolvedPolicy) -> list[str]:
    if not any(words in last for words in LAST_WORDS):
        return []
    from stockade.runs.explain import printed

    return printed.hints(last, program, resolved)


def _not_found(code: int, program: client.Program) -> str:
    if code != 127:
        return ""
    if os.path.basename(program.argv[0]) in SHELLS:
        path = program.env.get("PATH", "")
        meaning = "a shell exits with 127 if it does not find a command"
        return f"{meaning}: it looks in {path}; --toolchain NAME adds an install of yours"
    return (
        "the loader exits with 127 if a library is missing or hidden: its message names the library; "
        "`--read DIRECTORY` shows a directory, `--env LD_LIBRARY_PATH=DIRECTORY` makes the loader search it"
    )


def _network(reply: wire.Reply, resolved: ResolvedPolicy) -> str:
    """Return a hint if the kernel counted attempts to use the network that the policy does not give."""
    if not reply.index:
        return ""
    times = "once" if reply.index == 1 else f"{reply.index} times"
    if resolved.policy.net:
        return (
            f"the program sent datagrams {times} to a port that no rule for datagrams has: "
            "`--net udp://HOST:PORT` allows them"
        )
    return (
        f"the program tried to use the network {times} (an address without a route, or the lookup of a "
        "name), and the policy gives it none: `--net HOST` allows one host, `--net open` shares the host's "
        "whole network"
    )


def _disk(resolved: ResolvedPolicy) -> str:
    from stockade.policy.values import size_text

    limit = resolved.limits.disk or 0
    return (
        f"the disk is full: limits.disk = {size_text(limit)}; allow more: --limit disk={size_text(2 * limit)}"
    )


def _repository(code: int, program: client.Program, resolved: ResolvedPolicy) -> str:
    """Return a hint if git failed and the repository is read-only in a workspace of mode rw."""
    workspace, kept = resolved.workspace, resolved.repositories.kept
    if code != GIT_GAVE_UP or workspace is None or workspace.access != "write":
        return ""
    inside = [
        os.path.relpath(path, workspace.path)
        for path in kept
        if covers(workspace.path, path) and is_repository(os.path.basename(path))
    ]
    if not inside or not any(re.search(r"\bgit\b", word) for word in program.argv[:MOST_WORDS]):
        return ""
    fix = f"`--unprotect {shlex.quote(inside[0])}` allows it, and so does `--mode overlay`"
    return f"in mode rw the program cannot change {inside[0]}: {fix}"


def _unwritable(program: client.Program, resolved: ResolvedPolicy) -> str:
    """Return a hint if the last argument of a program that writes to it is read-only."""
    paths = paths_named(program)
    if os.path.basename(program.argv[0]) not in WRITERS or not paths:
        return ""
    path = paths[-1]
    trees = {grant.path: grant.access for grant in resolved.grants}
    if resolved.workspace is not None:
        trees[resolved.workspace.path] = resolved.workspace.access
    tree = max((tree for tree in trees if covers(tree, path)), key=len, default="")
    if tree and trees[tree] == "read":
        mode = resolved.workspace is not None and tree == resolved.workspace.path
        fix = "`--mode overlay`" if mode else f"`--write {shlex.quote(tree)}`"
        return f"{tree} is read-only inside: {fix} makes it writable"
    if not tree and any(covers(shown, path) for shown in shown_by(resolved.profile)):
        return f"{path} belongs to the system and is read-only: write to the workspace, the home or /tmp"
    return ""


def _renamed_directory(resolved: ResolvedPolicy) -> str:
    if resolved.workspace is None or resolved.workspace.access != "overlay":
        return ""
    return (
        "in an overlay the kernel cannot rename a directory that exists on the host: `mv` copies it "
        "instead, and `mv OLD NEW && git add -A OLD NEW` is what `git mv OLD NEW` does"
    )


def paths_named(program: client.Program, *, plain: bool = False) -> list[str]:
    """Return the arguments that look like paths, also after the = of an option; `plain` adds bare names."""
    words = [word.partition("=")[2] if word.startswith("-") else word for word in program.argv[1:MOST_WORDS]]
    words = [word for word in words if "/" in word or (plain and word)]
    return [os.path.normpath(os.path.join(program.cwd, word)) for word in words]
