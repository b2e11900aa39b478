"""Validate what a caller wants to run and turn it into a `Run`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from stockade.errors import PolicyError, TimeoutError
from stockade.gate import client, wire
from stockade.result import Decision
from stockade.runs.io.eventloop import Steps
from stockade.runs.io.streams import TerminalHandler, spill_place
from stockade.runs.launch import LaunchedSandbox
from stockade.runs.limits import seconds_of
from stockade.runs.options import CodeOptions, StartOptions, directory, input_bytes, variables
from stockade.runs.prepare import RunPreparation
from stockade.runs.supervise import GRACE, Run, StageTies, resumes_template

LONGEST_GRACE = 3600
NO_OPTIONS: StartOptions = {}


def wait_until_thawed(box: LaunchedSandbox) -> Steps[None]:
    """Wait while the sandbox is frozen."""
    while box.connection.starting.locked():
        yield 0.01


def command(
    prepared: RunPreparation,
    cmd: Sequence[str],
    options: StartOptions | CodeOptions = NO_OPTIONS,
    *,
    source: int | None = None,
    keep: bool = True,
    kept: bool,
    cancelled_by: tuple[type[BaseException], ...] = (),
    meanwhile: Callable[[], object] = lambda: None,
    terminal: TerminalHandler | None = None,
    on_decision: Callable[[Decision], object] | None = None,
    stage: StageTies | None = None,
) -> Run:
    """Validate the caller's options and return the run that they describe."""
    argv = words(cmd)
    asked: Any = options  # a union of tables has no `get` for a name that some of them lack
    grace = asked.get("grace", GRACE)
    if source is not None and os.isatty(source):
        raise PolicyError(
            "stdin is a terminal, and Stockade never passes a terminal of the host to a program",
            hint="pipe something in, or leave stdin out",
        )
    if not isinstance(grace, int | float) or not 0 <= grace <= LONGEST_GRACE:
        raise PolicyError(
            f"grace = {grace!r}: is not a time", hint=f"write seconds, from 0 to {LONGEST_GRACE}"
        )
    limits = prepared.resolved.limits
    seconds = [time for time in (seconds_of(asked.get("timeout")), limits.wall) if time is not None]
    here = prepared.resolved.start or prepared.home
    program = client.Program(
        argv=argv,
        env={**prepared.environ, **variables(asked.get("env"))},
        cwd=os.path.join(here, directory(asked.get("cwd"))),
        wall=min(seconds) if seconds else None,
        grace=grace,
        resumed=resumes_template(cmd, prepared.template),
        uid=prepared.ids[0],
        gid=prepared.ids[1],
    )
    return Run(
        program=program if terminal is None else terminal.fit(program),
        given=input_bytes(asked.get("input", b"")),
        source=source,
        limit=int(limits.output or 0),
        on_stdout=asked.get("on_stdout"),
        on_stderr=asked.get("on_stderr"),
        spill=spill_place(prepared.state, prepared.made.entry) if keep else None,
        kept=kept,
        cancelled_by=cancelled_by,
        meanwhile=meanwhile,
        terminal=terminal,
        on_decision=on_decision,
        stage=stage,
    )


def words(cmd: Sequence[str]) -> list[str]:
    """Validate a command and return its argv."""
    if isinstance(cmd, str | bytes):
        raise _one_string(os.fsdecode(cmd))
    try:
        argv = [os.fsdecode(word) for word in cmd]
    except TypeError:
        raise _not_words(cmd) from None
    if not argv:
        raise PolicyError("there is no command to run", hint='write a list: ["ls", "-l"]')
    if "\0" in "".join(argv):
        raise PolicyError("the command contains a NUL byte")
    return argv


def _one_string(text: str) -> PolicyError:
    """Return the error for a command that is one string, with the list that was meant."""
    import shlex

    shell = ["sh", "-c", text]
    try:
        parts = shlex.split(text)
    except ValueError:  # a quotation mark is missing
        parts = []
    plain = parts and not any(letter in text for letter in "|&;<>()$`*?[#~=%\n")
    return PolicyError(
        f"the command {text!r:.200} is one string, and Stockade starts no shell unasked",
        hint=f"write {parts if plain else shell}" + (f", or {shell} for a shell" if plain else ""),
    )


def _not_words(cmd: object) -> PolicyError:
    """Return the error for a command that is no list of words."""
    if not isinstance(cmd, Iterable):
        return PolicyError(f"the command {cmd!r:.200} is not a list", hint='write a list: ["ls", "-l"]')
    number, word = next(
        (place, word) for place, word in enumerate(cmd, 1) if not isinstance(word, str | bytes | os.PathLike)
    )
    return PolicyError(
        f"word {number} of the command is {word!r:.200}, of type {type(word).__name__}",
        hint=f"write it as text: {str(word)!r:.200}",
    )


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


def still_running_error(timeout: float | None) -> TimeoutError:
    """Return the error for a wait that timed out while the program goes on."""
    return TimeoutError(f"the program still runs after {timeout:g} s", hint="wait longer, or kill() it")
