"""Handlers that are agents: sandboxed under their own policy; without walls only by a recorded decision."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import sqlite3
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

import stockade
from stockade import PolicyError, ReceiptError, TimeoutError, cli
from stockade.agents import handler, registry
from stockade.receipt import chain, keys
from stockade.receipt.statement import Receipt
from stockade.receipt.verify import check_log
from support.agent_handlers import (
    Keeper,
    adder,
    counter,
    dripping,
    failing,
    hurried,
    later,
    leaver,
    other,
    patient,
    sleeper,
    talker,
    waiter,
)
from support.made_receipts import log, public


@pytest.fixture(autouse=True)
def elsewhere(workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No policy of the caller's own, and no project."""
    monkeypatch.chdir(workspace)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


def last(home: Path) -> Receipt:
    return log(home).find("last")


async def gathered(values: AsyncIterator[Any]) -> list[Any]:
    return [value async for value in values]


CALLS: dict[str, Callable[[], Any]] = {
    "adder": lambda: adder(1, 2)[1],
    "counter": lambda: next(value for value in [*counter(3)]),
    "waiter": lambda: asyncio.run(waiter(4))[1],
    "later": lambda: asyncio.run(gathered(later(3)))[0],
}


@pytest.mark.parametrize("name", CALLS)
def test_every_kind_of_handler_is_sandboxed_until_it_is_switched_off(stockade_home: Path, name: str) -> None:
    home = str(stockade_home)
    assert CALLS[name]() != os.getpid()
    receipt = stockade.verify(
        last(stockade_home), public(stockade_home), require=["files", "network.none", "processes"]
    )
    assert (receipt.predicate.who.agent, receipt.predicate.backend) == (name, "native")

    registry.switch(home, name, enabled=False, reason="a test")
    assert CALLS[name]() == os.getpid()
    bare = last(stockade_home).predicate
    assert (bare.who.agent, bare.backend, bare.policy, bare.ending.outcome) == (name, "none", "", "exited")
    assert {one.mechanism for one in bare.controls.values()} == {"none"}
    with pytest.raises(ReceiptError, match="not enforced in full: absent, by none"):
        stockade.verify(last(stockade_home), public(stockade_home), require=["files"])
    with pytest.raises(ReceiptError) as refused:
        stockade.verify(last(stockade_home), public(stockade_home), policy=stockade.Policy())
    assert refused.value.failure == "policy"

    assert check_log(log(stockade_home), {one.id: one.public for one in keys.known(home)}) == 5


def test_switching_one_off_leaves_the_others_sandboxed(
    stockade_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also one whose name begins with that name, and one of the same category."""
    for name in ("adder", "neighbour"):
        registry.add(str(stockade_home), name, "math")
    assert cli.main(["agents", "disable", "adder", "--reason", "a test"]) == 0
    assert adder(1, 2) == (3, os.getpid())
    assert cli.main(["verify", "last"]) == 0
    assert "it ran without a sandbox" in capsys.readouterr().out
    assert other(1, 2)[1] != os.getpid()
    assert registry.get(str(stockade_home), "neighbour").enabled
    assert cli.main(["agents", "enable", "adder"]) == 0
    assert adder(1, 2)[1] != os.getpid()


def test_what_cannot_be_read_is_not_run(stockade_home: Path) -> None:
    """Not even without a sandbox, for an agent whose is off."""
    registry.add(str(stockade_home), "adder", "math")
    registry.switch(str(stockade_home), "adder", enabled=False, reason="a test")
    count = len(log(stockade_home).rows())
    chain.shutdown()
    with contextlib.closing(sqlite3.connect(stockade_home / chain.FILE)) as connection, connection:
        connection.execute("UPDATE agents SET place = 1")
    with pytest.raises(ReceiptError, match="the registry is damaged"):
        adder(1)
    with contextlib.closing(sqlite3.connect(stockade_home / chain.FILE)) as connection, connection:
        connection.execute("DROP TABLE agents")
    with pytest.raises(ReceiptError):
        adder(1)
    assert len(log(stockade_home).rows()) == count
    chain.shutdown()
    (stockade_home / chain.FILE).write_bytes(b"nothing that SQLite knows" * 400)
    for name in ("-wal", "-shm"):
        (stockade_home / f"{chain.FILE}{name}").unlink(missing_ok=True)
    with pytest.raises(ReceiptError):
        adder(1)


def test_a_bare_handler_that_is_killed_was_recorded_and_else_does_not_run(
    stockade_home: Path, tmp_path: Path
) -> None:
    registry.add(str(stockade_home), "leaver")
    registry.switch(str(stockade_home), "leaver", enabled=False, reason="a test")
    ran = tmp_path / "ran"

    def leaves() -> int:
        pid = os.fork()
        if not pid:
            with contextlib.suppress(ReceiptError):
                leaver(str(ran))
            os._exit(9)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    assert leaves() == 0 and ran.exists()
    said = last(stockade_home).predicate
    assert (said.who.agent, said.who.action) == ("leaver", "agent-unwalled")
    assert "leaver: switched off: receipt 2" in said.who.words
    ran.unlink()
    (stockade_home / "keys/signing.pem").write_text("no key")
    assert leaves() == 9 and not ran.exists()


def test_a_failure_of_a_bare_handler_is_in_its_receipt(stockade_home: Path) -> None:
    for name in ("failing", "counter"):
        registry.add(str(stockade_home), name)
    registry.switch(str(stockade_home), "failing", enabled=False, reason="a test")
    with pytest.raises(FileNotFoundError):
        failing("/no/such/file")
    said = last(stockade_home).predicate
    assert (said.ending.exit_code, said.ending.error) == (1, "FileNotFoundError")
    registry.switch(str(stockade_home), "counter", enabled=False, reason="a test")
    values = counter(3)
    next(values)
    values.close()  # type: ignore[attr-defined]
    assert last(stockade_home).predicate.ending.outcome == "cancelled"


def test_a_generator_that_is_let_go_of_ends_at_once(stockade_home: Path) -> None:
    """Without a collector of garbage, which would end its parts in any order."""
    values = counter(100_000_000)  # it would not be done by itself before
    next(iter(values))
    gc.disable()
    try:
        del values
        assert last(stockade_home).predicate.ending.outcome == "cancelled"
    finally:
        gc.enable()


def test_an_agent_cannot_reach_the_registry(stockade_home: Path) -> None:
    """Outside it could write there; inside, the state is not there."""
    registry.add(str(stockade_home), "failing")
    with open(stockade_home / chain.FILE, "r+b") as file:
        assert file.read(6) == b"SQLite"
    with pytest.raises(FileNotFoundError):
        failing(str(stockade_home / chain.FILE))


def test_a_large_result_and_a_method_come_back(stockade_home: Path) -> None:
    assert talker(3_000_000) == "x" * 3_000_000
    assert Keeper().times(4) == 12 and Keeper.thrice(4) == 12


def test_a_killed_call_says_so_under_its_own_policy(stockade_home: Path, tmp_path: Path) -> None:
    """Its receipt is that of this call: how it ended, and the policy that was in force for it."""
    file = tmp_path / "sleeper.toml"
    file.write_text('limits = { wall = "500ms" }\n')
    registry.add(str(stockade_home), "sleeper", policy=str(file))
    with pytest.raises(TimeoutError):
        sleeper()
    own = stockade.Policy(limits={"wall": 0.5})
    receipt = stockade.verify(last(stockade_home), public(stockade_home), policy=own)
    assert receipt.predicate.ending.outcome == "timed-out" and receipt.predicate.ending.exit_code == 124
    file.write_text('net = "open"\n')
    with pytest.raises(PolicyError, match="has changed since it became"):
        sleeper()


def test_a_call_has_half_a_minute_unless_the_handler_or_the_policy_says_otherwise(
    stockade_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert handler.TIMEOUT == 30
    monkeypatch.setattr(handler, "TIMEOUT", 0.5)
    for call in (sleeper, lambda: list(dripping())):
        with pytest.raises(TimeoutError, match=r"ended after 0\.5 s, its time limit") as caught:
            call()
        assert "timeout=" in caught.value.hint
        assert last(stockade_home).predicate.ending.outcome == "timed-out"
    patient(1.5)
    file = tmp_path / "patient.toml"
    file.write_text('limits = { wall = "1s" }\n')
    registry.add(str(stockade_home), "patient", policy=str(file))
    with pytest.raises(TimeoutError, match="ended after 1 s"):
        patient(600)
    # A limit that the policy writes decides alone, unless the handler has a shorter one.
    monkeypatch.setattr(handler, "TIMEOUT", 0.001)
    file.write_text('limits = { wall = "1m" }\n')
    registry.add(str(stockade_home), "adder", "math", policy=str(file))
    assert adder(1, 2)[0] == 3
    registry.add(str(stockade_home), "hurried", policy=str(file))
    with pytest.raises(TimeoutError, match=r"ended after 0\.5 s"):
        hurried()


def test_two_agents_never_share_a_name(stockade_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handler, "_handlers", dict(handler._handlers))
    with pytest.raises(PolicyError, match="cannot have it too"):
        stockade.agent("adder")(gathered)
    with pytest.raises(PolicyError, match="is a lambda"):
        stockade.agent("nobody")(lambda: None)
    with pytest.raises(PolicyError, match="is not a valid name"):
        stockade.agent("no/name")(gathered)
    with pytest.raises(PolicyError, match="the registry decides it by the agent's name"):
        stockade.agent("adder", policy=stockade.Policy())
    registry.add(str(stockade_home), "adder", "letters")
    with pytest.raises(PolicyError, match="with the category 'letters', not 'math'"):
        adder(1)
