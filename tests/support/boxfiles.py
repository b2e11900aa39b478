"""The files of a living sandbox, asked of its gate as the library does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stockade import Policy, Sandbox
from stockade.workspace.files.file_info import Listing
from stockade.workspace.files.files import Files


@contextlib.contextmanager
def files_of(box: Sandbox) -> Iterator[Files]:
    """Its files, which outlive it until the statement ends."""
    files = box.files
    try:
        yield files
    finally:
        files.close()


@contextlib.contextmanager
def sandbox(
    workspace: Path | None = None, mode: str = "overlay", **policy: Any
) -> Iterator[tuple[Sandbox, Files]]:
    if workspace is not None:
        policy["workspace"] = {"path": str(workspace), "mode": mode}
        policy.setdefault("protect", [])
    with Sandbox(Policy(**policy)) as box, files_of(box) as files:
        yield box, files


def sh(box: Sandbox, script: str) -> str:
    result = box.run(["sh", "-c", script])
    assert result.ok, result.stderr
    return result.text


def names(found: Listing) -> list[str]:
    return [info.path.rpartition("/")[2] for info in found]
