"""Whether a receipt is true: every way in which it is not has a name."""

from __future__ import annotations

import base64
from pathlib import Path

import msgspec
import pytest

from stockade import PolicyError, ReceiptError, verify
from stockade.agents import registry
from stockade.receipt import chain, ed25519, keys
from stockade.receipt.statement import Receipt, Signature, canonical, to_sign
from stockade.receipt.verify import check_log
from support import made_receipts
from support.made_receipts import append, log, public

SEED = bytes(range(32))


def failure(receipt: Receipt | bytes, key: bytes, **asked: object) -> str:
    with pytest.raises(ReceiptError) as caught:
        verify(receipt, key, **asked)  # type: ignore[arg-type]
    assert str(caught.value)
    return caught.value.failure


def test_the_form_is_that_of_in_toto_and_dsse(stockade_home: Path) -> None:
    receipt = append(stockade_home)
    envelope = msgspec.json.decode(receipt.encode())
    assert set(envelope) == {"payload", "payloadType", "signatures"}
    assert envelope["payloadType"] == "application/vnd.in-toto+json"
    payload = base64.b64decode(envelope["payload"], validate=True)
    statement = msgspec.json.decode(payload)
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert statement["predicateType"] == "urn:stockade:receipt:1"
    assert canonical(statement) == payload == receipt.payload
    assert receipt.encode() == canonical(envelope) and b" " not in receipt.encode()
    assert to_sign(payload) == b"DSSEv1 28 application/vnd.in-toto+json %d %s" % (len(payload), payload)
    assert Receipt.decode(receipt.encode() + b"\n") == receipt


@pytest.mark.parametrize("kind", ["run", "agent", "rotation"])
def test_a_receipt_with_any_byte_changed_is_refused(stockade_home: Path, kind: str) -> None:
    """Of a run, and of each kind of record."""
    receipt = append(stockade_home)
    makers = [public(stockade_home)]
    if kind == "agent":
        registry.add(str(stockade_home), "coder")
        receipt = log(stockade_home).get(2)
    elif kind == "rotation":
        log(stockade_home).rotate()
        receipt = log(stockade_home).get(2)
        makers.append(public(stockade_home))
    data = receipt.encode() + b"\n"
    assert verify(data, makers)
    for place in range(len(data)):
        changed = bytearray(data)
        changed[place] ^= 0x01 if place % 2 else 0x20
        with pytest.raises(ReceiptError) as caught:
            verify(bytes(changed), makers)
        assert caught.value.failure in ("malformed", "signature", "unknown-key"), place


@pytest.mark.parametrize("kind", ["urn:stockade:other:1", "urn:stockade:event:1"])
def test_a_record_of_a_kind_that_nobody_knows_is_refused(stockade_home: Path, kind: str) -> None:
    """Also where our own key has signed it, and where it is called an event and holds none."""
    log(stockade_home).append(
        lambda link: msgspec.structs.replace(made_receipts.statement(link), predicate_type=kind)
    )
    own = {key.id: key.public for key in keys.known(str(stockade_home))}
    with pytest.raises(ReceiptError, match="of another kind"):
        check_log(log(stockade_home), own)


def test_a_receipt_with_a_byte_more_or_less_is_refused(stockade_home: Path) -> None:
    data = append(stockade_home).encode()
    key = public(stockade_home)
    for place in range(0, len(data), 7):
        assert failure(data[:place] + data[place + 1 :], key) in ("malformed", "signature", "unknown-key")
        assert failure(data[:place] + b"A" + data[place:], key) in ("malformed", "signature", "unknown-key")
    assert failure(b" " + data, key) == failure(data + b"\n\n", key) == failure(b"", key) == "malformed"
    assert failure(b"x" * (2 << 20), key) == "malformed"
    assert failure(b"[" * 100_000, key) == "malformed"


def test_the_key_of_somebody_else_is_unknown(stockade_home: Path) -> None:
    receipt = append(stockade_home)
    assert failure(receipt, ed25519.Signer(SEED).public) == "unknown-key"


def test_somebody_elses_signature_under_the_name_of_the_key_is_none(stockade_home: Path) -> None:
    receipt = append(stockade_home)
    other = ed25519.Signer(SEED).sign(to_sign(receipt.payload))
    forged = Receipt(receipt.payload, (Signature(receipt.signatures[0].keyid, other),))
    assert failure(forged, public(stockade_home)) == "signature"


def test_who_signs_for_another_key_is_refused(stockade_home: Path) -> None:
    """Somebody takes a receipt and signs it as his: it still names its maker."""
    receipt = append(stockade_home)
    thief = ed25519.Signer(SEED)
    stolen = Receipt(receipt.payload, (Signature(thief.id, thief.sign(to_sign(receipt.payload))),))
    assert failure(stolen, thief.public) == "unknown-key"


def test_a_second_key_signs_beside_the_first(stockade_home: Path) -> None:
    receipt = append(stockade_home)
    both = receipt.cosigned(ed25519.private_pem(SEED))
    second = ed25519.Signer(SEED).public
    first = public(stockade_home)
    assert verify(both.encode(), [first, second]).hash == receipt.hash
    assert both.cosigned(ed25519.private_pem(SEED)) == both
    made_by_it = Receipt(receipt.payload, both.signatures[1:])
    assert made_by_it.cosigned(ed25519.private_pem(SEED)) == made_by_it
    assert failure(receipt, [first, second]) == "unknown-key"  # type: ignore[arg-type]
    spoilt = Receipt(both.payload, (both.signatures[0], Signature(both.signatures[1].keyid, bytes(64))))
    assert failure(spoilt, [first, second]) == "signature"  # type: ignore[arg-type]
    assert failure(Receipt(both.payload, both.signatures[:1] * 2), first) == "malformed"


def test_a_true_receipt_of_another_kind_is_malformed(stockade_home: Path) -> None:
    """Signed by the right key, and yet nothing that this version made."""
    append(stockade_home)
    signer = chain.keys.signer(str(stockade_home), log(stockade_home).settings)
    good = msgspec.json.decode(log(stockade_home).get(1).payload)
    for payload in (
        b"{}",
        b"not json",
        canonical({**good, "predicateType": "urn:stockade:receipt:2"}),
        canonical({**good, "more": 1}),
        canonical({**good, "predicate": {**good["predicate"], "sequence": "one"}}),
    ):
        odd = Receipt(payload, (Signature(signer.id, signer.sign(to_sign(payload))),))
        assert failure(odd, signer.public) == "malformed"


def test_what_is_required_must_have_been_enforced(stockade_home: Path) -> None:
    receipt, key = append(stockade_home), public(stockade_home)
    verify(receipt, key, require=["processes"])
    assert failure(receipt, key, require=["processes", "limits.memory"]) == "weaker"
    assert failure(receipt, key, require=["network.none"]) == "weaker"
    with pytest.raises(PolicyError, match="not a control"):
        verify(receipt, key, require=["netwrk"])


def test_pem_and_raw_keys_are_taken_and_others_are_not(stockade_home: Path) -> None:
    receipt, key = append(stockade_home), public(stockade_home)
    pem = ed25519.public_pem(key)
    assert verify(receipt, pem) == verify(receipt, pem.decode()) == verify(receipt.encode().decode(), key)
    for bad in (b"", b"short", ed25519.private_pem(SEED)):
        assert failure(receipt, bad) == "unknown-key"
    with pytest.raises(PolicyError, match="no key"):
        verify(receipt, [])
