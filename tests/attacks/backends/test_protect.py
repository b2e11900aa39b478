"""Protected paths in a writable workspace: neither written, nor created, nor moved out of the way."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from attacks.arena import inside, outside
from stockade import PolicyError
from stockade.policy.model import PROTECT as PROTECTED

PROTECT = [".git/hooks", ".git/config", ".envrc"]


@pytest.fixture
def project(workspace: Path) -> Path:
    (workspace / ".git" / "hooks").mkdir(parents=True)
    (workspace / ".git" / "config").write_text("original\n")
    (workspace / ".envrc").write_text("original\n")
    return workspace


def rw(project: Path) -> dict[str, Any]:
    return {"workspace": {"path": str(project), "mode": "rw"}, "protect": PROTECT}


@pytest.mark.parametrize("path", [".git/config", ".envrc", ".git/hooks"])
def test_a_protected_path_cannot_be_changed(project: Path, path: str) -> None:
    verdict = inside("files", "chmod,utime,setxattr,rename,truncate", project / path, **rw(project))
    assert set(verdict.values()) <= {"EROFS", "EBUSY", "EISDIR"}, verdict
    assert outside("files", "chmod,utime", project / path) == {"chmod": "ok", "utime": "ok"}


def test_nothing_can_be_put_into_a_protected_directory(project: Path) -> None:
    hook = project / ".git" / "hooks" / "pre-commit"
    assert inside("files", "create,mkdir", hook, **rw(project)) == {"create": "EROFS", "mkdir": "EROFS"}
    assert not hook.exists()
    assert outside("files", "create", hook) == {"create": "ok"}


def test_the_directory_above_a_protected_path_cannot_be_moved_out_of_the_way(project: Path) -> None:
    """A directory that only contains mount points can be renamed, and another made in its place."""
    verdict = inside("files", "rename", project / ".git", **rw(project))
    assert verdict["rename"] in ("EBUSY", "EROFS", "EACCES", "EXDEV")
    assert (project / ".git" / "config").read_text() == "original\n"
    assert outside("files", "rename", project / ".git") == {"rename": "ok"}


def test_a_protected_path_that_is_absent_is_refused_before_the_start(workspace: Path) -> None:
    with pytest.raises(PolicyError, match=r"\.envrc"):
        inside("files", "create", workspace / ".envrc", **rw(workspace))
    assert list(workspace.iterdir()) == []
    assert outside("files", "create", workspace / ".envrc") == {"create": "ok"}


def test_a_repository_that_is_protected_by_name_and_absent_is_refused_as_well(workspace: Path) -> None:
    with pytest.raises(PolicyError, match=r"(?m)/\.git$"):
        inside("files", "create", workspace / "x", **rw(workspace) | {"protect": [".git"]})


SETTINGS = [".git/hooks/pre-commit", ".git/config", ".envrc", ".vscode/tasks.json", ".claude/settings.json"]
ABSENT = [
    ".git/hooks/post-checkout",
    ".vscode/settings.json",
    ".claude/settings.local.json",
    ".claude/agents",
]


@pytest.fixture
def configured(workspace: Path) -> Path:
    """Everything that the default protects is there."""
    for name in SETTINGS:
        (workspace / name).parent.mkdir(parents=True, exist_ok=True)
        (workspace / name).write_text("original\n")
    return workspace


def contents(directory: Path) -> dict[str, str]:
    return {str(p.relative_to(directory)): p.read_text() for p in directory.rglob("*") if p.is_file()}


@pytest.mark.parametrize("name", SETTINGS)
def test_what_the_host_would_execute_cannot_be_written_by_default(configured: Path, name: str) -> None:
    before = contents(configured)
    rule = {"path": str(configured), "mode": "rw"}
    ways = "write,truncate,unlink,rename,chmod"
    verdict = inside("files", ways, configured / name, workspace=rule)
    assert set(verdict.values()) <= {"EROFS", "EBUSY"}, verdict
    (configured / "mine").write_text("mine\n")
    moved = inside("files", "move", configured / "mine", configured / name, workspace=rule)
    assert moved["move"] in ("EXDEV", "EBUSY", "EROFS")
    (configured / "mine").unlink()
    assert contents(configured) == before
    assert outside("files", "write,chmod", configured / name) == {"write": "ok", "chmod": "ok"}


@pytest.mark.parametrize("name", ABSENT)
def test_what_the_host_would_execute_cannot_be_created_by_default(configured: Path, name: str) -> None:
    before = contents(configured)
    verdict = inside(
        "files", "create,mkdir", configured / name, workspace={"path": str(configured), "mode": "rw"}
    )
    assert verdict == {"create": "EROFS", "mkdir": "EROFS"}
    assert contents(configured) == before
    assert outside("files", "create", configured / name) == {"create": "ok"}


@pytest.mark.parametrize("name", [name for name in PROTECTED if not name.startswith(".git/")])
def test_an_absent_path_is_refused_by_its_name_and_leaves_no_placeholder(configured: Path, name: str) -> None:
    path = configured / name
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    before = sorted(configured.rglob("*"))
    with pytest.raises(PolicyError) as caught:
        inside("files", "create", path, workspace={"path": str(configured), "mode": "rw"})
    assert str(path) in caught.value.message and "overlay" in caught.value.hint
    assert sorted(configured.rglob("*")) == before


@pytest.mark.parametrize("name", [*SETTINGS, *ABSENT])
def test_in_an_overlay_nothing_of_it_reaches_the_host(configured: Path, name: str) -> None:
    before = sorted(configured.rglob("*"))
    verdict = inside("files", "write", configured / name, workspace=str(configured))
    assert verdict == {"write": "ok"}
    assert sorted(configured.rglob("*")) == before
    assert set(contents(configured).values()) == {"original\n"}
