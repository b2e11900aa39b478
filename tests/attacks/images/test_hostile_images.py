"""Archives and directories that were made to write elsewhere, to fill the disk, or to hang an import."""

from __future__ import annotations

import gzip
import io
import os
import struct
import tarfile
from pathlib import Path

import pytest

from stockade.backends.private_mounts import image_layout
from stockade.errors import SetupError
from stockade.images import store
from stockade.images.tree_writer import ImageError
from support.roots import archive, entry


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A directory that an import must not touch."""
    place = tmp_path / "outside"
    place.mkdir()
    (place / "file").write_text("before")
    return place


def refused(source: str, home: Path, match: str) -> None:
    with pytest.raises(ImageError, match=match):
        store.import_image(source, "hostile")
    assert os.listdir(home / "images") == []


def test_the_control_python_would_write_there(tmp_path: Path, outside: Path) -> None:
    path = archive(tmp_path / "a.tar", [entry("l", tarfile.SYMTYPE, str(outside)), (entry("l/new"), b"x")])
    with tarfile.open(path) as opened:
        opened.extractall(
            tmp_path / "target", **({"filter": "fully_trusted"} if hasattr(tarfile, "data_filter") else {})
        )
    assert (outside / "new").exists()


@pytest.mark.parametrize("name", ["../escaped", "a/../../escaped", "..", "./../x"])
def test_names_that_lead_upwards(tmp_path: Path, stockade_home: Path, name: str) -> None:
    refused(archive(tmp_path / "a.tar", [(entry(name), b"x")]), stockade_home, "leads out")


def test_absolute_names(tmp_path: Path, stockade_home: Path, outside: Path) -> None:
    refused(archive(tmp_path / "a.tar", [(entry(f"{outside}/new"), b"x")]), stockade_home, "not a path below")
    assert not (outside / "new").exists()


@pytest.mark.parametrize("kind", ["file", "directory", "link", "hard link", "below"])
def test_a_link_that_was_made_before(tmp_path: Path, stockade_home: Path, outside: Path, kind: str) -> None:
    through = {
        "file": (entry("l/new"), b"x"),
        "directory": entry("l/new", tarfile.DIRTYPE),
        "link": entry("l/new", tarfile.SYMTYPE, "x"),
        "hard link": entry("new", tarfile.LNKTYPE, "l/file"),
        "below": (entry("l/a/b/new"), b"x"),
    }[kind]
    refused(
        archive(tmp_path / "a.tar", [entry("l", tarfile.SYMTYPE, str(outside)), through]),
        stockade_home,
        "through a link",
    )
    assert [one.name for one in outside.iterdir()] == ["file"]


def test_links_through_links(tmp_path: Path, stockade_home: Path, outside: Path) -> None:
    steps = [
        entry("a", tarfile.SYMTYPE, "b"),
        entry("b", tarfile.SYMTYPE, "../" * 12 + str(outside)[1:]),
        (entry("a/new"), b"x"),
    ]
    refused(archive(tmp_path / "a.tar", steps), stockade_home, "through a link")
    assert not (outside / "new").exists()


def test_a_file_that_takes_the_place_of_a_link_replaces_the_link(tmp_path: Path, outside: Path) -> None:
    steps = [entry("l", tarfile.SYMTYPE, f"{outside}/file"), (entry("l"), b"new")]
    image = store.import_image(archive(tmp_path / "a.tar", steps), "a")
    assert (outside / "file").read_text() == "before"
    assert Path(f"{image.root}/l").read_text() == "new"


def test_a_directory_that_takes_the_place_of_a_link(
    tmp_path: Path, stockade_home: Path, outside: Path
) -> None:
    mode = outside.stat().st_mode
    steps = [entry("l", tarfile.SYMTYPE, str(outside)), entry("l", tarfile.DIRTYPE, mode=0o777)]
    refused(archive(tmp_path / "a.tar", steps), stockade_home, "through a link")
    assert outside.stat().st_mode == mode


@pytest.mark.parametrize("target", ["/etc/passwd", "../../../../etc/passwd"])
def test_hard_links_to_files_outside(tmp_path: Path, stockade_home: Path, target: str) -> None:
    refused(
        archive(tmp_path / "a.tar", [entry("l", tarfile.LNKTYPE, target)]),
        stockade_home,
        "below the root|leads out",
    )


def test_a_hard_link_to_a_symbolic_link(tmp_path: Path, stockade_home: Path, outside: Path) -> None:
    steps = [entry("s", tarfile.SYMTYPE, f"{outside}/file"), entry("h", tarfile.LNKTYPE, "s")]
    refused(archive(tmp_path / "a.tar", steps), stockade_home, "not a file")


def test_a_bomb(tmp_path: Path, stockade_home: Path) -> None:
    with gzip.open(tmp_path / "a.tar.gz", "wb") as packed, tarfile.open(fileobj=packed, mode="w|") as made:
        info = entry("zeros")
        info.size = 64 << 20
        made.addfile(info, io.BytesIO(bytes(info.size)))
    assert (tmp_path / "a.tar.gz").stat().st_size < 1 << 20
    with pytest.raises(ImageError, match="bytes"):
        store.import_image(str(tmp_path / "a.tar.gz"), "a", most_bytes=1 << 20, most_entries=10)
    assert os.listdir(stockade_home / "images") == []


def test_a_sparse_file_counts_with_its_whole_size(tmp_path: Path, stockade_home: Path) -> None:
    info = entry("sparse")
    info.pax_headers = {
        "GNU.sparse.major": "0",
        "GNU.sparse.minor": "1",
        "GNU.sparse.name": "sparse",
        "GNU.sparse.size": str(1 << 40),
        "GNU.sparse.numblocks": "1",
        "GNU.sparse.map": "0,1",
    }
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.PAX_FORMAT) as made:
        info.size = 1
        made.addfile(info, io.BytesIO(b"x"))
    with pytest.raises(ImageError, match="larger than"):
        store.import_image(str(tmp_path / "a.tar"), "a", most_bytes=8 << 20)
    assert os.listdir(stockade_home / "images") == []


def header(kind: bytes, size: int) -> bytes:
    """A header by hand, with a size that no archive of Python's has."""
    info = entry("x", kind)
    info.size = 0
    block = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    block[124:136] = b"\x80\0\0\0" + struct.pack(">Q", size)
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block[:512])
    return bytes(block[:512])


@pytest.mark.parametrize(
    "kind", [tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK]
)
@pytest.mark.parametrize("size", [64 << 20, 1 << 50, (1 << 63) - 1])
def test_headers_of_an_impossible_size(tmp_path: Path, stockade_home: Path, kind: bytes, size: int) -> None:
    (tmp_path / "a.tar").write_bytes(header(kind, size) + bytes(4096))
    refused(str(tmp_path / "a.tar"), stockade_home, "impossible size|damaged")


def test_a_long_chain_of_headers(tmp_path: Path, stockade_home: Path) -> None:
    one = header(tarfile.GNUTYPE_LONGNAME, 512) + b"name".ljust(512, b"\0")
    (tmp_path / "a.tar").write_bytes(one * 3000 + bytes(1024))
    refused(str(tmp_path / "a.tar"), stockade_home, "damaged|impossible")


def test_a_file_that_is_cut_off(tmp_path: Path, stockade_home: Path) -> None:
    path = Path(archive(tmp_path / "a.tar", [(entry("a"), b"x" * 100_000)]))
    path.write_bytes(path.read_bytes()[:50_000])
    refused(str(path), stockade_home, "damaged")


@pytest.mark.parametrize("content", [b"", b"not an archive" * 100, b"\x1f\x8b broken", b"\xfd7zXZ\0 broken"])
def test_what_is_not_an_archive(tmp_path: Path, stockade_home: Path, content: bytes) -> None:
    (tmp_path / "a.tar").write_bytes(content)
    with pytest.raises(SetupError):
        store.import_image(str(tmp_path / "a.tar"), "a")
    assert os.listdir(stockade_home / "images") == []


def test_paths_that_are_too_deep(tmp_path: Path, stockade_home: Path) -> None:
    refused(archive(tmp_path / "a.tar", [(entry("a/" * 400 + "b"), b"x")]), stockade_home, "deep")


def test_a_pipe_is_no_source(tmp_path: Path, stockade_home: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    refused(str(tmp_path / "pipe"), stockade_home, "neither a directory nor a file")


def test_links_pipes_and_sockets_of_a_directory(tmp_path: Path, outside: Path) -> None:
    source = tmp_path / "source"
    (source / "dir").mkdir(parents=True)
    (source / "dir/link").symlink_to(outside)
    (source / "absolute").symlink_to(f"{outside}/file")
    os.mkfifo(source / "pipe")
    image = store.import_image(str(source), "a")
    assert os.readlink(f"{image.root}/dir/link") == str(outside)
    assert image.record.skipped == 1 and image.record.bytes == 0


def test_a_directory_above_the_state_does_not_copy_the_state(tmp_path: Path, stockade_home: Path) -> None:
    (tmp_path / "file").write_text("x")
    image = store.import_image(str(tmp_path), "a")
    assert os.path.exists(f"{image.root}/file") and not os.path.exists(f"{image.root}/state/images")


def test_a_link_in_the_place_of_etc_shows_nothing_of_the_host(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "etc").symlink_to("/etc")
    assert (tmp_path / "etc" / "passwd").exists()  # the control: the link leads to the host's
    assert [shown.path for shown in image_layout(str(tmp_path), (), ())] == ["/bin"]
