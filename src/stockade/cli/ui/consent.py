"""Ask on the terminal whether a command that is learned from may have what looks like a secret."""

from __future__ import annotations

import sys

from stockade.cli.ui import output
from stockade.cli.ui.workspace_choice import confirm

#: How many questions are asked: a hostile command could ask until the user agrees to be done.
MOST_ASKED = 20


class TerminalConsent:
    """Asks about each thing once; without a terminal, the answer is no."""

    def __init__(self, *, silent: bool) -> None:
        self._asks = not silent and sys.stdin.isatty() and sys.stderr.isatty()
        self._answers: dict[str, bool] = {}

    def __call__(self, wanted: str, why: str) -> bool:
        """Return whether the user agrees to what the command wants."""
        if not self._asks or (wanted not in self._answers and len(self._answers) >= MOST_ASKED):
            return False
        if wanted not in self._answers:
            output.say(f"the command wants to {output.name(wanted)}: {output.name(why)}")
            self._answers[wanted] = confirm("Allow it, in the next run and in the policy?")
        return self._answers[wanted]
