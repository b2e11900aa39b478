"""The seatbelt draft: a profile for macOS's sandbox-exec, and limits by a prelude in a shell.

A profile is a program in Apple's dialect of Scheme: rules by operation, of which the last match counts. Here
nothing is allowed by default. Paths get into it as strings and never as patterns, so only quotes and
backslashes are escaped. A rule without a filter would allow its operation everywhere: `_rule` refuses that.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import ClassVar

import msgspec

from stockade.backends.backend import Mechanism
from stockade.backends.other_systems.draft import (
    DraftBackend,
    DraftPlan,
    DraftRequest,
    DraftStep,
    Granted,
    checked_tag,
    environment,
    granted,
    plain,
)
from stockade.backends.plan_parts import cpu_seconds, refuse_hiding, refuse_taking_away, within
from stockade.controls import Control
from stockade.errors import PolicyError

ENV, SHELL, SANDBOX_EXEC, LOG = "/usr/bin/env", "/bin/sh", "/usr/bin/sandbox-exec", "/usr/bin/log"

#: Readable trees of the system, by their real paths: /etc, /tmp and /var are links.
SYSTEM = (
    "/bin",
    "/sbin",
    "/usr/bin",
    "/usr/lib",
    "/usr/libexec",
    "/usr/sbin",
    "/usr/share",
    "/System/Library",
    "/System/Cryptexes",
    "/System/Volumes/Preboot/Cryptexes",
    "/Library/Apple",
    "/Library/Developer/CommandLineTools",
    "/private/etc/ssl/certs",
    "/private/var/db/dyld",
    "/private/var/db/timezone",
)
SYSTEM_FILES = ("/private/etc/localtime", "/private/etc/ssl/cert.pem", "/private/etc/ssl/openssl.cnf")
#: Trees that no policy may make writable.
NEVER_WRITABLE = (
    "/System",
    "/Library",
    "/Applications",
    "/private/etc",
    "/private/var/db",
    "/dev",
    "/usr",
    "/bin",
    "/sbin",
)
RESOLVER = ("/private/etc/hosts", "/private/etc/resolv.conf", "/private/var/run/resolv.conf")
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
#: The descriptors that a program has anyway.
OWN_DESCRIPTORS = ("/dev/fd", "/dev/stdin", "/dev/stdout", "/dev/stderr")
FIGURES = (
    "hw.activecpu",
    "hw.byteorder",
    "hw.cachelinesize",
    "hw.cputype",
    "hw.logicalcpu",
    "hw.machine",
    "hw.memsize",
    "hw.ncpu",
    "hw.pagesize",
    "hw.physicalcpu",
    "kern.argmax",
    "kern.hostname",
    "kern.maxfilesperproc",
    "kern.osproductversion",
    "kern.osrelease",
    "kern.ostype",
    "kern.osversion",
    "kern.version",
)

#: Every token occurs once; the text that replaces it is not searched for tokens.
TEMPLATE = """\
(version 1)
(deny default (with message "@TAG@"))

; Programs, among themselves.
(allow process-fork)
(allow process-info* (target same-sandbox))
(allow signal (target same-sandbox))

; What every program asks about the machine.
@FIGURES@

; Where the way to what is granted leads along; names only.
@ABOVE@

; What can be read, and run.
@READ@

; What can be changed as well.
@WRITE@

; Devices, whatever directory they are in: none but these.
(deny file-read* file-write* (vnode-type CHARACTER-DEVICE) (vnode-type BLOCK-DEVICE))
@DEVICES@

@NETWORK@
"""
TOKEN = re.compile("@[A-Z]+@")
NO_NETWORK = "; No network."
NETWORK = """\
; The host's network: its addresses, not its sockets in directories.
(allow network-outbound (remote ip "*:*") (literal "/private/var/run/mDNSResponder"))
(allow network-bind (local ip "*:*"))
(allow network-inbound (local ip "*:*"))
(allow system-socket)"""

FILES = (
    "nothing outside the grants can be opened, made, removed or changed; that a name exists can be told from "
    "the answer; /tmp is not granted"
)
LEAVES = "a process that leaves its group, as daemons do, is not found again"

MECHANISMS: Mapping[Control, Mechanism] = {
    Control.FILES: Mechanism(
        never="a refused path gives a different error than a path that does not exist",
        optional=True,
        weaker=FILES,
    ),
    Control.DENY: Mechanism(
        never="rules compare names exactly, and macOS finds files by names that differ in case"
    ),
    Control.PROTECT: Mechanism(
        never="rules compare names, and a program can rename the directory above", optional=True
    ),
    Control.EXEC: Mechanism(never="what is writable can be executed"),
    Control.WORKSPACE_OVERLAY: Mechanism(never="macOS has no overlay"),
    Control.NETWORK_NONE: Mechanism("no rule of the profile allows a socket"),
    Control.NETWORK_RULES: Mechanism(
        never="a profile knows ports and the local host, and no names of other hosts"
    ),
    Control.NETWORK_HTTP: Mechanism(
        never="a profile knows ports and the local host, and nothing of requests"
    ),
    Control.SECRETS: Mechanism(never="there is no egress process that could hold them"),
    Control.PROCESSES: Mechanism(
        never="that a process exists can be told from the answer to a signal",
        optional=True,
        weaker="none but those behind the same profile can be signalled or asked about",
    ),
    Control.IPC: Mechanism("no rule of the profile allows Mach services, shared memory or named sockets"),
    Control.SYSCALLS: Mechanism(
        never="macOS has no filter that a policy's names of calls could go into",
        optional=True,
        weaker="what the profile does not mediate is left to the kernel",
    ),
    Control.PRIVILEGES: Mechanism(
        never="a set-uid program may gain rights, and root stays root",
        optional=True,
        weaker="whatever it gains, the profile holds for it",
    ),
    Control.ENVIRONMENT: Mechanism("built anew by env -i"),
    Control.DEVICES: Mechanism("refused by kind of file, after the grants; then null, zero, random, urandom"),
    Control.TERMINAL: Mechanism("streams are pipes, and no rule of the profile allows a terminal"),
    Control.LIMITS_MEMORY: Mechanism(never="macOS bounds the memory of no group of processes"),
    Control.LIMITS_TASKS: Mechanism(never="macOS counts all processes of the user", optional=True),
    Control.LIMITS_CPU: Mechanism(never="macOS bounds the share of no group of processes"),
    Control.LIMITS_CPU_TIME: Mechanism(
        never="macOS adds up the time of no group of processes",
        optional=True,
        weaker="RLIMIT_CPU for each process only",
    ),
    Control.LIMITS_WALL: Mechanism(never=LEAVES, optional=True, weaker="the group of the command is ended"),
    Control.LIMITS_OUTPUT: Mechanism("counted by the supervisor"),
    Control.LIMITS_FILES: Mechanism("RLIMIT_NOFILE"),
    Control.LIMITS_DISK: Mechanism(never="macOS bounds one file, not all together"),
    Control.LIMITS_NETWORK: Mechanism(never="no process is between the program and the network to count"),
    Control.CLEANUP: Mechanism(never=LEAVES, optional=True, weaker="the group of the command is ended"),
}


class Seatbelt(DraftBackend):
    """A sandbox-exec profile and rlimits."""

    name: ClassVar[str] = "seatbelt"
    system: ClassVar[str] = "darwin"
    foundation = ("sandbox-exec",)
    mechanisms = MECHANISMS

    @classmethod
    def draw(cls, asked: DraftRequest) -> DraftPlan:
        return compile_plan(inputs(asked))


class SeatbeltInputs(msgspec.Struct, frozen=True):
    """Everything that a plan depends on."""

    command: tuple[str, ...]
    cwd: str
    environ: tuple[tuple[str, str], ...]
    tag: str
    #: The private directory: home, and for temporary files.
    scratch: str
    files: int
    own_network: bool
    grants: tuple[Granted, ...] = ()
    cpu_time: int = 0


def inputs(asked: DraftRequest) -> SeatbeltInputs:
    """Return the value that a plan is compiled from."""
    resolved = asked.resolved
    grants = granted(resolved)
    refuse_taking_away(grants, Seatbelt.name)
    refuse_hiding(grants, resolved.denied)
    workspace = resolved.workspace
    by_process = Control.LIMITS_CPU_TIME in asked.selection.by_process
    return SeatbeltInputs(
        command=asked.command,
        cwd=asked.scratch if workspace is None else workspace.path,
        environ=environment(resolved, asked.scratch),
        tag=asked.tag,
        scratch=asked.scratch,
        files=resolved.limits.files or 0,
        own_network=resolved.policy.net != "open",
        grants=plain(grants),
        cpu_time=cpu_seconds(resolved.limits) if by_process else 0,
    )


def compile_plan(given: SeatbeltInputs) -> DraftPlan:
    """Return the steps, in order."""
    _refuse(given.grants)
    text = profile(given)
    limits = prelude(given)
    # The hash of the plan covers neither the tag of the run nor its private directory.
    known = profile(msgspec.structs.replace(given, tag="run"))
    steps = [
        DraftStep(words=f"begin in {given.cwd}", clause="workspace", given=(_own(given, given.cwd),)),
        DraftStep(words="clear the environment", clause="env"),
        DraftStep(words=f"in a shell: {limits}", clause="limits", given=(limits,)),
        *(DraftStep(words=_words(grant), clause=grant[3], given=grant[:2]) for grant in given.grants),
        DraftStep(
            words="no network" if given.own_network else "the host's network, without named sockets",
            clause="net",
        ),
        DraftStep(words=f"have {SANDBOX_EXEC} put it behind the profile", given=(known,)),
        DraftStep(
            words=f"clear the environment once more and set {', '.join(name for name, _ in given.environ)}",
            clause="env",
            given=tuple(f"{name}={_own(given, value)}" for name, value in given.environ),
        ),
        DraftStep(
            words=f"find what was refused by {' '.join(denials(given.tag)[:2])}, where the kernel says it"
        ),
    ]
    return DraftPlan(
        Seatbelt.name,
        tuple(steps),
        texts=(("profile", text), ("predicate", predicate(given.tag))),
        argv=argv(given, text),
    )


def _own(given: SeatbeltInputs, text: str) -> str:
    """Replace the private directory, which differs from run to run, by a fixed name."""
    return "SCRATCH" if text == given.scratch else text


def _words(grant: Granted) -> str:
    path, access, is_dir, _ = grant
    what = "all of it" if is_dir else "this file"
    return f"allow to {'read and run' if access == 'read' else 'read, run and change'} {path}, {what}"


def _refuse(grants: Iterable[Granted]) -> None:
    for path, access, _, clause in grants:
        try:
            path.encode()
        except UnicodeEncodeError:
            raise PolicyError(
                f"{clause}: {path!r} is not UTF-8, and it is not known how sandbox-exec reads it",
                hint="rename it",
            ) from None
        if "\0" in path or not path.startswith("/"):
            raise PolicyError(f"{clause}: {path!r} is not an absolute path", hint="check the path")
        for tree in NEVER_WRITABLE:
            if access == "write" and (within(path, tree) or within(tree, path)):
                raise PolicyError(
                    f"{clause}: {tree} belongs to the system", hint="grant another directory to write to"
                )


def profile(given: SeatbeltInputs) -> str:
    """Return the profile of a run."""
    readable = [_filter(path, is_dir=True) for path in SYSTEM]
    files = (*SYSTEM_FILES, *(() if given.own_network else RESOLVER))
    readable += [_filter(path, is_dir=False) for path in files]
    readable += [_filter(path, is_dir=is_dir) for path, _, is_dir, _ in given.grants]
    scratch = '(subpath (param "SCRATCH"))'
    changed = [(path, is_dir) for path, access, is_dir, _ in given.grants if access == "write"]
    writable = [scratch, *(_filter(path, is_dir=is_dir) for path, is_dir in changed)]
    shown = (*SYSTEM, *files, given.scratch, *(path for path, *_ in given.grants))
    above = {parent for path in shown for parent in _above(path)}
    own = [_filter(path, is_dir=path == OWN_DESCRIPTORS[0]) for path in OWN_DESCRIPTORS]
    return fill(
        TEMPLATE,
        {
            "TAG": f"stockade-{checked_tag(given.tag)}",
            "FIGURES": _rule("sysctl-read", [f"(sysctl-name {quoted(name)})" for name in FIGURES]),
            "ABOVE": "\n".join(
                (
                    _rule("file-read-data", [_filter("/", is_dir=False)]),
                    _rule("file-read-metadata", [_filter(path, is_dir=False) for path in sorted(above)]),
                )
            ),
            "READ": _rule("file-read* file-map-executable process-exec", [*readable, scratch]),
            "WRITE": _rule("file-write*", writable),
            "DEVICES": _rule(
                "file-read* file-write-data", [*(_filter(path, is_dir=False) for path in DEVICES), *own]
            ),
            "NETWORK": NO_NETWORK if given.own_network else NETWORK,
        },
    )


def fill(template: str, parts: Mapping[str, str]) -> str:
    """Replace all tokens of the template at once: a token in a replacement is only text."""
    tokens = TOKEN.findall(template)
    if sorted(tokens) != sorted(f"@{name}@" for name in parts):
        raise ValueError(f"the template has {', '.join(tokens)}, and not each of {', '.join(parts)} once")
    return TOKEN.sub(lambda found: parts[found.group()[1:-1]], template)


def quoted(text: str) -> str:
    """Return a string literal of the profile's language. Line ends and all else stand for themselves."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _filter(path: str, *, is_dir: bool) -> str:
    return f"({'subpath' if is_dir else 'literal'} {quoted(path)})"


def _rule(operations: str, filters: Iterable[str]) -> str:
    found = list(dict.fromkeys(filters))
    if not found:
        raise ValueError(f"{operations} without a filter would be allowed everywhere")
    return f"(allow {operations}\n    " + "\n    ".join(found) + ")"


def _above(path: str) -> list[str]:
    """Return the directories above a path."""
    parts = path.split("/")[1:-1]
    return ["/", *("/" + "/".join(parts[: number + 1]) for number in range(len(parts)))]


def prelude(given: SeatbeltInputs) -> str:
    """Return the shell commands that set the limits; if one cannot be set, nothing else runs."""
    limits = ["ulimit -c 0", f"ulimit -n {given.files:d}"]
    if given.cpu_time:
        limits.append(f"ulimit -t {given.cpu_time:d}")
    return " && ".join((*limits, 'exec "$@"'))


def argv(given: SeatbeltInputs, text: str) -> tuple[str, ...]:
    """Return the whole command line. The shell's own text contains nothing of the policy or the command.

    The environment is set behind the profile: a variable could mislead the programs that run before.
    """
    if given.command and (given.command[0].startswith("-") or "=" in given.command[0]):
        raise PolicyError(
            f"{given.command[0]!r}: {ENV} would take that for an option or a variable",
            hint="rename the program",
        )
    return (
        ENV,
        "-i",
        SHELL,
        "-c",
        prelude(given),
        "stockade",
        SANDBOX_EXEC,
        "-D",
        f"SCRATCH={given.scratch}",
        "-p",
        text,
        "--",
        ENV,
        "-i",
        *(f"{name}={value}" for name, value in given.environ),
        *given.command,
    )


def predicate(tag: str) -> str:
    """Return a predicate for the unified log that finds what the profile of that run refused.

    Only the kernel can write such entries.
    """
    return (
        'process == "kernel" AND eventMessage CONTAINS "Sandbox" '
        f'AND eventMessage CONTAINS "stockade-{checked_tag(tag)}"'
    )


def denials(tag: str) -> tuple[str, ...]:
    """Return the command that reads these entries."""
    return (LOG, "show", "--style", "ndjson", "--info", "--debug", "--predicate", predicate(tag))
