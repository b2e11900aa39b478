"""Tests that need a sandbox. `pytest --stockade` runs others in one; these make their own."""

import os
from pathlib import Path

import pytest

from stockade import Policy, Sandbox


@pytest.fixture
def stockade_policy(tmp_path: Path) -> Policy:
    """The policy of this module's sandboxes."""
    return Policy(workspace=str(tmp_path), limits={"wall": "30s"})


def test_a_tool_changes_only_what_it_should(stockade_sandbox: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "input").write_text("b\na\n")
    stockade_sandbox.run(["sort", "input", "-o", "sorted"]).check()
    assert [change.path for change in stockade_sandbox.workspace.diff()] == ["sorted"]
    assert stockade_sandbox.files.read("sorted") == b"a\nb\n"


@pytest.mark.sandboxed
def test_a_parser_is_given_hostile_input(tmp_path: Path) -> None:
    (tmp_path / "anything").write_text("written in a copy")
    assert os.listdir(os.path.expanduser("~")) == []
