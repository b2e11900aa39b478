"""The settings of a loop, its state on the disk, and the prompts that it writes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stockade.errors import NotFoundError, PolicyError
from stockade.loop import events
from stockade.loop.events import LoopEvent
from stockade.loop.items.item import WorkItem
from stockade.loop.record import (
    AttemptRecord,
    ItemRecord,
    LoopError,
    LoopRecord,
    file_name,
    find_store,
    is_locked,
    new_store,
    project_lock,
)
from stockade.loop.settings import LoopSettings, make_settings, parse_budgets, parse_settings
from stockade.loop.work.prompt import MOST_FEEDBACK, make_prompt


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"verfiy": "x"}, "loop.verify"),
        ({"attempts": 0}, "attempts = 0"),
        ({"attempts": "3"}, "attempts"),
        ({"agent": "claude"}, "is a list"),
        ({"judge": ["../tests"]}, "not a path in the project"),
        ({"judge": ["."]}, "not a path in the project"),
        ({"budget": {"atempt": {"time": 3}}}, "atempt"),
        ({"budget": {"attempt": 3}}, "must have tables"),
        ({"budget": {"attempt": {"time": "soon"}}}, "soon"),
    ],
)
def test_a_wrong_setting_is_an_error_that_names_it(table: dict[str, Any], words: str) -> None:
    with pytest.raises(PolicyError) as caught:
        parse_settings(table, "stockade.toml")
    assert words in f"{caught.value} {caught.value.hint}"


def test_budgets_are_written_alike_in_a_file_and_on_the_command_line() -> None:
    table = {"attempt": {"time": "30m", "idle": "90s"}, "loop": {"tokens": 1000, "cost": 2.5}}
    flags = parse_budgets(["attempt.time=30m", "attempt.idle=90s", "loop.tokens=1000", "loop.cost=2.5"])
    assert parse_settings({"budget": table}, "x")["budget"] == flags
    assert make_settings({"budget": flags}, "x").budget.attempt.idle == 90
    assert LoopSettings().budget.attempt.time, "an attempt has a time limit whatever is said"


def record(project: str, *items: ItemRecord) -> LoopRecord:
    return LoopRecord(
        id="", project=project, created=1.0, settings=LoopSettings(), policy={}, items=list(items)
    )


def test_the_state_is_written_whole_and_read_back(tmp_path: Path) -> None:
    attempt = AttemptRecord(number=1, round=1, started=1.0, landed=0, outcome="rejected", feedback="\x1b bad")
    made = record(str(tmp_path), ItemRecord(item=WorkItem(id="a", title="A"), attempts=[attempt]))
    store = new_store()
    made.id = store.id
    store.save(made)
    assert store.read() == made and os.listdir(store.path) == ["loop.json"]
    assert find_store(None, str(tmp_path)).id == find_store(store.id[:6], "/").id == store.id
    with pytest.raises(NotFoundError):
        find_store(None, "/elsewhere")
    assert os.stat(store.path).st_mode & 0o077 == os.stat(f"{store.path}/loop.json").st_mode & 0o077 == 0


def test_rounds_count_once_and_waits_and_conflicts_not_at_all() -> None:
    outcomes = ["rejected", "no-change", "rate-limited", "cancelled", "conflict", "surpassed", "crashed"]
    attempts = [
        AttemptRecord(number=n + 1, round=max(1, n), started=0, landed=0, outcome=how)  # type: ignore[arg-type]
        for n, how in enumerate(outcomes)
    ]
    item = ItemRecord(item=WorkItem(id="a", title="A"), attempts=attempts)
    assert item.failures == 2
    item.first = 7
    assert item.failures == 1, "those before a retry do not count"


def test_one_process_at_a_time_has_the_lock_of_a_project(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    with project_lock(str(tmp_path)):
        assert is_locked(str(tmp_path / "link"))
        with pytest.raises(LoopError, match="another loop"), project_lock(str(tmp_path)):
            pass
    assert not is_locked(str(tmp_path))


@pytest.mark.parametrize("id", ["../../x", "a/b", ".", "..", "", "ü\n", "a" * 500, "x\0y"])
def test_an_items_id_makes_a_harmless_file_name(id: str) -> None:
    name = file_name(id)
    assert "/" not in name and "\0" not in name and name.strip(".") and len(name) < 100
    assert file_name("US-3") == "US-3" and file_name("a/b") != file_name("a_b")


def test_requests_are_taken_once_and_in_order(tmp_path: Path) -> None:
    store = new_store()
    store.ask({"do": "skip", "item": "a"})
    store.ask({"do": "retry", "item": "b"})
    assert [one["item"] for one in store.requests()] == ["a", "b"] and store.requests() == []


def test_every_event_has_a_kind_of_its_own_in_json() -> None:
    kinds = [kind for kind in vars(events).values() if isinstance(kind, type) and issubclass(kind, LoopEvent)]
    tags = {kind.__struct_config__.tag for kind in kinds}
    assert len(tags) == len(kinds) > 15 and "attempt-end" in tags
    line = events.AgentLine(time=1.0, item="a", attempt=1, text="x")
    assert msgspec.json.decode(msgspec.json.encode(line))["event"] == "agent-line"


def test_a_prompt_has_the_item_the_judge_and_the_end_of_the_last_failure() -> None:
    item = WorkItem(id="US-1", title="Add it", body="It should add.")
    first = make_prompt(item, "pytest -q", ("tests",), "", "")
    assert (
        "# Add it" in first
        and "It should add." in first
        and "    pytest -q" in first
        and "failed" not in first
    )
    again = make_prompt(item, "pytest -q", ("tests",), "2 tests failed", "x" * 50_000 + "\n# the end")
    assert "2 tests failed" in again and "    # the end" in again and len(again) < MOST_FEEDBACK + 2000
