"""The changes of a workspace with what a reader needs to judge each without its content."""

from __future__ import annotations

import stat
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from stockade.workspace.diff.layer_walk import FileStat, Kind, PathDifference

if TYPE_CHECKING:
    from stockade.workspace.holdback.screening import Screening, Verdict

#: Differs if a run wrote or replaced a path of the layer.
Mark = tuple[int, int]


class ChangeDetail(msgspec.Struct, frozen=True, gc=False):
    """One change: its size, whether it is a link, and what a commit or the next command does with it."""

    path: str
    kind: Kind
    size: int = 0
    link: bool = False
    directory: bool = False
    #: Why a commit holds it back: the reason in one word, and in words.
    held: str = ""
    why: str = ""
    #: How it runs at the user's next command.
    runs: str = ""


def details(
    found: Sequence[PathDifference], verdicts: Sequence[Verdict], screening: Screening
) -> Iterator[ChangeDetail]:
    """Yield the detail of each change."""
    for one, verdict in zip(found, verdicts, strict=True):
        after = one.after
        mode = 0 if after is None else after.st_mode
        yield ChangeDetail(
            one.path or ".",
            one.kind,
            size=after.st_size if after is not None and stat.S_ISREG(mode) else 0,
            link=stat.S_ISLNK(mode),
            directory=stat.S_ISDIR(mode),
            held=verdict[0] if verdict else "",
            why=verdict[1] if verdict else "",
            runs="" if verdict else screening.runs(one),
        )


def mark(after: FileStat | None) -> Mark:
    """Return the mark of a path of the layer. That of a directory does not depend on its entries."""
    if after is None:
        return (0, 0)
    return (after.st_ino, after.st_mode if stat.S_ISDIR(after.st_mode) else after.st_ctime_ns)
