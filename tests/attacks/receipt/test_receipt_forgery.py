"""Receipts that an attacker made up or changed: none verifies that its maker has not signed."""

from __future__ import annotations

import base64
import copy
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stockade import ReceiptError, cli, verify
from stockade.receipt import ed25519, keys
from stockade.receipt.statement import PAYLOAD_TYPE, to_sign
from support.made_receipts import append, log, public

ROUNDS = 400
ODD = [
    None, True, 0, -1, 1 << 63, 1 << 64, 10**400, 1e308, "", "\0", "\x9b2J", "yes", "x" * 5000, [], {}, [[]],
]  # fmt: skip


def as_json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def envelope(payload: bytes, *signatures: dict[str, str], kind: str = PAYLOAD_TYPE) -> bytes:
    text = base64.b64encode(payload).decode()
    return as_json({"payload": text, "payloadType": kind, "signatures": signatures})


def signature(signer: ed25519.Signer, payload: bytes, keyid: str = "") -> dict[str, str]:
    sig = base64.b64encode(signer.sign(to_sign(payload))).decode()
    return {"keyid": keyid or signer.id, "sig": sig}


def places(value: Any, above: Any = None, name: Any = None) -> Iterator[tuple[Any, Any]]:
    if above is not None:
        yield above, name
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, below in inner:
        yield from places(below, value, key)


def changed(value: Any, chance: random.Random) -> Any:
    """A copy of a statement in which one thing is another, missing, added or very deep."""
    made = copy.deepcopy(value)
    above, name = chance.choice(list(places(made)))
    how = chance.randrange(4)
    if how == 0:
        above[name] = copy.deepcopy(chance.choice(ODD))
    elif how == 1:
        del above[name]
    elif how == 2 and isinstance(above, dict):
        above[chance.choice(["x", "", "key", "event"])] = copy.deepcopy(chance.choice(ODD))
    else:
        for _ in range(300):
            above[name] = [above[name]]
    return made


def garbled(data: bytes, chance: random.Random) -> bytes:
    """The same bytes with a piece moved, doubled, cut out, escaped or exchanged."""
    at, size = chance.randrange(len(data)), chance.randrange(1, 40)
    piece = data[at : at + size]
    return chance.choice(
        [
            data[:at] + data[at + size :],
            data[:at] + piece + data[at:],
            data[:at],
            data[:at] + b"\\u%04x" % data[at] + data[at + 1 :],
            data[:at] + bytes([chance.randrange(256)]) + data[at + 1 :],
            data[:at] + b" " + data[at:],
            data.replace(b"{", b'{"payload":"",', 1),
            data.replace(b"+", b"-").replace(b"/", b"_"),
            data.replace(b"=", b""),
            b"\xef\xbb\xbf" + data,
            data.decode().encode("utf-16"),
        ]
    )


def test_nothing_verifies_that_its_maker_has_not_signed(stockade_home: Path) -> None:
    chance = random.Random(8)
    receipts = [append(stockade_home), append(stockade_home)]
    key, thief = public(stockade_home), ed25519.Signer(bytes(range(32)))
    true = {one.payload for one in receipts}
    whole = receipts[0].encode()
    own, other = (json.loads(one.encode())["signatures"][0] for one in receipts)
    for _ in range(ROUNDS):
        payload = as_json(changed(json.loads(receipts[0].payload), chance))
        forgeries = [
            garbled(whole, chance),
            envelope(payload, own),
            envelope(payload, other),
            envelope(payload, signature(thief, payload, own["keyid"])),
            envelope(payload, signature(thief, payload), own),
            envelope(receipts[0].payload, other),
            envelope(receipts[0].payload, own, own),
            envelope(receipts[0].payload, own, kind="application/json"),
        ]
        for data in forgeries:
            try:
                assert verify(data, key).payload in true and data == whole
            except ReceiptError as error:
                assert error.failure in ("malformed", "signature", "unknown-key")


def test_what_a_maker_signs_can_be_odd_and_breaks_nothing(
    stockade_home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also a maker may be hostile: the verifier refuses or shows, and ends with a code of its own."""
    chance = random.Random(15)
    statement = json.loads(append(stockade_home).payload)
    signer = keys.signer(str(stockade_home), log(stockade_home).settings)
    file = tmp_path / "receipt.json"
    codes = set()
    for _ in range(ROUNDS // 4):
        payload = as_json(changed(statement, chance))
        file.write_bytes(envelope(payload, signature(signer, payload)))
        for words in ([], ["--chain"], ["--json"]):
            codes.add(cli.main(["verify", str(file), *words]))
            assert not {*capsys.readouterr().out} & {"\x1b", "\x9b", "\0"}
    assert codes == {0, 1}


def test_a_grade_that_nobody_knows_is_not_taken_for_enforced(stockade_home: Path) -> None:
    statement = json.loads(append(stockade_home).payload)
    statement["predicate"]["controls"]["processes"]["grade"] = "better than ever"
    signer = keys.signer(str(stockade_home), log(stockade_home).settings)
    payload = as_json(statement)
    with pytest.raises(ReceiptError, match="malformed"):
        verify(envelope(payload, signature(signer, payload)), public(stockade_home), require=["processes"])


@pytest.mark.parametrize("keyid", ["\x1b[2Jx", "a\nVERIFIED", "A" * 64, "a" * 63 + "\n", ""])
def test_a_signature_that_names_no_key_reaches_no_message(stockade_home: Path, keyid: str) -> None:
    """Anybody can add one: it is not part of what was signed."""
    receipt = append(stockade_home)
    own = json.loads(receipt.encode())["signatures"][0]
    with pytest.raises(ReceiptError) as caught:
        verify(envelope(receipt.payload, own, {**own, "keyid": keyid}), public(stockade_home))
    assert caught.value.failure == "malformed"
    assert not keyid or keyid not in caught.value.message


def test_signatures_are_bounded_and_text_that_is_no_utf8_is_refused(stockade_home: Path) -> None:
    receipt, key = append(stockade_home), public(stockade_home)
    own = json.loads(receipt.encode())["signatures"][0]
    many = [{**own, "keyid": f"{number:064x}"} for number in range(16)]
    assert verify(envelope(receipt.payload, own, *many[1:]), key)
    for data in (envelope(receipt.payload, own, *many), "\ud800"):
        with pytest.raises(ReceiptError) as caught:
            verify(data, key)
        assert caught.value.failure == "malformed"


def test_a_pipe_that_nobody_writes_to_is_not_waited_for(
    stockade_home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    append(stockade_home)
    os.mkfifo(tmp_path / "all.jsonl")
    assert cli.main(["verify", str(tmp_path / "all.jsonl"), "--chain"]) == 1
    assert "contains no receipt" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["NULL", "5", "'text'", "zeroblob(3)"])
@pytest.mark.parametrize("column", ["key", "signature"])
def test_a_second_signature_of_another_type_in_the_log_is_named(
    stockade_home: Path, column: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    append(stockade_home)
    connection = log(stockade_home).connection()
    row = {"key": f"'{'ab' * 32}'", "signature": "zeroblob(64)", column: value}
    connection.execute("DROP TABLE cosignatures")
    connection.execute("CREATE TABLE cosignatures (sequence, key, signature)")
    connection.execute(f"INSERT INTO cosignatures VALUES (1, {row['key']}, {row['signature']})")
    assert cli.main(["verify", "--chain"]) == 1
    assert "malformed" in capsys.readouterr().err
