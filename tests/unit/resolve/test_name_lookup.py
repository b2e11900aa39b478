"""The /etc/resolv.conf of a sandbox with network rules: our server, the host's search domains."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stockade.resolve.name_lookup import resolv_conf


def made_from(tmp_path: Path, text: str) -> list[str]:
    file = tmp_path / "resolv.conf"
    file.write_text(text)
    return resolv_conf(str(file)).decode().splitlines()


def test_the_servers_of_the_host_are_not_named(tmp_path: Path) -> None:
    assert made_from(tmp_path, "nameserver 10.0.0.53\nnameserver 10.0.0.54\n") == [
        "nameserver 198.18.0.1",
        "options timeout:5 attempts:2",
    ]


def test_search_domains_and_ndots_are_kept(tmp_path: Path) -> None:
    lines = made_from(tmp_path, "domain a.example\nsearch corp.example. b.example\noptions ndots:2 rotate\n")
    assert "search corp.example b.example" in lines
    assert lines[-1] == "options timeout:5 attempts:2 ndots:2"


@pytest.mark.parametrize(
    "line",
    [
        "search $(reboot)",
        "search a..b",
        "search \x1b[2J",
        "search " + "a" * 300,
        "options ndots:x",
        "options ndots:" + "9" * 9,
    ],
)
def test_what_makes_no_sense_is_left_out(tmp_path: Path, line: str) -> None:
    assert made_from(tmp_path, f"{line}\n") == ["nameserver 198.18.0.1", "options timeout:5 attempts:2"]


def test_the_length_is_bounded(tmp_path: Path) -> None:
    lines = made_from(
        tmp_path, "search " + " ".join(f"d{number}.{'x' * 60}.example" for number in range(20)) + "\n"
    )
    assert len(lines[1]) <= 256 + len("search ")
    many = made_from(tmp_path, "search " + " ".join(f"d{number}" for number in range(20)) + "\n")
    assert many[1] == "search d0 d1 d2 d3 d4 d5"


def test_a_file_that_is_missing_or_blocks_changes_nothing(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for name in ("missing", "fifo"):
        assert resolv_conf(str(tmp_path / name)).startswith(b"nameserver 198.18.0.1\noptions ")
