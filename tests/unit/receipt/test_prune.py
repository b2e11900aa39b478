"""Pruning: the beginning of the log goes, and a signed checkpoint says so."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from stockade import ReceiptError
from stockade.agents import registry
from stockade.receipt import chain, ed25519, keys, prune
from stockade.receipt.statement import Receipt
from stockade.receipt.verify import ChainCheck, check_log, walk_log
from support.made_receipts import append, log
from support.paths import ROOT

FIXTURE = ROOT / "tests/fixtures/receipts"
OLD, NEW = "2026-01-01T00:00:00.000000Z", "2026-06-01T00:00:00.000000Z"
#: Between the two.
CUT = 1772323200.0


def known(home: Path) -> dict[str, bytes]:
    return {key.id: key.public for key in keys.known(str(home))}


def pruned(home: Path, before: float = CUT) -> Receipt:
    """Prune what began before a time, and return the checkpoint."""
    old = prune.find(log(home), before)
    assert old is not None
    return prune.remove(log(home), old)


def places(home: Path) -> list[int]:
    return [row.sequence for row in log(home).rows()]


def test_old_receipts_go_and_the_rest_is_a_chain_that_begins_after_them(stockade_home: Path) -> None:
    made = [append(stockade_home, started=OLD) for _ in range(5)] + [append(stockade_home, started=NEW)]
    checkpoint = pruned(stockade_home)
    assert places(stockade_home) == [6, 7]
    said = checkpoint.predicate.event
    assert said is not None and said.pruned is not None
    assert (said.pruned.through, said.pruned.hash, said.pruned.count) == (5, made[4].hash, 5)
    assert append(stockade_home).predicate.sequence == 8
    walk = walk_log(log(stockade_home), known(stockade_home))
    assert (walk.count, walk.removed_through, walk.kept) == (3, 5, 0)
    assert walk.checkpoint == checkpoint
    assert prune.find(log(stockade_home), CUT) is None


def test_the_log_can_be_pruned_again_and_to_the_last_receipt(stockade_home: Path) -> None:
    for _ in range(4):
        append(stockade_home, started=OLD)
    pruned(stockade_home)
    append(stockade_home, started=NEW)
    assert walk_log(log(stockade_home), known(stockade_home)).removed_through == 4
    pruned(stockade_home, time.time() + 1)
    assert places(stockade_home) == [7]
    append(stockade_home)
    assert check_log(log(stockade_home), known(stockade_home)) == 2


def test_the_first_receipt_that_is_not_old_enough_keeps_all_after_it(stockade_home: Path) -> None:
    for started in (OLD, NEW, OLD):
        append(stockade_home, started=started)
    pruned(stockade_home)
    assert places(stockade_home) == [2, 3, 4]


def test_a_receipt_from_the_future_keeps_nothing(stockade_home: Path) -> None:
    for started in (OLD, "2999-01-01T00:00:00.000000Z", OLD, NEW):
        append(stockade_home, started=started)
    pruned(stockade_home)
    assert places(stockade_home) == [4, 5]


def test_rotations_stay_so_that_the_first_key_alone_is_enough(stockade_home: Path) -> None:
    append(stockade_home, started=OLD)
    [first] = known(stockade_home).items()
    for _ in range(2):
        log(stockade_home).rotate()
        append(stockade_home, started=OLD)
    append(stockade_home, started=NEW)
    pruned(stockade_home, time.time() + 1)
    assert places(stockade_home) == [2, 4, 7]
    walk = walk_log(log(stockade_home), dict([first]), every=True)
    assert (walk.count, walk.kept) == (3, 2)


def test_the_registry_stays_bound_to_its_events(stockade_home: Path) -> None:
    home = str(stockade_home)
    for name in ("coder", "gone", "idle"):
        registry.add(home, name)
    registry.switch(home, "coder", enabled=False, reason="a test")
    registry.remove(home, "gone")
    append(stockade_home)
    pruned(stockade_home, time.time() + 1)
    assert places(stockade_home) == [3, 4, 5, 7]
    assert not registry.get(home, "coder").enabled
    assert registry.get(home, "idle").enabled
    assert registry.find(home, "gone") is None
    assert check_log(log(stockade_home), known(stockade_home)) == 4


def test_an_export_of_what_is_left_is_a_chain(stockade_home: Path) -> None:
    registry.add(str(stockade_home), "coder")
    archive = [registry_event.receipt for registry_event in log(stockade_home).all()]
    archive += [append(stockade_home, started=OLD) for _ in range(3)]
    pruned(stockade_home, time.time() + 1)
    left = [entry.receipt for entry in log(stockade_home).all()]
    for lines in (left, [*archive, left[-1]]):  # what is left, and a copy of all that there ever was
        walk = ChainCheck(known(stockade_home), whole=False)
        for receipt in lines:
            walk.step(receipt)
        assert walk.end() == len(lines)


def test_a_log_that_is_not_whole_is_not_pruned(stockade_home: Path) -> None:
    for _ in range(3):
        append(stockade_home, started=OLD)
    old = prune.find(log(stockade_home), CUT)
    assert old is not None
    connection = log(stockade_home).connection()
    connection.execute("DROP TRIGGER receipts_UPDATE")
    connection.execute("UPDATE receipts SET outcome = 'denied' WHERE sequence = 2")
    with pytest.raises(ReceiptError, match="do not match the receipt"):
        prune.remove(log(stockade_home), old)
    assert places(stockade_home) == [1, 2, 3]


def test_two_processes_that_prune_do_not_vouch_for_each_other(stockade_home: Path) -> None:
    for _ in range(3):
        append(stockade_home, started=OLD)
    old = prune.find(log(stockade_home), CUT)
    assert old is not None
    prune.remove(log(stockade_home), old)
    with pytest.raises(ReceiptError, match="another process has pruned the log"):
        prune.remove(log(stockade_home), old)
    assert places(stockade_home) == [4]


def test_without_its_key_nothing_is_removed(stockade_home: Path) -> None:
    for _ in range(3):
        append(stockade_home, started=OLD)
    file = stockade_home / "keys/signing.pem"
    file.write_bytes(ed25519.private_pem(bytes(32), b"passphrase"))
    with pytest.raises(ReceiptError, match="encrypted"):
        pruned(stockade_home)
    assert places(stockade_home) == [1, 2, 3]


def test_receipts_are_protected_again_afterwards(stockade_home: Path) -> None:
    append(stockade_home, started=OLD)
    triggers = "SELECT name, sql FROM sqlite_master WHERE type = 'trigger' ORDER BY name"
    before = log(stockade_home).look(triggers)
    pruned(stockade_home)
    assert log(stockade_home).look(triggers) == before


def test_the_room_is_given_back(stockade_home: Path) -> None:
    for _ in range(200):
        append(stockade_home, started=OLD)
    pruned(stockade_home)
    before = log(stockade_home).size
    log(stockade_home).shrink()
    assert log(stockade_home).size < before / 2
    assert check_log(log(stockade_home), known(stockade_home)) == 1


def test_a_log_of_the_second_version_can_be_pruned(stockade_home: Path) -> None:
    stockade_home.mkdir(0o700)
    (stockade_home / "keys").mkdir(0o700)
    shutil.copy(FIXTURE / "2.db", stockade_home / chain.FILE)
    for key in FIXTURE.glob("*.pem"):
        shutil.copy(key, stockade_home / "keys")
    assert places(stockade_home) == [1, 2, 3, 4, 5]
    assert not registry.get(str(stockade_home), "coder").enabled
    pruned(stockade_home, time.time() + 1)
    assert places(stockade_home) == [3, 4, 6]
    assert not registry.get(str(stockade_home), "coder").enabled
    assert check_log(log(stockade_home), known(stockade_home)) == 3
