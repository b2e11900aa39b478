"""Reviews: what `stockade diff` has shown of a workspace, and where. A commit applies only what was shown.

They are kept in the layer and go with it. A review counts for the session
(a terminal, say) that it was shown in: one shell does not review for another.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Sequence

import msgspec

from stockade.linux import dirwalk
from stockade.workspace import metadata

FILE = "reviews"
#: How many sessions' reviews to keep.
MOST = 16
#: No file of ours is larger.
LARGEST = 1 << 20


class Review(msgspec.Struct, frozen=True, kw_only=True):
    """What `stockade diff` showed last in one session."""

    session: int
    shown: float
    digest: str
    """Of the workspace as it was; empty if a sandbox was using it and may have changed it meanwhile."""
    paths: tuple[bytes, ...] | None = None
    """The paths at and below which changes were shown; None for all."""

    def covers(self, paths: Sequence[str] | None) -> bool:
        """Return whether the review showed all changes at and below the paths."""
        if self.paths is None:
            return True
        shown = {os.fsdecode(path) for path in self.paths}
        return paths is not None and all(shown & {path, *dirwalk.parents(path)} for path in paths)


def known(layer: str) -> list[Review]:
    """Return every review of a layer, the latest first."""
    try:
        with open(f"{layer}/{FILE}", "rb") as file:
            return _decode(file.read(LARGEST))
    except FileNotFoundError:
        return []


def latest(reviews: Sequence[Review]) -> Review | None:
    """Return the review that counts in this session: its own, or else the latest of any."""
    return next((one for one in reviews if one.session == os.getsid(0)), reviews[0] if reviews else None)


def remember(layer: str, digest: str, paths: Sequence[str] | None) -> None:
    """Record what this session has shown; partial reviews of one state add up."""
    with metadata.keeping_mtime(layer):
        file = os.open(f"{layer}/{FILE}", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        session = os.getsid(0)
        reviews = _decode(os.pread(file, LARGEST, 0))
        shown = None if paths is None or "" in paths else {os.fsencode(path) for path in paths}
        for one in reviews:
            if one.session == session and one.digest == digest and shown is not None:
                shown = None if one.paths is None else shown.union(one.paths)
        new = Review(
            session=session,
            shown=time.time(),
            digest=digest,
            paths=None if shown is None else tuple(sorted(shown)),
        )
        others = [one for one in reviews if one.session != session]
        # If this is interrupted, the file is invalid and counts as no review.
        os.ftruncate(file, 0)
        os.pwrite(file, msgspec.json.encode([new, *others[: MOST - 1]]), 0)
    finally:
        os.close(file)


def _decode(data: bytes) -> list[Review]:
    try:
        return msgspec.json.decode(data, type=list[Review])
    except msgspec.MsgspecError:
        return []  # interrupted while it was written: counts as no review
