"""`Sandbox` and `run`: what users of the library call."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Literal

from stockade.errors import PolicyError, SetupError
from stockade.gate import client
from stockade.policy import Limits, Policy
from stockade.sandbox.launch import Box, Prepared, launch, prepare
from stockade.sandbox.outcome import judge
from stockade.sandbox.result import Result, Usage
from stockade.sandbox.supervise import GRACE, Ended, Run, Sink, Streams, supervise

OnExit = Literal["keep", "discard"]
DEFAULT = Policy()


class Sandbox:
    """A policy and a backend, living: several commands behind the same walls.

    >>> import stockade
    >>> with stockade.Sandbox(stockade.Policy()) as box:
    ...     _ = box.run(["sh", "-c", "echo 1 > /tmp/x"])
    ...     box.run(["cat", "/tmp/x"]).text
    '1\\n'

    `on_exit` says what becomes of the changes in an overlay workspace: "keep" them in the state
    directory (an unchanged one leaves nothing) or "discard" them.
    """

    _box: Box | None = None

    def __init__(
        self, policy: Policy | None = None, *, on_exit: OnExit = "keep", pinned: bool = False
    ) -> None:
        if on_exit not in ("keep", "discard"):
            raise PolicyError(f"on_exit = {on_exit!r}: is not a way to end", hint='write "keep" or "discard"')
        self.policy = DEFAULT if policy is None else policy
        self._on_exit = on_exit
        self._pinned = pinned
        self._lock = threading.Lock()
        self._prepared: Prepared | None = None
        self._runs = 0

    def __enter__(self) -> Sandbox:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self) -> None:
        """Raise the walls. `with` does it."""
        if self._box is not None:
            raise SetupError("the sandbox is open already", stage="sandbox")
        prepared = prepare(self.policy, pinned=self._pinned)
        try:
            self._box = launch(prepared)
        except BaseException:
            prepared.close(discard=True)
            raise
        self._prepared = prepared

    def close(self) -> None:
        """End everything inside; harmless when repeated."""
        box, prepared = self._box, self._prepared
        self._box = self._prepared = None
        if box is not None and box.owner == os.getpid():
            box.connection.stop()  # a run in another thread ends now
        with self._lock:
            if box is not None:
                box.close()
        if prepared is not None:
            prepared.close(discard=self._on_exit == "discard" or prepared.unchanged())

    def __del__(self) -> None:
        if self._box is not None:
            import warnings

            warnings.warn(
                "a Sandbox was not closed: use it in a `with` statement", ResourceWarning, stacklevel=2
            )
            self.close()

    def run(
        self,
        cmd: Sequence[str],
        *,
        input: bytes = b"",
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        timeout: float | None = None,
        on_stdout: Sink | None = None,
        on_stderr: Sink | None = None,
    ) -> Result:
        """Run a command to its end. The sandbox and what is in it live on."""
        if self._box is None or self._prepared is None:
            raise SetupError("the sandbox is not open", stage="sandbox", hint="use it in a `with` statement")
        box, prepared = self._box, self._prepared
        run = _run(
            prepared, cmd, given=input, env=env, cwd=cwd, timeout=timeout, on_stdout=on_stdout,
            on_stderr=on_stderr, last=False,
        )  # fmt: skip
        with self._lock:
            if self._box is not box:
                raise SetupError("the sandbox was closed meanwhile", stage="sandbox")
            self._runs += 1
            streams = Streams(run)
            try:
                return _result(supervise(box, self._runs, run, streams), run, prepared)
            finally:
                streams.close()


def run(
    cmd: Sequence[str],
    policy: Policy | None = None,
    *,
    input: bytes = b"",
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    timeout: float | None = None,
    grace: float = GRACE,
    on_stdout: Sink | None = None,
    on_stderr: Sink | None = None,
    on_exit: OnExit = "keep",
    stdin: int | None = None,
    keep_output: bool = True,
    pinned: bool = False,
) -> Result:
    """Run one command in a sandbox of its own.

    `stdin` is a descriptor whose content is handed to the program; a terminal is not.

    >>> import stockade
    >>> result = stockade.run(["cat"], input=b"hello")
    >>> result.ok, result.stdout
    (True, b'hello')
    """
    prepared = prepare(DEFAULT if policy is None else policy, pinned=pinned)
    discard = False
    try:
        one = _run(
            prepared, cmd, given=input, env=env, cwd=cwd, timeout=timeout, grace=grace, on_stdout=on_stdout,
            on_stderr=on_stderr, source=stdin, keep=keep_output, last=True,
        )  # fmt: skip
        pipes: list[Streams] = []
        try:
            box = launch(prepared, lambda: pipes.append(Streams(one)))
            try:
                ended = supervise(box, 1, one, pipes[0])
            finally:
                box.close()
        finally:
            for streams in pipes:
                streams.close()
        result = _result(ended, one, prepared)
        discard = not result.changes
        return result
    except BaseException:
        # Whatever ended it, what was done is kept, unless nothing was.
        with contextlib.suppress(SetupError):
            discard = prepared.unchanged()
        raise
    finally:
        prepared.close(discard=discard or on_exit == "discard")


def _run(
    prepared: Prepared,
    cmd: Sequence[str],
    *,
    given: bytes = b"",
    env: Mapping[str, str] | None,
    cwd: str | os.PathLike[str] | None,
    timeout: float | None,
    grace: float = GRACE,
    on_stdout: Sink | None,
    on_stderr: Sink | None,
    source: int | None = None,
    keep: bool = True,
    last: bool,
) -> Run:
    if isinstance(cmd, str | bytes):
        raise PolicyError(f"the command {cmd!r} is one string", hint='write a list: ["sh", "-c", "..."]')
    argv = [os.fsdecode(word) for word in cmd]
    place = os.fsdecode(cwd) if cwd is not None else ""
    if not argv:
        raise PolicyError("there is no command to run", hint="stockade run -- COMMAND ...")
    if any("\0" in word for word in (*argv, place)):
        raise PolicyError("the command or its directory has a NUL byte in it")
    if source is not None and os.isatty(source):
        raise PolicyError(
            "stdin is a terminal, which is never handed in", hint="pipe something in, or leave it out"
        )
    limits, workspace = prepared.resolved.limits, prepared.resolved.workspace
    given_time = None if timeout is None else Limits(wall=timeout).wall
    seconds = [time for time in (given_time, limits.wall) if time is not None]
    here = workspace.path if workspace is not None else prepared.home
    environ = {**prepared.resolved.environ, "HOME": prepared.home, **_variables(env)}
    return Run(
        argv=argv,
        env=environ,
        cwd=os.path.join(here, place),
        given=given,
        source=source,
        seconds=min(seconds) if seconds else None,
        grace=grace,
        limit=int(limits.output or 0),
        on_stdout=on_stdout,
        on_stderr=on_stderr,
        keep=keep,
        last=last,
    )


def _variables(env: Mapping[str, str] | None) -> Mapping[str, str]:
    for name, value in (env or {}).items():
        if not name or "=" in name or "\0" in name or "\0" in value:
            raise PolicyError(
                f"env: {name!r} cannot be set", hint="names are not empty and have no = in them"
            )
    return env or {}


def _result(ended: Ended, run: Run, prepared: Prepared) -> Result:
    verdict = judge(ended, run, prepared.resolved.caller)
    reply = ended.reply
    usage = Usage(wall=ended.wall)
    if reply is not None and reply.kind == client.EXITED:
        usage = Usage(
            wall=ended.wall,
            cpu_user=reply.user,
            cpu_system=reply.system,
            peak_memory=reply.peak,
            context_switches=reply.switches,
        )
    layer = prepared.layer
    changes = tuple(layer.changes()) if layer is not None else ()
    return Result(
        outcome=verdict.outcome,
        exit_code=verdict.exit_code,
        signal=verdict.signal,
        reason=verdict.reason,
        hint=verdict.hint,
        stdout=ended.stdout,
        stderr=ended.stderr,
        truncated=ended.truncated,
        usage=usage,
        controls=prepared.controls,
        changes=changes,
        workspace=layer.id if layer is not None and changes else "",
        plan=prepared.plan.hash,
    )
