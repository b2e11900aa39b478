"""What a diff costs grows with the change, not with the tree."""

from __future__ import annotations

import os
import time
from pathlib import Path

from stockade import Workspace
from support.trees import changed

RATIO = 2.0
SMALL, LARGE = 100, 100_000


def planted(place: Path, files: int) -> Workspace:
    """A workspace with ten changes in a tree of so many files."""
    for number in range(files):
        if number % 100 == 0:
            directory = place / f"{number // 10_000}" / f"{number // 100}"
            directory.mkdir(parents=True)
        (directory / f"{number}").symlink_to("x") if number % 10 else (directory / f"{number}").write_text(
            "1\n"
        )
    script = (
        "for i in 10 20 30 40 50; do echo x >> 0/0/$i; done; rm 0/0/60 0/0/70; echo new > n; chmod 600 0/0/80"
    )
    return changed(place, script + "; mkdir d")


def quickest(workspace: Workspace) -> float:
    times = []
    for _ in range(15):
        began = time.perf_counter()
        found = workspace.diff()
        times.append(time.perf_counter() - began)
        assert len(found.files) == 10
    return min(times)


def test_ten_changes_in_a_large_tree_cost_at_most_twice_those_in_a_small_one(tmp_path: Path) -> None:
    places = [tmp_path / "small", tmp_path / "large"]
    for place in places:
        place.mkdir()
    small, large = (planted(place, files) for place, files in zip(places, (SMALL, LARGE), strict=True))
    base = quickest(small)
    ratio = quickest(large) / base
    if ratio > RATIO:  # once more: another program may have been busy
        ratio = quickest(large) / quickest(small)
    assert ratio <= RATIO, f"{ratio:.2f} times {base * 1000:.2f} ms"
    assert sum(len(files) for _, _, files in os.walk(places[1])) == LARGE
