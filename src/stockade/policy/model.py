"""The policy: a frozen value that says what a run may see, change, reach and use.

    >>> policy = Policy(workspace=".", limits={"wall": "30s"})
    >>> policy.limits.wall, policy.workspace.mode
    (30.0, 'overlay')

TOML and Python say the same with the same names, and go through the same
checks: `Policy(...)` normalises what it is given, so that two policies that
mean the same are equal. A clause that this version cannot enforce is not a
field; writing it is refused (see `LATER`), never accepted and ignored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from stockade.controls import Control
from stockade.errors import PolicyError
from stockade.policy import values
from stockade.policy.values import FrozenMap, Invalid

TYPE_CHECKING = False
if TYPE_CHECKING:
    from stockade.backends.select import Selected
    from stockade.host import Host

PROFILES = ("strict", "dev", "net-client")
#: The walls and a shell need half a megabyte on two processors, and more on many.
LEAST_MEMORY = 2 << 20
PROTECT = (".git/hooks", ".git/config", ".envrc", ".vscode", ".claude")
NOTHING = object()

#: Clauses whose wall is not built: what each would do, and the value that asks for nothing.
#: Building one deletes its row and adds the field.
LATER: dict[str, tuple[str, object]] = {
    "secrets": ("hold secrets back from the program", {}),
}
LATER_BACKENDS = ("gvisor", "container", "microvm")
BACKENDS = ("native", "bwrap", "landlock")
#: Those of other systems, which show plans and start nothing.
DRAFTS = ("seatbelt", "apple-container", "pledge", "jobobject")

#: Controls that every run needs, whatever its policy says.
ALWAYS = (
    Control.FILES,
    Control.PROCESSES,
    Control.IPC,
    Control.SYSCALLS,
    Control.PRIVILEGES,
    Control.ENVIRONMENT,
    Control.DEVICES,
    Control.TERMINAL,
    Control.CLEANUP,
)
#: Limits for which every profile has a number.
DEFAULT_LIMITS = (Control.LIMITS_TASKS, Control.LIMITS_OUTPUT, Control.LIMITS_FILES)


class _Checked(msgspec.StructMeta):
    """Makes an unknown or not yet enforced keyword a PolicyError that names it."""

    _prefix: str

    def __call__(cls, *args: Any, **fields: Any) -> Any:
        names: tuple[str, ...] = cls.__struct_fields__
        prefix = cls._prefix
        if len(args) > (len(names) if prefix else 0):
            raise PolicyError(f"{cls.__name__} takes its clauses by name, such as {names[0]}=...")
        fields.update(zip(names, args, strict=False))
        for name in [name for name in fields if name not in names]:
            key, value = prefix + name, fields.pop(name)
            if key not in LATER:
                raise Invalid(key, value, "there is no such key", values.nearest(name, names, prefix))
            words, nothing = LATER[key]
            if not (type(value) is type(nothing) and value == nothing):
                hint = f"nothing here can {words} yet: leave it out"
                raise Invalid(key, value, "this version does not enforce it", hint)
        return super().__call__(**fields)


class _Clauses(msgspec.Struct, frozen=True, cache_hash=True, forbid_unknown_fields=True, metaclass=_Checked):
    """A value whose every field is checked and brought to one form when it is made."""

    # Not annotated, so that msgspec does not take them for fields.
    _prefix = ""
    _checks = {}  # type: ignore[var-annotated]

    def __post_init__(self) -> None:
        for name, check in self._checks.items():
            given = getattr(self, name)
            kept = check(self._prefix + name, given)
            if kept is not given:
                msgspec.structs.force_setattr(self, name, kept)


class WorkspaceRule(_Clauses, frozen=True):
    """The directory that commands work in, at the same path inside as outside."""

    path: str = "."
    mode: Literal["overlay", "rw", "ro"] = "overlay"
    #: Whether changes must survive a killed supervisor. They do, except under a limit of disk space.
    durable: bool = False

    _prefix = "workspace."
    _checks = {"path": values.path, "mode": values.one_of("overlay", "rw", "ro"), "durable": values.flag}


class Limits(_Clauses, frozen=True):
    """What a run may use up. None means the profile's default; a number that was written is required."""

    memory: int | None = None
    tasks: int | None = None
    cpu: float | None = None
    cpu_time: float | None = None
    wall: float | None = None
    output: int | None = None
    files: int | None = None
    disk: int | None = None

    _prefix = "limits."
    _checks = {
        "memory": values.size_from(LEAST_MEMORY),
        "tasks": values.count(1 << 22),
        "cpu": values.cores,
        "cpu_time": values.time,
        "wall": values.time,
        "output": values.size,
        "files": values.count(1 << 20, least=16),  # the gate itself needs a dozen
        "disk": values.size,
    }

    if TYPE_CHECKING:

        def __init__(
            self,
            memory: int | str | None = None,
            tasks: int | str | None = None,
            cpu: float | str | None = None,
            cpu_time: float | str | None = None,
            wall: float | str | None = None,
            output: int | str | None = None,
            files: int | str | None = None,
            disk: int | str | None = None,
        ) -> None: ...


def limit_text(name: str, value: float) -> str:
    """A limit as one would write it."""
    if name in ("cpu_time", "wall"):
        return f'"{values.time_text(value)}"'
    return f'"{values.size_text(int(value))}"' if name in ("memory", "output", "disk") else str(value)


class Syscalls(_Clauses, frozen=True):
    """System calls beyond the profile's set, and further refusals."""

    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()

    _prefix = "syscalls."
    _checks = {"allow": values.many(values.syscall), "deny": values.many(values.syscall)}

    if TYPE_CHECKING:

        def __init__(self, allow: Sequence[str] = (), deny: Sequence[str] = ()) -> None: ...

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.allow:
            if name in self.deny:
                raise Invalid("syscalls.allow", name, "syscalls.deny names it too")


def _written(check: values.Check) -> values.Check:
    """A check for what has a number in any case."""

    def checked(key: str, value: Any) -> Any:
        if value is None:
            raise Invalid(key, value, "must be a number", "leave it out for the default")
        return check(key, value)

    return checked


class Reuse(_Clauses, frozen=True):
    """How long a pool may use the same sandbox, for runs that have nothing to hide from one another."""

    requests: int = 100
    age: float = 600.0
    #: How long it may wait for the next run once it has had one.
    idle: float = 60.0

    _prefix = "reuse."
    _checks = {
        "requests": _written(values.count(1_000_000)),
        "age": _written(values.time),
        "idle": _written(values.time),
    }

    if TYPE_CHECKING:

        def __init__(
            self, requests: int | str = 100, age: float | str = 600.0, idle: float | str = 60.0
        ) -> None: ...


def _table(kind: type[_Clauses]) -> values.Check:
    def check(key: str, value: Any) -> _Clauses:
        if isinstance(value, kind):
            return value
        if isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
            return kind(**value)
        raise Invalid(key, value, "must be a table", f"known: {', '.join(kind.__struct_fields__)}")

    return check


_LIMITS, _SYSCALLS, _WORKSPACE = _table(Limits), _table(Syscalls), _table(WorkspaceRule)
_REUSE = _table(Reuse)


def _workspace(key: str, value: Any) -> Any:
    if value is None or isinstance(value, WorkspaceRule | Mapping):
        return None if value is None else _WORKSPACE(key, value)
    return WorkspaceRule(values.path(key, value))


def _reuse(key: str, value: Any) -> Any:
    return None if value is None else _REUSE(key, value)


def _net(key: str, value: Any) -> tuple[()] | str:
    if isinstance(value, str) and value == "open":
        return "open"
    if isinstance(value, list | tuple):
        if not value:
            return ()
        raise Invalid(key, value, "this version does not enforce network rules", 'write [] or "open"')
    raise Invalid(key, value, 'is neither [] nor "open"', 'write [] for no network, "open" for the host\'s')


_ONE_BACKEND = values.one_of("auto", *BACKENDS, *DRAFTS, later=LATER_BACKENDS)
_SEVERAL_BACKENDS = values.many(values.one_of(*BACKENDS, *DRAFTS, later=LATER_BACKENDS))


def _backend(key: str, value: Any) -> str | tuple[str, ...]:
    if not isinstance(value, list | tuple):
        one: str = _ONE_BACKEND(key, value)
        return one
    several: tuple[str, ...] = _SEVERAL_BACKENDS(key, value)
    if not several:
        raise Invalid(key, value, "names no backend", 'write "auto", or name one')
    return several if len(several) > 1 else several[0]


def _programs(key: str, value: Any) -> tuple[str, ...] | None:
    if value is None:
        return None
    found: tuple[str, ...] = values.many(values.grant)(key, value)
    if not found:
        raise Invalid(key, value, "nothing could run", "leave it out, or name the programs")
    return found


def _toolchain(key: str, value: Any) -> bool | tuple[str, ...]:
    if isinstance(value, bool):
        return value
    if isinstance(value, str):
        raise Invalid(key, value, "must be true, false or a list", f"write {key} = [{values.show(value)}]")
    # An empty list asks for nothing more than the command's own.
    return values.many(values.command)(key, value) or True


def _accepted(key: str, value: Any) -> Control:
    try:
        return Control(value)
    except ValueError:
        names = [control.value for control in Control]
        raise Invalid(key, value, "is not a control", values.nearest(str(value), names)) from None


class Policy(_Clauses, frozen=True, kw_only=True):
    """What a run may see, change, reach and use; everything else is refused.

    `Policy()` is the strict profile without a workspace.
    """

    profile: Literal["strict", "dev", "net-client"] = "strict"
    read: tuple[str, ...] = ()
    write: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()
    protect: tuple[str, ...] = PROTECT
    exec: tuple[str, ...] | None = None
    net: tuple[()] | Literal["open"] = ()
    env: Mapping[str, str] = FrozenMap()
    pass_env: tuple[str, ...] = ()
    image: Literal["host"] = "host"
    #: One of them, several in the order of preference, or whichever enforces it all.
    backend: (
        Literal["auto", "native", "bwrap", "landlock", "seatbelt", "apple-container", "pledge", "jobobject"]
        | tuple[
            Literal["native", "bwrap", "landlock", "seatbelt", "apple-container", "pledge", "jobobject"], ...
        ]
    ) = "auto"
    accept: tuple[Control, ...] = ()
    workspace: WorkspaceRule | None = None
    limits: Limits = Limits()
    syscalls: Syscalls = Syscalls()
    #: Whether the install that the command belongs to is shown; further commands whose installs are.
    toolchain: bool | tuple[str, ...] = True
    #: Whether the program may ask for sandboxes, none of which has more than it has itself.
    delegate: bool = False
    #: Whether a pool may use a sandbox for several runs, one after another; None: each for one.
    reuse: Reuse | None = None

    _checks = {
        "profile": values.one_of(*PROFILES),
        "read": values.many(values.grant),
        "write": values.many(values.grant),
        "deny": values.many(values.denied),
        "protect": values.many(values.inside),
        "exec": _programs,
        "net": _net,
        "env": values.variables,
        "pass_env": values.many(values.variable),
        "image": values.one_of("host"),
        "backend": _backend,
        "accept": values.many(_accepted),
        "workspace": _workspace,
        "limits": _LIMITS,
        "syscalls": _SYSCALLS,
        "toolchain": _toolchain,
        "delegate": values.flag,
        "reuse": _reuse,
    }

    if TYPE_CHECKING:

        def __init__(
            self,
            *,
            profile: str = "strict",
            read: Sequence[str] = (),
            write: Sequence[str] = (),
            deny: Sequence[str] = (),
            protect: Sequence[str] = PROTECT,
            exec: Sequence[str] | None = None,
            net: Sequence[str] | str = (),
            env: Mapping[str, str] = ...,
            pass_env: Sequence[str] = (),
            image: str = "host",
            backend: str | Sequence[str] = "auto",
            accept: Sequence[str] = (),
            workspace: WorkspaceRule | Mapping[str, Any] | str | None = None,
            limits: Limits | Mapping[str, Any] = ...,
            syscalls: Syscalls | Mapping[str, Any] = ...,
            toolchain: bool | Sequence[str] = True,
            delegate: bool = False,
            reuse: Reuse | Mapping[str, Any] | None = None,
        ) -> None: ...

    @classmethod
    def from_toml(cls, text: str, *, base: str | None = None, name: str = "") -> Policy:
        """The policy that `text` writes; relative paths count from `base`, `name` appears in errors."""
        from stockade.policy.text import parse

        return parse(text, base=base, name=name)

    def table(self, *, full: bool = False) -> dict[str, Any]:
        """The clauses as plain values; those that are not at their default, unless `full`."""
        return {
            name: _plain(value)
            for name in self.__struct_fields__
            if (value := getattr(self, name)) is not None and (full or value != getattr(DEFAULT, name))
        }

    def to_toml(self) -> str:
        """TOML that loads as a policy equal to this one."""
        from stockade.policy.text import write

        return write(self.table())

    @property
    def hash(self) -> str:
        """SHA-256 of every clause, defaults included: equal policies, equal hashes."""
        from stockade.digest import sha256
        from stockade.policy.text import write

        canonical = "stockade policy 1\n" + write(self.table(full=True))
        return sha256(canonical.encode("utf-8", "surrogateescape")).hexdigest()

    def within(self, other: Policy) -> bool:
        """Whether this policy asks for no more than the other: paths are compared as they are written."""
        return not self.excess(other)

    def excess(self, other: Policy) -> list[str]:
        """In words, what this policy asks for beyond the other."""
        from stockade.policy.compare import excess

        return excess(self, other)

    def controls(self) -> dict[Control, str]:
        """The controls this policy needs, each with the clause that needs it."""
        needed = dict.fromkeys(ALWAYS, "default")
        for name in ("read", "write"):
            if getattr(self, name):
                needed[Control.FILES] = f"{name} = {values.show(getattr(self, name))}"
        if self.deny:
            needed[Control.DENY] = f"deny = {values.show(self.deny)}"
        if self.exec is not None:
            needed[Control.EXEC] = f"exec = {values.show(self.exec)}"
        if self.net != "open":
            needed[Control.NETWORK_NONE] = "default"
        if self.workspace is not None:
            if self.workspace.mode == "overlay":
                needed[Control.WORKSPACE_OVERLAY] = 'workspace.mode = "overlay"'
            # In mode ro nothing lands on the host, unless something in it is writable after all.
            if self.protect and (self.workspace.mode != "ro" or self.write):
                written = f"protect = {values.show(self.protect)}"
                needed[Control.PROTECT] = "default" if self.protect == PROTECT else written
        limits = self.limits
        needed |= dict.fromkeys(DEFAULT_LIMITS, "default")
        for name in limits.__struct_fields__:
            if (value := getattr(limits, name)) is not None:
                needed[Control(f"limits.{name}")] = f"limits.{name} = {limit_text(name, value)}"
        if self.syscalls != Syscalls():
            name = "deny" if self.syscalls.deny else "allow"
            needed[Control.SYSCALLS] = f"syscalls.{name} = {values.show(getattr(self.syscalls, name))}"
        return needed

    def enforcement(self, host: Host) -> dict[Control, Selected]:
        """The requested controls met with what the host can deliver; UnsupportedError where it cannot."""
        from stockade.backends.select import select

        return select(self, host).controls

    def required(self, control: Control | str) -> bool:
        """Whether a run must be refused where the control cannot be had in full.

        Not if `accept` names it, nor for a task limit that is only the profile's default.
        """
        control = Control(control)
        if control in self.accept or control not in self.controls():
            return False
        return control is not Control.LIMITS_TASKS or self.limits.tasks is not None


DEFAULT = Policy()


def _plain(value: Any) -> Any:
    if isinstance(value, _Clauses):
        items = {name: getattr(value, name) for name in value.__struct_fields__}
        return {name: _plain(item) for name, item in items.items() if item is not None}
    if isinstance(value, tuple):
        return [str(item) for item in value]
    return dict(value) if isinstance(value, FrozenMap) else value
