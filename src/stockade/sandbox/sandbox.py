"""`Sandbox` and `run`: what users of the library call."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

import msgspec

from stockade.errors import PolicyError, SetupError
from stockade.gate import client
from stockade.policy import Policy
from stockade.policy.model import DEFAULT
from stockade.receipt.account import Account, named
from stockade.sandbox.continued import commit_and_close, opened, snapshot_before
from stockade.sandbox.launch import Box, Prepared, launch, prepare
from stockade.sandbox.limits import seconds_of
from stockade.sandbox.process import PIPE, Opening, Parts, Process, Used, starting
from stockade.sandbox.report import committed, result_of
from stockade.sandbox.result import Result
from stockade.sandbox.steps import Events, Steps, drive
from stockade.sandbox.still import held_still
from stockade.sandbox.streams import Sink, Streams, Terminal, spill_place
from stockade.sandbox.supervise import GRACE, Ended, Run, goes_on, may_ask, supervise, template_of
from stockade.workspace import record
from stockade.workspace.layers import Layer, lost

if TYPE_CHECKING:
    from stockade.gate.template import Template
    from stockade.receipt.statement import Receipt, Who
    from stockade.workspace.commit import Commit
    from stockade.workspace.files import Files
    from stockade.workspace.workspace import Workspace

OnExit = Literal["keep", "discard", "commit"]
WAYS = get_args(OnExit)
LONGEST_GRACE = 3600
#: How the names of snapshots begin that are taken before each run.
RUN = "run-"


class Living:
    """What `Sandbox` and `AsyncSandbox` share: everything but the waiting."""

    _box: Box | None = None
    #: What its first process is a copy of, and a command that is known to run: `worker.warm`.
    _template: Template | None = None
    _command: tuple[str, ...] = ()

    def __init__(
        self,
        policy: Policy | None = None,
        *,
        on_exit: OnExit = "keep",
        workspace: Workspace | str | None = None,
        snapshot: bool = False,
        who: Who | Mapping[str, str] | None = None,
        pinned: bool = False,
    ) -> None:
        self.policy = DEFAULT if policy is None else policy
        #: With `on_exit="commit"`: what was committed when it was closed.
        self.committed: Commit | None = None
        self._on_exit = way(on_exit)
        self._continued = opened(workspace)
        self._snapshot = snapshot
        self._pinned = pinned
        self._who = named(who)
        #: Where the receipts of its runs are, and in which places.
        self._log, self._receipts = "", list[int]()
        self._prepared: Prepared | None = None
        self._files: Files | None = None
        self._asking = threading.Lock()
        #: Held by whoever looks at the workspace of the living sandbox, and by whoever puts it away.
        self._looking = threading.RLock()
        self._paused = False

    def _opening(self, events: Events) -> Steps[None]:
        if self._box is not None:
            raise SetupError("the sandbox is open already", stage="sandbox")
        account = Account(self.policy, (), self._who, self._receipts)
        with account.telling():
            prepared = prepare(
                self.policy, pinned=self._pinned, living=True, command=self._command,
                workspace=self._continued, template=self._template,
            )  # fmt: skip
            account.prepared, self._log = prepared, prepared.state
            try:
                self._box = yield from launch(prepared, events)
            except BaseException:
                prepared.close(discard=True)
                raise
        self._prepared = prepared
        from stockade.sandbox import unclosed

        unclosed.opened(self)

    def _opened(self) -> tuple[Box, Prepared]:
        if self._box is None or self._prepared is None:
            raise SetupError("the sandbox is not open", stage="sandbox", hint="use it in a `with` statement")
        return self._box, self._prepared

    def _account(self, cmd: Sequence[str], who: Who | Mapping[str, str] | None) -> Account:
        box, prepared = self._opened()
        account = Account(self.policy, words(cmd), named(who, self._who), self._receipts)
        account.prepared, account.box = prepared, box
        return account

    def _running(
        self, box: Box, prepared: Prepared, run: Run, events: Events, account: Account
    ) -> Steps[Result]:
        yield from calm(box)
        streams = (run := may_ask(run, prepared, account)).streams()
        try:
            ended = yield from supervise(box, run, streams, events)
        finally:
            streams.close()
        return self._judged(ended, run.program, prepared, box, account)

    def _starting(
        self,
        box: Box,
        program: client.Program,
        stdio: tuple[int | None, int | None, int | None],
        pty: bool | tuple[int, int],
        events: Events,
    ) -> Steps[Parts]:
        yield from calm(box)
        return (yield from starting(box, program, stdio, pty, events))

    def _judged(
        self,
        ended: Ended,
        program: client.Program,
        prepared: Prepared,
        box: Box,
        account: Account,
        revised: Callable[[Result], Result] = lambda result: result,
    ) -> Result:
        closed = self._box is not box
        return result_of(ended, program, prepared, box, account, closed=closed, revised=revised)

    @property
    def receipts(self) -> list[Receipt]:
        """Those of its runs that have ended, in that order."""
        from stockade.receipt import chain

        return [chain.of(self._log).get(sequence) for sequence in self._receipts]

    def _taken(self) -> tuple[Box | None, Prepared | None]:
        """The sandbox, to be closed: nobody else has it from now on, and runs in it end."""
        box, prepared = self._box, self._prepared
        self._box = self._prepared = None
        if box is not None and box.owner == os.getpid():
            box.connection.stop()
        return box, prepared

    def _end(self, box: Box | None, prepared: Prepared | None) -> None:
        """Close what nobody uses any more, waiting in this thread."""
        try:
            if box is not None:
                with Events() as events:
                    drive(box.closed(events), events)
        finally:
            if prepared is not None:
                self._put_away(prepared)

    def _left_by(self, kind: type[BaseException] | None) -> None:
        """What was not finished is kept, and not committed."""
        if kind is not None and self._on_exit == "commit":
            self._on_exit = "keep"

    def _put_away(self, prepared: Prepared) -> None:
        layer = prepared.layer
        with self._looking:
            if self._on_exit == "commit":
                self.committed = commit_and_close(prepared)
                return
            discard = self._on_exit == "discard" or prepared.unchanged()
            if discard and self._files is not None and prepared.layer is not None:
                self._files.close()  # there is nothing left to look at
            prepared.close(discard=discard, earlier=self._on_exit == "discard")
        if layer is not None and layer.lost:
            raise SetupError(lost(layer.lost), stage="workspace", hint=f"the others are in {layer.path}")

    def _found_files(self) -> Files:
        """The sandbox's files, asked for when they are first needed."""
        with self._asking:
            if self._files is None:
                from stockade.workspace.files import Files

                box, prepared = self._opened()
                roots = () if prepared.plan.plain else box.roots()
                self._files = Files.from_descriptors(roots, prepared.resolved, prepared.home)
            return self._files

    @property
    def workspace(self) -> Workspace:
        """The changes so far. Everything inside is held still while they are read or committed."""
        from stockade.workspace.workspace import Workspace

        _, prepared = self._opened()
        if prepared.layer is None:
            raise PolicyError(
                "the sandbox has no overlay workspace", hint='Policy(workspace="."): changes are kept aside'
            )
        layer = prepared.layer
        return Workspace(layer.path, lambda: self._alone(layer))

    def _before_run(self) -> None:
        """Take the snapshot that was asked for before each run."""
        if self._snapshot and self._opened()[1].layer is not None:
            self.workspace.snapshot(prefix=RUN)

    @contextlib.contextmanager
    def _alone(self, layer: Layer) -> Iterator[record.Hold]:
        """Keep the sandbox off its layer while somebody uses it; once it is closed, everybody else."""
        with self._looking:
            box, prepared = self._box, self._prepared
            if box is None or prepared is None or prepared.layer is not layer:
                with record.held(layer.path, layer.id) as hold:
                    yield hold
            else:
                with held_still(box, stays=self._paused) as sure:
                    layer.bring()
                    layer.changes()
                    layer.note()
                    yield record.Hold(living=True, sure=sure)

    def pause(self) -> None:
        """Stop every process inside until `resume`. Time limits go on."""
        with self._looking:
            self._opened()[0].connection.signal(signal.SIGSTOP, everything=True)
            self._paused = True

    def resume(self) -> None:
        """Let every process inside go on."""
        with self._looking:
            self._opened()[0].connection.signal(signal.SIGCONT, everything=True)
            self._paused = False


def calm(box: Box) -> Steps[None]:
    """Wait while everything inside is held still."""
    while box.connection.starting.locked():
        yield 0.01


def way(on_exit: OnExit) -> OnExit:
    if on_exit not in WAYS:
        raise PolicyError(
            f"on_exit = {on_exit!r}: is not a way to end", hint='write "keep", "discard" or "commit"'
        )
    return on_exit


class Sandbox(Opening, Living):
    """A policy and a backend, living: several commands behind the same walls, also at the same time.

    >>> import stockade
    >>> with stockade.Sandbox(stockade.Policy()) as box:
    ...     _ = box.run(["sh", "-c", "echo 1 > /tmp/x"])
    ...     box.run(["cat", "/tmp/x"]).text
    '1\\n'

    `on_exit` says what becomes of the changes in an overlay workspace: "keep" them in the state
    directory (an unchanged one leaves nothing), "discard" or "commit" them. A commit that is refused
    raises and keeps them; after an exception in the `with` statement nothing is committed.

    `workspace` is one to go on with, or its id; the policy need not name its directory then. With
    `snapshot` one is taken before each run, called run-1, run-2 and so on. `who` is what the receipts
    say about who asked: agent, category, action and words; a run may say more.
    """

    def __init__(
        self,
        policy: Policy | None = None,
        *,
        on_exit: OnExit = "keep",
        workspace: Workspace | str | None = None,
        snapshot: bool = False,
        who: Who | Mapping[str, str] | None = None,
        pinned: bool = False,
    ) -> None:
        super().__init__(
            policy, on_exit=on_exit, workspace=workspace, snapshot=snapshot, who=who, pinned=pinned
        )
        self._quiet = threading.Condition()
        self._using = 0

    @property
    def files(self) -> Files:
        """The files inside, as its programs see them; those of the workspace also when it has ended."""
        return self._found_files()

    def __enter__(self) -> Sandbox:
        self.open()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._left_by(kind)
        self.close()

    def open(self) -> None:
        """Raise the walls. `with` does it."""
        with Events() as events:
            drive(self._opening(events), events)

    def close(self) -> None:
        """End everything inside; harmless when repeated."""
        box, prepared = self._taken()
        try:
            if box is not None and box.owner == os.getpid():
                with self._quiet:
                    self._quiet.wait_for(lambda: not self._using)
        finally:
            self._end(box, prepared)

    def __del__(self) -> None:
        if self._box is not None:
            from stockade.sandbox import unclosed

            unclosed.tell("a Sandbox was not closed: use it in a `with` statement", self._box.owner)
            self._left_by(ResourceWarning)
            self.close()

    def run(
        self,
        cmd: Sequence[str],
        *,
        input: bytes = b"",
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        timeout: float | None = None,
        grace: float = GRACE,
        on_stdout: Sink | None = None,
        on_stderr: Sink | None = None,
        who: Who | Mapping[str, str] | None = None,
    ) -> Result:
        """Run a command to its end. The sandbox and what is in it live on."""
        return self._run(
            cmd, who, given=input, env=env, cwd=cwd, timeout=timeout, grace=grace, on_stdout=on_stdout,
            on_stderr=on_stderr, kept=True,
        )  # fmt: skip

    def run_last(self, cmd: Sequence[str], **options: Any) -> Result:
        """Run a command as `run` does; the sandbox ends with it. Nobody else may use it then.

        Its first process attends to the command itself, which saves one process.
        """
        return self._run(cmd, options.pop("who"), given=options.pop("input"), kept=False, **options)

    def _run(self, cmd: Sequence[str], who: Who | Mapping[str, str] | None, **options: Any) -> Result:
        account = self._account(cmd, who)
        with account.telling():
            run = command(self._opened()[1], cmd, meanwhile=account.ready, **options)
            if run.kept:
                self._before_run()
            with self._used() as (box, prepared), Events() as events:
                if not run.kept:
                    events.watch(box.connection.fileno())
                return drive(self._running(box, prepared, run, events, account), events)

    @property
    def gate(self) -> int | None:
        """A descriptor that is ready to read when everything inside has ended; None once it is closed."""
        return None if self._box is None else self._box.pidfd

    @property
    def ended(self) -> bool:
        """Whether nothing lives inside any more."""
        gate = self.gate
        return gate is None or bool(select.select([gate], [], [], 0)[0])

    def start(
        self,
        cmd: Sequence[str],
        *,
        stdin: int | None = None,
        stdout: int | None = PIPE,
        stderr: int | None = PIPE,
        pty: bool | tuple[int, int] = False,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        timeout: float | None = None,
        grace: float = GRACE,
        who: Who | Mapping[str, str] | None = None,
    ) -> Process:
        """Start a command and go on.

        Streams are `subprocess.PIPE` or `DEVNULL` (stdin: None for an empty one); stderr can be `STDOUT`.
        With `pty` the program has a terminal of its own instead, of 24 lines and 80 columns or as given.
        """
        account = self._account(cmd, who)
        with account.telling():
            prepared = self._opened()[1]
            run = command(prepared, cmd, env=env, cwd=cwd, timeout=timeout, grace=grace, kept=True)
            self._before_run()
            with self._used() as (box, prepared), Events() as events:
                stdio = (stdin, stdout, stderr)
                parts = drive(self._starting(box, run.program, stdio, pty, events), events)
            return Process(
                parts,
                lambda ended: self._judged(ended, run.program, prepared, box, account),
                account.abandoned,
            )

    def _used(self) -> Used:
        return Used(self)


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
    workspace: Workspace | str | None = None,
    snapshot: bool = False,
    who: Who | Mapping[str, str] | None = None,
    stdin: int | None = None,
    keep_output: bool = True,
    pinned: bool = False,
    cancelled_by: tuple[type[BaseException], ...] = (),
    terminal: Terminal | None = None,
) -> Result:
    """Run one command in a sandbox of its own.

    `on_exit`, `workspace`, `snapshot` and `who` are as for `Sandbox`, but a commit that is refused is told in
    the result, and a run that did not end by itself commits nothing.

    `stdin` is a descriptor whose content is handed to the program; a terminal is not. Exceptions named
    in `cancelled_by` end the run and make its outcome "cancelled"; others end it and are raised.
    `terminal` looks after a terminal of the sandbox's own, which the program gets instead of pipes.

    >>> import stockade
    >>> result = stockade.run(["cat"], input=b"hello")
    >>> result.ok, result.stdout
    (True, b'hello')
    """
    argv, end = words(cmd), way(on_exit)
    chosen = DEFAULT if policy is None else policy
    account = Account(chosen, argv, named(who))
    with account.telling(), Events() as events:
        again = opened(workspace)
        prepared = prepare(chosen, pinned=pinned, command=argv, workspace=again, template=template_of(cmd))
        account.prepared = prepared

        def made() -> Run:
            one = command(
                prepared, cmd, given=input, env=env, cwd=cwd, timeout=timeout, grace=grace,
                on_stdout=on_stdout, on_stderr=on_stderr, source=stdin, keep=keep_output, kept=False,
                cancelled_by=cancelled_by, meanwhile=account.ready, terminal=terminal,
            )  # fmt: skip
            if snapshot:
                snapshot_before(prepared, RUN)
            return one

        return drive(one_shot(prepared, made, account, events, end), events)


def one_shot(
    prepared: Prepared, made: Callable[[], Run], account: Account, events: Events, end: OnExit
) -> Steps[Result]:
    """A sandbox for one run, which is put away afterwards."""
    discard = False
    try:
        result = yield from _once(prepared, made(), account, events)
        if end != "discard" and result.workspace and prepared.layer is not None:
            result = msgspec.structs.replace(result, lost=prepared.layer.bring_last())
        if end == "commit":
            return committed(result, prepared)
        discard = not result.workspace
        return result
    except BaseException:
        # Whatever ended it, what was done is kept, unless nothing was.
        with contextlib.suppress(SetupError):
            discard = prepared.unchanged()
        raise
    finally:
        prepared.close(discard=discard or end == "discard", earlier=end == "discard")


def _once(prepared: Prepared, run: Run, account: Account, events: Events) -> Steps[Result]:
    """A sandbox for one run."""
    run, pipes = may_ask(run, prepared, account), list[Streams]()
    try:
        box = yield from launch(prepared, events, lambda: pipes.append(run.streams()))
        account.box = box
        try:
            ended = yield from supervise(box, run, pipes[0], events)
        finally:
            yield from box.closed(events)
        return result_of(ended, run.program, prepared, box, account)
    finally:
        for streams in pipes:
            streams.close()


def command(
    prepared: Prepared,
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
    terminal: Terminal | None = None,
) -> Run:
    """What the caller asks for, checked."""
    argv = words(cmd)
    place = os.fsdecode(cwd) if cwd is not None else ""
    if "\0" in place:
        raise PolicyError("the directory of the command has a NUL byte in its name")
    if source is not None and os.isatty(source):
        raise PolicyError(
            "stdin is a terminal, which is never handed in", hint="pipe something in, or leave it out"
        )
    if not 0 <= grace <= LONGEST_GRACE:
        raise PolicyError(f"grace = {grace!r}: is not a time", hint=f"seconds, from 0 to {LONGEST_GRACE}")
    limits, workspace = prepared.resolved.limits, prepared.resolved.workspace
    seconds = [time for time in (seconds_of(timeout), limits.wall) if time is not None]
    here = workspace.path if workspace is not None else prepared.home
    program = client.Program(
        argv=argv,
        env={**prepared.environ, **_variables(env)},
        cwd=os.path.join(here, place),
        wall=min(seconds) if seconds else None,
        grace=grace,
        resumed=goes_on(cmd, prepared.template),
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
    """The words of a command, or why they are none."""
    if isinstance(cmd, str | bytes):
        raise PolicyError(f"the command {cmd!r} is one string", hint='write a list: ["sh", "-c", "..."]')
    argv = [os.fsdecode(word) for word in cmd]
    if not argv:
        raise PolicyError("there is no command to run", hint="stockade run -- COMMAND ...")
    if "\0" in "".join(argv):
        raise PolicyError("the command has a NUL byte in it")
    return argv


def _variables(env: Mapping[str, str] | None) -> Mapping[str, str]:
    for name, value in (env or {}).items():
        if not name or "=" in name or "\0" in name or "\0" in value:
            raise PolicyError(
                f"env: {name!r} cannot be set", hint="names are not empty and have no = in them"
            )
    return env or {}
