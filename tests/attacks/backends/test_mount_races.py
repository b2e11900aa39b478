"""What was looked at is shown: a path swapped before it is mounted is refused (CVE-2021-30465)."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import stockade
from attacks.arena import outside
from stockade import Policy, SetupError
from stockade.runs.io.eventloop import Steps
from stockade.runs.launch import LaunchedSandbox, launch
from stockade.runs.prepare import RunPreparation
from stockade.sandbox import sandbox
from stockade.sandbox.sandbox import RunExtras, run_once

LAUNCHES = 50
RENAME_EXCHANGE = 2


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """parent/data is to be granted; evil/data and secret are what an attacker would rather have shown."""
    for name, content in (("parent/data", "original"), ("evil/data", "secret"), ("secret", "secret")):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "file").write_text(content)
    return tmp_path


def by_link(tree: Path) -> None:
    (tree / "parent" / "data").rename(tree / "away")
    (tree / "parent" / "data").symlink_to(tree / "secret")


def by_directory(tree: Path) -> None:
    (tree / "parent" / "data").rename(tree / "away")
    (tree / "secret").rename(tree / "parent" / "data")


def parent_by_link(tree: Path) -> None:
    (tree / "parent").rename(tree / "away")
    (tree / "parent").symlink_to(tree / "evil")


def parent_by_directory(tree: Path) -> None:
    (tree / "parent").rename(tree / "away")
    (tree / "evil").rename(tree / "parent")


def removed(tree: Path) -> None:
    (tree / "parent").rename(tree / "away")


def file_by_link(tree: Path) -> None:
    (tree / "parent" / "data" / "file").unlink()
    (tree / "parent" / "data" / "file").symlink_to(tree / "secret" / "file")


def file_by_file(tree: Path) -> None:
    os.replace(tree / "secret" / "file", tree / "parent" / "data" / "file")


def policy_for(kind: str, path: Path) -> Policy:
    if kind in ("read", "write"):
        return Policy(**{kind: [str(path)]})
    return Policy(workspace={"path": str(path), "mode": kind}, protect=[])


def shown(policy: Policy, file: Path, meanwhile: Callable[[], object]) -> str:
    """What the sandbox shows where something happened after the look at the files and before the walls."""

    def late(prepared: RunPreparation, *rest: Any) -> Steps[LaunchedSandbox]:
        meanwhile()
        return launch(prepared, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sandbox, "launch", late)
        return stockade.run(["cat", str(file)], policy, cwd="/", timeout=10).text


@pytest.mark.parametrize("swap", [by_link, by_directory, parent_by_link, parent_by_directory, removed])
@pytest.mark.parametrize("kind", ["read", "write", "overlay", "ro", "rw"])
def test_a_directory_that_is_swapped_after_it_was_looked_at_is_refused(
    tree: Path, swap: Callable[[Path], None], kind: str
) -> None:
    """The control follows the path once more, as a launcher that trusts names would."""
    data = tree / "parent" / "data"
    with pytest.raises(SetupError):
        shown(policy_for(kind, data), data / "file", lambda: swap(tree))
    expected = "ENOENT" if swap is removed else "secret"
    assert outside("files", "read", data / "file") == {"read": expected}


@pytest.mark.parametrize("swap", [file_by_link, file_by_file])
def test_a_file_that_is_swapped_after_it_was_looked_at_is_refused(
    tree: Path, swap: Callable[[Path], None]
) -> None:
    file = tree / "parent" / "data" / "file"
    with pytest.raises(SetupError):
        shown(policy_for("read", file), file, lambda: swap(tree))
    assert outside("files", "read", file) == {"read": "secret"}


def program_by_link(tools: Path) -> None:
    (tools / "listed").unlink()
    (tools / "listed").symlink_to("/usr/bin/uname")


def directory_by_link(tools: Path) -> None:
    (tools.parent / "other").mkdir()
    (tools.parent / "other" / "listed").symlink_to("/usr/bin/uname")
    tools.rename(tools.parent / "away")
    tools.symlink_to("other")


@pytest.mark.parametrize("listed", ["listed", "*"])
@pytest.mark.parametrize("swap", [program_by_link, directory_by_link])
def test_a_link_in_place_of_a_listed_program_lets_nothing_else_be_executed(
    tmp_path: Path, swap: Callable[[Path], None], listed: str
) -> None:
    """An earlier run that still writes the tree for real could name any program, such as an interpreter."""
    tools = tmp_path / "workspace" / "tools"
    tools.mkdir(parents=True)
    shutil.copy("/usr/bin/true", tools / "listed")
    policy = Policy(
        workspace={"path": str(tools.parent), "mode": "ro"},
        protect=[],
        exec=["/usr/bin/dash", f"{tools}/{listed}"],
    )

    def late(prepared: RunPreparation, *rest: Any) -> Steps[LaunchedSandbox]:
        swap(tools)
        return launch(prepared, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sandbox, "launch", late)
        try:
            result = stockade.run(["/usr/bin/dash", "-c", "/usr/bin/uname"], policy, timeout=10)
        except SetupError as error:
            assert "replaced by a link" in error.hint
        else:  # the directory is listed, and what its links lead to is not
            assert (listed, swap) == ("*", program_by_link)
            assert (result.text, result.exit_code) == ("", 126)
    assert subprocess.check_output([tools / "listed"], text=True).strip() == "Linux"


def test_what_is_not_swapped_is_shown(tree: Path) -> None:
    file = tree / "parent" / "data" / "file"
    assert shown(policy_for("read", file.parent), file, lambda: None) == "original"


def exchange(one: Path, other: Path) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(-100, bytes(one), -100, bytes(other), RENAME_EXCHANGE):
        raise OSError(ctypes.get_errno(), "renameat2")


class Hammer:
    """Swaps two paths as fast as it can, and puts them back at the end."""

    def __init__(self, one: Path, other: Path) -> None:
        self.paths = (one, other)
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.run)

    def run(self) -> None:
        while not self.over.is_set():
            exchange(*self.paths)

    def __enter__(self) -> Hammer:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.thread.join()
        if self.paths[0].is_symlink():
            exchange(*self.paths)


@pytest.fixture(params=["data", "parent"])
def swapped(tree: Path, request: pytest.FixtureRequest) -> tuple[Path, Path]:
    """The granted directory or the one above it, and a link that leads to a secret in its place."""
    target = request.param
    (tree / "decoy").symlink_to(tree / ("secret" if target == "data" else "evil"))
    return (tree / "parent" / "data" if target == "data" else tree / "parent"), tree / "decoy"


@pytest.mark.parametrize("kind", ["read", "overlay"])
def test_under_constant_swapping_only_the_original_is_ever_shown(
    tree: Path, swapped: tuple[Path, Path], kind: str
) -> None:
    """`pinned` says that the path itself is meant: a link in its place is refused, not followed."""
    data = tree / "parent" / "data"
    seen: list[str] = []
    with Hammer(*swapped):
        for _ in range(LAUNCHES):
            try:
                command = ["cat", str(data / "file")]
                seen.append(
                    run_once(command, policy_for(kind, data), {"cwd": "/"}, RunExtras(pinned=True)).text
                )
            except stockade.StockadeError as refusal:
                seen.append(type(refusal).__name__)
    assert set(seen) <= {"original", "SetupError", "PolicyError"}, seen
    assert set(seen) != {"original"}, "the race was none"


@pytest.mark.parametrize("kind", ["read", "overlay"])
def test_swapping_while_the_walls_are_raised_only_the_original_is_ever_shown(
    tree: Path, swapped: tuple[Path, Path], kind: str
) -> None:
    data = tree / "parent" / "data"
    seen: list[str] = []
    for _ in range(LAUNCHES):
        with contextlib.ExitStack() as stack:
            try:
                policy = policy_for(kind, data)
                seen.append(shown(policy, data / "file", lambda: stack.enter_context(Hammer(*swapped))))
            except SetupError as refusal:
                seen.append(type(refusal).__name__)
    assert set(seen) <= {"original", "SetupError"}, seen
    assert "SetupError" in seen, "the race was none"
