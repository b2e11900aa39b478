"""What `box.files` refuses, as Python programs catch it; and files that the program may not write."""

from __future__ import annotations

import asyncio
import builtins
import errno
import io
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from stockade import AsyncSandbox, DeniedError, Policy
from stockade.errors import StockadeError
from stockade.workspace.files.files import Files
from support.boxfiles import sandbox, sh
from support.means import applies

ACTS: dict[str, tuple[Callable[[Files], object], type[OSError], int, str]] = {
    "read what is missing": (lambda files: files.read("no"), FileNotFoundError, errno.ENOENT, "no"),
    "write below what is missing": (
        lambda files: files.write("no/x", ""),
        FileNotFoundError,
        errno.ENOENT,
        "no/x",
    ),
    "move to what is missing": (
        lambda files: files.move("file", "no/x"),
        FileNotFoundError,
        errno.ENOENT,
        "no/x",
    ),
    "read a directory": (lambda files: files.read("tree"), IsADirectoryError, errno.EISDIR, "tree"),
    "write a directory": (lambda files: files.write("tree", ""), IsADirectoryError, errno.EISDIR, "tree"),
    "list a file": (lambda files: files.list("file"), NotADirectoryError, errno.ENOTDIR, "file"),
    "read below a file": (
        lambda files: files.read("file/x"),
        NotADirectoryError,
        errno.ENOTDIR,
        "file/x",
    ),
    "make a directory again": (lambda files: files.mkdir("tree"), FileExistsError, errno.EEXIST, "tree"),
    "move onto a file": (
        lambda files: files.move("file", "other"),
        FileExistsError,
        errno.EEXIST,
        "other",
    ),
    "read a closed file": (lambda files: files.read("closed"), PermissionError, errno.EACCES, "closed"),
    "remove a full directory": (lambda files: files.remove("tree"), OSError, errno.ENOTEMPTY, "tree"),
}


@pytest.mark.parametrize("act", ACTS)
def test_a_refusal_is_the_builtin_error_with_errno_path_and_hint(workspace: Path, act: str) -> None:
    (workspace / "tree").mkdir()
    for name in ("file", "other", "tree/file", "closed"):
        (workspace / name).write_text("x")
    (workspace / "closed").chmod(0)
    call, kind, number, path = ACTS[act]
    with sandbox(workspace) as (_, files), pytest.raises(kind) as refused:
        call(files)
    error = refused.value
    assert isinstance(error, StockadeError) and error.hint
    assert (error.errno, error.filename) == (number, f"{workspace}/{path}")
    assert str(error).startswith(f"{workspace}/{path}: ")


def test_a_full_disk_is_an_oserror(workspace: Path) -> None:
    with sandbox(workspace, limits={"disk": "1M"}) as (_, files), pytest.raises(OSError) as refused:
        files.write("/tmp/x", b"y" * (2 << 20))
    assert refused.value.errno == errno.ENOSPC


@pytest.mark.parametrize("mode", ["overlay", "rw"])
@pytest.mark.parametrize("act", ["write", "upload", "append", "replace"])
def test_a_file_that_the_program_may_not_write_keeps_its_content(
    workspace: Path, act: str, mode: str
) -> None:
    (workspace / "file").write_text("original")
    (workspace / "file").chmod(0o444)
    with sandbox(workspace, mode) as (box, files):
        acts: dict[str, Callable[[], object]] = {
            "write": lambda: files.write("file", "x"),
            "upload": lambda: files.upload(io.BytesIO(b"x"), "file"),
            "append": lambda: files.append("file", "x"),
            "replace": lambda: files.replace("file", "original", "x"),
        }
        assert "denied" in sh(box, "echo x 2>&1 > file; true")
        with pytest.raises(PermissionError, match="permission denied") as refused:
            acts[act]()
        assert isinstance(refused.value, DeniedError)
        assert "replace=True" in refused.value.hint
        assert files.read("file") == b"original"


@pytest.mark.parametrize("mode", ["overlay", "rw"])
def test_asked_to_replace_it_a_write_puts_a_new_file_in_its_place(workspace: Path, mode: str) -> None:
    (workspace / "file").write_text("original")
    (workspace / "file").chmod(0o444)
    with sandbox(workspace, mode) as (box, files):
        files.write("file", "new", replace=True)
        assert sh(box, "cat file; stat -c ' %a' file") == "new 444\n"
        files.upload(io.BytesIO(b"newer"), "file", replace=True, mode=0o640)
        assert sh(box, "cat file; stat -c ' %a' file") == "newer 640\n"


def test_asked_to_overwrite_it_a_move_replaces_a_file_that_may_not_be_written(workspace: Path) -> None:
    (workspace / "file").write_text("original")
    (workspace / "file").chmod(0o444)
    (workspace / "new").write_text("new")
    with sandbox(workspace) as (box, files):
        files.move("new", "file", overwrite=True)
        assert sh(box, "cat file") == "new"


def test_what_may_not_be_written_is_not_copied_into_the_overlay(workspace: Path) -> None:
    (workspace / "file").write_text("original")
    (workspace / "file").chmod(0o444)
    with sandbox(workspace) as (box, files):
        with pytest.raises(PermissionError):
            files.write("file", "x")
        assert box.workspace is not None
        assert os.listdir(f"{box.workspace.layer}/upper") == []


def test_root_may_not_write_another_users_file_either(workspace: Path) -> None:
    applies(os.geteuid() == 0, "only root can make a file of another user")
    (workspace / "file").write_text("original")
    os.chown(workspace / "file", 12345, 12345)
    (workspace / "file").chmod(0o644)
    with sandbox(workspace) as (_, files):
        with pytest.raises(PermissionError):
            files.write("file", "x")
        files.write("file", "x", replace=True)
        assert files.read("file") == b"x"


def test_async_files_replace_and_refuse_alike(workspace: Path) -> None:
    (workspace / "file").write_text("original")
    (workspace / "file").chmod(0o444)

    async def main() -> None:
        async with AsyncSandbox(Policy(workspace=str(workspace))) as box:
            with pytest.raises(builtins.PermissionError):
                await box.files.write("file", "x")
            await box.files.write("file", "new", replace=True)
            await box.files.upload(io.BytesIO(b"newer"), "file", replace=True)
            assert await box.files.read("file") == b"newer"

    asyncio.run(main())
