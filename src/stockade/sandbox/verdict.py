"""What is said about a run that is over."""

from __future__ import annotations

import msgspec

from stockade.sandbox.result import Outcome


class Verdict(msgspec.Struct, frozen=True):
    """The outcome, the exit code that stands for it, and what to tell the user."""

    outcome: Outcome
    exit_code: int
    reason: str = ""
    hint: str = ""
    signal: int | None = None
