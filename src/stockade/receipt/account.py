"""The account of one run, from what was asked for to the receipt.

It is begun with the run and closed with it, however that ends: by itself, by
a limit, by a signal, by an exception in the caller, or because nothing could
be started. What it says of the policy, the plan and the controls is that of
this very run. What it takes to make a receipt is loaded while the program
runs, and not before.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from stockade.errors import ReceiptError, StockadeError

if TYPE_CHECKING:
    from stockade.policy import Policy
    from stockade.receipt.statement import Parent, Receipt, Who
    from stockade.sandbox.launch import Box, Prepared
    from stockade.sandbox.result import Result


class Account:
    """What is known about one run so far. `places` is told where in the log its receipt is."""

    def __init__(
        self, policy: Policy, command: Sequence[str], who: Who | None, places: list[int] | None = None
    ) -> None:
        self.policy = policy
        self.command = command
        self.who = who
        self.places = [] if places is None else places
        self.prepared: Prepared | None = None
        self.box: Box | None = None
        #: The run that asked for this one, how many such there are above it, and the receipts of those below.
        self.parent: Parent | None = None
        self.depth = 0
        self.children: list[str] = []
        #: Processor time of those below.
        self.cpu_below = 0.0
        #: Why it is being cancelled, where somebody has said so.
        self.because = ""
        self.started = time.time()
        self._clock = time.monotonic()
        self._closed = False

    @property
    def age(self) -> float:
        """Seconds since it was begun."""
        return time.monotonic() - self._clock

    @property
    def home(self) -> str:
        """The state directory whose log the receipt goes to."""
        if self.prepared is not None:
            return self.prepared.state
        from stockade import state
        from stockade.policy import Caller

        caller = Caller.current()
        return state.state_dir(caller.environ, caller.home)

    @property
    def receipt(self) -> Receipt | None:
        """The one that was made last, if any was."""
        from stockade.receipt import chain

        return chain.of(self.home).get(self.places[-1]) if self.places else None

    def ready(self) -> None:
        """Load what the receipt will need, while the program runs. Where none can be made, the run ends."""
        from stockade.receipt.making import ready

        ready(self.home)

    def telling(self) -> Telling:
        """Make a receipt also where an exception ends the run; a StockadeError carries it."""
        return Telling(self)

    def failed(self, error: BaseException) -> None:
        """An exception has ended the run, or kept it from starting."""
        if self._closed:
            return
        self._closed = True
        # Where the log itself is out of reach, the reason of the refusal is the news.
        with contextlib.suppress(StockadeError, OSError):
            from stockade.receipt import making

            receipt = making.failed(self, error)
            if isinstance(error, StockadeError):
                error.receipt = receipt

    def ended(self, result: Result, streams: dict[str, str]) -> Result:
        """The result with the receipt of its run; `streams` are the digests of what it printed."""
        from stockade.receipt.making import ended

        with_receipt = ended(self, result, streams)
        self._closed = True
        return with_receipt

    def abandoned(self) -> None:
        """The caller has let go of the run before it ended."""
        if self._closed:
            return
        self._closed = True
        from stockade.receipt import making

        with contextlib.suppress(StockadeError, OSError):
            making.abandoned(self)


class Telling:
    """For a `with` statement: what is raised in it has ended the run."""

    __slots__ = ("_account",)

    def __init__(self, account: Account) -> None:
        self._account = account

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None and not isinstance(error, ReceiptError):
            self._account.failed(error)


@lru_cache(maxsize=64)
def policy_hash(policy: Policy) -> str:
    """The hash of a policy, which is a value: it is the same next time."""
    return policy.hash


def named(given: Who | Mapping[str, str] | None, over: Who | None = None) -> Who | None:
    """Who asks for a run, in the caller's words; what is not said is as in `over`."""
    if given is None:
        return over
    from stockade.receipt.statement import who

    return who(given, over)
