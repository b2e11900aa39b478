"""Validate what a caller wants to run and turn it into a `Run`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

from stockade.errors import PolicyError, TimeoutError
from stockade.gate import client, wire
from stockade.runs.io.eventloop import Steps
from stockade.runs.io.streams import Sink, TerminalHandler, spill_place
from stockade.runs.launch import LaunchedSandbox
from stockade.runs.limits import seconds_of
from stockade.runs.prepare import RunPreparation
from stockade.runs.supervise import GRACE, Run, resumes_template

LONGEST_GRACE = 3600


def calm(box: LaunchedSandbox) -> Steps[None]:
    """Wait while the sandbox is frozen."""
    while box.connection.starting.locked():
        yield 0.01


def command(
    prepared: RunPreparation,
    cmd: Sequence[str],
    *,
    given: bytes = b"",
    env: Mapping[str, str] | None,
    cwd: str | os.PathLike[str] | None,
    timeout: float | None,
    grace: float = GRACE,
    on_stdout: Sink | None = None,
    on_stderr: Sink | None = None,
    source: int | None = None,
    keep: bool = True,
    kept: bool,
    cancelled_by: tuple[type[BaseException], ...] = (),
    meanwhile: Callable[[], object] = lambda: None,
    terminal: TerminalHandler | None = None,
) -> Run:
    """Validate the caller's arguments and return the run that they describe."""
    argv = words(cmd)
    place = os.fsdecode(cwd) if cwd is not None else ""
    if "\0" in place:
        raise PolicyError("cwd contains a NUL byte")
    if source is not None and os.isatty(source):
        raise PolicyError(
            "stdin is a terminal, and Stockade never passes a terminal of the host to a program",
            hint="pipe something in, or leave stdin out",
        )
    if not 0 <= grace <= LONGEST_GRACE:
        raise PolicyError(
            f"grace = {grace!r}: is not a time", hint=f"write seconds, from 0 to {LONGEST_GRACE}"
        )
    limits, workspace = prepared.resolved.limits, prepared.resolved.workspace
    seconds = [time for time in (seconds_of(timeout), limits.wall) if time is not None]
    here = workspace.path if workspace is not None else prepared.home
    program = client.Program(
        argv=argv,
        env={**prepared.environ, **_variables(env)},
        cwd=os.path.join(here, place),
        wall=min(seconds) if seconds else None,
        grace=grace,
        resumed=resumes_template(cmd, prepared.template),
    )
    return Run(
        program=program if terminal is None else terminal.fit(program),
        given=given,
        source=source,
        limit=int(limits.output or 0),
        on_stdout=on_stdout,
        on_stderr=on_stderr,
        spill=spill_place(prepared.state, prepared.made.entry) if keep else None,
        kept=kept,
        cancelled_by=cancelled_by,
        meanwhile=meanwhile,
        terminal=terminal,
    )


def words(cmd: Sequence[str]) -> list[str]:
    """Validate a command and return its argv."""
    if isinstance(cmd, str | bytes):
        raise PolicyError(f"the command {cmd!r} is one string", hint='write a list: ["sh", "-c", "..."]')
    argv = [os.fsdecode(word) for word in cmd]
    if not argv:
        raise PolicyError("there is no command to run", hint="name one: stockade run -- COMMAND ...")
    if "\0" in "".join(argv):
        raise PolicyError("the command contains a NUL byte")
    return argv


def _variables(env: Mapping[str, str] | None) -> Mapping[str, str]:
    for name, value in (env or {}).items():
        if not name or "=" in name or "\0" in name or "\0" in value:
            raise PolicyError(
                f"env: {name!r} cannot be set",
                hint="a name must not be empty or contain =, and neither name nor value may contain NUL",
            )
    return env or {}


GONE = wire.Reply(
    kind=wire.REPLY_EXEC_FAILED,
    operation="plan",
    error=0,
    status=0,
    index=0,
    ended=0,
    user=0,
    system=0,
    peak=0,
    switches=0,
    text="gate",
    pid=0,
    descriptors=(),
)


def late(timeout: float | None) -> TimeoutError:
    """Return the error for a wait that timed out while the program goes on."""
    return TimeoutError(f"the program still runs after {timeout:g} s", hint="wait longer, or kill() it")
