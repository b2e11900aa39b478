"""Protected paths in a writable workspace: neither written, nor created, nor moved out of the way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from security.arena import inside, outside
from stockade import PolicyError

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
