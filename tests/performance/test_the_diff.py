"""What a diff costs grows with the change, not with the tree; and what lies deep costs little more."""

from __future__ import annotations

import os
import time
from pathlib import Path

from stockade import Workspace
from support.trees import changed

RATIO = 2.0
SMALL, LARGE = 100, 100_000
#: Files that lie so deep take so many times the processor time of those that lie beside as many directories.
DEEP_RATIO = 8.0
DEPTH, FILES = 900, 1000


def planted(place: Path, files: int) -> Workspace:
    """A workspace with ten changes in a tree of so many files."""
    for number in range(files):
        if number % 100 == 0:
            directory = f"{place}/{number // 10_000}/{number // 100}"
            os.makedirs(directory)
        name = f"{directory}/{number}"
        if number % 10 == 0:
            with open(name, "w") as file:
                file.write("1\n")
        else:  # another name of a file is made and removed sooner than another file
            os.link(f"{directory}/{number // 100 * 100}", name)
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


MAKE_FILES = """
import os, sys
depth, files, nested = map(int, sys.argv[1:])
for number in range(depth):
    os.mkdir(f"d{number}")
    if nested:
        os.chdir(f"d{number}")
for number in range(files):
    with open(f"f{number}", "w") as file:
        file.write("x")
"""


def processor_time(place: Path, *, nested: bool) -> tuple[float, float]:
    """What a diff, and then a commit, of files takes that lie below or beside directories."""
    place.mkdir()
    workspace = changed(place, MAKE_FILES, f"{DEPTH}", f"{FILES}", f"{nested:d}", python=True)
    times = [time.process_time()]
    assert len(workspace.diff().files) == DEPTH + FILES
    times.append(time.process_time())
    assert len(workspace.commit().changes) == DEPTH + FILES
    times.append(time.process_time())
    return times[1] - times[0], times[2] - times[1]


def test_files_that_lie_deep_cost_little_more_than_those_at_the_top(tmp_path: Path) -> None:
    """A program makes such a tree in a moment; whoever looks at it must not need a minute."""
    flat = processor_time(tmp_path / "flat", nested=False)
    deep = processor_time(tmp_path / "deep", nested=True)
    for what, one, other in zip(("diff", "commit"), flat, deep, strict=True):
        assert other <= DEEP_RATIO * one, f"{what}: {other:.2f} s, {other / one:.1f} times {one:.2f} s"
