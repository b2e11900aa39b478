"""Whether a receipt is true: every way in which it is not has a name."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import msgspec
import pytest

import stockade
from stockade import Policy, PolicyError, ReceiptError, verify
from stockade.receipt import ed25519
from stockade.receipt.statement import Receipt
from support.made_receipts import append, public
from support.means import need_program
from support.paths import ROOT


def failure(receipt: Receipt | bytes, key: bytes, **asked: object) -> str:
    with pytest.raises(ReceiptError) as caught:
        verify(receipt, key, **asked)  # type: ignore[arg-type]
    assert str(caught.value)
    return caught.value.failure


def test_the_policy_and_the_result_must_be_those_of_the_run(stockade_home: Path) -> None:
    policy = Policy(limits={"wall": "20s"})
    one = stockade.run(["echo", "one"], policy)
    two = stockade.run(["echo", "two"], policy)
    assert one.receipt is not None
    key = public(stockade_home)
    verify(one.receipt, key, policy=policy, result=one, require=["files", "network.none", "limits.wall"])
    assert failure(one.receipt, key, policy=Policy()) == "policy"
    assert failure(one.receipt, key, result=two) == "result"
    for changed in (
        msgspec.structs.replace(one, exit_code=1),
        msgspec.structs.replace(one, stdout=b"One\n"),
        msgspec.structs.replace(one, stderr=b"!"),
        msgspec.structs.replace(one, reason="well"),
    ):
        assert failure(one.receipt, key, result=changed) == "result"


def test_a_receipt_that_is_about_no_result_fits_none(stockade_home: Path) -> None:
    result = stockade.run(["echo", "one"])
    with pytest.raises(PolicyError) as caught:
        stockade.run(["true"], Policy(read=["/no/such"]))
    refused = caught.value.receipt
    assert refused is not None and not refused.subjects
    key = public(stockade_home)
    assert failure(refused, key, result=result) == "result"
    assert failure(append(stockade_home), key, result=result) == "result"


def test_streams_that_went_past_us_are_not_missed(stockade_home: Path) -> None:
    with stockade.Sandbox() as box:
        process = box.start(["true"])
        result = process.wait()
    assert result.receipt is not None and "stdout" not in result.receipt.subjects
    key = public(stockade_home)
    verify(result.receipt, key, result=result)
    assert failure(result.receipt, key, result=msgspec.structs.replace(result, stdout=b"x")) == "result"


def test_the_documented_way_with_openssl_and_jq_works(stockade_home: Path, tmp_path: Path) -> None:
    need_program("openssl")
    need_program("jq")
    text = (ROOT / "docs/reference/receipts.md").read_text()
    (script,) = re.findall(r"```sh\n(# verify with openssl and jq.*?)```", text, re.DOTALL)
    receipt = append(stockade_home)
    (tmp_path / "run.json").write_bytes(receipt.encode() + b"\n")
    (tmp_path / "stockade.pem").write_bytes(ed25519.public_pem(public(stockade_home)))

    def done() -> subprocess.CompletedProcess[str]:
        command = ["bash", "-eu", "-o", "pipefail", "-c", script]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    good = done()
    assert good.returncode == 0 and "Signature Verified Successfully" in good.stdout, good.stderr
    assert '"outcome": "exited"' in good.stdout
    forged = receipt.payload.replace(b'"exited"', b'"denied"')
    (tmp_path / "run.json").write_bytes(Receipt(forged, receipt.signatures).encode())
    assert done().returncode != 0
