"""`Sandbox` and `run`: what users of the library call."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Unpack

import msgspec

import stockade
from stockade.errors import PolicyError, SetupError
from stockade.gate import client
from stockade.policy.model import PolicyLike, policy_or_default
from stockade.receipt.account import Account, resolve_who
from stockade.result import Decision, Handoff, Result, describe_lost
from stockade.runs.command import command, wait_until_thawed, words
from stockade.runs.finish import is_settled, left_by_run, left_by_sandbox, result_of, with_handoffs
from stockade.runs.io.eventloop import Events, Steps, drive, in_thread
from stockade.runs.io.streams import PIPE, Streams, TerminalHandler
from stockade.runs.launch import LaunchedSandbox, launch
from stockade.runs.options import (
    Answer,
    BackgroundOptions,
    OneShotOptions,
    OnExit,
    ProcessOptions,
    RunOptions,
    refuse_unknown,
    valid_name,
    valid_on_exit,
)
from stockade.runs.prepare import Observation, RunPreparation, prepare
from stockade.runs.supervise import Run, RunEnding, StageTies, supervise, template_of
from stockade.sandbox.workspace_lifecycle import (
    commit_and_close,
    living_files,
    open_workspace,
    snapshot_before,
    with_commit,
)
from stockade.workspace import metadata
from stockade.workspace.overlay import OverlayLayer

if TYPE_CHECKING:
    from stockade.gate.template import Template
    from stockade.linux.user import Caller
    from stockade.observe.records import Observations
    from stockade.receipt.statement import PipelinePlace
    from stockade.resolve.environment import Environment
    from stockade.runs.network.published_ports import PublishedPort
    from stockade.sandbox.process import ProcessHandles
    from stockade.sessions.session import LivingSandbox

#: The prefix of the snapshots taken before each run.
RUN = "run-"


class SandboxBase:
    """What `Sandbox` and `AsyncSandbox` share: everything but the waiting."""

    _box: LaunchedSandbox | None = None

    def __init__(
        self,
        policy: PolicyLike | None = None,
        *,
        on_exit: OnExit = "keep",
        resume: stockade.Workspace | str | None = None,
        snapshot: bool = False,
        name: str = "",
        publish: Sequence[str] = (),
        on_ask: Callable[[stockade.result.NetworkQuestion], Answer] | None = None,
        who: stockade.receipt.Who | Mapping[str, str] | None = None,
        explain: bool = False,
        _environment: Any = None,
    ) -> None:
        self.policy = policy_or_default(policy)
        #: The private environment that the server gives its sandboxes.
        self._environment: Environment | None = _environment
        if _environment is not None and on_exit == "commit":
            raise PolicyError(
                "the overlays of a private environment are not committed at the end",
                hint="commit each of them while the sandbox lives",
            )
        #: What `stockade ps`, logs and receipts call it.
        self.name = valid_name(name)
        #: The template that its first process is copied from, and a command that is known to run; see
        #: `functions.warm_python`.
        self._template: Template | None = None
        self._command: tuple[str, ...] = ()
        #: With `on_exit="commit"`: what `close` has committed.
        self.committed: stockade.workspace.Commit | None = None
        #: After `close`: files that programs left, where they could write for real, for tools of the host to
        #: obey.
        self.handoffs: tuple[Handoff, ...] = ()
        #: After `close`: what the search for handoffs could not read.
        self.warnings: tuple[str, ...] = ()
        self._on_exit = valid_on_exit(on_exit)
        self._continued = open_workspace(resume)
        self._snapshot = snapshot
        self._publish, self._on_ask, self._explain = publish, on_ask, explain
        #: Whether the policy's paths are real names (`resolve.discovery`).
        self._pinned = False
        self._who = resolve_who(who)
        #: The state directory with the receipts of its runs, and their sequence numbers.
        self._log, self._receipts = "", list[int]()
        self._prepared: RunPreparation | None = None
        self._files: stockade.workspace.Files | None = None
        self._files_lock = threading.Lock()
        #: Held while a thread uses the workspace of the living sandbox, and while one puts it away.
        self._workspace_lock = threading.RLock()
        self._paused = False
        self._using = 0
        self._set_up()

    def _set_up(self) -> None:
        """Make what lets `close` wait for calls that use the sandbox."""

    def __repr__(self) -> str:
        name = f" {self.name!r}" if self.name else ""
        where = f" in {rule.path}" if (rule := self.policy.workspace) is not None else ""
        state = "closed" if self._box is None else "paused" if self._paused else "open"
        return f"<{type(self).__name__}{name} {self.id or '-'}: {state}{where}>"

    @property
    def id(self) -> str:
        """Its id while it is open, as `stockade ps` shows it; "" if the register does not have it."""
        entry = None if self._prepared is None else self._prepared.made.entry
        return "" if entry is None else entry.record.id

    @property
    def gate(self) -> int | None:
        """A descriptor that becomes readable when everything inside has ended; None after `close`."""
        return None if self._box is None else self._box.pidfd

    @property
    def ended(self) -> bool:
        """Whether everything inside has ended."""
        if self.gate is None:
            return True
        poll = select.poll()  # `select` refuses descriptors from 1024 on
        poll.register(self.gate, select.POLLIN)
        return bool(poll.poll(0))

    @property
    def cgroup_parents(self) -> stockade.linux.cgroups.CgroupParents | None:
        """Where other sandboxes can have cgroups that count against the limits of this one; None without."""
        group = self._require_open()[0].group
        return None if group is None else group.parents()

    @property
    def network_namespace(self) -> int:
        """A descriptor of its network namespace while it is open; -1 if it shares the host's network."""
        box, prepared = self._require_open()
        return -1 if prepared.resolved.policy.net == "open" else box.network_fd

    def _open_steps(self, events: Events) -> Steps[None]:
        if self._box is not None:
            raise SetupError("the sandbox is already open", stage="sandbox")
        account = Account(self.policy, (), self._who, self._receipts, name=self.name)
        with account.telling():
            prepared = prepare(
                self.policy, pinned=self._pinned, living=True, command=self._command, name=self.name,
                workspace=self._continued, template=self._template, publish=self._publish,
                environment=self._environment, observe="refusals" if self._explain else "",
            )  # fmt: skip
            account.prepared, self._log = prepared, prepared.state
            prepared.made.on_ask = self._on_ask
            try:
                self._box = yield from launch(prepared, events)
            except BaseException:
                prepared.close(discard=True)
                raise
        self._prepared = prepared
        from stockade.sandbox import finalize

        finalize.close_at_exit(self)

    def _require_open(self) -> tuple[LaunchedSandbox, RunPreparation]:
        if self._box is None or self._prepared is None:
            raise SetupError("the sandbox is not open", stage="sandbox", hint="use it in a `with` statement")
        return self._box, self._prepared

    def _require_observer(self, explain: bool) -> None:
        if explain and self._require_open()[1].observations < 0:
            raise PolicyError(
                "explain: no observer watches this sandbox, and none can join a sandbox that is open",
                hint=f"open it with {type(self).__name__}(policy, explain=True): then all runs are observed",
            )

    def _account(
        self,
        cmd: Sequence[str],
        who: stockade.receipt.Who | Mapping[str, str] | None,
        *,
        advise: bool = False,
    ) -> Account:
        box, prepared = self._require_open()
        account = Account(
            self.policy, words(cmd), resolve_who(who, self._who), self._receipts, name=self.name
        )
        account.prepared, account.box, account.advise = prepared, box, advise
        if box.egress is not None:
            account.network_mark = box.egress.mark()
        if prepared.observations >= 0:
            from stockade.observe import records

            account.observation_mark = records.mark(prepared.observations)
        return account

    def _run_steps(
        self, box: LaunchedSandbox, prepared: RunPreparation, run: Run, events: Events, account: Account
    ) -> Steps[Result]:
        yield from wait_until_thawed(box)
        streams = (run := with_delegation(run, prepared, account)).streams()
        try:
            ended = yield from supervise(box, run, streams, events)
        finally:
            streams.close()
        return self._make_result(ended, run.program, prepared, box, account)

    def _start_request(
        self, cmd: Sequence[str], options: ProcessOptions
    ) -> tuple[Account, Run, tuple[int | None, int | None, int | None]]:
        """Validate the options of `start`; return the account, the run and the program's streams."""
        refuse_unknown("start", options, ProcessOptions.__optional_keys__)
        account = self._account(cmd, options.get("who"))
        with account.telling():
            run = command(self._require_open()[1], cmd, options, kept=True)
        return account, run, (options.get("stdin"), options.get("stdout", PIPE), options.get("stderr", PIPE))

    def _start_steps(
        self,
        box: LaunchedSandbox,
        program: client.Program,
        stdio: tuple[int | None, int | None, int | None],
        pty: bool | tuple[int, int],
        events: Events,
    ) -> Steps[ProcessHandles]:
        from stockade.sandbox.process import start_steps

        yield from wait_until_thawed(box)
        return (yield from start_steps(box, program, stdio, pty, events))

    def _make_result(
        self,
        ended: RunEnding,
        program: client.Program,
        prepared: RunPreparation,
        box: LaunchedSandbox,
        account: Account,
        revised: Callable[[Result], Result] = lambda result: result,
    ) -> Result:
        closed = self._box is not box

        def explained(result: Result) -> Result:
            return revised(_with_denials(result, prepared, account))

        return result_of(ended, program, prepared, box, account, closed=closed, revised=explained)

    @property
    def receipts(self) -> list[stockade.Receipt]:
        """The receipts of its ended runs, in the order in which they ended."""
        from stockade.receipt import chain

        return [chain.of(self._log).get(sequence) for sequence in self._receipts]

    def _detach(self) -> tuple[LaunchedSandbox | None, RunPreparation | None]:
        """Take the sandbox in order to close it: later calls find it closed, and its runs end."""
        box, prepared = self._box, self._prepared
        self._box = self._prepared = None
        if box is not None and box.owner == os.getpid():
            box.connection.stop()
        return box, prepared

    def _end(self, box: LaunchedSandbox | None, prepared: RunPreparation | None) -> None:
        """Close a sandbox that `_detach` has returned, waiting in this thread."""
        try:
            if box is not None:
                with Events() as events:
                    drive(box.closed(events), events)
        finally:
            if prepared is not None:
                self._put_away(prepared)

    def _left_by(self, kind: type[BaseException] | None) -> None:
        """After an exception keep the changes instead of committing them: they may be half done."""
        if kind is not None and self._on_exit == "commit":
            self._on_exit = "keep"

    def _put_away(self, prepared: RunPreparation) -> None:
        if (found := left_by_sandbox(prepared)) is not None:
            self.handoffs, self.warnings = found.left, found.warnings
        with self._workspace_lock:
            if self._on_exit == "commit":
                self.committed = commit_and_close(prepared)
                return
            discard = self._on_exit == "discard" or prepared.unchanged()
            if discard and self._files is not None and prepared.layer is not None:
                self._files.close()  # the files are about to go
            prepared.close(discard=discard, earlier=self._on_exit == "discard")
        for layer in prepared.layers:
            if layer.lost:
                raise SetupError(
                    describe_lost(layer.lost), stage="workspace", hint=f"the others are in {layer.path}"
                )

    def _open_files(self) -> stockade.workspace.Files:
        """Return the sandbox's files; ask the gate for them at the first call."""
        with self._files_lock:
            if self._files is None:
                box, prepared = self._require_open()
                roots = () if prepared.plan.plain else box.roots()
                self._files = living_files(roots, prepared.resolved, prepared.home)
            return self._files

    @property
    def workspace(self) -> stockade.Workspace:
        """The changes so far. Everything inside is frozen while you read or commit them."""
        from stockade.sandbox.workspace import Workspace

        _, prepared = self._require_open()
        if prepared.layer is None:
            raise PolicyError(
                "the sandbox has no overlay workspace", hint='write Policy(workspace="."), which makes one'
            )
        layer = prepared.layer
        return Workspace(layer.path, lambda: self._alone(layer))

    def _overlays(self) -> dict[str, stockade.Workspace]:
        """Return the changes in each overlay of a private environment, by its path inside."""
        from functools import partial

        from stockade.sandbox.workspace import Workspace

        _, prepared = self._require_open()
        return {
            path: Workspace(layer.path, partial(self._alone, layer))
            for path, layer in prepared.made.layers.items()
        }

    def _before_run(self) -> None:
        """Take a snapshot, if the user asked for one before each run."""
        if self._snapshot and self._require_open()[1].layer is not None:
            self.workspace.snapshot(prefix=RUN)

    @contextlib.contextmanager
    def _alone(self, layer: OverlayLayer) -> Iterator[metadata.WorkspaceLock]:
        """Lock the layer: freeze the living sandbox; once it is closed, take the workspace's own lock."""
        with self._workspace_lock:
            box, prepared = self._box, self._prepared
            if box is None or prepared is None or layer not in prepared.layers:
                with metadata.held(layer.path, layer.id) as hold:
                    yield hold
            else:
                from stockade.sandbox.freeze import frozen

                with frozen(box, stays=self._paused) as sure:
                    layer.bring()
                    layer.changes()
                    layer.note()
                    yield metadata.WorkspaceLock(living=True, sure=sure)

    def pause(self) -> None:
        """Stop every process inside until `resume`. Time limits keep running."""
        with self._workspace_lock:
            self._require_open()[0].connection.signal(signal.SIGSTOP, everything=True)
            self._paused = True

    def resume(self) -> None:
        """Continue every process inside."""
        with self._workspace_lock:
            self._require_open()[0].connection.signal(signal.SIGCONT, everything=True)
            self._paused = False


def account_of(sandbox: SandboxBase, cmd: Sequence[str]) -> Account:
    """Return the account of a command in a living sandbox, to measure what its receipt costs."""
    return sandbox._account(cmd, None)


class Sandbox(SandboxBase):
    """A living sandbox: several commands behind the same walls, also at the same time.

    >>> import stockade
    >>> with stockade.Sandbox(stockade.Policy()) as box:
    ...     _ = box.run(["sh", "-c", "echo 1 > /tmp/x"])
    ...     box.run(["cat", "/tmp/x"]).text
    '1\\n'

    `on_exit` decides about the changes in an overlay workspace: "keep" them in the state directory
    (without changes nothing is kept), "discard" or "commit" them. If the commit is refused, an error is
    raised and the changes are kept; after an exception in the `with` statement nothing is committed.

    `policy` is a `Policy`, its clauses as a dict, or the path of a policy file. `resume` goes on in an
    earlier workspace, given as a `Workspace` or its id; the policy need not name its directory then.
    `snapshot` takes a snapshot before each run, named run-1, run-2 and so on. `name` is what `stockade ps`,
    logs and receipts call the sandbox. `publish` lists ports of the host that lead to servers inside, such as
    "8080:80". With `ask` in `net`, `on_ask` answers for connections that no rule covers. `who` tells the
    receipts who asked: agent, category, action and words; a run may add to it. `explain` has an observer
    watch what programs try, so that `result.denials` explains each refusal.
    """

    def _set_up(self) -> None:
        self._quiet = threading.Condition()

    @property
    def files(self) -> stockade.workspace.Files:
        """The files inside, as programs see them; those of the workspace also after the sandbox has ended."""
        return self._open_files()

    @property
    def net(self) -> stockade.sandbox.SandboxNetwork:
        """The network: rules that can change while the sandbox lives, and published ports."""
        from stockade.sandbox.network import SandboxNetwork

        return SandboxNetwork(self)

    @property
    def secrets(self) -> stockade.sandbox.SandboxSecrets:
        """The secrets: their placeholders, and values that can be read again while the sandbox lives."""
        from stockade.sandbox.secrets import SandboxSecrets

        return SandboxSecrets(self)

    def __enter__(self) -> Sandbox:
        self.open()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._left_by(kind)
        self.close()

    def open(self) -> None:
        """Raise the walls. `with` calls this."""
        with Events() as events:
            drive(self._open_steps(events), events)

    def close(self) -> None:
        """End everything inside; harmless when repeated."""
        box, prepared = self._detach()
        try:
            if box is not None and box.owner == os.getpid():
                with self._quiet:
                    self._quiet.wait_for(lambda: not self._using)
        finally:
            self._end(box, prepared)

    def __del__(self) -> None:
        if self._box is not None:
            from stockade.sandbox import finalize

            finalize.warn_unclosed("a Sandbox was not closed: use it in a `with` statement", self._box.owner)
            self._left_by(ResourceWarning)
            self.close()

    def run(self, cmd: Sequence[str], **options: Unpack[RunOptions]) -> Result:
        """Run a command to its end. The sandbox and its other programs live on.

        The options are `input`, `env`, `cwd`, `timeout`, `grace`, `on_stdout`, `on_stderr`, `explain`,
        `advise` and `who`, as for `stockade.run`. The sandbox must have been opened with `explain` for that.
        """
        return self._run(cmd, options, kept=True)

    def run_last(self, cmd: Sequence[str], **options: Unpack[RunOptions]) -> Result:
        """Run a command as `run` does, and end the sandbox with it. No other run may use the sandbox."""
        return self._run(cmd, options, kept=False)

    def _run(self, cmd: Sequence[str], options: RunOptions, *, kept: bool) -> Result:
        refuse_unknown("run", options, RunOptions.__optional_keys__)
        self._require_observer(options.get("explain", False))
        account = self._account(cmd, options.get("who"), advise=options.get("advise", False))
        with account.telling():
            run = command(self._require_open()[1], cmd, options, meanwhile=account.ready, kept=kept)
            if run.kept:
                self._before_run()
            with self._in_use() as (box, prepared), Events() as events:
                if not run.kept:
                    events.watch(box.connection.fileno())
                return drive(self._run_steps(box, prepared, run, events, account), events)

    def start(self, cmd: Sequence[str], **options: Unpack[ProcessOptions]) -> stockade.sandbox.Process:
        """Start a command without waiting for its end.

        `stdin`, `stdout` and `stderr` are `subprocess.PIPE` or `DEVNULL` (stdin: None for an empty one);
        stderr can be `STDOUT`. By default the program's stdin is empty and the other two are pipes. With
        `pty` it gets its own terminal instead, of 24 lines and 80 columns or the given size. The other
        options are `env`, `cwd`, `timeout`, `grace` and `who`, as for `stockade.run`.
        """
        from stockade.sandbox.process import Process

        account, run, stdio = self._start_request(cmd, options)
        with account.telling():
            self._before_run()
            with self._in_use() as (box, prepared), Events() as events:
                steps = self._start_steps(box, run.program, stdio, options.get("pty", False), events)
                parts = drive(steps, events)
            return Process(
                parts,
                lambda ended: self._make_result(ended, run.program, prepared, box, account),
                account.abandoned,
            )

    def shell(self, *, first: bool = False) -> stockade.sandbox.Shell:
        """Return one bash for many runs: directory, variables and functions stay. The first run starts it.

        With `first` it is process 2, right after init: nothing else may have run in the sandbox before.
        """
        from stockade.sessions.shell import Shell

        return Shell(self._living(), first=first)

    def python(
        self, *, preload: Iterable[str] = (), executable: str = "python3", ipython: bool | None = None
    ) -> stockade.sandbox.Interpreter:
        """Return one Python for many runs; its variables stay. The first run starts it and imports `preload`.

        IPython's shell runs the code if it is installed inside; `ipython` forces or forbids that.
        """
        from stockade.sessions.interpreter import Interpreter

        return Interpreter(self._living(), preload, executable, ipython)

    def background(
        self, cmd: Sequence[str], **options: Unpack[BackgroundOptions]
    ) -> stockade.sandbox.Background:
        """Start a command whose output goes to logs outside, which you can read from any byte on.

        The options are `input`, `env`, `cwd`, `timeout`, `grace` and `who`, as for `stockade.run`.
        """
        from stockade.sessions.background import Background

        return Background(self._living(), cmd, options)

    def _living(self) -> LivingSandbox:
        """Return the calls into this sandbox that a session needs."""
        from stockade.sessions.session import LivingSandbox

        return LivingSandbox(
            self._require_open,
            self._account,
            self._run_steps,
            self._make_result,
            self._before_run,
            self._in_use,
        )

    def _in_use(self) -> UseGuard:
        return UseGuard(self)


class UseGuard:
    """Keeps a `Sandbox` open for the time of one call: `close` waits for it."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    def __enter__(self) -> tuple[LaunchedSandbox, RunPreparation]:
        with self._sandbox._quiet:
            opened = self._sandbox._require_open()
            self._sandbox._using += 1
        return opened

    def __exit__(self, *_: object) -> None:
        with self._sandbox._quiet:
            self._sandbox._using -= 1
            self._sandbox._quiet.notify_all()


class RunExtras(msgspec.Struct, frozen=True, kw_only=True):
    """What only the command line, or a pipeline, gives a run."""

    #: The program reads the content of this descriptor, which must not be a terminal.
    stdin: int | None = None
    #: Whether the result has the output.
    keep_output: bool = True
    #: Whether the policy's paths are real names (`resolve.discovery`).
    pinned: bool = False
    #: Exceptions that end the run and make its outcome "cancelled"; others end it and are raised.
    cancelled_by: tuple[type[BaseException], ...] = ()
    #: Handles a terminal of the sandbox's own, which the program gets instead of pipes.
    terminal: TerminalHandler | None = None
    #: The user who asks, and the state directory, if they are known already.
    caller: Caller | None = None
    state: str = ""
    #: Gets each decision of network rules as it is recorded.
    on_decision: Callable[[Decision], object] | None = None
    #: Gets the published ports as soon as the host listens on them.
    on_published: Callable[[tuple[PublishedPort, ...]], object] | None = None
    #: What ties a stage to the others of its pipeline, and its place there, for the receipt.
    stage: StageTies | None = None
    place: PipelinePlace | None = None
    #: The files of the policy, so that denials name the lines of their clauses.
    sources: tuple[str, ...] = ()
    #: Gets what the programs tried, refused or not, when the run has ended; with it the run is observed.
    on_observed: Callable[[Observations, RunPreparation], object] | None = None


NO_EXTRAS = RunExtras()


def run(cmd: Sequence[str], policy: PolicyLike | None = None, **options: Unpack[OneShotOptions]) -> Result:
    """Run one command in its own sandbox.

    `cmd` is a list of words. `policy` is a `Policy`, its clauses as a dict, or the path of a policy file. The
    options:

    - `input`: its standard input, bytes or text; `env`: variables besides those of the policy; `cwd`: where
      it starts, relative to the workspace
    - `timeout`: when to end it, in seconds or as text such as "5m"; `grace`: seconds from TERM to KILL
    - `on_stdout`, `on_stderr`: functions that get each piece of output as it comes
    - `on_exit`: what happens to the changes in an overlay workspace, "keep", "discard" or "commit"; the
      result reports a refused commit, and a run that did not end by itself commits nothing
    - `resume`: the workspace to go on in, or its id; `snapshot`: whether to take a snapshot before the run
    - `name`: what `stockade ps`, logs and receipts call the sandbox; `who`: who asks, for the receipt
    - `publish`: ports of the host that lead to servers inside, such as "8080:80" or "127.0.0.1:8080:80"
    - `on_ask`: with `ask` in `net`, a function that answers for connections that no rule covers
    - `explain`: have an observer watch what the program tries, so that `result.denials` explains each refusal
    - `advise`: let `reason` and `hint` say what a look at the host's files finds, such as where a command is
      that the policy does not show; leave it out if a model reads them, since they tell which files exist

    >>> import stockade
    >>> result = stockade.run(["cat"], input="hello")
    >>> result.ok, result.stdout
    (True, b'hello')
    """
    refuse_unknown("run", options, OneShotOptions.__optional_keys__)
    return run_once(cmd, policy, options)


def run_once(
    cmd: Sequence[str], policy: PolicyLike | None, options: OneShotOptions, extras: RunExtras = NO_EXTRAS
) -> Result:
    """Run one command as `run` does, with what only the command line gives it."""
    with Events() as events:
        return drive(run_once_steps(cmd, policy, options, extras, events), events)


def run_once_steps(
    cmd: Sequence[str],
    policy: PolicyLike | None,
    options: OneShotOptions,
    extras: RunExtras,
    events: Events,
) -> Steps[Result]:
    """Return the steps of `run` and `run_async`."""
    argv, end = words(cmd), valid_on_exit(options.get("on_exit", "keep"))
    chosen, name = policy_or_default(policy), valid_name(options.get("name", ""))
    account = Account(chosen, argv, resolve_who(options.get("who")), name=name)
    account.pipeline, account.advise = extras.place, options.get("advise", False)
    with account.telling():
        prepared = prepare(
            chosen, pinned=extras.pinned, command=argv, cwd=options.get("cwd"), name=name,
            workspace=open_workspace(options.get("resume")), template=template_of(cmd), caller=extras.caller,
            state=extras.state, publish=options.get("publish", ()),
            observe=_observation(options, extras),
        )  # fmt: skip
        account.prepared = prepared
        prepared.made.on_ask = options.get("on_ask")
        if extras.on_published is not None and prepared.made.published is not None:
            extras.on_published(prepared.made.published.ports)

        def make_run() -> Run:
            return command(
                prepared, cmd, options, source=extras.stdin, keep=extras.keep_output, kept=False,
                cancelled_by=extras.cancelled_by, meanwhile=account.ready, terminal=extras.terminal,
                on_decision=extras.on_decision, stage=extras.stage,
            )  # fmt: skip

        snapshot = options.get("snapshot", False)
        steps = one_shot(
            prepared, make_run, account, events, end, snapshot=snapshot, on_observed=extras.on_observed,
            sources=extras.sources,
        )  # fmt: skip
        return (yield from steps)


def _with_denials(
    result: Result, prepared: RunPreparation, account: Account, sources: Sequence[str] = ()
) -> Result:
    """Return the result of an observed run with what the walls refused; others as they are."""
    if prepared.observations < 0:
        return result
    from stockade.observe import denials, records
    from stockade.runs.explain.ran_and_failed import GUESS

    if result.hint.startswith(GUESS):  # what it guesses is known now
        result = msgspec.structs.replace(result, hint="")
    return denials.with_denials(result, prepared, account.observation_mark or records.START, sources)


def _observation(options: OneShotOptions, extras: RunExtras) -> Observation:
    if extras.on_observed is not None:
        return "everything"
    return "refusals" if options.get("explain", False) else ""


def with_delegation(run: Run, prepared: RunPreparation, account: Account | None) -> Run:
    """Return the run, with the means to ask for sandboxes if its policy allows delegation.

    A worker's functions cannot ask: the supervisor uses those descriptors to talk with the worker.
    """
    if not prepared.resolved.policy.delegate or run.beside is not None:
        return run
    from stockade.sandbox.delegation import with_requests

    return with_requests(run, prepared, account)


def one_shot(
    prepared: RunPreparation,
    make_run: Callable[[], Run],
    account: Account,
    events: Events,
    end: OnExit,
    *,
    snapshot: bool = False,
    on_observed: Callable[[Observations, RunPreparation], object] | None = None,
    sources: Sequence[str] = (),
) -> Steps[Result]:
    """Run one command in a new sandbox, then keep, commit or discard its changes."""
    discard = False
    try:
        one = make_run()
        if snapshot:
            yield from in_thread(lambda: snapshot_before(prepared, RUN), events)
        result = yield from _launch_and_run(prepared, one, account, events, sources)
        if on_observed is not None:
            from stockade.observe import records

            on_observed(records.read(prepared.observations), prepared)
        if end != "discard" and result.workspace_id and prepared.layer is not None:
            result = msgspec.structs.replace(result, lost=prepared.layer.bring_last())
        if end == "commit":
            return with_commit(result, prepared)
        discard = not result.workspace_id
        return result
    except BaseException:
        # After any exception keep the changes, if there are some.
        with contextlib.suppress(SetupError):
            discard = prepared.unchanged()
        raise
    finally:
        prepared.close(discard=discard or end == "discard", earlier=end == "discard")


def _launch_and_run(
    prepared: RunPreparation, run: Run, account: Account, events: Events, sources: Sequence[str] = ()
) -> Steps[Result]:
    """Launch a sandbox, run one command in it and close it."""
    run, pipes = with_delegation(run, prepared, account), list[Streams]()

    def meanwhile() -> None:
        pipes.append(run.streams())
        account.load()
        if prepared.resolved.policy.net:
            run.meanwhile()  # the first launch with rules waits for the egress template

    try:
        box = yield from launch(prepared, events, meanwhile)
        account.box = box
        try:
            if run.stage is not None:
                yield from run.stage.walls_up(events)
            ended = yield from supervise(box, run, pipes[0], events)
            if is_settled(ended, prepared, box):
                # The receipt is made while the gate takes the sandbox apart.
                return result_of(ended, run.program, prepared, box, account)
        finally:
            yield from box.closed(events)
        left = yield from left_by_run(prepared, events)

        def revised(result: Result) -> Result:
            return with_handoffs(_with_denials(result, prepared, account, sources), left)

        return result_of(ended, run.program, prepared, box, account, revised=revised)
    finally:
        for streams in pipes:
            streams.close()
