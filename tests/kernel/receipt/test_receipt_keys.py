"""Who signs: one private key, made on first use, and every public one that there was."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

import stockade
from stockade import Policy, PolicyError
from stockade.receipt import chain, ed25519, keys
from stockade.receipt.statement import digest
from support.made_receipts import append, log
from support.means import need_program

SEED = bytes(range(32))


def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    chain.shutdown()
    (tmp_path / "stockade").mkdir(exist_ok=True)
    (tmp_path / "stockade/config.toml").write_text(text)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


def test_openssl_reads_the_key_and_names_it_alike(stockade_home: Path) -> None:
    openssl = need_program("openssl")
    append(stockade_home)
    (key,) = keys.known(str(stockade_home))
    private = stockade_home / "keys" / keys.SIGNING
    of_private = subprocess.run([openssl, "pkey", "-in", private, "-pubout"], capture_output=True, check=True)
    assert of_private.stdout == Path(key.path).read_bytes()
    der = subprocess.run(
        [openssl, "pkey", "-pubin", "-in", key.path, "-outform", "DER"], capture_output=True, check=True
    ).stdout
    assert digest(der) == key.id


def test_a_process_that_has_the_old_key_uses_the_new_one(stockade_home: Path) -> None:
    append(stockade_home)
    pid = os.fork()
    if not pid:
        code = 1
        try:
            log(stockade_home).rotate()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    assert append(stockade_home).predicate.key == keys.find(str(stockade_home), "").id


def test_what_signs_receipts_is_shown_to_no_program(
    stockade_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, links = tmp_path / "place", tmp_path / "links"
    (place / "inner").mkdir(parents=True)
    (place / "beside").mkdir()
    links.mkdir()
    second, word = place / "inner/second.pem", place / "inner/word"
    second.write_bytes(ed25519.private_pem(SEED))
    word.write_text("secret\n")
    (links / "second.pem").symlink_to(second)
    for file in (second, word):
        file.chmod(0o600)
    assert stockade.run(["cat", str(second)], Policy(read=[str(place)])).stdout == second.read_bytes()
    for setting, shown in (("cosign", links / "second.pem"), ("passphrase_file", word)):
        config(tmp_path, monkeypatch, f'[receipts]\n{setting} = "{shown}"\n')
        real = os.path.realpath(shown)
        for policy in (
            Policy(read=[str(place)]),
            Policy(write=[str(place)]),
            Policy(read=[real]),
            Policy(workspace=str(place)),
            Policy(write=[str(shown.parent)]),
        ):
            with pytest.raises(PolicyError, match=r"under \[receipts\]") as caught:
                stockade.run(["cat", real], policy)
            assert "move that file" in caught.value.hint
        assert stockade.run(["true"], Policy(read=[str(place / "beside")])).ok
