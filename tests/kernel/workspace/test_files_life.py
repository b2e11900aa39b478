"""`box.files` when a sandbox ends, in threads, and with `await`."""

from __future__ import annotations

import asyncio
import io
import os
import threading
from pathlib import Path

import pytest

from stockade import DeniedError, LimitError, NotFoundError, Policy, Sandbox, SetupError, StockadeError
from stockade.workspace.files import atomic_write
from stockade.workspace.files.async_files import AsyncFiles
from support.boxfiles import files_of, names, sandbox, sh

MODES = ["overlay", "rw"]


@pytest.mark.parametrize("mode", MODES)
def test_the_workspace_can_be_used_after_the_sandbox_has_ended(workspace: Path, mode: str) -> None:
    (workspace / "low").write_text("low")
    box = Sandbox(Policy(workspace={"path": str(workspace), "mode": mode}, protect=[]), on_exit="keep")
    box.open()
    with files_of(box) as files:
        sh(box, "echo x > made; mkdir dir; ln -s /etc/passwd out; ln -s made link; ln -s ../../.. up")
        files.write("/tmp/gone", "x")
        box.close()
        assert files.read("made") == b"x\n" == files.read(str(workspace / "link"))
        files.write("dir/after", "y", parents=True)
        files.write("link", "z")
        assert names(files.list(str(workspace))) == ["dir", "link", "low", "made", "out", "up"]
        assert names(files.search("**/after")) == ["after"]
        assert files.read("made") == b"z"
        for path in ("/tmp/gone", "/etc/passwd", "/", "/proc/0", f"{workspace}/../x", f"{workspace}x"):
            with pytest.raises(StockadeError, match="ended"):
                files.read(path)
            with pytest.raises(StockadeError, match="ended"):
                files.write(f"{path}/new", "x")
        for path in ("out", "up/etc/passwd"):
            with pytest.raises(DeniedError, match="leads out"):
                files.read(path)


def test_a_read_only_workspace_stays_read_only_after_the_end(workspace: Path) -> None:
    (workspace / "file").write_text("original")
    box = Sandbox(Policy(workspace={"path": str(workspace), "mode": "ro"}), on_exit="discard")
    box.open()
    with files_of(box) as files:
        box.close()
        assert files.read("file") == b"original"
        with pytest.raises(DeniedError, match="read-only"):
            files.write("file", "x")
    assert (workspace / "file").read_text() == "original"


def test_closed_files_are_refused_and_calls_under_way_end_first(workspace: Path) -> None:
    with sandbox(workspace) as (_, files):
        started, goes_on = threading.Event(), threading.Event()

        class Slow(io.BytesIO):
            def read(self, size: int | None = -1, /) -> bytes:
                started.set()
                goes_on.wait(10)
                return super().read(size)

        failures: list[BaseException] = []

        def upload() -> None:
            try:
                files.upload(Slow(b"x"), "slow")
            except StockadeError as error:
                failures.append(error)

        thread = threading.Thread(target=upload)
        thread.start()
        started.wait(10)
        files.close()
        goes_on.set()
        thread.join()
        assert [str(failure) for failure in failures] == ["the files of this sandbox are closed"]
        with pytest.raises(SetupError, match="closed"):
            files.read("slow")


def test_many_threads_write_at_once(workspace: Path) -> None:
    with sandbox(workspace) as (_, files):

        def work(number: int) -> None:
            for turn in range(30):
                files.write("shared", f"{number}" * 1000)
                files.write(f"own/{number}/{turn}", "x", parents=True)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(set(files.read("shared"))) == 1
        assert len(files.search("own/*/*")) == 240
        assert names(files.list()) == ["own", "shared"]


def test_a_file_system_without_nameless_files_pretend(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(atomic_write, "_NAMELESS", os.O_RDONLY | os.O_CREAT | os.O_DIRECTORY)
    with sandbox(workspace) as (box, files):
        files.write("x", "1")
        files.write("x", "2", mode=0o640)
        assert sh(box, "cat x; stat -c %a x; ls -A") == "2640\nx\n"
        with pytest.raises(LimitError):
            files.upload(io.BytesIO(b"too much"), "x", limit=1)
        assert sh(box, "ls -A") == "x\n"


def test_the_async_face_does_the_same(workspace: Path, tmp_path: Path) -> None:
    async def main(files: AsyncFiles) -> None:
        await files.mkdir("dir")
        await files.write("dir/x", "a")
        await files.append("dir/x", "b")
        assert await files.replace("dir/x", "b", "c") == 1
        assert await files.read("dir/x") == b"ac"
        await files.chmod("dir/x", 0o600)
        assert (await files.info("dir/x")).mode == 0o600
        await files.move("dir/x", "y")
        assert await files.upload(io.BytesIO(b"zz"), "z") == 2
        assert await files.download("z", tmp_path / "z") == 2
        assert names(await files.list()) == ["dir", "y", "z"]
        assert names(await files.search("?")) == ["y", "z"]
        await files.remove("dir")

    with sandbox(workspace) as (_, files):
        asyncio.run(main(AsyncFiles(files)))
        assert names(files.list()) == ["y", "z"]


def test_another_user_than_the_sandboxs_is_refused_pretend(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with sandbox(workspace) as (_, files):
        monkeypatch.setattr(os, "geteuid", lambda: 4242)
        with pytest.raises(SetupError, match="4242"):
            files.write("x", "x")


def test_what_is_denied_stays_hidden_also_after_the_end(workspace: Path) -> None:
    (workspace / "secret").write_text("x")
    box = Sandbox(Policy(workspace=str(workspace), deny=[str(workspace / "secret")]))
    box.open()
    with files_of(box) as files:
        files.write("kept", b"")
        for _ in range(2):
            with pytest.raises(NotFoundError):
                files.read("secret")
            assert names(files.list()) == ["kept"]
            box.close()


def test_what_was_laid_over_a_host_directory_counts_after_the_end(workspace: Path) -> None:
    (workspace / ".envrc").write_text("original")
    policy = Policy(workspace={"path": str(workspace), "mode": "rw"}, protect=[".envrc"])
    box = Sandbox(policy, on_exit="discard")
    box.open()
    with files_of(box) as files:
        box.close()
        assert files.read(".envrc") == b"original"
        with pytest.raises(DeniedError):
            files.write(".envrc", "x")
