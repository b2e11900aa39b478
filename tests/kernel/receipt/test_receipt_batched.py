"""Receipts that are signed together: real runs, the command line, and processes that are killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import stockade
from stockade import Policy, ReceiptError, cli
from stockade.receipt import keys
from stockade.receipt.statement import SIGNED
from stockade.receipt.verify import check_log
from support import made_receipts
from support.made_receipts import log

BATCHED = Policy(receipts="batched")


def whole(home: Path) -> int:
    return check_log(log(home), {key.id: key.public for key in keys.known(str(home))})


def test_a_run_returns_before_its_receipt_is_signed_and_can_prove_it_then(stockade_home: Path) -> None:
    key = stockade.receipt.public_key
    result = stockade.run(["echo", "hello"], policy=BATCHED)
    assert result.receipt is not None and result.receipt.predicate.policy == BATCHED.hash
    with pytest.raises(ReceiptError) as caught:
        stockade.verify(result.receipt, key())
    assert caught.value.failure == "unsigned"
    proven = result.receipt.with_head()
    stockade.verify(proven, key(), policy=BATCHED, require=["network.none"], result=result)
    signed = stockade.run(["true"]).receipt
    assert signed is not None and signed.with_head() is signed and stockade.verify(signed, key())
    assert whole(stockade_home) == 3


def test_a_living_sandbox_and_an_error_have_such_receipts_too(stockade_home: Path) -> None:
    with stockade.Sandbox(BATCHED) as box:
        for _ in range(3):
            box.run(["true"])
        receipts = box.receipts
    for receipt in receipts:
        assert receipt.head is not None
        stockade.verify(receipt, stockade.receipt.public_key())
    with pytest.raises(stockade.StockadeError) as caught:
        stockade.run(["true"], policy=Policy(receipts="batched", read=["/no/such/file"]))
    assert caught.value.receipt is not None and not caught.value.receipt.signatures


def test_the_command_line_writes_exports_and_verifies_them(
    stockade_home: Path, tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text('receipts = "batched"\n')
    file, pem, all_of_them = tmp_path / "run.json", tmp_path / "key.pem", tmp_path / "all.jsonl"
    assert cli.main(["run", "-q", "-p", str(policy), "--receipt", str(file), "--", "true"]) == 0
    assert cli.main(["run", "-q", "-p", str(policy), "--", "true"]) == 0
    capsysbinary.readouterr()
    assert cli.main(["keys", "export"]) == 0
    pem.write_bytes(capsysbinary.readouterr().out)
    assert cli.main(["verify", str(file), "--key", str(pem)]) == 0
    assert b"in a batch  head 2-" in capsysbinary.readouterr().out
    assert cli.main(["verify", "3", "--json"]) == 0
    said = json.loads(capsysbinary.readouterr().out)
    assert said["ok"] and said["head"].startswith("4-") and said["found"] is False
    assert cli.main(["receipts", "export"]) == 0
    lines = capsysbinary.readouterr().out
    all_of_them.write_bytes(lines)
    assert cli.main(["verify", str(all_of_them), "--chain", "--key", str(pem)]) == 0
    assert capsysbinary.readouterr().out == b"the chain is whole: 4 receipts\n"
    all_of_them.write_bytes(b"".join(lines.splitlines(keepends=True)[:3]))
    assert cli.main(["verify", str(all_of_them), "--chain", "--key", str(pem)]) == 1
    assert b"receipt 3 is not signed yet" in capsysbinary.readouterr().err
    assert cli.main(["receipts", "list"]) == 0
    assert SIGNED.encode() in capsysbinary.readouterr().out


def test_killed_at_any_moment_it_stays_one_chain_and_every_receipt_gets_its_proof(
    stockade_home: Path,
) -> None:
    told = set()
    for turn in range(6):
        names = ("batched victim", "batched witness") if turn % 2 else ("batched victim", "witness")
        victim, witness = (
            subprocess.Popen(
                [sys.executable, made_receipts.__file__, str(stockade_home), count, name],
                stdout=subprocess.PIPE,
                text=True,
            )
            for name, count in zip(names, ("10000", "5"), strict=True)
        )
        assert victim.stdout is not None
        told.add(victim.stdout.readline().strip())
        time.sleep(0.004 * turn)
        victim.send_signal(signal.SIGKILL)
        told |= set(victim.communicate()[0].splitlines(keepends=False)[:-1])
        told |= set(witness.communicate()[0].splitlines())
        assert witness.returncode == 0
    count = whole(stockade_home)
    there = {f"{row.sequence} {row.hash}": row.sequence for row in log(stockade_home).rows()}
    assert told <= there.keys() and count == len(there)
    public = keys.find(str(stockade_home), "").public
    for sequence in sorted(there.values())[-80:]:
        stockade.verify(log(stockade_home).get(sequence), public)


def test_a_process_signs_before_it_ends(stockade_home: Path) -> None:
    code = "import stockade; stockade.run(['true'], policy=stockade.Policy(receipts='batched'))"
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ)
    found = log(stockade_home).get(1)
    assert found.head is not None and found.head.predicate.event is not None
    assert found.head.predicate.event.signed == (found.hash,)
