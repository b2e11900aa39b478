"""`stockade receipts prune`: say what goes, ask, remove it, and say what became free."""

from __future__ import annotations

import os
import time

from stockade import state
from stockade.cli.ui import output
from stockade.cli.ui.formats import age, many, print_json, size
from stockade.cli.ui.workspace_choice import confirm_removal
from stockade.receipt import chain
from stockade.receipt.prune import Prunable, find
from stockade.runs.register import register
from stockade.runs.register.pruning import PruneReport, cutoff, prune_all


def prune(home: str, seconds: float, *, yes: bool, as_json: bool) -> int:
    """Remove the receipts, runs of the log and spill files that are older than so many seconds."""
    if not os.path.lexists(home):
        return _report(PruneReport(), None, as_json=as_json)
    state.ensure(home)
    register.sweep(home)  # a run whose supervisor was killed gets its receipt first
    asked = time.time() - seconds
    before = cutoff(home, asked)
    if before < asked:
        output.say(f"a sandbox runs since {age(time.time() - before)}: what came after its start stays")
    log = chain.of(home)
    old = find(log, before) if log.exists() else None
    if not yes and not _agreed(old, seconds):
        output.say("nothing was removed")
        return 1
    return _report(prune_all(home, before, old), old, as_json=as_json)


def _agreed(old: Prunable | None, seconds: float) -> bool:
    what = f"runs and spill files older than {age(seconds)}"
    if old is not None:
        what = f"{many(old.count, 'receipt')} up to {old.id} of {old.started[:10]}, and {what}"
    return confirm_removal(f"Remove {what}?", what)


def _report(done: PruneReport, old: Prunable | None, *, as_json: bool) -> int:
    checkpoint = done.checkpoint
    if as_json:
        print_json(
            {
                "receipts": done.receipts,
                "runs": done.runs,
                "spill_files": done.spill_files,
                "freed": done.freed,
                "through": old.id if old is not None else None,
                "checkpoint": checkpoint.id if checkpoint is not None else None,
            }
        )
        return 0
    parts = [many(done.runs, "line") + " of the run log", many(done.spill_files, "spill file")]
    if old is None:
        parts.insert(0, "no receipt")
    else:
        parts.insert(0, f"{many(done.receipts, 'receipt')} up to {old.id}")
    output.announce(f"removed {parts[0]}, {parts[1]} and {parts[2]}; {size(done.freed)} became free")
    if checkpoint is not None and old is not None:
        output.say(f"checkpoint {checkpoint.id} says so: `stockade verify --chain` begins after {old.id}")
    return 0
