"""`confine`: walls on the calling process itself, for good.

The gate is loaded as a library and raises the walls of the landlock backend on
the process that called it: Landlock, the filter, limits, no privileges. All
that it starts afterwards inherits them; nothing takes them off.

A living process already has things that no wall takes away: threads,
descriptors, shared memory, children. They are looked for first and refused, or
named in what is returned. Whatever can fail is tried before the first step
that cannot be undone, by a child that does everything first.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import resource
import sys
from collections.abc import Iterable

import msgspec

from stockade import digest, gate, state
from stockade.backends.base import Given
from stockade.backends.confined import NAME, Confined
from stockade.backends.select import Selection, select
from stockade.controls import Grade
from stockade.errors import PolicyError, SetupError, UnsupportedError, one_line
from stockade.gate import plan as ops
from stockade.host import host
from stockade.policy import Policy, Resolved, lookup
from stockade.policy.caller import Caller
from stockade.policy.compare import excess
from stockade.policy.resolve import resolve
from stockade.sandbox import scarce
from stockade.sandbox.evidence import CANARIES, CAPABILITIES, NOTHING, SCOPED, Evidence, reported
from stockade.sandbox.limits import most_files
from stockade.sandbox.result import Enforced

#: What others load when they first need it: the second time it could not be found any more.
LOADED = (digest, lookup)
STANDARD = (0, 1, 2)
#: Children that do not tell of their end by SIGCHLD as well.
_WALL = 0x40000000
MUST_END = "the process is partly confined and must end: nothing that it does is behind whole walls"
ACCESS = ("read", "write", "read and write")


class Descriptor(msgspec.Struct, frozen=True):
    """One that was open before the walls. What it leads to, and may be done with it, stays so."""

    number: int
    #: A path, or what the kernel calls it: `pipe:[123]`, `socket:[456]`.
    leads_to: str
    access: str


class Confinement(msgspec.Struct, frozen=True, kw_only=True):
    """What the process is held to from now on, as it was seen once the walls were up."""

    policy: Policy
    controls: dict[str, Enforced]
    evidence: Evidence
    #: The hash of the plan.
    plan: str
    descriptors: tuple[Descriptor, ...]


class _Said(ctypes.Structure):
    """struct confined of gate/src/confine.c."""

    _fields_ = (
        ("begun", ctypes.c_uint32),
        ("op", ctypes.c_uint32),
        ("rules", ctypes.c_uint32),
        ("error", ctypes.c_int32),
        ("filter", ctypes.c_char * 65),
        ("text", ctypes.c_char * 128),
    )


class _Itself:
    """What is read about this process. Opened before the walls, because nothing opens it afterwards.

    After a fork it would tell about the parent.
    """

    def __init__(self) -> None:
        self.owner = os.getpid()
        self._status = os.open("/proc/self/status", os.O_RDONLY | os.O_CLOEXEC)
        self._memory = os.open("/proc/self/smaps", os.O_RDONLY | os.O_CLOEXEC)
        self._mounts = os.open("/proc/self/mountinfo", os.O_RDONLY | os.O_CLOEXEC)
        self._open = os.open("/proc/self/fd", os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)

    @property
    def numbers(self) -> frozenset[int]:
        return frozenset((self._status, self._memory, self._mounts, self._open))

    def mounts(self) -> bytes:
        return _whole(self._mounts).encode(errors="surrogateescape")

    def descriptors(self) -> list[int]:
        return sorted(map(int, os.listdir(self._open)))

    def status(self) -> dict[str, str]:
        return dict(line.split(":\t", 1) for line in _whole(self._status).splitlines())

    def shared_memory(self) -> list[str]:
        """What can be written and is somebody else's as well: neither Landlock nor the filter sees it."""
        found, name = [], ""
        for line in _whole(self._memory).splitlines():
            if line.startswith("VmFlags:"):
                found += [name or "memory without a name"] if "sh" in line.split() else []
            elif not line[0].isupper():
                name = [*line.split(None, 5), ""][5]
        return found

    def close(self) -> None:
        for number in self.numbers:
            os.close(number)


class _Done:
    """What this process, or the one that it was forked from, has done to itself."""

    policy: Policy | None = None
    itself: _Itself | None = None
    #: Walls were begun, and nobody knows that all of them are there.
    partly = False


def _after_fork() -> None:
    if _Done.itself is not None:
        _Done.itself.close()
        _Done.itself = None


os.register_at_fork(after_in_child=_after_fork)


def confine(policy: Policy, *, keep: Iterable[int] = ()) -> Confinement:
    """Hold the calling process, and all that it starts from now on, to the policy, for good.

    The process must be single-threaded, without children, shared memory or open descriptors but 0, 1, 2
    and those that `keep` names: what is open stays open, whatever the policy says. What cannot be done to a
    living process is refused; what can be done in part needs the policy's `accept`. A second time the policy
    must be within the first one.

    A `SetupError` which says that the process is partly confined must end it.
    """
    if not isinstance(policy, Policy):
        raise PolicyError(f"confine({policy!r}): is not a policy", hint="confine(Policy(...))")
    _refuse_clauses(policy)
    if _Done.partly:
        raise _missing("an earlier call failed halfway, or was interrupted")
    selection = select(policy, host(), {NAME: Confined})
    _refuse_wider(policy)
    with scarce.refused():
        itself = _Done.itself or _looking()
        try:
            done = _confined(policy, selection, itself, frozenset(keep))
        except BaseException:
            if itself is not _Done.itself:
                itself.close()
            raise
    _Done.policy, _Done.itself, _Done.partly = policy, itself, False
    return done


def _looking() -> _Itself:
    try:
        return _Itself()
    except PermissionError:
        raise UnsupportedError(
            "the process is behind walls already, and can look at nothing of its own",
            hint="what was started by a confined process is as confined as that",
        ) from None


def _confined(policy: Policy, selection: Selection, itself: _Itself, kept: frozenset[int]) -> Confinement:
    before = itself.status()
    _refuse_others(before, itself)
    descriptors = _descriptors(itself, kept)
    library = ctypes.CDLL(gate.library())
    caller = Caller.current()
    home = state.state_dir(caller.environ, caller.home)
    with resolve(policy, caller, home, command=sys.executable, table=itself.mounts()) as resolved:
        plan = _plan(resolved, selection, before)
        controls = _controls(selection, policy)
        said = _raised(library, plan, _grants(resolved))
    evidence = _observed(said, plan, before, itself.status())
    return Confinement(
        policy=policy, controls=controls, evidence=evidence, plan=plan.hash, descriptors=descriptors
    )


def _refuse_clauses(policy: Policy) -> None:
    for name in ("env", "pass_env"):
        if getattr(policy, name):
            raise PolicyError(
                f"{name}: a living process has its variables already",
                hint="leave it out, and change os.environ before",
            )
    if policy.backend != "auto":
        raise PolicyError(
            f"backend = {policy.backend!r}: a living process is confined by itself, not by a backend",
            hint="leave it out, or run it in a Sandbox",
        )


def _refuse_wider(policy: Policy) -> None:
    """Landlock and the filter only ever take away, so a wider policy would not be what it says."""
    if _Done.policy is None:
        return
    if more := excess(policy, _Done.policy):
        raise PolicyError(
            "the process is confined already, and walls do not come off: " + "; ".join(more),
            hint="a second policy can only be narrower",
        )
    if _Done.itself is None:
        raise UnsupportedError(
            "the process was forked from one that had confined itself, and can look at nothing of its own",
            hint="confine it before the fork",
        )


def _refuse_others(status: dict[str, str], itself: _Itself) -> None:
    """What would stay outside the walls, or leads there."""
    if status["Threads"] != "1":
        raise _threads()
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT | _WALL)
    except ChildProcessError:
        pass
    else:
        raise UnsupportedError(
            "the process has children, which would stay outside the walls",
            hint="end them and wait for them first; after a Sandbox was used there are some: confine before",
        )
    if shared := itself.shared_memory():
        raise UnsupportedError(
            f"the process shares memory that it can write: {', '.join(shared)}", hint="unmap it first"
        )


def _threads() -> UnsupportedError:
    return UnsupportedError(
        "the process has several threads, and the walls are a thread's own: the others would be outside",
        hint="confine before threads are started, or run the work in a Sandbox",
    )


def _others(who: bytes) -> UnsupportedError:
    if who == b"threads":
        return _threads()
    return UnsupportedError(
        "the process shares its memory with another one, which would stay outside the walls",
        hint="end that one first, or run the work in a Sandbox",
    )


def _descriptors(itself: _Itself, kept: frozenset[int]) -> tuple[Descriptor, ...]:
    """What is open: each is a way out, unless somebody has thought of it."""
    found, unnamed = [], []
    for number in itself.descriptors():
        try:
            flags = fcntl.fcntl(number, fcntl.F_GETFL)
        except OSError:
            continue  # the listing's own
        leads_to = os.readlink(f"/proc/self/fd/{number}")
        if number in STANDARD or number in kept or number in itself.numbers:
            access = "path" if flags & os.O_PATH else ACCESS[flags & os.O_ACCMODE]
            found.append(Descriptor(number, leads_to, access))
        else:
            unnamed.append(f"{number} ({one_line(leads_to)})")
    if unnamed:
        raise UnsupportedError(
            f"descriptors are open that no policy takes away: {', '.join(unnamed)}",
            hint="close them, or name those that may stay: confine(policy, keep=[...])",
        )
    return tuple(found)


def _grants(resolved: Resolved) -> list[int]:
    """Their descriptors, in the order of the plan."""
    workspace = [] if resolved.workspace is None else [resolved.workspace]
    return [grant.fd for grant in (*resolved.grants, *workspace)]


def _plan(resolved: Resolved, selection: Selection, status: dict[str, str]) -> ops.Plan:
    given = Given(
        resolved=resolved,
        selection=selection,
        landlock=host().landlock,
        files=most_files(resolved),
        layer="",
        state="",
    )
    plan = Confined.plan(given)
    used = int(status["VmSize"].split()[0]) * 1024
    if (memory := plan.limits.get("memory")) is not None and used >= memory:
        raise PolicyError(
            f"limits.memory = {memory}: the process has {used} bytes of addresses already",
            hint="write more, or run the work in a Sandbox",
        )
    usage = resource.getrusage(resource.RUSAGE_SELF)
    spent = usage.ru_utime + usage.ru_stime
    if (seconds := plan.limits.get("cpu_time")) is not None and spent >= seconds:
        raise PolicyError(
            f"limits.cpu_time: the process has used {spent:.1f} of the {seconds} s already",
            hint="write more, or run the work in a Sandbox",
        )
    return plan


def _raised(library: ctypes.CDLL, plan: ops.Plan, descriptors: list[int]) -> _Said:
    """Let the gate raise the walls on this process. Then they are there, or it has said why not."""
    said, encoded = _Said(), plan.encoded
    numbers = (ctypes.c_int * len(descriptors))(*descriptors)
    size, count = ctypes.c_size_t(len(encoded)), ctypes.c_uint(len(descriptors))
    _Done.partly = True  # until all was seen: an interrupt can come in between
    if library.gate_confine(encoded, size, numbers, count, ctypes.byref(said)) == 0:
        return said
    _Done.partly = bool(said.begun)
    if said.error == errno.EBUSY and not said.begun:
        raise _others(said.text)
    stage = next((type(op).__name__.lower() for op in plan.ops if op.kind == said.op), "confine")
    what = said.text.decode(errors="replace") or stage
    so_far = MUST_END if said.begun else "nothing was changed"
    raise SetupError(
        f"{stage}: {what}: {os.strerror(said.error)}; {so_far}",
        stage=stage,
        errno=said.error,
        hint="end the process" if said.begun else "`stockade doctor` shows what this machine can do",
    )


def _observed(said: _Said, plan: ops.Plan, before: dict[str, str], after: dict[str, str]) -> Evidence:
    """Look at the process once more, through what the kernel tells about it."""
    filters = int(before.get("Seccomp_filters", 0)) + 1
    empty = {name.decode(): NOTHING.decode() for name in CAPABILITIES if name != b"CapBnd"}
    wanted = empty | {"NoNewPrivs": "1", "Seccomp": "2", "Seccomp_filters": str(filters), "Threads": "1"}
    for name, value in wanted.items():
        if after[name] != value:
            raise _missing(f"{name} is {after[name]} instead of {value}")
    for name, most in plan.limits.items():
        if resource.getrlimit(ops.RESOURCES[name]) != (most, most):
            raise _missing(f"its limit of {name} is not {most}")
    if said.filter.decode() != plan.filter:
        raise _missing("another system call filter was installed")
    if said.rules != plan.rules:
        raise _missing("Landlock has other rules")
    return Evidence(
        capabilities=empty,
        no_new_privs=True,
        seccomp=2,
        filters=filters,
        filter=plan.filter,
        rules=plan.rules,
        canaries=CANARIES + SCOPED,
        rlimits=dict(plan.limits),
    )


def _missing(what: str) -> SetupError:
    return SetupError(f"{what}; {MUST_END}", stage="evidence", hint="end the process")


def _controls(selection: Selection, policy: Policy) -> dict[str, Enforced]:
    """Nobody but the gate's library has looked, in the process itself and before anything else ran in it."""
    return {
        name: control if not control.grade.enforced else msgspec.structs.replace(control, grade=Grade.GATE)
        for name, control in reported(Confined, selection, policy).items()
    }


def _whole(file: int) -> str:
    content = b""
    while part := os.pread(file, 1 << 16, len(content)):
        content += part
    return content.decode(errors="surrogateescape")
