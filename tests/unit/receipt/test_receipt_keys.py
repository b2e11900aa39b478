"""Who signs: one private key, made on first use, and every public one that there was."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from stockade import NotFoundError, PolicyError, ReceiptError, verify
from stockade.receipt import chain, ed25519, keys
from stockade.receipt.statement import Receipt
from stockade.receipt.verify import ChainCheck, check_log
from stockade.resolve.receipt_settings import Settings, settings
from support.made_receipts import append, log, public

SEED = bytes(range(32))


def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    chain.shutdown()
    (tmp_path / "stockade").mkdir(exist_ok=True)
    (tmp_path / "stockade/config.toml").write_text(text)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


def test_the_two_libraries_sign_alike() -> None:
    by_openssl, theirs = ed25519._by_openssl(SEED), ed25519._by_cryptography(SEED)
    assert by_openssl is not None, "there is no OpenSSL where the interpreter looks for it"
    for data in (b"", b"x", bytes(10_000)):
        assert by_openssl[0](data) == theirs[0](data)
        assert ed25519.verifies(by_openssl[1], by_openssl[0](data), data)
        assert not ed25519.verifies(by_openssl[1], by_openssl[0](data), data + b"y")
    assert by_openssl[1] == theirs[1]


def test_threads_sign_at_once_and_also_where_openssl_has_no_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    class Old:
        """OpenSSL 1.1, as far as that goes."""

        def __getattr__(self, name: str) -> Any:
            return getattr(known, name) if name != "EVP_MD_CTX_copy_ex" else lambda *_: 0

    known, right = ed25519._library(), ed25519._by_cryptography(SEED)[0]
    for library in (known, Old()):
        monkeypatch.setattr(ed25519, "_loaded", [library])
        sign = ed25519.Signer(SEED).sign
        many = [bytes([number]) * 3000 for number in range(64)]
        with ThreadPoolExecutor(4) as threads:
            assert list(threads.map(sign, many)) == [right(data) for data in many]


def test_where_there_is_no_openssl_the_other_one_signs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ed25519, "_loaded", [None])
    assert ed25519.Signer(SEED).sign(b"x") == ed25519._by_cryptography(SEED)[0](b"x")


def test_the_first_receipt_makes_the_key(stockade_home: Path) -> None:
    receipt = append(stockade_home)
    (key,) = keys.known(str(stockade_home))
    assert key.current and key.id == receipt.predicate.key == receipt.signatures[0].keyid
    private = stockade_home / "keys" / keys.SIGNING
    assert private.stat().st_mode & 0o777 == 0o600
    assert private.parent.stat().st_mode & 0o777 == 0o700
    assert sorted(os.listdir(private.parent)) == sorted(["current", f"{key.id}.pem", "signing.pem"])


def test_rotation_keeps_old_receipts_verifiable(stockade_home: Path) -> None:
    old = append(stockade_home)
    id = log(stockade_home).rotate()
    new = append(stockade_home)
    assert new.predicate.key == id != old.predicate.key
    assert [key.current for key in keys.known(str(stockade_home))] == [True, False]
    verify(old, public(stockade_home, old.predicate.key))
    verify(new, public(stockade_home))
    with pytest.raises(ReceiptError) as caught:
        verify(old, public(stockade_home))
    assert caught.value.failure == "unknown-key"


def test_the_old_key_vouches_for_the_new_one(stockade_home: Path) -> None:
    """Whoever has the first key of a chain can follow it; nobody else puts a key in its place."""
    first = append(stockade_home).predicate.key
    for _ in range(2):
        log(stockade_home).rotate()
        append(stockade_home)
    own = {first: public(stockade_home, first)}
    assert check_log(log(stockade_home), own) == 5
    record = log(stockade_home).get(2)
    assert record.predicate.who.action == "key-rotated" and len(record.signatures) == 2
    with pytest.raises(ReceiptError) as caught:  # the new one must have signed as well
        ChainCheck(own, whole=False).step(Receipt(record.payload, record.signatures[:1]))
    assert caught.value.failure == "signature"
    with pytest.raises(ReceiptError) as caught:  # and it vouches for nothing before it
        check_log(log(stockade_home), {keys.find(str(stockade_home), "").id: public(stockade_home)})
    assert caught.value.failure == "unknown-key"


def test_a_key_that_was_replaced_makes_no_more_receipts(
    stockade_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever has a copy cannot go on with the chain. Until the new one has signed, none was replaced."""
    append(stockade_home)
    signing = stockade_home / "keys" / keys.SIGNING
    stolen = signing.read_bytes()
    made = keys.replacement
    with monkeypatch.context() as patch:
        patch.setattr(keys, "replacement", lambda *given: (made(*given)[0], lambda: None))
        log(stockade_home).rotate()  # killed before the new key was in its place
    first = append(stockade_home).predicate.key
    log(stockade_home).rotate()
    append(stockade_home)
    own = {first: public(stockade_home, first)}
    assert check_log(log(stockade_home), own) == 5
    signing.unlink()
    signing.write_bytes(stolen)
    signing.chmod(0o600)
    assert append(stockade_home).predicate.key == first
    with pytest.raises(ReceiptError, match="which another key has replaced") as caught:
        check_log(log(stockade_home), own)
    assert caught.value.failure == "unknown-key"


def test_a_key_that_cannot_be_used_vouches_for_none(stockade_home: Path) -> None:
    append(stockade_home)
    (stockade_home / "keys" / keys.SIGNING).write_bytes(b"nonsense")
    log(stockade_home).rotate()
    append(stockade_home)
    assert [row.action for row in log(stockade_home).rows()] == ["", ""]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_key_that_others_can_read_does_not_sign(mode: int, stockade_home: Path) -> None:
    append(stockade_home)
    keys._signers.clear()
    (stockade_home / "keys" / keys.SIGNING).chmod(mode)
    with pytest.raises(ReceiptError, match="not a private file") as caught:
        append(stockade_home)
    assert caught.value.failure == "not-made" and "chmod 600" in caught.value.hint


@pytest.mark.parametrize(
    "content", [b"", b"nonsense", b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"]
)
def test_a_damaged_key_is_an_error(content: bytes, stockade_home: Path) -> None:
    append(stockade_home)
    (stockade_home / "keys" / keys.SIGNING).write_bytes(content)
    with pytest.raises(ReceiptError) as caught:
        append(stockade_home)
    assert caught.value.failure == "not-made" and "rotate" in caught.value.hint


def test_an_encrypted_key_needs_its_passphrase(
    stockade_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append(stockade_home)
    log(stockade_home).rotate(b"secret")
    assert b"ENCRYPTED" in (stockade_home / "keys" / keys.SIGNING).read_bytes()
    with pytest.raises(ReceiptError, match="passphrase") as caught:
        append(stockade_home)
    assert "passphrase_file" in caught.value.hint
    word = tmp_path / "word"
    word.write_text("secret\n")
    word.chmod(0o600)
    config(tmp_path, monkeypatch, f'[receipts]\npassphrase_file = "{word}"\n')
    verify(append(stockade_home), public(stockade_home))
    word.write_text("wrong\n")
    keys._signers.clear()
    with pytest.raises(ReceiptError, match="the passphrase is wrong"):
        append(stockade_home)
    word.chmod(0o644)
    with pytest.raises(ReceiptError, match="not a private file"):
        append(stockade_home)


def test_a_second_key_signs_too_where_the_settings_name_it(
    stockade_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = tmp_path / "second.pem"
    second.write_bytes(ed25519.private_pem(SEED))
    second.chmod(0o600)
    config(tmp_path, monkeypatch, '[receipts]\ncosign = "../second.pem"\n')
    receipt = append(stockade_home)
    both = [public(stockade_home), ed25519.Signer(SEED).public]
    assert verify(receipt, both) == log(stockade_home).get(1)
    for key in both:
        verify(receipt, key)
    second.unlink()
    with pytest.raises(ReceiptError, match=r"second\.pem cannot be used"):
        append(stockade_home)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[receipts]\nfsnyc = true\n", "did you mean"),
        ("[receipts]\nfsync = 1\n", "true or false"),
        ("receipts = 3\n", "must be a table"),
        ("[receipts]\ncosign = true\n", "a path"),
    ],
)
def test_settings_that_make_no_sense_are_named(
    text: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config(tmp_path, monkeypatch, text)
    with pytest.raises(PolicyError) as caught:
        settings()
    assert "receipts" in str(caught.value) and said in f"{caught.value} {caught.value.hint}"


def test_the_clause_and_the_settings_of_that_name_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stockade.policy.toml import RECEIPTS, load

    config(tmp_path, monkeypatch, 'receipts = "batched"\n')
    assert settings() == Settings()
    (file,) = tmp_path.rglob("config.toml")
    assert load(str(file), besides=(RECEIPTS,)).receipts == "batched"
    file.write_text("[receipts]\nfsync = true\n")
    assert settings().fsync and load(str(file), besides=(RECEIPTS,)).receipts == "each"


def test_a_policy_file_cannot_say_how_receipts_are_made(tmp_path: Path) -> None:
    from stockade.policy.toml import load

    file = tmp_path / "policy.toml"
    file.write_text("[receipts]\nfsync = true\n")
    with pytest.raises(PolicyError, match="receipts"):
        load(str(file))


def test_a_key_is_found_by_the_beginning_of_its_id(stockade_home: Path) -> None:
    append(stockade_home)
    id = keys.find(str(stockade_home), "").id
    assert keys.find(str(stockade_home), id[:8]).id == id
    with pytest.raises(NotFoundError):
        keys.find(str(stockade_home), "zz")
