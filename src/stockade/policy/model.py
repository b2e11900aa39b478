"""The policy: a frozen value that says what a run may see, change, reach and use.

    >>> policy = Policy(workspace=".", limits={"wall": "30s"})
    >>> policy.limits.wall, policy.workspace.mode
    (30.0, 'overlay')

TOML and Python use the same names and go through the same checks:
`Policy(...)` normalises its arguments, so that two policies that mean the same
are equal. A clause that this version cannot enforce is not a field, so it is
refused, never accepted and ignored.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import msgspec

from stockade.controls import Control
from stockade.errors import PolicyError
from stockade.policy import values
from stockade.policy.values import FrozenMap, InvalidValueError

TYPE_CHECKING = False

PROFILES = ("strict", "dev", "net-client", "worker")
#: The walls and a shell need half a megabyte on two processors, and more on many.
LEAST_MEMORY = 2 << 20
PROTECT = (".git/hooks", ".git/config", ".envrc", ".vscode", ".claude")
#: Where version control systems keep what they run: read-only where the program can write for real.
REPOSITORIES = (".git", ".hg", ".jj", ".sl")
NOTHING = object()

LATER_BACKENDS = ("gvisor", "container", "microvm")
#: The best first.
BACKENDS = ("native", "bwrap", "landlock")
#: The controls that a backend leaves weaker than the ones before it, if the policy accepts that:
#: limits.tasks on some machines, the others always. The backends' own tables say the same.
WEAKER: dict[str, tuple[Control, ...]] = {
    "bwrap": (Control.LIMITS_TASKS,),
    "landlock": (
        Control.FILES,
        Control.PROTECT,
        Control.PROCESSES,
        Control.DEVICES,
        Control.LIMITS_TASKS,
    ),
}
#: Backends of other systems, which show plans and start nothing.
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
#: The limits that the egress process keeps.
NETWORK_LIMITS = (
    "connections", "requests", "upload", "download",
    "host_connections", "host_requests", "host_upload", "host_download",
)  # fmt: skip
#: The limits that are sizes.
SIZES = ("memory", "output", "disk", "upload", "download", "host_upload", "host_download")
#: The limits that may be weaker where the host has no means and only the profile asks for them.
WEAKER_BY_DEFAULT = (Control.LIMITS_MEMORY, Control.LIMITS_TASKS, Control.LIMITS_CPU_TIME)


def _suggest_key(name: str, names: Iterable[str], prefix: str) -> str:
    """Return the hint for an unknown key: a table's key, a near name, or another tool's word."""
    from stockade.policy.suggestions import closest, for_clause

    for table in () if prefix else ("workspace", "limits", "reuse"):
        if name in TABLES[table].__struct_fields__:
            return f"did you mean {table}.{name}?"
    known = tuple(names)
    if (written := for_clause(name)) and not closest(name, known):
        return written
    return values.nearest(name, known, prefix)


class _KeywordCheck(msgspec.StructMeta):
    """Makes an unknown keyword a PolicyError that names it."""

    _prefix: str

    def _make(cls, *args: Any, **fields: Any) -> Any:
        names: tuple[str, ...] = cls.__struct_fields__
        prefix = cls._prefix
        if len(args) > (len(names) if prefix else 0):
            raise PolicyError(f"{cls.__name__} takes its clauses by name, such as {names[0]}=...")
        fields.update(zip(names, args, strict=False))
        for name in [name for name in fields if name not in names]:
            hint = _suggest_key(name, names, prefix)
            raise InvalidValueError(prefix + name, fields[name], "there is no such key", hint)
        return super().__call__(**fields)

    if not TYPE_CHECKING:  # otherwise pyright would take every policy for Any
        __call__ = _make


class _Clauses(
    msgspec.Struct, frozen=True, cache_hash=True, forbid_unknown_fields=True, metaclass=_KeywordCheck
):
    """A value that checks and normalises every field when it is made."""

    # Not annotated, so that msgspec does not take them for fields.
    _prefix = ""
    _checks = {}  # type: ignore[var-annotated]

    def __post_init__(self) -> None:
        for name, check in self._checks.items():
            value = getattr(self, name)
            normalised = check(self._prefix + name, value)
            if normalised is not value:
                msgspec.structs.force_setattr(self, name, normalised)


class WorkspaceRule(_Clauses, frozen=True):
    """The directory that commands work in, at the same path inside as outside.

    Attributes:
        path: Appears inside at the same path as outside (a path).
        mode: `overlay`: changes go to a layer; `rw`: they are real; `ro`: they are refused (`"overlay"`,
            `"rw"`, `"ro"`).
        durable: Changes survive a killed supervisor even under `limits.disk`, or Stockade refuses the run
            (true or false).
    """

    path: str = "."
    mode: Literal["overlay", "rw", "ro"] = "overlay"
    #: Whether changes must survive a killed supervisor. They do, except under a limit of disk space.
    durable: bool = False

    _prefix = "workspace."
    _checks = {"path": values.path, "mode": values.one_of("overlay", "rw", "ro"), "durable": values.flag}


class Limits(_Clauses, frozen=True):
    """How much a run may use. None means the profile's default; a number in the policy is required.

    Write a size as a number of bytes, or as "64K", "10M" or "1G"; a time as a number of seconds, or as
    "250ms", "30s", "5m" or "1h".

    Attributes:
        memory: Memory of the whole sandbox (a size).
        tasks: Processes and threads at once (a number).
        cpu: Cores (a number).
        cpu_time: Processor time of the whole sandbox (a time).
        wall: Time from start to end (a time).
        output: How much of each stream is kept in memory; the rest goes to a file (a size).
        files: Open descriptors of one process (a number).
        disk: Changes, private `/tmp`, `/dev/shm` and home together (a size).
        connections: Connections to the outside, in the life of the sandbox (a number).
        requests: HTTP requests; every rule must let Stockade look into HTTP (a number).
        upload: Bytes to the outside (a size).
        download: Bytes from the outside (a size).
        host_connections: Connections to each single host (a number).
        host_requests: HTTP requests to each single host (a number).
        host_upload: Bytes to each single host (a size).
        host_download: Bytes from each single host (a size).
    """

    memory: int | None = None
    tasks: int | None = None
    cpu: float | None = None
    cpu_time: float | None = None
    wall: float | None = None
    output: int | None = None
    files: int | None = None
    disk: int | None = None
    connections: int | None = None
    requests: int | None = None
    upload: int | None = None
    download: int | None = None
    host_connections: int | None = None
    host_requests: int | None = None
    host_upload: int | None = None
    host_download: int | None = None

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
        **{name: values.size if name in SIZES else values.count(1 << 40) for name in NETWORK_LIMITS},
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
            connections: int | str | None = None,
            requests: int | str | None = None,
            upload: int | str | None = None,
            download: int | str | None = None,
            host_connections: int | str | None = None,
            host_requests: int | str | None = None,
            host_upload: int | str | None = None,
            host_download: int | str | None = None,
        ) -> None: ...


def limit_text(name: str, value: float) -> str:
    """Return a limit as a policy writes it."""
    if name in ("cpu_time", "wall"):
        return f'"{values.time_text(value)}"'
    return f'"{values.size_text(int(value))}"' if name in SIZES else str(value)


def control_of_limit(name: str) -> Control:
    """Return the control that a key of `limits` asks for."""
    return Control.LIMITS_NETWORK if name in NETWORK_LIMITS else Control(f"limits.{name}")


class Syscalls(_Clauses, frozen=True):
    """System calls beyond the profile's set, and further refusals.

    Attributes:
        allow: Calls and socket options that the built-in list leaves out (names).
        deny: Further calls to refuse (names).
    """

    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()

    _prefix = "syscalls."
    _checks = {"allow": values.many(values.allowed_call), "deny": values.many(values.syscall)}

    if TYPE_CHECKING:

        def __init__(self, allow: Sequence[str] = (), deny: Sequence[str] = ()) -> None: ...

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.allow:
            if name in self.deny:
                raise InvalidValueError(
                    "syscalls.allow", name, "syscalls.deny names it too", "remove it from one of them"
                )


def _not_none(check: values.Check) -> values.Check:
    """Return the same check, which also refuses None."""

    def check_value(key: str, value: Any) -> Any:
        if value is None:
            raise InvalidValueError(key, value, "must be a number", "leave it out for the default")
        return check(key, value)

    return check_value


class Reuse(_Clauses, frozen=True):
    """How long a pool may use the same sandbox, for runs that have nothing to hide from one another.

    Attributes:
        requests: How many runs one sandbox serves (a number).
        age: Age from which a sandbox takes no more runs (a time).
        idle: How long a sandbox waits for the next run before the pool ends it (a time).
    """

    requests: int = 100
    age: float = 600.0
    #: How long a sandbox may wait for the next run after its first one.
    idle: float = 60.0

    _prefix = "reuse."
    _checks = {
        "requests": _not_none(values.count(1_000_000)),
        "age": _not_none(values.time),
        "idle": _not_none(values.time),
    }

    if TYPE_CHECKING:

        def __init__(
            self, requests: int | str = 100, age: float | str = 600.0, idle: float | str = 60.0
        ) -> None: ...


def _secret_check(name: str) -> values.Check:
    """Return a check of `policy.secrets`, which is loaded only for policies with secrets."""

    def check(key: str, value: Any) -> Any:
        from stockade.policy import secrets

        return getattr(secrets, name)(key, value)

    return check


#: Where the value of a secret may be found.
SECRET_SOURCES = ("from_env", "from_file", "from_command")


class Secret(_Clauses, frozen=True, rename={"as_": "as"}):
    """A value that stays outside: programs have a placeholder, which the egress process replaces.

    Exactly one of `from_env`, `from_file` and `from_command` says where the supervisor finds the value.

    Attributes:
        from_env: The variable of your environment that has the value; with `?` at the end the secret is left
            out if there is none (a name).
        from_file: The file that has the value; with `?` at the end only if it exists (a path).
        from_command: The command that prints the value, which no shell reads (a list of words).
        hosts: The only hosts that get the value, each with a rule for requests in `net` (hosts:
            `api.example.com`, `api.example.com:8443`, `http://intranet.example`).
        as_: Where in a request the placeholder is replaced (`"bearer"`, `"basic"`, `"header:X-Api-Key"`,
            `"query:key"`, `"body"`, or a list of these).
        prefix: What the placeholder begins with, for programs that check how a key looks (text).
        inside: Where programs find the placeholder: in a variable with the secret's name, or in the file
            `/run/secrets/NAME` (`"env"`, `"file"`, `"both"`).
    """

    from_env: str | None = None
    from_file: str | None = None
    from_command: tuple[str, ...] | None = None
    hosts: tuple[str, ...] = ()
    as_: tuple[str, ...] = ("bearer", "basic")
    prefix: str = ""
    inside: Literal["env", "file", "both"] = "env"

    _prefix = "secrets.NAME."
    _checks = {
        "from_env": _secret_check("variable"),
        "from_file": lambda key, value: None if value is None else values.path(key, value),
        "from_command": _secret_check("command"),
        "hosts": _secret_check("hosts"),
        "as_": _secret_check("forms"),
        "prefix": _secret_check("prefix"),
        "inside": values.one_of("env", "file", "both"),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        sources = [name for name in SECRET_SOURCES if getattr(self, name) is not None]
        if len(sources) != 1:
            problem = f"has {' and '.join(sources)}" if sources else "does not say where its value is"
            hint = "write one of from_env, from_file and from_command"
            raise InvalidValueError("secrets.NAME.", None, problem, hint)

    @property
    def source(self) -> str:
        """Which of the three says where the value is."""
        return next(name for name in SECRET_SOURCES if getattr(self, name) is not None)


def _secrets(key: str, value: Any) -> Any:
    if type(value) is FrozenMap and all(isinstance(one, Secret) for one in value.values()):
        return value
    if not value and isinstance(value, Mapping):
        return FrozenMap()
    from stockade.policy import secrets

    return secrets.named(key, value, Secret)


def _table(kind: type[_Clauses]) -> values.Check:
    def check(key: str, value: Any) -> _Clauses:
        if isinstance(value, kind):
            return value
        if isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
            return kind(**value)
        raise InvalidValueError(key, value, "must be a table", f"known: {', '.join(kind.__struct_fields__)}")

    return check


#: The clauses that are tables.
TABLES: dict[str, type[_Clauses]] = {
    "workspace": WorkspaceRule,
    "limits": Limits,
    "syscalls": Syscalls,
    "reuse": Reuse,
}
_LIMITS, _SYSCALLS, _WORKSPACE = _table(Limits), _table(Syscalls), _table(WorkspaceRule)
_REUSE = _table(Reuse)


def _workspace(key: str, value: Any) -> Any:
    if value is None or isinstance(value, WorkspaceRule | Mapping):
        return None if value is None else _WORKSPACE(key, value)
    return WorkspaceRule(values.path(key, value))


def _reuse(key: str, value: Any) -> Any:
    return None if value is None else _REUSE(key, value)


def _net(key: str, value: Any) -> tuple[str, ...] | str:
    if isinstance(value, str) and value in ("open", "none"):
        return "open" if value == "open" else ()
    if value == "ask":
        return ("ask",)
    if isinstance(value, list | tuple | set | frozenset):
        return _net_rules(key, value) if value else ()
    if isinstance(value, str) and any(letter in value for letter in ".:/*"):
        raise InvalidValueError(key, value, "rules are a list", f"write {key} = [{values.show(value)}]")
    raise InvalidValueError(
        key,
        value,
        'is neither "none" nor "open" nor a list of rules',
        'write "none" for no network, "open" for all of the host\'s, or rules: ["api.example.com:443"]',
    )


def _roots(key: str, value: Any) -> str:
    if value == "":
        return ""
    text = values.path(key, value)
    if not text.startswith(("/", "~/")):
        raise InvalidValueError(key, value, "is not an absolute path", f"write ~/{text} or /etc/ssl/{text}")
    return text


def _net_rules(key: str, value: Iterable[Any]) -> tuple[str, ...]:
    """Check the rules of `net` and return each in its one spelling."""
    from stockade.policy import net_errors, net_rules

    written = sorted(value, key=str) if isinstance(value, set | frozenset) else list(value)
    found: dict[str, net_rules.NetRule] = {}
    for index, text in enumerate(written):
        where = f"{key}[{index}]"
        if not isinstance(text, str):
            raise InvalidValueError(where, text, "must be a rule as text", 'such as "api.example.com:443"')
        try:
            rule = net_rules.parse_new_rule(text)
        except net_errors.NetRuleError as error:
            raise InvalidValueError(where, text, error.problem, error.hint) from None
        found[rule.text] = rule
    if len(found) > net_rules.MOST_RULES:
        problem = f"has {len(found)} rules, and a policy has at most {net_rules.MOST_RULES}"
        raise InvalidValueError(key, None, problem, "write *.example.com for several hosts of one domain")
    try:
        net_rules.ports_of(found.values())
        net_rules.check_rules(tuple(found.values()))
    except net_errors.NetRuleError as error:
        raise InvalidValueError(key, written, error.problem, error.hint) from None
    return tuple(found)


_ONE_BACKEND = values.one_of("auto", *BACKENDS, *DRAFTS, later=LATER_BACKENDS)
_SEVERAL_BACKENDS = values.many(values.one_of(*BACKENDS, *DRAFTS, later=LATER_BACKENDS))


def _backend(key: str, value: Any) -> str | tuple[str, ...]:
    if not isinstance(value, list | tuple):
        one: str = _ONE_BACKEND(key, value)
        return one
    several: tuple[str, ...] = _SEVERAL_BACKENDS(key, value)
    if not several:
        raise InvalidValueError(key, value, "names no backend", 'write "auto", or name a backend')
    return several if len(several) > 1 else several[0]


def _programs(key: str, value: Any) -> tuple[str, ...] | None:
    if value is None:
        return None
    patterns: tuple[str, ...] = values.many(values.grant)(key, value)
    if not patterns:
        raise InvalidValueError(key, value, "no program could run", "leave it out, or name the programs")
    return patterns


def _toolchain(key: str, value: Any) -> bool | tuple[str, ...]:
    if isinstance(value, bool):
        return value
    if isinstance(value, str):
        raise InvalidValueError(
            key, value, "must be true, false or a list", f"write {key} = [{values.show(value)}]"
        )
    # An empty list asks for no more than the command's own install.
    return values.many(values.command)(key, value) or True


def _accepted(key: str, value: Any) -> Control:
    try:
        return Control(value)
    except ValueError:
        names = [control.value for control in Control]
        raise InvalidValueError(
            key, value, "is not a known control", values.nearest(str(value), names)
        ) from None


class Policy(_Clauses, frozen=True, kw_only=True):
    """What a run may see, change, reach and use; everything else is refused.

    `Policy()` is the strict profile without a workspace. The tables take a mapping too:
    `Policy(workspace=".", limits={"memory": "512M"})`.

    Attributes:
        profile: The named starting point (`"strict"`, `"dev"`, `"net-client"`, `"worker"`).
        read: Visible, read-only; with `?` at the end only if it exists (paths).
        write: Visible, and writable for real (paths).
        deny: Hidden, also inside visible trees (paths and patterns, relative to the workspace).
        protect: Paths of the workspace that must not change (relative paths).
        unprotect: May change although protected: protected paths, `.git`, `.hg`, `.jj`, `.sl`, and what
            version control runs (paths, relative to the workspace).
        hold_back: Paths of the workspace that a commit holds back, besides those that tools of the host run
            or obey (relative patterns).
        allow_commit: Paths of the workspace that a commit takes although tools of the host run or obey them
            (relative patterns).
        exec: The only files that may be executed (patterns).
        net: No network, all of the host's, or only what the rules allow; a rule without ports means 80 and
            443 (`"none"`, `"open"`, or rules: `host[:ports]`, `*.host[:ports]`, `*[:ports]`,
            `address[:ports]`, `network[:ports]`, `tcp://host:port`, `udp://host:port`, `METHOD[,METHOD]
            https://host/path/**`, `!` before a rule that denies, and `ask`: you are asked about names that no
            rule covers).
        net_roots: The file of certificates by which Stockade verifies servers whose requests rules judge;
            without it, the file that your `SSL_CERT_FILE` names, or the system's (a path).
        on_egress_end: What a run does if the process that relays its connections ends: it goes on and reaches
            nothing, or it ends too (`"continue"`, `"end"`).
        proxy: Whether programs find a proxy inside, at `198.18.0.1:3128`, for HTTP CONNECT and SOCKS5, and
            `HTTPS_PROXY` names it; it reaches what `net` allows (true or false).
        env: Variables to set inside (a table).
        pass_env: Variables of your environment to pass on (names).
        image: The root file system (`"host"`).
        backend: What raises the walls; Stockade uses the backend that you name, or refuses the run; a list is
            in order of preference (`"auto"`, `"native"`, `"bwrap"`, `"landlock"`, or a list of names; the
            backends of other systems start nothing).
        accept: Controls that may be weaker where the host cannot do better (controls).
        workspace: The directory that commands work in (a path or a table).
        limits: How much the sandbox may use (a table).
        syscalls: Additions to the built-in list of system calls, and removals from it (a table).
        toolchain: Whether Stockade shows the install of the command; or further commands whose installs it
            shows (true, false, or commands).
        delegate: Whether the program may ask for further sandboxes, which never get more than it has itself
            (true or false).
        reuse: A pool may use a sandbox for several runs, one after another (a table).
        secrets: Values that stay outside, by the name of the variable that has a placeholder inside (a table
            for each).
        receipts: Whether each receipt is signed before its run returns, or many together soon after
            (`"each"`, `"batched"`).
    """

    profile: Literal["strict", "dev", "net-client", "worker"] = "strict"
    read: tuple[str, ...] = ()
    write: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()
    protect: tuple[str, ...] = PROTECT
    unprotect: tuple[str, ...] = ()
    hold_back: tuple[str, ...] = ()
    allow_commit: tuple[str, ...] = ()
    exec: tuple[str, ...] | None = None
    net: tuple[str, ...] | Literal["open"] = ()
    net_roots: str = ""
    on_egress_end: Literal["continue", "end"] = "continue"
    proxy: bool = False
    env: Mapping[str, str] = FrozenMap()
    pass_env: tuple[str, ...] = ()
    image: Literal["host"] = "host"
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
    toolchain: bool | tuple[str, ...] = True
    delegate: bool = False
    reuse: Reuse | None = None
    secrets: Mapping[str, Secret] = FrozenMap()  # type: ignore[assignment]
    receipts: Literal["each", "batched"] = "each"

    _checks = {
        "profile": values.one_of(*PROFILES),
        "read": values.many(values.grant),
        "write": values.many(values.grant),
        "deny": values.many(values.denied),
        "protect": values.many(values.protected),
        "unprotect": values.many(values.unprotected),
        "hold_back": values.many(values.inside),
        "allow_commit": values.many(values.inside),
        "exec": _programs,
        "net": _net,
        "net_roots": _roots,
        "on_egress_end": values.one_of("continue", "end"),
        "proxy": values.flag,
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
        "secrets": _secrets,
        "receipts": values.one_of("each", "batched"),
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
            unprotect: Sequence[str] = (),
            hold_back: Sequence[str] = (),
            allow_commit: Sequence[str] = (),
            exec: Sequence[str] | None = None,
            net: Sequence[str] | str = (),
            net_roots: str = "",
            on_egress_end: str = "continue",
            proxy: bool = False,
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
            secrets: Mapping[str, Secret | Mapping[str, Any]] = ...,
            receipts: str = "each",
        ) -> None: ...

    @classmethod
    def from_toml(cls, text: str, *, base: str | None = None, name: str = "") -> Policy:
        """Parse a policy from TOML; paths are relative to `base`, and `name` appears in errors."""
        from stockade.policy.toml import parse

        return parse(text, base=base, name=name)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Policy:
        """Load the policy of a TOML file; in a pyproject.toml it is the table [tool.stockade].

        `read`, `write`, `exec` and the workspace are relative to the file's directory. The policy protects
        the file, so that a program in its workspace cannot choose the policy of the next run.
        """
        from stockade.linux.user import Caller
        from stockade.policy.toml import load, protect_source, refuse_what_is_no_file

        file, caller = os.fsdecode(path), Caller.current()
        refuse_what_is_no_file(file)
        return protect_source(load(file), file, caller.home, caller.cwd, caller.environ)

    def table(self, *, full: bool = False) -> dict[str, Any]:
        """Return the clauses as plain values; without those at their default unless `full`."""
        return {
            name: _plain(value)
            for name in self.__struct_fields__
            if (value := getattr(self, name)) is not None and (full or value != getattr(DEFAULT, name))
        }

    def to_toml(self) -> str:
        """Return TOML that loads as a policy equal to this one."""
        from stockade.policy.toml import write

        return write(self.table())

    @property
    def hash(self) -> str:
        """SHA-256 of every clause, defaults included: equal policies, equal hashes."""
        from stockade.linux.sha256 import sha256
        from stockade.policy.toml import write

        clauses = self.table(full=True)
        if self.receipts == DEFAULT.receipts:
            del clauses["receipts"]  # policies that do not mention it keep their hashes
        canonical = "stockade policy 1\n" + write(clauses)
        return sha256(canonical.encode("utf-8", "surrogateescape")).hexdigest()

    def __repr__(self) -> str:
        """Show the clauses that differ from `Policy()`."""
        shown = (f"{name}={value!r}" for name, value in self.table().items())
        return f"Policy({', '.join(shown)})"

    def within(self, other: Policy) -> bool:
        """Whether this policy asks for no more than the other. Paths are compared as text."""
        return not self.excess(other)

    def excess(self, other: Policy) -> list[str]:
        """Describe what this policy asks for beyond the other, one line for each difference."""
        from stockade.policy.compare import excess

        return excess(self, other)

    def protected(self) -> tuple[str, ...]:
        """Return the paths that `protect` names and `unprotect` does not."""
        return tuple(values.unquote_protected(path) for path in self.protect if path not in self.unprotect)

    def unprotected(self) -> tuple[str, ...]:
        """Return the paths that `unprotect` names."""
        return tuple(map(values.unquote_protected, self.unprotect))

    def controls(self) -> dict[Control, str]:
        """Return the controls this policy needs, each with the clause that needs it."""
        needed = dict.fromkeys(ALWAYS, "default")
        for name in ("read", "write"):
            if getattr(self, name):
                needed[Control.FILES] = f"{name} = {values.show(getattr(self, name))}"
        if self.deny:
            needed[Control.DENY] = f"deny = {values.show(self.deny)}"
        if self.exec is not None:
            needed[Control.EXEC] = f"exec = {values.show(self.exec)}"
        if not self.net:
            needed[Control.NETWORK_NONE] = "default"
        elif self.net != "open":
            needed[Control.NETWORK_RULES] = f"net = {values.show(self.net)}"
            if requests := tuple(rule for rule in self.net if " " in rule):
                needed[Control.NETWORK_HTTP] = f"net = {values.show(requests)}"
        if self.secrets and self.net:
            name, secret = next(iter(self.secrets.items()))
            needed[Control.SECRETS] = f"secrets.{name}.hosts = {values.show(secret.hosts)}"
        if self.workspace is not None:
            if self.workspace.mode == "overlay":
                needed[Control.WORKSPACE_OVERLAY] = 'workspace.mode = "overlay"'
            # In mode ro nothing lands on the host, unless a grant makes something in it writable.
            if (paths := self.protected()) and (self.workspace.mode != "ro" or self.write):
                needed[Control.PROTECT] = "default" if paths == PROTECT else f"protect = {values.show(paths)}"
        from stockade.policy.profile import profile

        limits, default = self.limits, profile(self.profile).limits
        for name in limits.__struct_fields__:
            if (value := getattr(limits, name)) is not None:
                clause, control = f"limits.{name} = {limit_text(name, value)}", control_of_limit(name)
                needed[control] = f"{needed[control]}, {clause}" if control in needed else clause
            elif getattr(default, name) is not None:
                needed[control_of_limit(name)] = "default"
        if self.syscalls != Syscalls():
            name = "deny" if self.syscalls.deny else "allow"
            needed[Control.SYSCALLS] = f"syscalls.{name} = {values.show(getattr(self.syscalls, name))}"
        return needed

    def required(self, control: Control | str) -> bool:
        """Whether a run must be refused where the control cannot be enforced in full.

        It need not if `accept` names the control, or if only the profile asks for a limit on tasks, memory or
        processor time.
        """
        control = Control(control)
        if control in self.accept or control not in self.controls():
            return False
        written = control.startswith("limits.") and getattr(self.limits, control[7:], None) is not None
        return written or control not in WEAKER_BY_DEFAULT


DEFAULT = Policy()
#: What calls take as a policy: a `Policy`, its clauses, or the path of a policy file.
PolicyLike: TypeAlias = Policy | Mapping[str, Any] | str | os.PathLike[str]


def policy_or_default(policy: PolicyLike | None) -> Policy:
    """Return the policy that a call was given, from its clauses or its file too; the default one for None."""
    if policy is None:
        return DEFAULT
    if isinstance(policy, Policy):
        return policy
    if isinstance(policy, Mapping) and all(isinstance(name, str) for name in policy):
        return Policy(**policy)
    if isinstance(policy, str | os.PathLike):
        return Policy.load(policy)
    hint = 'write Policy(workspace="."), its clauses as a dict, or the path of a policy file'
    if isinstance(policy, list | tuple):
        hint = 'the command and its arguments are one list: run(["ls", "-l"])'
    raise PolicyError(f"the policy is of type {type(policy).__name__}, not a Policy", hint=hint)


def _plain(value: Any) -> Any:
    if isinstance(value, _Clauses):
        names = zip(value.__struct_encode_fields__, value.__struct_fields__, strict=True)
        items = {shown: getattr(value, name) for shown, name in names}
        return {name: _plain(item) for name, item in items.items() if item is not None}
    if isinstance(value, tuple):
        return [str(item) for item in value]
    return {name: _plain(item) for name, item in value.items()} if isinstance(value, FrozenMap) else value


def in_repository(path: str) -> bool:
    """Whether a path names a repository, or something in one."""
    return any(map(is_repository, path.split("/")))


def is_repository(name: str) -> bool:
    """Whether a version control system looks for this name; some file systems ignore the case."""
    return name[:1] == "." and name.lower() in REPOSITORIES
