"""Changes that are taken back, combined with the host's, or forgotten."""

from __future__ import annotations

from pathlib import Path

import pytest

import stockade
from stockade import ConflictError, Policy, Workspace

TREE = {
    "src/a.py": "a\n",
    "src/tests/t.py": "t\n",
    "tests/b.py": "b\n",
    "tests/deep/c.py": "c\n",
    "keep": "1\n",
}


def changed(tree: Path, script: str) -> Workspace:
    result = stockade.run(["sh", "-ec", script], Policy(workspace=str(tree))).check()
    return Workspace.open(result.workspace_id)


def inside(workspace: Workspace, tree: Path) -> str:
    script = "find . -type f | sort | while read f; do echo $f $(cat $f); done; find . -type l"
    return stockade.run(["sh", "-c", script], Policy(workspace=str(tree)), resume=workspace).text


def is_test(path: str) -> bool:
    return "tests" in path.split("/")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in TREE.items():
        (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tree" / name).write_text(text)
    return tmp_path / "tree"


@pytest.mark.parametrize(
    "script",
    [
        "echo 2 > keep; echo x > tests/b.py; rm tests/deep/c.py; echo n > tests/n",
        "echo 2 > keep; rm -r tests; ln -s /tmp tests",
        "echo 2 > keep; rm -r tests; echo file > tests",
        "echo 2 > keep; rm -r tests; mkdir tests; echo x > tests/b.py",
        "echo 2 > keep; chmod 700 tests; mv tests t; mv t tests",
        "echo 2 > keep; rm -r src; mkdir -p src/tests; echo a > src/a.py; echo x > src/tests/t.py",
        "echo 2 > keep; rm -r src; echo file > src",
        "echo 2 > keep; mv src other; rm -r other",
    ],
)
def test_a_path_is_as_the_host_has_it_whatever_was_done_there_or_above(tree: Path, script: str) -> None:
    workspace = changed(tree, script)
    before = {change.path for change in workspace.changes()}
    taken = {change.path for change in workspace.revert(is_test)}
    assert taken and taken < before and "keep" not in taken
    lines = inside(workspace, tree).splitlines()
    assert lines == [
        "./keep 2", "./src/a.py a", "./src/tests/t.py t", "./tests/b.py b", "./tests/deep/c.py c",
    ]  # fmt: skip
    assert not any(is_test(change.path) for change in workspace.changes())
    workspace.discard()


def test_nothing_to_take_back_changes_nothing(tree: Path) -> None:
    workspace = changed(tree, "echo 2 > keep")
    assert workspace.revert(is_test) == [] and [one.path for one in workspace.changes()] == ["keep"]
    workspace.discard()


def test_a_rebase_combines_both_sides_and_leaves_the_host_alone(tree: Path) -> None:
    lines = "".join(f"{n}\n" for n in range(20))
    (tree / "keep").write_text(lines)
    workspace = changed(tree, "sed -i s/^3$/three/ keep")
    (tree / "keep").write_text(lines.replace("17\n", "seventeen\n"))
    assert workspace.rebase() == ["keep"] and "three" not in (tree / "keep").read_text()
    assert "three" in (text := inside(workspace, tree)) and "seventeen" in text
    (tree / "keep").write_text(lines.replace("3\n", "drei\n"))
    with pytest.raises(ConflictError):
        workspace.rebase()
    workspace.discard()


def test_what_was_committed_is_forgotten_so_that_later_changes_are_the_hosts(tree: Path) -> None:
    workspace = changed(tree, "echo 2 > keep; echo home > pyvenv.cfg")
    assert [change.path for change in workspace.commit()] == ["keep"]
    workspace.compact()
    (tree / "keep").write_text("3\n")
    assert [change.path for change in workspace.changes()] == ["pyvenv.cfg"]
    workspace.discard()
