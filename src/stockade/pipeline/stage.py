"""`Stage`: a command, or a Python function, with the policy of its own sandbox."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeAlias, TypedDict, Unpack, cast

import msgspec

import stockade
from stockade.errors import PolicyError
from stockade.pipeline.wiring import Ties
from stockade.policy.model import PolicyLike, policy_or_default
from stockade.receipt.statement import PipelinePlace
from stockade.result import Result
from stockade.runs.command import words
from stockade.runs.io.eventloop import Events, Steps, drive
from stockade.runs.io.streams import OutputCopy, Sink, TerminalHandler
from stockade.runs.limits import seconds_of
from stockade.runs.options import Asker, OneShotOptions, OnExit, Variables, refuse_unknown, variables
from stockade.runs.supervise import GRACE
from stockade.sandbox.sandbox import RunExtras, run_once_steps

#: How long after the time limit output still waits for a stalled reader of an inherited stream, in seconds.
STALLED_SECONDS = 1.0


class HasDescriptor(Protocol):
    """An open file."""

    def fileno(self) -> int:
        """Return its descriptor."""


#: Where a program's stdin comes from: an open file, a descriptor, or the caller's own.
Source: TypeAlias = HasDescriptor | int | Literal["inherit"]
Inherit: TypeAlias = Literal["inherit"]


class StageOptions(TypedDict, total=False):
    """How to run a stage, besides its policy and its command."""

    #: Variables besides those of the policy.
    env: Variables | None
    #: Where the command starts; a relative path begins in the workspace.
    cwd: str | os.PathLike[str] | None
    #: What it reads if no other stage writes to it: bytes or text, or the content of `stdin`.
    input: bytes | str
    stdin: Source | None
    #: "inherit" also writes its stderr to the caller's; it is kept all the same.
    stderr: Inherit | None
    #: Seconds from TERM to KILL.
    grace: float
    #: What happens to the changes in an overlay workspace.
    on_exit: OnExit
    #: The workspace to go on in, or its id.
    resume: stockade.Workspace | str | None
    #: Ports of the host that lead to servers inside, as `[HOST:]PORT:PORT`.
    publish: Sequence[str]
    #: Of a function: its arguments.
    args: Sequence[Any]
    kwargs: Mapping[str, Any]


class PipelineOptions(TypedDict, total=False):
    """How to run a pipeline."""

    #: What the first stage reads: bytes or text, or the content of `stdin`.
    input: bytes | str
    stdin: Source | None
    #: When to end all stages: seconds, or text such as "250ms" and "5m".
    timeout: float | str | None
    #: Called with each piece of the last stage's output as it comes.
    on_stdout: Sink | None
    on_stderr: Sink | None
    #: "inherit" also writes the last stage's stdout, or the stderr of all stages, to the caller's.
    stdout: Inherit | None
    stderr: Inherit | None
    #: The name of the pipeline: its stages are NAME-stage-0 and so on in `stockade ps`, in logs and in
    #: receipts.
    name: str
    #: Who asks for the run, for the receipts: agent, category, action and words.
    who: Asker


class StageRunOptions(PipelineOptions, total=False):
    """How to run a stage alone."""

    #: Give the program a terminal of its own, connected with the caller's, instead of pipes.
    terminal: bool


class StageSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a pipeline, or a run of the stage alone, adds to a stage."""

    input: bytes | str = b""
    stdin: Source | None = None
    timeout: float | None = None
    on_stdout: Sink | None = None
    on_stderr: Sink | None = None
    stderr: Inherit | None = None
    name: str = ""
    who: Asker = None
    env: Mapping[str, str] = {}
    terminal: TerminalHandler | None = None
    keep_output: bool = True
    #: Whether the policy's paths are real names (`resolve.discovery`).
    pinned: bool = False
    #: Whether results may say what a look at the host's files finds.
    advise: bool = False
    cancelled_by: tuple[type[BaseException], ...] = ()
    ties: Ties | None = None
    place: PipelinePlace | None = None


class Stage:
    """A command, or a Python function, in its own sandbox under its own policy.

    >>> import stockade
    >>> words = stockade.Stage({}, ["cat"]) | stockade.Stage({}, ["wc", "-w"])
    >>> words.run(input="one two three").text
    '3\\n'

    `policy` is a `Policy`, its clauses as a dict, or the path of a policy file. A function is called inside
    with `args` and `kwargs`; it reads `sys.stdin` and prints, and its value is dropped. For a function that
    `sandboxed` made, the policy None is its own. The other options are `env`, `cwd`, `grace`, `on_exit`,
    `resume` and `publish`, as for `stockade.run`; `input` or `stdin`, which the stage reads if no other stage
    writes to it; and `stderr="inherit"`.
    """

    def __init__(
        self,
        policy: PolicyLike | None,
        cmd: Sequence[str] | Callable[..., Any],
        **options: Unpack[StageOptions],
    ) -> None:
        refuse_unknown("Stage", options, StageOptions.__optional_keys__)
        self.options = options
        self.function: Callable[..., Any] | None = cmd if callable(cmd) else None
        self.command: Sequence[str] = () if callable(cmd) else words(cmd)
        own = getattr(cmd, "policy", None) if policy is None and callable(cmd) else None
        self.policy = policy_or_default(policy if own is None else own)
        if self.function is None and ("args" in options or "kwargs" in options):
            raise PolicyError("args and kwargs are for a function", hint="write them into the command")
        if self.function is not None:
            _refuse_for_function(self.function, options)
        if options.get("input") and options.get("stdin") is not None:
            raise PolicyError("a stage has input or stdin, not both")
        variables(options.get("env"))
        descriptor(options.get("stdin"))
        inherits("stderr", options.get("stderr"))

    def __repr__(self) -> str:
        what = self.function if self.function is not None else list(self.command)
        return f"<Stage {what!r:.200}>"

    def __or__(self, other: Stage | stockade.Pipeline) -> stockade.Pipeline:
        from stockade.pipeline.pipeline import Pipeline

        if not isinstance(other, Stage | Pipeline):
            return NotImplemented
        return Pipeline([self, *([other] if isinstance(other, Stage) else other.stages)])

    def run(self, **options: Unpack[StageRunOptions]) -> Result:
        """Run the stage alone, to its end.

        The options are `input` or `stdin`, `timeout`, `on_stdout`, `on_stderr`, `name` and `who`, as for
        `stockade.run`; `stdin`, `stdout` and `stderr` can be "inherit". With `terminal=True` the program gets
        a terminal of its own, which is connected with the caller's.
        """
        settings = self._alone("run", options)
        try:
            with Events() as events:
                return drive(self.steps(settings, events), events)
        finally:
            if settings.terminal is not None:
                settings.terminal.close()

    async def run_async(self, **options: Unpack[StageRunOptions]) -> Result:
        """Run the stage alone as `run` does, with `await`."""
        from stockade.runs.io.async_eventloop import drive as drive_async

        settings = self._alone("run_async", options)
        if settings.terminal is not None:
            raise PolicyError("run_async has no terminal", hint="call run(terminal=True)")
        with Events() as events:
            return await drive_async(self.steps(settings, events), events)

    def _alone(self, call: str, options: StageRunOptions) -> StageSettings:
        refuse_unknown(call, options, StageRunOptions.__optional_keys__)
        timeout = seconds_of(options.get("timeout"))
        terminal = None
        if options.get("terminal"):
            if self.function is not None:
                raise PolicyError("a function has no terminal", hint="give the stage a command")
            if not os.isatty(0):
                raise PolicyError("stdin is not a terminal", hint='write stdin="inherit"')
            from stockade.sessions.attach.user_terminal import UserTerminal

            terminal = UserTerminal(until(timeout))
        return settings_of(options, timeout, terminal=terminal)

    def steps(self, settings: StageSettings, events: Events) -> Steps[Result]:
        """Return the steps of one run of this stage."""
        mine, given = self.options, settings
        own = given.ties is None or 0 not in given.ties.numbers
        input = (given.input or mine.get("input", b"")) if own else b""
        source = descriptor(given.stdin if given.stdin is not None else mine.get("stdin")) if own else None
        on_stderr = given.on_stderr
        if on_stderr is None and "inherit" in (mine.get("stderr"), given.stderr):
            on_stderr = OutputCopy(2, until(given.timeout))
        env = {**variables(mine.get("env")), **given.env}
        if self.function is not None:
            return self._call_steps(given, input, source, env, on_stderr, events)
        options: OneShotOptions = {
            "env": env, "cwd": mine.get("cwd"), "timeout": given.timeout, "grace": mine.get("grace", GRACE),
            "input": input, "on_stdout": given.on_stdout, "on_stderr": on_stderr, "name": given.name,
            "who": given.who, "on_exit": mine.get("on_exit", "keep"), "resume": mine.get("resume"),
            "publish": mine.get("publish", ()), "advise": given.advise,
        }  # fmt: skip
        extras = RunExtras(
            stdin=source, keep_output=given.keep_output, pinned=given.pinned, terminal=given.terminal,
            cancelled_by=given.cancelled_by, stage=given.ties, place=given.place,
        )  # fmt: skip
        return run_once_steps(self.command, self.policy, options, extras, events)

    def _call_steps(
        self,
        given: StageSettings,
        input: bytes | str,
        source: int | None,
        env: Mapping[str, str],
        on_stderr: Sink | None,
        events: Events,
    ) -> Steps[Result]:
        from stockade.pipeline.function_stage import call_steps

        return call_steps(
            self, events, timeout=given.timeout, who=given.who, name=given.name, env=env, input=input,
            stdin=source, on_stdout=given.on_stdout, on_stderr=on_stderr, stage=given.ties, place=given.place,
        )  # fmt: skip


def _refuse_for_function(function: Callable[..., Any], options: StageOptions) -> None:
    import inspect  # slow to load

    if inspect.isgeneratorfunction(inspect.unwrap(function)):
        raise PolicyError("a generator cannot be a stage", hint="print what it would yield")
    for name in ("cwd", "publish", "resume"):
        if options.get(name):
            raise PolicyError(f"{name}: a function as a stage does not take it", hint=f"leave {name} out")


def settings_of(
    options: StageRunOptions | PipelineOptions, timeout: float | None, terminal: TerminalHandler | None = None
) -> StageSettings:
    """Validate the options of a run and return what they add to a stage."""
    if options.get("input") and options.get("stdin") is not None:
        raise PolicyError("give input or stdin, not both")
    on_stdout = options.get("on_stdout")
    for name, taken in (("stdout", on_stdout), ("stderr", options.get("on_stderr"))):
        if inherits(name, options.get(name)) and taken is not None:
            raise PolicyError(f'on_{name} and {name}="inherit" exclude each other')
    if options.get("stdout") is not None:
        on_stdout = OutputCopy(1, until(timeout))
    return StageSettings(
        input=options.get("input", b""),
        stdin=options.get("stdin"),
        timeout=timeout,
        on_stdout=on_stdout,
        on_stderr=options.get("on_stderr"),
        stderr=options.get("stderr"),
        name=options.get("name", ""),
        who=options.get("who"),
        terminal=terminal,
    )


def until(timeout: float | None) -> float | None:
    """Return the time until which output waits for a stalled reader."""
    return None if timeout is None else time.monotonic() + timeout + STALLED_SECONDS


def inherits(name: str, value: object) -> bool:
    """Whether an option for an output stream says "inherit"; refuse any other value but None."""
    if value not in (None, "inherit"):
        raise PolicyError(
            f"{name} = {value!r:.200}: is not known", hint=f'write {name}="inherit", or leave it out'
        )
    return value is not None


def descriptor(source: Source | None) -> int | None:
    """Return the descriptor that a program's stdin is read from; None for an empty one."""
    if source is None:
        return None
    if source == "inherit":
        return 0
    if isinstance(source, int) and not isinstance(source, bool) and source >= 0:
        return source
    if hasattr(source, "fileno"):
        return cast(HasDescriptor, source).fileno()
    raise PolicyError(
        f"stdin = {source!r:.200}: is not an open file", hint='write an open file, a descriptor or "inherit"'
    )
