"""The registry of agents: a switch for each, recorded in the chain; refused where it cannot be read."""

from __future__ import annotations

import contextlib
import json
import shutil
import sqlite3
import threading
from pathlib import Path

import pytest

from stockade import NotFoundError, PolicyError, ReceiptError, cli
from stockade.agents import policies, registry
from stockade.linux.user import Caller
from stockade.receipt import chain, keys
from stockade.receipt.verify import check_controls, check_log
from support.made_receipts import append, log
from support.paths import ROOT

Captured = pytest.CaptureFixture[str]
FIXTURE = ROOT / "tests/fixtures/receipts"


def whole(home: Path) -> int:
    return check_log(log(home), {key.id: key.public for key in keys.known(str(home))})


def by_hand(home: Path, words: str) -> None:
    """Somebody writes into the file without asking us."""
    chain.shutdown()
    with contextlib.closing(sqlite3.connect(home / chain.FILE)) as connection, connection:
        connection.execute(words)


def test_a_switch_is_one_agent_s_own_and_in_the_chain(stockade_home: Path, capsys: Captured) -> None:
    """Names are compared whole: neither a beginning of one nor another case is the same agent."""
    for name in ("lint", "linter", "Lint", "lint-2"):
        assert cli.main(["agents", "add", name, "--category", "reviewers"]) == 0
    assert cli.main(["agents", "disable", "lint"]) == 125
    assert "needs a reason" in capsys.readouterr().err
    assert cli.main(["agents", "disable", "lint", "--reason", "the driver"]) == 0
    capsys.readouterr()
    assert cli.main(["agents", "--json"]) == 0
    listed = {one["name"]: one["enabled"] for one in json.loads(capsys.readouterr().out)}
    assert listed == {"lint": False, "linter": True, "Lint": True, "lint-2": True}

    said = log(stockade_home).find("last").predicate
    assert (said.who.agent, said.who.action, said.who.words) == ("lint", "agent-disabled", "the driver")
    assert said.event is not None and not said.event.enabled and said.ending.outcome == "recorded"
    with pytest.raises(ReceiptError, match="records agent-disabled, and no run"):
        check_controls(log(stockade_home).find("last"), ["files"])
    assert cli.main(["verify", "last"]) == 0
    assert "and no run" in capsys.readouterr().out

    assert cli.main(["agents", "enable", "lint"]) == 0
    assert cli.main(["agents", "enable", "lint"]) == 0  # nothing more to record
    assert registry.get(str(stockade_home), "lint").enabled
    assert whole(stockade_home) == 6
    assert cli.main(["agents", "remove", "lint"]) == 0
    assert registry.find(str(stockade_home), "lint") is None and whole(stockade_home) == 7
    with pytest.raises(NotFoundError):
        registry.switch(str(stockade_home), "lint", enabled=False, reason="gone")
    assert cli.main(["agents", "show", "linter"]) == 0
    assert "reviewers" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["", "-x", "a b", "a/b", "../a", "a" * 65, "lint\u0435r", "a\n"])
def test_what_is_no_name_is_refused(stockade_home: Path, name: str) -> None:
    with pytest.raises(PolicyError, match="is not a valid name"):
        registry.add(str(stockade_home), name)


@pytest.mark.parametrize(
    "words",
    [
        "UPDATE agents SET enabled = 0",
        "UPDATE agents SET enabled = 2",
        "UPDATE agents SET enabled = 'no'",
        "UPDATE agents SET policy = '/tmp/wide.toml', enabled = 0",
        "UPDATE agents SET place = 1, enabled = 0",
        "UPDATE agents SET place = 99",
        "UPDATE agents SET name = 'coder', category = x'00'",
        "DROP TABLE agents",
    ],
)
def test_a_registry_that_was_tampered_with_switches_nothing_off(stockade_home: Path, words: str) -> None:
    append(stockade_home)
    registry.add(str(stockade_home), "coder")
    by_hand(stockade_home, words)
    with pytest.raises(ReceiptError) as refused:
        registry.get(str(stockade_home), "coder")
    assert refused.value.failure in ("damaged", "not-made")
    with pytest.raises(ReceiptError):  # nor is it made true by writing over it
        registry.add(str(stockade_home), "coder", "reviewers")
    with contextlib.suppress(ReceiptError):
        registry.remove(str(stockade_home), "coder")
        assert registry.find(str(stockade_home), "coder") is None


@pytest.mark.parametrize(
    "words",
    [
        "UPDATE agents SET enabled = 0, place = 2",
        # The triggers let rows be added.
        "INSERT INTO statements SELECT 4, key, signature, payload FROM statements WHERE sequence = 2",
    ],
)
def test_a_decision_that_was_taken_back_does_not_count_again(stockade_home: Path, words: str) -> None:
    home = str(stockade_home)
    registry.add(home, "coder")
    for enabled in (False, True):
        registry.switch(home, "coder", enabled=enabled, reason="a test")
    by_hand(stockade_home, words)
    if "INSERT" in words:
        by_hand(stockade_home, "UPDATE agents SET enabled = 0, place = 4")
    with pytest.raises(ReceiptError) as refused:
        registry.get(home, "coder")
    assert refused.value.failure == "damaged"


def test_words_that_are_not_utf_8_break_nothing(
    stockade_home: Path, tmp_path: Path, capsys: Captured
) -> None:
    assert cli.main(["agents", "add", "coder", "--reason", "\udcff"]) == 0
    assert log(stockade_home).find("last").predicate.who.words == "\ufffd"
    file = tmp_path / "\udcff.toml"
    file.touch()
    assert cli.main(["agents", "add", "other", "-p", str(file)]) == 125
    assert "is not UTF-8" in capsys.readouterr().err


def test_an_event_that_no_key_of_ours_has_signed_switches_nothing_off(stockade_home: Path) -> None:
    home = str(stockade_home)
    registry.add(home, "coder")
    registry.switch(home, "coder", enabled=False, reason="a test")
    by_hand(stockade_home, "DROP TRIGGER statements_UPDATE")
    by_hand(stockade_home, "UPDATE statements SET signature = zeroblob(64) WHERE sequence = 2")
    with pytest.raises(ReceiptError) as refused:
        registry.get(home, "coder")
    assert refused.value.failure == "signature"


def test_without_the_log_there_is_nobody_to_switch_off(stockade_home: Path) -> None:
    """One that is gone makes every agent a sandboxed one; one that cannot be read refuses."""
    home = str(stockade_home)
    registry.add(home, "coder")
    registry.switch(home, "coder", enabled=False, reason="a test")
    chain.shutdown()
    for file in stockade_home.glob(f"{chain.FILE}*"):
        file.rename(stockade_home.parent / file.name)
    assert registry.find(home, "coder") is None
    (stockade_home / chain.FILE).write_bytes(b"not a database" * 400)
    with pytest.raises(ReceiptError):
        registry.find(home, "coder")
    (stockade_home / chain.FILE).unlink()


def test_switches_at_the_same_time_are_all_in_the_chain(stockade_home: Path) -> None:
    home = str(stockade_home)
    registry.add(home, "coder")

    def turn() -> None:
        for number in range(10):
            registry.switch(home, "coder", enabled=bool(number % 2), reason="a test")

    threads = [threading.Thread(target=turn) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    count = whole(stockade_home)
    assert 3 <= count <= 31
    assert registry.get(home, "coder").place == count


def test_a_policy_file_counts_as_it_was(stockade_home: Path, tmp_path: Path) -> None:
    file = tmp_path / "coder.toml"
    file.write_text('limits = { wall = "5s" }\n')
    agent = registry.add(str(stockade_home), "coder", policy=str(file))
    assert policies.policy_for(agent, Caller.current()).policy.limits.wall == 5
    file.write_text('net = "open"\n')
    with pytest.raises(PolicyError, match="has changed since it became"):
        policies.policy_for(agent, Caller.current())
    with pytest.raises(PolicyError):
        registry.add(str(stockade_home), "other", policy=str(tmp_path / "none.toml"))
    assert registry.find(str(stockade_home), "other") is None


def test_a_log_of_the_first_version_is_brought_up_to_date(stockade_home: Path) -> None:
    stockade_home.mkdir(0o700)
    (stockade_home / "keys").mkdir(0o700)
    shutil.copy(FIXTURE / "1.db", stockade_home / chain.FILE)
    for key in FIXTURE.glob("*.pem"):
        shutil.copy(key, stockade_home / "keys")
    assert registry.every(str(stockade_home)) == []
    registry.add(str(stockade_home), "coder")
    assert [row.agent for row in log(stockade_home).rows()] == ["old", "old", "old", "coder"]
    assert whole(stockade_home) == 4
