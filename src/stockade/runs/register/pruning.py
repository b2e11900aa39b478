"""Remove old receipts together with what belongs to them: the lines of the run log, and the spill files.

Nothing of a sandbox that lives now is removed. The receipts go first, in one transaction; if the process is
killed afterwards, the next pruning removes the rest.
"""

from __future__ import annotations

import contextlib
import os

import msgspec

from stockade.receipt import chain, prune
from stockade.receipt.builder import stamp
from stockade.receipt.statement import Receipt
from stockade.runs.register import register, runlog


class PruneReport(msgspec.Struct, frozen=True):
    """What was removed: receipts, with the checkpoint that says so; runs of the log; spill files; bytes."""

    receipts: int = 0
    checkpoint: Receipt | None = None
    runs: int = 0
    spill_files: int = 0
    freed: int = 0


def cutoff(home: str, before: float) -> float:
    """Return the time before which a run must have begun, so that nothing of a living sandbox is removed."""
    return min([before, *(_seconds(one.started) for one in register.living(home))])


def _seconds(text: str) -> float:
    """Convert the time in a record of the register; one that cannot be read is before all others."""
    from calendar import timegm
    from time import strptime

    try:
        return timegm(strptime(text, "%Y-%m-%dT%H:%M:%SZ"))
    except ValueError:
        return 0.0


def prune_all(home: str, before: float, old: prune.Prunable | None) -> PruneReport:
    """Remove these receipts, and the runs and the spill files from before a time that no receipt is about."""
    log = chain.of(home)
    size = log.size if log.exists() else 0
    checkpoint = None if old is None else prune.remove(log, old)
    stays = _sandboxes_before(log, before) if log.exists() else frozenset[str]()
    runs = runlog.prune(home, lambda ran: ran.at < before and ran.sandbox not in stays)
    spill_files, freed = _remove_spill_files(home, before)
    if checkpoint is not None:
        log.shrink()
        freed += max(0, size - log.size)
    return PruneReport(0 if old is None else old.count, checkpoint, len(runs), spill_files, freed)


def _sandboxes_before(log: chain.Chain, before: float) -> frozenset[str]:
    """Return the sandboxes of runs that began before a time and whose receipts stay."""
    rows = log.rows(chain.Filter(until=stamp(before)))
    return frozenset(log.get(row.sequence).predicate.sandbox for row in rows) - {""}


def _remove_spill_files(home: str, before: float) -> tuple[int, int]:
    """Remove old spill files that no line of the run log names; return how many, and their bytes."""
    named = {one.path for ran in runlog.read(home)[0] for one in ran.spilled}
    count = freed = 0
    with contextlib.suppress(FileNotFoundError):
        for entry in os.scandir(f"{home}/output"):
            info = entry.stat(follow_symlinks=False)
            if info.st_mtime < before and entry.path not in named and entry.is_file(follow_symlinks=False):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(entry.path)
                    count, freed = count + 1, freed + info.st_size
    return count, freed
