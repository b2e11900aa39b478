"""The apple-container draft: a Linux virtual machine for each run, by Apple's `container` on macOS.

It needs an image, and a policy cannot name one yet, so every policy is refused; this module compiles the
rest. `container` splits the option of a mount at commas, so paths with a comma are refused too. A machine
has at least 200 MiB of memory, and a policy that asks for less must accept that by name.
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
    checked_tag,
    environment,
    granted,
    plain,
)
from stockade.backends.plan_parts import refuse_hiding, refuse_taking_away
from stockade.controls import Control
from stockade.errors import PolicyError
from stockade.policy.values import size_text

PROGRAM = "container"
MIB = 1 << 20
#: `container` starts no machine with less.
LEAST_MEMORY = 200 * MIB
#: The home inside: every run has a machine to itself.
HOME = "/tmp"

OUTLIVES = "the machine belongs to a service of macOS's, which does not end it when the supervisor dies"

MECHANISMS: Mapping[Control, Mechanism] = {
    Control.FILES: Mechanism(never="a virtual machine needs an image, and a policy can name none yet"),
    Control.DENY: Mechanism(never="nothing can be hidden in a directory that is shared with the machine"),
    Control.PROTECT: Mechanism(
        never="nothing can be kept as it is in a directory that is shared writable", optional=True
    ),
    Control.EXEC: Mechanism(never="what is writable can be executed"),
    Control.WORKSPACE_OVERLAY: Mechanism(never="directories are shared with the machine as they are"),
    Control.NETWORK_NONE: Mechanism("the machine is attached to no network"),
    Control.NETWORK_RULES: Mechanism(
        never="the machine's network cannot be led through a process that decides"
    ),
    Control.NETWORK_HTTP: Mechanism(
        never="the machine's network cannot be led through a process that decides"
    ),
    Control.SECRETS: Mechanism(never="there is no egress process that could hold them"),
    Control.PROCESSES: Mechanism("a kernel of its own"),
    Control.IPC: Mechanism("a kernel of its own; no socket is published"),
    Control.SYSCALLS: Mechanism(
        never="calls are not filtered", optional=True, weaker="they reach the machine's own kernel"
    ),
    Control.PRIVILEGES: Mechanism(
        never="a set-uid program of the image gains root in the machine",
        optional=True,
        weaker="root there has no right on the host but to what is shared",
    ),
    Control.ENVIRONMENT: Mechanism("none but what is passed by name"),
    Control.DEVICES: Mechanism("those of the machine"),
    Control.TERMINAL: Mechanism("no terminal is passed"),
    Control.LIMITS_MEMORY: Mechanism("memory of the machine, 200 MiB at least"),
    Control.LIMITS_TASKS: Mechanism(never="the machine bounds no number of tasks", optional=True),
    Control.LIMITS_CPU: Mechanism("processors of the machine, whole ones"),
    Control.LIMITS_CPU_TIME: Mechanism(never="the machine's time is not added up"),
    Control.LIMITS_WALL: Mechanism(never=OUTLIVES, optional=True, weaker="`container stop` by its name"),
    Control.LIMITS_OUTPUT: Mechanism("counted by the supervisor"),
    Control.LIMITS_FILES: Mechanism("RLIMIT_NOFILE"),
    Control.LIMITS_DISK: Mechanism(never="the size of the machine's disk is not the policy's"),
    Control.LIMITS_NETWORK: Mechanism(never="no process is between the machine and the network to count"),
    Control.CLEANUP: Mechanism(never=OUTLIVES, optional=True, weaker="`container stop` by its name"),
}


class AppleContainer(DraftBackend):
    """A Linux virtual machine for each run."""

    name: ClassVar[str] = "apple-container"
    system: ClassVar[str] = "darwin"
    foundation = ("apple-container",)
    mechanisms = MECHANISMS

    @classmethod
    def draw(cls, asked: DraftRequest) -> DraftPlan:
        return compile_plan(inputs(asked))


class AppleContainerInputs(msgspec.Struct, frozen=True):
    """Everything that a plan depends on. A limit of 0 is none."""

    image: str
    command: tuple[str, ...]
    cwd: str
    environ: tuple[tuple[str, str], ...]
    tag: str
    uid: int
    gid: int
    files: int
    own_network: bool
    grants: tuple[Granted, ...] = ()
    memory: int = 0
    cpu: float = 0
    #: Controls that the policy accepts to be weaker.
    accept: tuple[str, ...] = ()


def inputs(asked: DraftRequest) -> AppleContainerInputs:
    """Return the value that a plan is compiled from."""
    resolved = asked.resolved
    policy, limits, caller = resolved.policy, resolved.limits, resolved.caller
    grants = granted(resolved)
    refuse_taking_away(grants, AppleContainer.name)
    refuse_hiding(grants, resolved.denied)
    workspace = resolved.workspace
    return AppleContainerInputs(
        image=policy.image,
        command=asked.command,
        cwd=HOME if workspace is None else workspace.path,
        environ=environment(resolved, HOME),
        tag=asked.tag,
        uid=caller.uid,
        gid=caller.gid,
        files=limits.files or 0,
        own_network=policy.net != "open",
        grants=plain(grants),
        memory=limits.memory or 0,
        cpu=limits.cpu or 0,
        accept=tuple(policy.accept),
    )


def compile_plan(given: AppleContainerInputs) -> DraftPlan:
    """Return the steps, in order."""
    if given.image == "host" or not given.image or given.image.startswith("-"):
        raise PolicyError(
            f'image = "{given.image}": a virtual machine needs an image, and this is not one',
            hint="use another backend",
        )
    memory, warnings = floor(given)
    if given.cpu != int(given.cpu):
        raise PolicyError(
            f"limits.cpu = {given.cpu:g}: a virtual machine can only have whole processors",
            hint="write a whole number",
        )
    name = f"stockade-{checked_tag(given.tag)}"
    files = f"nofile={given.files:d}:{given.files:d}"
    parts: list[tuple[str, str, tuple[str, ...]]] = [
        (f"call the machine {name}, and remove it when it stops", "always", ("--rm", "--name", name)),
        ("say nothing of its own", "always", ("--progress", "none")),
        (f"act as {given.uid}:{given.gid}", "always", ("--user", f"{given.uid:d}:{given.gid:d}")),
        (f"begin in {given.cwd}", "workspace", ("--workdir", given.cwd)),
        (f"let it have {given.files} open files", "limits", ("--ulimit", files)),
        (f"a private {HOME} in its memory", "always", ("--tmpfs", HOME)),
    ]
    if memory:
        words = f"give the machine {size_text(memory)} of memory"
        parts.append((words, "limits.memory", ("--memory", f"{memory // MIB}M")))
    if given.cpu:
        cpus = f"{given.cpu:g}"
        parts.append((f"give the machine {cpus} processors", "limits.cpu", ("--cpus", cpus)))
    if given.own_network:
        parts.append(("attach it to no network", "net", ("--network", "none", "--no-dns")))
    parts += [(f"set {key}", "env", ("--env", f"{key}={value}")) for key, value in given.environ]
    parts += [_mount(grant) for grant in given.grants]
    steps = [DraftStep(words=words, clause=clause, given=options) for words, clause, options in parts]
    steps[0] = msgspec.structs.replace(steps[0], given=("--rm",))  # its name differs from run to run
    steps.append(DraftStep(words=f"start it from {given.image}", clause="image", given=(given.image,)))
    options = [option for part in parts for option in part[2]]
    command = (PROGRAM, "run", *options, given.image, *given.command)
    return DraftPlan(AppleContainer.name, tuple(steps), argv=command, warnings=warnings)


def floor(given: AppleContainerInputs) -> tuple[int, tuple[str, ...]]:
    """Return the memory of the machine, in whole MiB, and warnings about it."""
    if not given.memory:
        return 0, ()
    if given.memory >= LEAST_MEMORY:
        return given.memory // MIB * MIB, ()
    asked = f"limits.memory = {size_text(given.memory)}"
    if Control.LIMITS_MEMORY not in given.accept:
        raise PolicyError(
            f"{asked}: a virtual machine has at least {size_text(LEAST_MEMORY)}",
            hint='ask for that much, or accept a weaker limit: accept = ["limits.memory"]',
        )
    warning = f"{asked} is NOT enforced: the virtual machine has {size_text(LEAST_MEMORY)}, the minimum"
    return LEAST_MEMORY, (warning,)


def _mount(grant: Granted) -> tuple[str, str, tuple[str, ...]]:
    path, access, is_dir, clause = grant
    if not is_dir:
        raise PolicyError(
            f"{clause}: only directories can be shared with a virtual machine", hint="grant its directory"
        )
    if any(char in path for char in ",=:\0\n") or not _utf8(path):
        raise PolicyError(
            f"{clause}: {path!r} cannot be written in an option of `{PROGRAM}`", hint="rename it"
        )
    end = "" if access == "write" else ",readonly"
    words = f"share {path}{'' if access == 'write' else ', read-only'}"
    return words, clause, ("--mount", f"type=bind,source={path},target={path}{end}")


def _utf8(path: str) -> bool:
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True
