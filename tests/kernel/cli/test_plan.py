"""`stockade plan`: what `run` would do, in words and in JSON, without doing it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import stockade
from stockade import Policy, cli
from stockade.gate import operations as ops
from stockade.runs import prepare

STOCKADE = str(Path(sys.executable).with_name("stockade"))


@pytest.fixture
def shown(workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):  # type: ignore[no-untyped-def]
    """What `stockade plan` prints, called in the workspace."""
    monkeypatch.chdir(workspace)

    def call(*arguments: str) -> str:
        assert cli.main(["plan", *arguments]) == 0
        return capsys.readouterr().out

    return call


def compiled(policy: Policy) -> ops.Plan:
    prepared = prepare.prepare(policy, dry=True)
    prepared.close(discard=True)
    return prepared.plan


def test_every_operation_is_told_with_the_clause_it_serves(shown, workspace: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "data").mkdir()
    text = shown("--read", f"{tmp_path}/data", "--limit", "files=99", "--", "make", "check")
    lines = text.splitlines()
    assert any(f"show {tmp_path}/data read-only" in line and "read = " in line for line in lines)
    assert any("limit files to 99" in line and "limits.files = 99" in line for line in lines)
    assert any(f"show {workspace} copy-on-write" in line and "workspace" in line for line in lines)
    assert "then execute: make check" in text
    numbered = [line.split()[0] for line in lines if line[:1].isdigit()]
    assert numbered == [str(number) for number in range(1, len(numbered) + 1)]


def test_in_json_it_has_every_operation_in_words_and_in_values(shown, workspace: Path) -> None:  # type: ignore[no-untyped-def]
    plan = json.loads(shown("--json", "--", "true"))
    assert (plan["backend"], plan["command"]) == ("native", ["true"])
    assert len(plan["hash"]) == 64
    kinds = [op["type"] for op in plan["operations"]]
    assert kinds[0] == "namespaces" and kinds[-1] == "seccomp"
    assert all(op["does"] and op["clause"] for op in plan["operations"])
    (overlay,) = [op for op in plan["operations"] if op["type"] == "overlay"]
    assert overlay["path"] == str(workspace)


def test_it_makes_nothing(shown, stockade_home: Path, workspace: Path) -> None:  # type: ignore[no-untyped-def]
    shown("--", "true")
    shown("--json", "--", "true")
    assert not (stockade_home / "workspaces").exists()
    assert not (stockade_home / "cache").exists()
    assert os.listdir(workspace) == []


def test_what_cannot_be_run_cannot_be_planned(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--read", "/no/such/path", "--", "true"]) == 125
    assert "/no/such/path" in capsys.readouterr().err


def test_it_is_the_plan_that_is_run(shown, workspace: Path) -> None:  # type: ignore[no-untyped-def]
    planned = json.loads(shown("--json", "--", "true"))["hash"]
    assert stockade.run(["true"], Policy(workspace=str(workspace))).plan == planned


def test_the_same_plan_has_the_same_hash_in_every_process(shown, workspace: Path) -> None:  # type: ignore[no-untyped-def]
    here = json.loads(shown("--json", "--", "true"))["hash"]
    done = subprocess.run(
        [STOCKADE, "plan", "--json", "--", "false"],
        cwd=workspace,
        capture_output=True,
        timeout=60,
        check=True,
    )
    assert json.loads(done.stdout)["hash"] == here


def test_where_the_changes_are_kept_does_not_count(workspace: Path) -> None:
    policy = Policy(workspace=str(workspace))
    first = stockade.run(["touch", "x"], policy)
    second = stockade.run(["touch", "x"], policy)
    assert first.workspace_id != second.workspace_id and first.plan == second.plan


def test_the_command_does_not_count() -> None:
    assert stockade.run(["true"]).plan == stockade.run(["false"], env={"A": "b"}).plan


@pytest.mark.parametrize(
    "clauses",
    [
        {"read": ["/usr/share"]},
        {"profile": "dev"},
        {"net": "open"},
        {"limits": {"files": 99}},
        {"syscalls": {"deny": ["chmod"]}},
    ],
    ids=lambda clauses: next(iter(clauses)),
)
def test_another_policy_has_another_plan(clauses: dict[str, object]) -> None:
    assert compiled(Policy(**clauses)).hash != compiled(Policy()).hash  # type: ignore[arg-type]


def test_each_mode_of_a_workspace_has_its_plan(workspace: Path) -> None:
    plans = {
        compiled(Policy(workspace={"path": str(workspace), "mode": mode}, protect=[])).hash
        for mode in ("overlay", "rw", "ro")
    }
    assert len(plans) == 3


def test_control_characters_of_a_path_are_shown_not_sent(shown, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    odd = tmp_path / "a\x1b[2J\nb"
    odd.mkdir()
    text = shown("--read", str(odd), "--", "true")
    assert "\x1b" not in text


def test_a_path_that_is_not_utf8_can_be_planned(shown, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    odd = os.fsencode(tmp_path) + b"/a\xff"
    os.mkdir(odd)
    shown("--read", os.fsdecode(odd), "--", "true")
    shown("--json", "--read", os.fsdecode(odd), "--", "true")


def test_an_option_chooses_the_profile(shown, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "home/.cargo/bin").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert ".cargo" not in shown("--", "true")
    assert 'profile = "dev"' in shown("--profile", "dev", "--", "true")
    assert shown("--profile", "strict", "--", "true") == shown("--", "true")


def test_secrets_are_named_and_not_read(shown, workspace: Path) -> None:  # type: ignore[no-untyped-def]
    found = shown("--secret", "NOT_SET@api.example.com", "--", "true")
    assert "secret NOT_SET: a placeholder inside, and its value only in requests to api.example.com" in found


def test_an_option_takes_the_network_away(shown, workspace: Path) -> None:  # type: ignore[no-untyped-def]
    without = shown("--", "true").splitlines()[-1]
    assert shown("--net", "none", "--", "true").splitlines()[-1] == without
    (workspace / "open.toml").write_text('net = "open"\nworkspace = "."\n')
    (workspace / "none.toml").write_text('net = "none"\nworkspace = "."\n')
    flags = [shown("-p", "open.toml", "--net", "none", "--json", "--", "true")]
    flags.append(shown("-p", "none.toml", "--json", "--", "true"))
    for text in flags:
        first = json.loads(text)["operations"][0]
        assert first["type"] == "namespaces" and "net" in first["does"]
