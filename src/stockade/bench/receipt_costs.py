"""Measure what receipts cost: to make one, to verify one, and to append to a long log."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from stockade import Receipt, Sandbox, verify
from stockade.bench.competitors import SPAWN
from stockade.bench.measure import Figure, Section, interleaved, ratio, timing
from stockade.receipt import chain, database, keys
from stockade.receipt.builder import ended
from stockade.sandbox.sandbox import account_of

MILLION = 1_000_000
TRUE = "/bin/true"


def measure(place: Path, rounds: int) -> Section:
    """Measure each against a posix_spawn, in turns."""
    with tempfile.TemporaryDirectory(prefix="receipts-", dir=place) as directory:
        one, long = Path(directory, "one"), Path(directory, "long")
        with _receipt_maker(one) as short_log, _receipt_maker(long) as long_log:
            _lengthen(long)
            return _compare(one, short_log, long_log, rounds)


@contextmanager
def _receipt_maker(home: Path) -> Iterator[Callable[[], Receipt]]:
    """Yield a function that adds a receipt to a state directory, for an ended run with real evidence."""
    before = os.environ.get("STOCKADE_HOME")
    os.environ["STOCKADE_HOME"] = str(home)
    try:
        with Sandbox() as box:
            result = box.run([TRUE])
            account = account_of(box, [TRUE])
            digests = {"stdout": "0" * 64, "stderr": "0" * 64}

            def make() -> Receipt:
                receipt = ended(account, result, digests).receipt
                assert receipt is not None
                return receipt

            yield make
    finally:
        chain.shutdown()
        os.environ.pop("STOCKADE_HOME")
        if before is not None:
            os.environ["STOCKADE_HOME"] = before


def _compare(
    home: Path, short_log: Callable[[], Receipt], long_log: Callable[[], Receipt], rounds: int
) -> Section:
    envelope, public = short_log().encode(), keys.find(str(home), "").public
    turns = {
        SPAWN: _spawn,
        "receipt made": short_log,
        "receipt made, a million before": long_log,
        "receipt verified": lambda: verify(envelope, public),
    }
    times = interleaved({name: _timed(turn) for name, turn in turns.items()}, rounds * 10)
    figures = (
        Figure("receipt/made", ratio(times["receipt made"], times[SPAWN])),
        Figure("receipt/verified", ratio(times["receipt verified"], times[SPAWN])),
        Figure("receipt/long", ratio(times["receipt made, a million before"], times["receipt made"])),
    )
    return Section(figures, {name: timing(taken) for name, taken in times.items()})


def _timed(turn: Callable[[], object]) -> Callable[[], float]:
    def milliseconds() -> float:
        began = time.perf_counter()
        turn()
        return (time.perf_counter() - began) * 1000

    return milliseconds


def _lengthen(home: Path) -> None:
    """Make a log look as if it had a million receipts."""
    log = chain.of(str(home))
    numbers = (
        f"WITH RECURSIVE numbers(value) AS (SELECT 2 UNION ALL SELECT value + 1 FROM numbers"
        f" WHERE value < {MILLION}) INSERT INTO"
    )
    log.settle()
    with log.connection() as connection:
        connection.execute(database.BEGIN)
        connection.execute(f"{numbers} statements SELECT value, '', x'', x'' FROM numbers")
        connection.execute(
            f"{numbers} receipts SELECT value, '', '', '', '', '', 'exited', 'true' FROM numbers"
        )


def _spawn() -> None:
    pid = os.posix_spawn(TRUE, [TRUE], {})
    os.waitpid(pid, 0)
