"""The options that calls share, each written once.

A call that runs something takes them by name: `run(cmd, timeout=5, env={"CI": "1"})`. Type checkers see the
names and types below; at run time `refuse_unknown` raises for any other name.

Annotations are evaluated here: as text, typing would compile each of them at every start, for 0.3 ms.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeAlias, TypedDict, get_args

import stockade
from stockade.errors import PolicyError
from stockade.runs.io.streams import Sink

OnExit: TypeAlias = Literal["keep", "discard", "commit"]
WAYS = get_args(OnExit)
Answer: TypeAlias = Literal["once", "run", "policy", "no"]
Variables: TypeAlias = Mapping[str, str | int | os.PathLike[str]]
Asker: TypeAlias = "stockade.receipt.Who | Mapping[str, str] | None"
#: The most characters of a sandbox's name.
LONGEST_NAME = 64


class CodeOptions(TypedDict, total=False):
    """How to run code in an interpreter."""

    #: The standard input: bytes, or text, which is encoded as UTF-8.
    input: bytes | str
    #: When to end the run: seconds, or text such as "250ms" and "5m". Without it, only `limits.wall` ends it.
    timeout: float | str | None
    #: Seconds from the request to end to the kill.
    grace: float
    #: Called with each piece of output as it comes.
    on_stdout: Sink | None
    on_stderr: Sink | None
    #: Who asks for the run, for its receipt: agent, category, action and words.
    who: Asker


class ShellOptions(CodeOptions, total=False):
    """How to run code in a shell."""

    #: Variables besides those of the policy.
    env: Variables | None
    #: Where this run starts; the shell returns to its directory afterwards.
    cwd: str | os.PathLike[str] | None


class StartOptions(TypedDict, total=False):
    """How to start a command."""

    #: Variables besides those of the policy.
    env: Variables | None
    #: Where the command starts; a relative path begins in the workspace.
    cwd: str | os.PathLike[str] | None
    #: When to end the run: seconds, or text such as "250ms" and "5m". Without it, only `limits.wall` ends it.
    timeout: float | str | None
    #: Seconds from TERM to KILL.
    grace: float
    #: Who asks for the run, for its receipt: agent, category, action and words.
    who: Asker


class ProcessOptions(StartOptions, total=False):
    """How to start a command whose streams the caller holds."""

    #: `subprocess.PIPE` or `DEVNULL`; stdin: None for an empty one; stderr can be `STDOUT`.
    stdin: int | None
    stdout: int | None
    stderr: int | None
    #: Give the program a terminal of its own instead, of 24 lines and 80 columns or this size.
    pty: bool | tuple[int, int]


class BackgroundOptions(StartOptions, total=False):
    """How to start a command with a given input."""

    #: The standard input: bytes, or text, which is encoded as UTF-8.
    input: bytes | str


class SpawnOptions(BackgroundOptions, total=False):
    """How to start a command in its own sandbox, for `Spawner`."""

    #: The name of the sandbox in `stockade ps`, in logs and in receipts.
    name: str


class RunOptions(BackgroundOptions, total=False):
    """How to run a command to its end."""

    #: Whether to observe what the program tries, so that the result explains each refusal.
    explain: bool
    #: Whether `reason` and `hint` may say what a look at the host's files finds: for a person, not a model.
    advise: bool
    #: Called with each piece of output as it comes.
    on_stdout: Sink | None
    on_stderr: Sink | None


class SandboxOptions(TypedDict, total=False):
    """How to make a sandbox, besides its policy."""

    #: Whether to observe what programs try, so that results explain each refusal.
    explain: bool

    #: What happens to the changes in an overlay workspace.
    on_exit: OnExit
    #: The workspace to go on in, or its id.
    resume: "stockade.Workspace | str | None"
    #: Take a snapshot of the workspace before each run.
    snapshot: bool
    #: The name of the sandbox in `stockade ps`, in logs and in receipts.
    name: str
    #: Ports of the host that lead to servers inside, as `[HOST:]PORT:PORT`.
    publish: Sequence[str]
    #: With `ask` in `net`: called, in a thread of its own, with each connection that no rule covers. It
    #: returns "once", "run", "policy" or "no". Without it, such connections are refused.
    on_ask: "Callable[[stockade.result.NetworkQuestion], Answer] | None"
    #: Who asks for its runs, for their receipts: agent, category, action and words.
    who: Asker


class OneShotOptions(RunOptions, SandboxOptions, total=False):
    """How to run a command to its end, and the sandbox around it."""


def refuse_unknown(call: str, given: Mapping[str, object], known: frozenset[str]) -> None:
    """Raise a TypeError for an option that a call does not have, and say what was meant."""
    for name, value in given.items():
        if name not in known:
            from stockade.runs.explain.wrong_option import explain

            raise TypeError(explain(call, name, value, known))


def valid_on_exit(on_exit: OnExit) -> OnExit:
    """Validate a choice for `on_exit` and return it."""
    if on_exit not in WAYS:
        raise PolicyError(
            f"on_exit = {on_exit!r}: is not a known choice", hint='write "keep", "discard" or "commit"'
        )
    return on_exit


def valid_name(name: str) -> str:
    """Validate the name of a sandbox and return it; "" is no name."""
    if not name and isinstance(name, str):
        return ""
    if (
        not isinstance(name, str)
        or not name.isprintable()
        or name != name.strip()
        or len(name) > LONGEST_NAME
    ):
        raise PolicyError(
            f"name = {name!r:.200}: is not a name for a sandbox",
            hint=f"write 1 to {LONGEST_NAME} printable characters, without a space at either end",
        )
    return name


def input_bytes(given: bytes | str) -> bytes:
    """Return what a program reads as its standard input; text is encoded as UTF-8."""
    if isinstance(given, bytes):
        return given
    if isinstance(given, str):
        return given.encode("utf-8", "surrogateescape")
    if isinstance(given, bytearray | memoryview):
        return bytes(given)
    hint = "read it first: input=file.read()" if hasattr(given, "read") else "write bytes or text"
    raise PolicyError(f"input is of type {type(given).__name__}, neither bytes nor text", hint=hint)


def directory(cwd: object) -> str:
    """Validate the directory that a command starts in and return it; "" is the default one."""
    if cwd is None:
        return ""
    if not isinstance(cwd, str | bytes | os.PathLike):
        raise PolicyError(f"cwd = {cwd!r:.200}: is not a path", hint='write a path, such as cwd="src"')
    place = os.fsdecode(cwd)
    if "\0" in place:
        raise PolicyError("cwd contains a NUL byte")
    return place


def variables(env: Variables | None) -> dict[str, str]:
    """Validate environment variables and return them as text; a number or a path has only one spelling."""
    if env is not None and not isinstance(env, Mapping):
        raise PolicyError(f"env = {env!r:.200}: is not a table", hint='write env={"NAME": "value"}')
    found: dict[str, str] = {}
    for name, value in (env or {}).items():
        text = _text(value)
        if text is None:
            raise PolicyError(
                f"env: {name} = {value!r:.200} is not text",
                hint=f"write env={{{name!r}: {str(value)!r:.200}}}"
                if value is not None
                else f"leave {name} out",
            )
        if not isinstance(name, str) or not name or "=" in name or "\0" in name or "\0" in text:
            raise PolicyError(
                f"env: {name!r} cannot be set",
                hint="a name must not be empty or contain =, and neither name nor value may contain NUL",
            )
        found[name] = text
    return found


def _text(value: object) -> str | None:
    if isinstance(value, str):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return os.fsdecode(value) if isinstance(value, os.PathLike) else None
