"""The state directory that cannot be written, was damaged, or is reached through a link."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import stockade
from stockade import state
from stockade.backends.seccomp import syscalls
from stockade.errors import SetupError
from stockade.resolve import trust

NOBODY = 65534


@contextlib.contextmanager
def as_nobody(*owned: Path) -> Iterator[None]:
    """Without root's right to write everywhere, and the owner of these."""
    if os.geteuid() != 0:
        yield
        return
    for path in owned:
        os.chown(path, NOBODY, -1)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_directory_that_cannot_be_written_is_refused_by_its_real_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o711)
    path = tmp_path / "closed"
    path.mkdir(mode=0o500)
    monkeypatch.chdir(tmp_path)  # the way to it is closed to others
    with as_nobody(path), pytest.raises(SetupError, match="Permission denied") as caught:
        state.ensure("./closed")
    assert caught.value.errno == errno.EACCES


def test_a_umask_that_takes_ones_own_rights_is_told_and_nothing_is_left(tmp_path: Path) -> None:
    before = os.umask(0o777)
    try:
        with pytest.raises(SetupError, match="your umask"):
            state.ensure(str(tmp_path / "state"))
    finally:
        os.umask(before)
    assert not (tmp_path / "state").exists()


def test_a_link_is_followed_once(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("real")
    found = state.state_dir({"STOCKADE_HOME": str(tmp_path / "link")}, "/h")
    assert found == str(tmp_path / "real")


class TestFilter:
    """The compiled filter that is kept for the next start."""

    @pytest.fixture
    def kept(self, stockade_home: Path) -> Path:
        syscalls.program.cache_clear()
        syscalls.program((), (), str(stockade_home))
        syscalls.program.cache_clear()
        (file,) = stockade_home.glob("cache/filter-*.bpf")
        return file

    @pytest.mark.parametrize("left", [0, 1, 12], ids=["nothing", "a byte", "one and a half instructions"])
    def test_what_a_crash_left_of_it_is_compiled_again(self, kept: Path, left: int) -> None:
        whole = kept.read_bytes()
        kept.write_bytes(whole[:left])
        assert stockade.run(["true"]).ok
        assert kept.read_bytes() == whole

    def test_one_that_cannot_be_used_is_a_setup_error(self, kept: Path) -> None:
        kept.unlink()
        kept.mkdir()
        with pytest.raises(SetupError, match=kept.name) as caught:
            stockade.run(["true"])
        assert caught.value.errno == errno.EISDIR


@pytest.mark.parametrize(
    "content",
    [b"\xff" * 64 + b" /x\0", b"a" * 64 + b" /x", b"a" * 64 + b" x\0", b"a" * 63 + b" /x\0", b"\0"],
)
def test_a_damaged_record_of_trust_is_refused(stockade_home: Path, content: bytes) -> None:
    (Path(state.ensure(str(stockade_home))) / "trust").write_bytes(content)
    with pytest.raises(SetupError, match="damaged"):
        trust.recorded(str(stockade_home))
