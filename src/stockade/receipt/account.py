"""The account of one run, from the request to the receipt.

It begins with the run and is closed with it, however the run ends: by itself, by a limit, by a signal, by an
exception in the caller, or because nothing could be started. Its policy, plan and controls are those of this
very run. The modules that make receipts are loaded while the program runs, and not before.

How a run ended is decided once. An exception that arrives while that is recorded, such as a Ctrl-C, does not
change it: the record is completed, and the exception goes on. So a run has one receipt, and the log of runs
says the same.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgspec

from stockade.errors import ReceiptError, StockadeError

if TYPE_CHECKING:
    from stockade.observe.records import Mark
    from stockade.policy import Policy
    from stockade.receipt.statement import (
        NetworkCounts,
        Parent,
        PipelinePlace,
        Protection,
        Receipt,
        RuleChange,
        Statement,
        Who,
    )
    from stockade.result import Result
    from stockade.runs.launch import LaunchedSandbox
    from stockade.runs.network.egress_handle import NetworkMark
    from stockade.runs.prepare import RunPreparation


#: How many sandboxes a program and all its descendants may ask for: each has a receipt.
MOST_REQUESTS = 256


class Requests:
    """Counts how many sandboxes a program and its descendants may still ask for."""

    def __init__(self) -> None:
        self._left = MOST_REQUESTS

    def take(self) -> bool:
        """Count one request, and return whether it is allowed."""
        self._left -= 1
        return self._left >= 0


class Account:
    """What is known about one run so far. `places` receives the place of its receipt in the log."""

    def __init__(
        self,
        policy: Policy,
        command: Sequence[str],
        who: Who | None,
        places: list[int] | None = None,
        *,
        name: str = "",
    ) -> None:
        self.policy = policy
        #: The name of the sandbox.
        self.name = name
        self.command = command
        self.who = who
        self.places = [] if places is None else places
        self.prepared: RunPreparation | None = None
        self.box: LaunchedSandbox | None = None
        #: The run that asked for this one, how many ancestors it has, and the receipts of its children.
        self.parent: Parent | None = None
        self.depth = 0
        self.children: list[str] = []
        #: The place of the run in a pipeline, if it is a stage of one.
        self.pipeline: PipelinePlace | None = None
        #: Shared with all descendants, whose number would be unlimited otherwise.
        self.asked = Requests()
        #: Processor time of all descendants.
        self.cpu_below = 0.0
        #: With network rules: what became of the connections and names of the run.
        self.network: NetworkCounts | None = None
        #: How the rules changed during the run.
        self.network_changes: tuple[RuleChange, ...] = ()
        #: What the user was asked about connections during the run, and answered.
        self.network_answers: tuple[str, ...] = ()
        #: How much the sandbox's egress had recorded when the run began.
        self.network_mark: NetworkMark | None = None
        #: For the call of a function: says what protected its arguments and its result.
        self.protection: Callable[[], Protection] | None = None
        #: In an observed sandbox: how much its observer had written down when the run began.
        self.observation_mark: Mark | None = None
        #: The fields of the receipt that are known since the program was started.
        self.known: dict[str, Any] | None = None
        #: Whether its result may say what a look at the host's files finds: only a person reads it.
        self.advise = False
        #: Why the run is being cancelled, if the caller gave a reason.
        self.because = ""
        self.started = time.time()
        self._clock = time.monotonic()
        self._closed = False
        #: How the run ended, once that is decided.
        self._decided: RunRecord | None = None
        #: The statement of its receipt and the place that it was made for, also if it may not be in the log.
        self.statement: tuple[int, Statement] | None = None

    @property
    def age(self) -> float:
        """Seconds since the account began."""
        return time.monotonic() - self._clock

    @property
    def home(self) -> str:
        """The state directory whose log the receipt goes to."""
        if self.prepared is not None:
            return self.prepared.state
        from stockade import state
        from stockade.linux.user import Caller

        caller = Caller.current()
        return state.state_dir(caller.environ, caller.home)

    @property
    def receipt(self) -> Receipt | None:
        """The receipt that was made last, if any."""
        from stockade.receipt import chain

        return chain.of(self.home).get(self.places[-1]) if self.places else None

    def load(self) -> None:
        """Load the modules that make receipts: the first launch waits for its gate meanwhile."""
        from stockade.receipt import builder  # noqa: F401

    def ready(self) -> None:
        """Prepare the receipt while the program runs. A ReceiptError here ends the run."""
        from stockade.receipt.builder import ready

        ready(self)

    def telling(self) -> FailureRecorder:
        """Return a context manager that makes a receipt if an exception ends the run."""
        return FailureRecorder(self)

    def failed(self, error: BaseException) -> None:
        """Make the receipt of a run that an exception ended or kept from starting.

        A StockadeError carries the receipt.
        """
        receipt = self._close(lambda: self._failure_receipt(error))
        if isinstance(error, StockadeError) and receipt is not None:
            error.receipt = receipt

    def _failure_receipt(self, error: BaseException) -> Receipt:
        from stockade.receipt import builder

        return builder.failed(self, error)

    def ended(self, record: RunRecord) -> Result:
        """Record how the run ended, unless that is decided already; return the result with its receipt."""
        from stockade.receipt.builder import ended

        repeated = self._decided is not None
        self._decided = record = self._decided or record
        record.log(repeated)
        with_receipt = ended(self, record.result, record.streams)
        self._closed = True
        return with_receipt

    def abandoned(self) -> None:
        """Make the receipt of a run that its caller abandoned before it ended."""
        self._close(self._abandonment_receipt)

    def _abandonment_receipt(self) -> Receipt:
        from stockade.receipt import builder

        return builder.abandoned(self)

    def _close(self, make: Callable[[], Receipt]) -> Receipt | None:
        """Record the ending that is decided, or else the one of `make`, whatever interrupts that.

        If the log cannot be written, the caller still gets the original error.
        """
        receipt = None
        with contextlib.suppress(StockadeError, OSError):
            while not self._closed:
                with contextlib.suppress(KeyboardInterrupt):
                    receipt = make() if self._decided is None else self.ended(self._decided).receipt
                    self._closed = True
        self._closed = True
        return receipt


class RunRecord(msgspec.Struct, frozen=True):
    """How a run ended, as the log of runs and its receipt say it."""

    result: Result
    #: The digests of the program's output.
    streams: dict[str, str]
    #: Adds the run to the log of runs; with True only if it is not there yet.
    log: Callable[[bool], object]


class FailureRecorder:
    """A context manager: an exception in its block has ended the run, and gets a receipt."""

    __slots__ = ("_account",)

    def __init__(self, account: Account) -> None:
        self._account = account

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        try:
            self._record(error)
        except KeyboardInterrupt:  # a second Ctrl-C, before `_close` was reached
            self._record(error)
            raise

    def _record(self, error: BaseException | None) -> None:
        if error is not None and not isinstance(error, ReceiptError):
            self._account.failed(error)


@lru_cache(maxsize=64)
def policy_hash(policy: Policy) -> str:
    """Return the hash of a policy, cached: a policy never changes."""
    return policy.hash


def resolve_who(given: Who | Mapping[str, str] | None, over: Who | None = None) -> Who | None:
    """Return who asks for a run, in the caller's words; fields that are not given come from `over`."""
    if given is None:
        return over
    from stockade.receipt.statement import who

    return who(given, over)
