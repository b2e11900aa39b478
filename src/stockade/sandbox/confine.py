"""`confine`: raise walls around the calling process itself, for good.

The process loads the gate as a library, which raises the walls of the landlock
backend around it: Landlock, the filter, limits, no privileges. Every process
that it starts afterwards inherits them; nothing removes them.

A living process already has things that no wall takes away: threads,
descriptors, shared memory, children. `confine` looks for them first, and
refuses them or names them in the value that it returns. A child tries every
step first, so that nothing fails after the first step that cannot be undone.
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

from stockade import gate, state
from stockade.backends.backend import PlanInputs
from stockade.backends.confinement import NAME, ConfinementBackend
from stockade.backends.selection import Selection, select
from stockade.controls import Grade
from stockade.errors import PolicyError, SetupError, UnsupportedError, one_line
from stockade.gate import operations as ops
from stockade.gate import wire
from stockade.host import host
from stockade.linux import os_errors, sha256
from stockade.linux.user import Caller
from stockade.policy import Policy
from stockade.policy.compare import excess
from stockade.policy.model import PolicyLike, policy_or_default
from stockade.resolve.resolution import resolve
from stockade.resolve.resolved import ResolvedPolicy
from stockade.resolve.toolchain import search
from stockade.result import Enforcement
from stockade.runs.evidence import CANARIES, CAPABILITIES, NOTHING, SCOPED, Evidence, reported
from stockade.runs.explain.gate_refused import why
from stockade.runs.limits import most_files

#: Modules that are otherwise loaded when first needed. They are loaded now, because behind the walls a second
#: `confine` could not find their files.
LOADED = (sha256, search)
STANDARD = (0, 1, 2)
#: __WALL: also find children whose end is not signalled by SIGCHLD.
_WALL = 0x40000000
MUST_END = "the process is only partly confined and must end"
ACCESS = ("read", "write", "read and write")


class Descriptor(msgspec.Struct, frozen=True):
    """A descriptor that was open before the walls. Its target and its access stay as they were.

    A pipe or a memory file can be reopened for both reading and writing; a file with a name cannot.
    """

    number: int
    #: A path, or the kernel's name for it: `pipe:[123]`, `socket:[456]`.
    leads_to: str
    access: str


class Confinement(msgspec.Struct, frozen=True, kw_only=True):
    """The walls around the process from now on, as observed once they were up."""

    policy: Policy
    controls: dict[str, Enforcement]
    evidence: Evidence
    #: The hash of the plan.
    plan: str
    descriptors: tuple[Descriptor, ...]


class _GateReport(ctypes.Structure):
    """struct confinement of gate/src/wire.h."""

    _fields_ = (
        ("begun", ctypes.c_uint32),
        ("op", ctypes.c_uint32),
        ("rules", ctypes.c_uint32),
        ("error", ctypes.c_int32),
        ("filter", ctypes.c_char * wire.SHA256_TEXT),
        ("text", ctypes.c_char * wire.CONFINED_TEXT),
    )


class _SelfView:
    """The /proc files of this process, opened before the walls, because afterwards they cannot be opened.

    After a fork they would describe the parent.
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
        """Return writable shared mappings: neither Landlock nor the filter controls writes to them."""
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


class _ConfinementState:
    """How this process, or the one that it was forked from, has confined itself."""

    policy: Policy | None = None
    itself: _SelfView | None = None
    #: Some walls may be up, and it is not known that all of them are.
    partly = False


def _after_fork() -> None:
    if _ConfinementState.itself is not None:
        _ConfinementState.itself.close()
        _ConfinementState.itself = None


os.register_at_fork(after_in_child=_after_fork)


def confine(policy: PolicyLike, *, keep: Iterable[int] = ()) -> Confinement:
    """Hold the calling process, and every process that it starts from now on, to the policy, for good.

    The process must be single-threaded, without children, shared memory or open descriptors except 0, 1, 2
    and those that `keep` names: what is open stays open, whatever the policy says. A clause that cannot be
    applied to a living process is refused; one that can be applied in part needs the policy's `accept`. The
    policy of a second call must be within the first one.

    If a `SetupError` says that the process is only partly confined, end the process.
    """
    if policy is None:
        raise PolicyError("confine(None): is not a policy", hint="write confine(Policy(...))")
    policy = policy_or_default(policy)
    _refuse_clauses(policy)
    if _ConfinementState.partly:
        raise _missing("an earlier call of confine failed halfway or was interrupted")
    selection = select(policy, host(), {NAME: ConfinementBackend})
    _refuse_wider(policy)
    with os_errors.setup_errors():
        itself = _ConfinementState.itself or _view_self()
        try:
            done = _confine_process(policy, selection, itself, frozenset(keep))
        except BaseException:
            if itself is not _ConfinementState.itself:
                itself.close()
            raise
    _ConfinementState.policy, _ConfinementState.itself, _ConfinementState.partly = policy, itself, False
    return done


def _view_self() -> _SelfView:
    try:
        return _SelfView()
    except PermissionError:
        raise UnsupportedError(
            "the process is already behind walls and cannot read its own /proc files",
            hint="a process that a confined process starts is already confined in the same way",
        ) from None


def _confine_process(
    policy: Policy, selection: Selection, itself: _SelfView, kept: frozenset[int]
) -> Confinement:
    before = itself.status()
    _refuse_others(before, itself)
    descriptors = _descriptors(itself, kept)
    library = ctypes.CDLL(gate.library())
    caller = Caller.current()
    home = state.state_dir(caller.environ, caller.home)
    with resolve(policy, caller, home, command=sys.executable, table=itself.mounts()) as resolved:
        plan = _plan(resolved, selection, before)
        controls = _controls(selection, policy)
        report = _raise_walls(library, plan, _grants(resolved))
    evidence = _check_walls(report, plan, before, itself.status())
    return Confinement(
        policy=policy, controls=controls, evidence=evidence, plan=plan.hash, descriptors=descriptors
    )


def _refuse_clauses(policy: Policy) -> None:
    for name in ("env", "pass_env"):
        if getattr(policy, name):
            raise PolicyError(
                f"{name}: a living process already has its environment variables",
                hint=f"leave {name} out, and change os.environ before you call confine",
            )
    if policy.secrets:
        raise PolicyError(
            "secrets: a living process has no egress process that could hold them",
            hint="leave secrets out, or run the work in a Sandbox",
        )
    if policy.backend != "auto":
        raise PolicyError(
            f"backend = {policy.backend!r}: confine has its own way to raise walls and uses no other backend",
            hint="leave backend out, or run the work in a Sandbox",
        )


def _refuse_wider(policy: Policy) -> None:
    """Refuse a policy that is wider than the first: Landlock and the filter can only take away."""
    if _ConfinementState.policy is None:
        return
    if more := excess(policy, _ConfinementState.policy):
        raise PolicyError(
            "the process is already confined, and its walls cannot be removed: " + "; ".join(more),
            hint="pass a policy that is within the first one",
        )
    if _ConfinementState.itself is None:
        raise UnsupportedError(
            "the process was forked from a confined one and cannot read its own /proc files",
            hint="call confine with the narrower policy before the fork",
        )


def _refuse_others(status: dict[str, str], itself: _SelfView) -> None:
    """Refuse threads, children and shared memory: they would stay outside the walls or lead there."""
    if status["Threads"] != "1":
        raise _threads_error()
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT | _WALL)
    except ChildProcessError:
        pass
    else:
        raise UnsupportedError(
            "the process has children, which would stay outside the walls",
            hint="end them and wait for them first; using a Sandbox starts some, so call confine before that",
        )
    if shared := itself.shared_memory():
        raise UnsupportedError(
            f"the process has writable shared memory: {', '.join(shared)}", hint="unmap it first"
        )


def _threads_error() -> UnsupportedError:
    return UnsupportedError(
        "the process has several threads, and walls hold only the thread that raises them",
        hint="call confine before you start threads, or run the work in a Sandbox",
    )


def _sharing_error(who: bytes) -> UnsupportedError:
    if who == b"threads":
        return _threads_error()
    return UnsupportedError(
        "the process shares its memory with another process, which would stay outside the walls",
        hint="end the other process first, or run the work in a Sandbox",
    )


def _descriptors(itself: _SelfView, kept: frozenset[int]) -> tuple[Descriptor, ...]:
    """List the open descriptors and refuse those that the caller did not name: each is a way out."""
    found, unnamed = [], []
    for number in itself.descriptors():
        try:
            flags = fcntl.fcntl(number, fcntl.F_GETFL)
        except OSError:
            continue  # the descriptor of the listing itself, closed by now
        leads_to = os.readlink(f"/proc/self/fd/{number}")
        if number in STANDARD or number in kept or number in itself.numbers:
            access = "path" if flags & os.O_PATH else ACCESS[flags & os.O_ACCMODE]
            found.append(Descriptor(number, leads_to, access))
        else:
            unnamed.append(f"{number} ({one_line(leads_to)})")
    if unnamed:
        raise UnsupportedError(
            f"open descriptors would stay open whatever the policy says: {', '.join(unnamed)}",
            hint="close them, or name those that may stay open: confine(policy, keep=[...])",
        )
    return tuple(found)


def _grants(resolved: ResolvedPolicy) -> list[int]:
    """Return the descriptors of the grants, in the order of the plan."""
    workspace = [] if resolved.workspace is None else [resolved.workspace]
    return [grant.fd for grant in (*resolved.grants, *workspace)]


def _plan(resolved: ResolvedPolicy, selection: Selection, status: dict[str, str]) -> ops.Plan:
    given = PlanInputs(
        resolved=resolved,
        selection=selection,
        landlock=host().landlock,
        files=most_files(resolved),
        layer="",
        state="",
    )
    plan = ConfinementBackend.plan(given)
    used = int(status["VmSize"].split()[0]) * 1024
    if (memory := plan.limits.get("memory")) is not None and used >= memory:
        raise PolicyError(
            f"limits.memory = {memory}: the process already uses {used} bytes of address space",
            hint="raise the limit, or run the work in a Sandbox",
        )
    usage = resource.getrusage(resource.RUSAGE_SELF)
    spent = usage.ru_utime + usage.ru_stime
    if (seconds := plan.limits.get("cpu_time")) is not None and spent >= seconds:
        raise PolicyError(
            f"limits.cpu_time: the process has already used {spent:.1f} of the {seconds} s",
            hint="raise the limit, or run the work in a Sandbox",
        )
    return plan


def _raise_walls(library: ctypes.CDLL, plan: ops.Plan, descriptors: list[int]) -> _GateReport:
    """Let the gate raise the walls around this process, and raise an error if it could not."""
    report, encoded = _GateReport(), plan.encoded
    numbers = (ctypes.c_int * len(descriptors))(*descriptors)
    size, count = ctypes.c_size_t(len(encoded)), ctypes.c_uint(len(descriptors))
    _ConfinementState.partly = True  # until everything is checked: an interrupt can come in between
    if library.gate_confine(encoded, size, numbers, count, ctypes.byref(report)) == 0:
        return report
    _ConfinementState.partly = bool(report.begun)
    if report.error == errno.EBUSY and not report.begun:
        raise _sharing_error(report.text)
    stage = next((str(op.__struct_config__.tag) for op in plan.ops if op.kind == report.op), "confine")
    what = report.text.decode(errors="replace") or stage
    so_far = MUST_END if report.begun else "nothing was changed"
    reason, hint = why(stage, report.error)
    raise SetupError(
        f"{stage}: {what}: {reason}; {so_far}",
        stage=stage,
        errno=report.error,
        hint="end the process" if report.begun else hint,
    )


def _check_walls(
    report: _GateReport, plan: ops.Plan, before: dict[str, str], after: dict[str, str]
) -> Evidence:
    """Check the walls against what the kernel reports about the process, and return that as evidence."""
    filters = int(before.get("Seccomp_filters", 0)) + 1
    empty = {name.decode(): NOTHING.decode() for name in CAPABILITIES if name != b"CapBnd"}
    wanted = empty | {"NoNewPrivs": "1", "Seccomp": "2", "Seccomp_filters": str(filters), "Threads": "1"}
    for name, value in wanted.items():
        if after[name] != value:
            raise _missing(f"{name} is {after[name]} instead of {value}")
    for name, most in plan.limits.items():
        if resource.getrlimit(ops.RESOURCES[name]) != (most, most):
            raise _missing(f"the limit of {name} is not {most}")
    if report.filter.decode() != plan.filter:
        raise _missing("the installed system call filter is not the planned one")
    if report.rules != plan.rules:
        raise _missing("the Landlock rules are not the planned ones")
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


def _controls(selection: Selection, policy: Policy) -> dict[str, Enforcement]:
    """Grade the controls GATE: only the gate's library has checked them, from inside the process."""
    return {
        name: control if not control.grade.enforced else msgspec.structs.replace(control, grade=Grade.GATE)
        for name, control in reported(ConfinementBackend, selection, policy).items()
    }


def _whole(file: int) -> str:
    content = b""
    while part := os.pread(file, 1 << 16, len(content)):
        content += part
    return content.decode(errors="surrogateescape")
