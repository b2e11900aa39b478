"""The pledge draft: unveil(2) for files, pledge(2) for calls, on OpenBSD.

A small starter would unveil the grants, lock the list, set its limits, and execute the command under
*execpromises*: only with those does the kernel keep the unveiled list and refuse set-uid programs after
execve.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import msgspec

from stockade.backends.backend import Mechanism
from stockade.backends.other_systems.draft import (
    DraftBackend,
    DraftPlan,
    DraftRequest,
    DraftStep,
    Granted,
    environment,
    granted,
    plain,
)
from stockade.backends.plan_parts import cpu_seconds, refuse_taking_away, within
from stockade.controls import Control
from stockade.errors import PolicyError

#: What the starter itself still needs once everything is unveiled.
STARTER = "stdio exec"
#: Calls outside the promises are answered with ENOSYS, as elsewhere by the filter.
PROMISES = ("error", "stdio", "rpath", "wpath", "cpath", "fattr", "flock", "proc", "exec", "prot_exec")
NETWORK = ("inet", "dns")
#: Path and permissions: r read, w write, x execute, c create and remove.
SYSTEM = (
    ("/bin", "rx"),
    ("/sbin", "rx"),
    ("/usr/bin", "rx"),
    ("/usr/lib", "rx"),
    ("/usr/libexec", "rx"),
    ("/usr/local", "rx"),
    ("/usr/sbin", "rx"),
    ("/usr/share", "r"),
    ("/etc/localtime", "r"),
    ("/etc/ssl/cert.pem", "r"),
    ("/etc/ssl/openssl.cnf", "r"),
    ("/var/run/ld.so.hints", "r"),
    ("/dev/null", "rw"),
    ("/dev/zero", "r"),
    ("/dev/random", "r"),
    ("/dev/urandom", "r"),
)
RESOLVER = (("/etc/hosts", "r"), ("/etc/resolv.conf", "r"), ("/etc/services", "r"))
NEVER_WRITABLE = ("/bin", "/sbin", "/usr", "/etc", "/dev", "/var/run")
SCRATCH = "SCRATCH"
LEAVES = "a process that leaves its group, as daemons do, is not found again"

MECHANISMS: Mapping[Control, Mechanism] = {
    Control.FILES: Mechanism("unveil: no other name is there"),
    Control.DENY: Mechanism("unveil without any permission"),
    Control.PROTECT: Mechanism(
        never="it is not known whether a rename above makes an unveiled path writable", optional=True
    ),
    Control.EXEC: Mechanism(never="what is writable can be executed"),
    Control.WORKSPACE_OVERLAY: Mechanism(never="OpenBSD has no overlay"),
    Control.NETWORK_NONE: Mechanism("no promise of inet, dns or unix"),
    Control.NETWORK_RULES: Mechanism(
        never="OpenBSD has no network of a process's own that could be led through a process that decides"
    ),
    Control.NETWORK_HTTP: Mechanism(
        never="OpenBSD has no network of a process's own that could be led through a process that decides"
    ),
    Control.SECRETS: Mechanism(never="there is no egress process that could hold them"),
    Control.PROCESSES: Mechanism(
        never="a program that may start programs may signal all processes of the same user",
        optional=True,
        weaker="others cannot be listed or traced, but those of the same user can be signalled",
    ),
    Control.IPC: Mechanism("no promise of unix, sendfd or recvfd; no System V objects"),
    Control.SYSCALLS: Mechanism("pledge: calls outside the promises are refused"),
    Control.PRIVILEGES: Mechanism("no promise of id or settime; set-uid programs are refused"),
    Control.ENVIRONMENT: Mechanism("built anew by the supervisor"),
    Control.DEVICES: Mechanism(
        never="a device file in a granted directory can be opened",
        optional=True,
        weaker="of /dev only null, zero, random and urandom; none can be made",
    ),
    Control.TERMINAL: Mechanism("streams are pipes, no promise of tty"),
    Control.LIMITS_MEMORY: Mechanism(
        never="OpenBSD bounds the memory of no group of processes",
        optional=True,
        weaker="RLIMIT_DATA for each process only",
    ),
    Control.LIMITS_TASKS: Mechanism(never="OpenBSD counts all processes of the user", optional=True),
    Control.LIMITS_CPU: Mechanism(never="OpenBSD bounds the share of no group of processes"),
    Control.LIMITS_CPU_TIME: Mechanism(
        never="OpenBSD adds up the time of no group of processes",
        optional=True,
        weaker="RLIMIT_CPU for each process only",
    ),
    Control.LIMITS_WALL: Mechanism(never=LEAVES, optional=True, weaker="the group of the command is ended"),
    Control.LIMITS_OUTPUT: Mechanism("counted by the supervisor"),
    Control.LIMITS_FILES: Mechanism("RLIMIT_NOFILE"),
    Control.LIMITS_DISK: Mechanism(never="OpenBSD bounds one file, not all together"),
    Control.LIMITS_NETWORK: Mechanism(never="no process is between the program and the network to count"),
    Control.CLEANUP: Mechanism(never=LEAVES, optional=True, weaker="the group of the command is ended"),
}


class Pledge(DraftBackend):
    """unveil, pledge and rlimits."""

    name: ClassVar[str] = "pledge"
    system: ClassVar[str] = "openbsd"
    foundation = ("pledge", "unveil")
    mechanisms = MECHANISMS

    @classmethod
    def draw(cls, asked: DraftRequest) -> DraftPlan:
        return compile_plan(inputs(asked))


class PledgeInputs(msgspec.Struct, frozen=True):
    """Everything that a plan depends on. A limit of 0 is none."""

    command: tuple[str, ...]
    cwd: str
    environ: tuple[tuple[str, str], ...]
    #: The private directory: home, and for temporary files.
    scratch: str
    files: int
    own_network: bool
    grants: tuple[Granted, ...] = ()
    denied: tuple[str, ...] = ()
    memory: int = 0
    cpu_time: int = 0


def inputs(asked: DraftRequest) -> PledgeInputs:
    """Return the value that a plan is compiled from."""
    resolved = asked.resolved
    policy, limits = resolved.policy, resolved.limits
    if policy.syscalls.allow or policy.syscalls.deny:
        raise PolicyError(
            "syscalls: pledge knows promises, and no names of system calls",
            hint="leave the table `syscalls` out",
        )
    grants = granted(resolved)
    refuse_taking_away(grants, Pledge.name)
    workspace = resolved.workspace
    by_process = asked.selection.by_process
    return PledgeInputs(
        command=asked.command,
        cwd=asked.scratch if workspace is None else workspace.path,
        environ=environment(resolved, asked.scratch),
        scratch=asked.scratch,
        files=limits.files or 0,
        own_network=policy.net != "open",
        grants=plain(grants),
        denied=resolved.denied,
        memory=(limits.memory or 0) if Control.LIMITS_MEMORY in by_process else 0,
        cpu_time=cpu_seconds(limits) if Control.LIMITS_CPU_TIME in by_process else 0,
    )


def promises(own_network: bool) -> str:
    """Return the promises of the command."""
    return " ".join((*PROMISES, *(() if own_network else NETWORK)))


def unveiled(given: PledgeInputs) -> tuple[tuple[str, str, str], ...]:
    """Return path, permissions and clause, in order. A path below another has its own permissions."""
    found: list[tuple[str, str, str]] = [(path, rights, "profile") for path, rights in SYSTEM]
    if not given.own_network:
        found += [(path, rights, "net") for path, rights in RESOLVER]
    for path, access, is_dir, clause in given.grants:
        for tree in NEVER_WRITABLE:
            if access == "write" and (within(path, tree) or within(tree, path)):
                raise PolicyError(
                    f"{clause}: {tree} belongs to the system", hint="grant another directory to write to"
                )
        if "\0" in path or not path.startswith("/"):
            raise PolicyError(f"{clause}: {path!r} is not an absolute path", hint="check the path")
        found.append((path, "rx" if access == "read" else "rwxc" if is_dir else "rwx", clause))
    found.append((given.scratch, "rwxc", "always"))
    shown = [path for path, *_ in found]
    found += [(path, "", "deny") for path in given.denied if any(within(path, tree) for tree in shown)]
    return tuple(found)


def compile_plan(given: PledgeInputs) -> DraftPlan:
    """Return the steps, in order."""
    limits = {"RLIMIT_CORE": 0, "RLIMIT_NOFILE": given.files}
    limits |= {"RLIMIT_DATA": given.memory} if given.memory else {}
    limits |= {"RLIMIT_CPU": given.cpu_time} if given.cpu_time else {}
    steps = [
        DraftStep(words=f"begin in {given.cwd}", clause="workspace", given=(_own(given, given.cwd),)),
        DraftStep(
            words=f"clear the environment and set {', '.join(name for name, _ in given.environ)}",
            clause="env",
            given=tuple(f"{name}={_own(given, value)}" for name, value in given.environ),
        ),
        *(
            DraftStep(words=f"set {name} to {value}", clause="limits", given=(name, str(value)))
            for name, value in limits.items()
        ),
    ]
    lines = []
    for path, rights, clause in unveiled(given):
        words = f"unveil {path} for {rights}" if rights else f"hide {path}"
        steps.append(DraftStep(words=words, clause=clause, given=("unveil", _own(given, path), rights)))
        lines.append(f"{rights or '-':4} {path}")
    granted_to = promises(given.own_network)
    steps += [
        DraftStep(words="unveil nothing more", given=("unveil",)),
        DraftStep(
            words=f"promise for itself: {STARTER}; for the command and all it starts: {granted_to}",
            clause="syscalls",
            given=("pledge", STARTER, granted_to),
        ),
    ]
    texts = (("unveil", "\n".join(lines)), ("execpromises", granted_to))
    return DraftPlan(Pledge.name, tuple(steps), texts)


def _own(given: PledgeInputs, text: str) -> str:
    """Replace the private directory, which differs from run to run, by a fixed name."""
    return SCRATCH if text == given.scratch else text
