"""The log of receipts: one chain, whoever appends and whenever he is killed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from stockade import ReceiptError
from stockade.receipt import chain, keys
from stockade.receipt.statement import Statement
from stockade.receipt.verify import check_log
from support.made_receipts import append, log, statement
from support.paths import ROOT

SCRIPT = str(ROOT / "tests/support/made_receipts.py")


def known(home: Path) -> dict[str, bytes]:
    return {key.id: key.public for key in keys.known(str(home))}


def whole(home: Path) -> int:
    """How many receipts the log has; fails where it is not one chain."""
    return check_log(log(home), known(home))


def appender(home: Path, count: int, name: str) -> subprocess.Popen[str]:
    command = [sys.executable, SCRIPT, str(home), str(count), name]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_processes_and_threads_make_one_chain(stockade_home: Path) -> None:
    """They all begin with nothing there: the log and the key are made once."""
    others = [appender(stockade_home, 25, f"process {n}") for n in range(3)]
    threads = [
        threading.Thread(target=lambda: [append(stockade_home, "threads") for _ in range(25)])
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    told = [line for process in others for line in process.communicate()[0].splitlines()]
    assert all(process.returncode == 0 for process in others)
    assert whole(stockade_home) == 125
    assert len(known(stockade_home)) == 1
    there = {f"{row.sequence} {row.hash}" for row in log(stockade_home).rows()}
    assert len(told) == 75 and set(told) <= there


def test_killed_at_any_moment_it_stays_one_chain_with_all_that_was_told(stockade_home: Path) -> None:
    dice = random.Random(4)
    told = set()
    for turn in range(10):
        victim, witness = appender(stockade_home, 10_000, "victim"), appender(stockade_home, 5, "witness")
        assert victim.stdout is not None
        told.add(victim.stdout.readline().strip())
        time.sleep(dice.random() * 0.02)
        victim.send_signal(signal.SIGKILL)
        # The last line may be cut off in the middle.
        told |= set(victim.communicate()[0].splitlines(keepends=False)[:-1])
        told |= set(witness.communicate()[0].splitlines())
        assert witness.returncode == 0, turn
    count = whole(stockade_home)
    there = {f"{row.sequence} {row.hash}" for row in log(stockade_home).rows()}
    assert told <= there and len(there) == count >= len(told)


def test_processes_that_end_leave_no_ever_longer_wal(stockade_home: Path) -> None:
    wal = stockade_home / f"{chain.FILE}-wal"
    lengths = []
    for _ in range(5):
        appender(stockade_home, 160, "one").communicate()
        lengths.append(wal.stat().st_size if wal.exists() else 0)
    assert min(lengths) == 0, lengths
    assert max(lengths) <= chain.LEFT, lengths
    assert whole(stockade_home) == 800


def test_a_forked_child_appends_by_itself(stockade_home: Path) -> None:
    append(stockade_home)
    pid = os.fork()
    if not pid:
        code = 1
        try:
            append(stockade_home, "child")
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    append(stockade_home, "parent")
    assert [row.agent for row in log(stockade_home).rows()] == ["", "child", "parent"]
    assert whole(stockade_home) == 3


def test_no_log_is_begun_beside_what_is_left_of_another(stockade_home: Path) -> None:
    """As a process that ends leaves it, the last receipts are beside the log, and SQLite replays them."""
    appender(stockade_home, 3, "a").communicate()
    database, *beside = (stockade_home / f"{chain.FILE}{end}" for end in ("", "-wal", "-shm", "-tail"))
    aside = stockade_home.parent
    database.rename(aside / database.name)
    for file in beside:
        for look in (append, whole):
            with pytest.raises(ReceiptError, match="is gone") as caught:
                look(stockade_home)
            assert caught.value.failure == "damaged"
            assert all(str(name) in caught.value.hint for name in (database, *beside))
        assert log(stockade_home).exists() and not database.exists()
        file.rename(aside / file.name)
    append(stockade_home)
    assert whole(stockade_home) == 1
    for file in (database, *beside):
        file.unlink(missing_ok=True)
        (aside / file.name).rename(file)
    assert whole(stockade_home) == 3


def test_a_child_that_is_forked_while_a_receipt_is_written_can_make_its_own(
    stockade_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chain, "PATIENCE", 5.0)
    append(stockade_home)
    within, forking = threading.Event(), threading.Event()
    os.register_at_fork(before=forking.set)  # is called before the log's own

    def slowly(link: chain.ChainLink) -> Statement:
        within.set()
        forking.wait(10)
        return statement(link)

    writer = threading.Thread(target=lambda: log(stockade_home).append(slowly))
    writer.start()
    within.wait()
    child = os.fork()
    if not child:
        try:
            append(stockade_home, "child")
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    writer.join()
    append(stockade_home)
    assert (status, whole(stockade_home)) == (0, 4)
