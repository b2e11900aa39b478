"""What to tell about a program that ran and failed by itself, where a wall explains it.

Nothing is guessed from what was printed. A hint rests on what the kernel has
counted, on what the policy shows and hides, or on what a well-known program
cannot do behind any policy. Nobody can know that this was the reason; each
hint is true all the same.
"""

from __future__ import annotations

import os
import shlex

from stockade.gate import client
from stockade.policy import Resolved
from stockade.policy.resolve import OWN, covers
from stockade.policy.toolchain import shown_by
from stockade.sandbox.unstarted import is_secret, is_shown

#: Programs that answer 127 where they find no command.
SHELLS = ("sh", "bash", "dash", "zsh", "ksh", "busybox", "env")
TRACES = "inside, no process may trace another (ptrace, perf) whatever the policy says: trace it outside"
BECOMES = "inside, nobody becomes another user (set-uid programs have no effect): run it without"
MOUNTS = "inside, nothing is mounted and no namespace is made, whatever the policy says"
PACKETS = "inside, no program sends or sees raw packets, whatever the policy says"
#: What well-known programs try that no policy allows.
NEVER = {
    **dict.fromkeys(("strace", "ltrace", "gdb", "lldb", "rr", "perf", "bpftrace", "py-spy"), TRACES),
    **dict.fromkeys(("sudo", "su", "doas", "pkexec", "runuser"), BECOMES),
    **dict.fromkeys(("mount", "umount", "unshare", "nsenter", "chroot", "bwrap"), MOUNTS),
    **dict.fromkeys(("ping", "traceroute", "tcpdump", "arping"), PACKETS),
}
#: Programs whose last argument they write to.
WRITERS = (
    "chmod", "chown", "cp", "install", "ln", "mkdir", "mv", "rm", "rmdir", "tee", "touch", "truncate",
)  # fmt: skip
#: Entries of /etc that are made for the sandbox.
MADE = ("passwd", "group", "hostname", "hosts", "resolv.conf", "nsswitch.conf")
MOST_WORDS = 64


def hints(code: int, reply: client.Reply, program: client.Program, resolved: Resolved, full: bool) -> str:
    """What is known that may lie behind an exit code; `full` says that limits.disk is used up."""
    found = [
        NEVER.get(os.path.basename(program.argv[0]), ""),
        _not_found(code, program),
        _network(reply, resolved),
        _disk(resolved) if full else "",
        _unseen(program, resolved) or _unwritable(program, resolved),
    ]
    return "; ".join(filter(None, found))


def _not_found(code: int, program: client.Program) -> str:
    if code != 127:
        return ""
    if os.path.basename(program.argv[0]) in SHELLS:
        path = program.env.get("PATH", "")
        said = "127 is how a shell says that a command was not found"
        return f"{said}: it looks in {path}; --toolchain NAME adds an install of yours"
    return (
        "127 is how the loader ends a program of which a library is missing or hidden: its message names it; "
        "`--read DIRECTORY` shows one, `--env LD_LIBRARY_PATH=DIRECTORY` has it searched"
    )


def _network(reply: client.Reply, resolved: Resolved) -> str:
    """What the kernel has counted in a network that leads nowhere; nothing where there is one."""
    if not reply.index or resolved.policy.net == "open":
        return ""
    times = "once" if reply.index == 1 else f"{reply.index} times"
    return (
        f"the network was tried {times} (an address without a route, or a name that nobody looks up), and "
        'the policy gives none: `--net open`, or net = "open", shares the host\'s'
    )


def _disk(resolved: Resolved) -> str:
    from stockade.policy.values import size_text

    limit = resolved.limits.disk or 0
    return (
        f"the disk is full: limits.disk = {size_text(limit)}; allow more: --limit disk={size_text(2 * limit)}"
    )


def _unseen(program: client.Program, resolved: Resolved) -> str:
    """An argument that names a file of the host which is not there inside."""
    for path in _named(program):
        try:
            real = os.path.realpath(path)
        except OSError:  # a link in /proc that may not be read
            continue
        if is_secret(real, resolved):
            continue  # that there is one is nothing to spread
        if os.path.lexists(path) and not _is_there(path, resolved):
            return (
                f"{path} exists outside, and the policy does not show it: `--read {shlex.quote(path)}`, "
                "or put it into the workspace"
            )
    return ""


def _unwritable(program: client.Program, resolved: Resolved) -> str:
    """A place that a program is told to write to and that is read-only."""
    paths = _named(program)
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
        return f"{tree} is shown read-only: {fix} lets it be changed"
    if not tree and any(covers(shown, path) for shown in shown_by(resolved.profile)):
        return f"{path} is the system's, and read-only: write to the workspace, the home or /tmp"
    return ""


def _named(program: client.Program) -> list[str]:
    """The arguments that look like paths, also behind an option's =."""
    words = [word.partition("=")[2] if word.startswith("-") else word for word in program.argv[1:MOST_WORDS]]
    return [os.path.normpath(os.path.join(program.cwd, word)) for word in words if "/" in word]


def _is_there(path: str, resolved: Resolved) -> bool:
    """Whether something is at that path inside."""
    if is_shown(path, resolved) or any(covers(tree, path) for tree in OWN):
        return True
    made = [f"/etc/{name}" for name in MADE]
    private = [resolved.caller.home, "/tmp", "/var/tmp", *made]
    known = [*private, *shown_by(resolved.profile), *(grant.path for grant in resolved.grants)]
    known += [] if resolved.workspace is None else [resolved.workspace.path]
    return any(covers(path, place) for place in known)
