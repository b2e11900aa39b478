"""Workspaces: the directory a run works in, and the layer that receives its changes."""

from __future__ import annotations

from stockade.lazy import loader

TYPE_CHECKING = False
if TYPE_CHECKING:
    from stockade.workspace.commit import Commit, Note
    from stockade.workspace.diff.diff import Diff, FileDiff
    from stockade.workspace.files.async_files import AsyncFiles
    from stockade.workspace.files.file_info import FileInfo, Listing
    from stockade.workspace.files.files import Files
    from stockade.workspace.holdback.holdback import HoldBack
    from stockade.workspace.snapshots import Snapshot

__all__ = [
    "AsyncFiles",
    "Commit",
    "Diff",
    "FileDiff",
    "FileInfo",
    "Files",
    "HoldBack",
    "Listing",
    "Note",
    "Snapshot",
]

#: Public names and their modules, which load on first use.
_LAZY = {
    "AsyncFiles": "stockade.workspace.files.async_files",
    "Commit": "stockade.workspace.commit",
    "Diff": "stockade.workspace.diff.diff",
    "FileDiff": "stockade.workspace.diff.diff",
    "FileInfo": "stockade.workspace.files.file_info",
    "Files": "stockade.workspace.files.files",
    "HoldBack": "stockade.workspace.holdback.holdback",
    "Listing": "stockade.workspace.files.file_info",
    "Note": "stockade.workspace.commit",
    "Snapshot": "stockade.workspace.snapshots",
}

if not TYPE_CHECKING:  # otherwise type checkers would believe that every name exists
    __getattr__ = loader(__name__, _LAZY)
