"""What a run changed, as `stockade run` reports it at the end, and how to go on from there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from stockade.cli.ui import output
from stockade.cli.ui.change_list import change_lines, folds
from stockade.errors import StockadeError
from stockade.result import Change, Result

if TYPE_CHECKING:
    from stockade.workspace.diff.change_details import ChangeDetail, Mark

#: With more changes than this, the report does not ask what a commit would hold back: it takes too long.
MOST_SCREENED = 20_000


def report_lines(
    result: Result,
    *,
    discarded: bool,
    verbose: bool,
    count: int = 0,
    earlier: Mapping[str, Mark] | None = None,
) -> Iterator[str]:
    """Yield the lines about a run whose workspace has changes.

    `count` is the number of changes, if the result has only some of them. `earlier` are the marks of the
    changes that a continued workspace had before: then only those of this run are listed.
    """
    total = max(count, len(result.changes))
    kept = bool(result.workspace_id) and not discarded and result.committed is None
    changes: Sequence[Change] = result.changes
    undone = 0
    if earlier is not None and kept and not result.changes_cut:
        changes, undone = _of_this_run(result, earlier)
    own = len(changes) if changes is not result.changes else total
    yield _headline(result, own, total, undone, discarded=discarded)
    listed: Sequence[Change | ChangeDetail] = changes
    if unscreened := kept and bool(changes) and (verbose or folds(changes)):
        wanted = None if changes is result.changes else changes
        found = _details(result.workspace_id, wanted) if total <= MOST_SCREENED else []
        listed, unscreened = found or changes, not found
    yield from change_lines(listed, own, whole=verbose)
    if unscreened:
        yield "a commit may hold some of them back: `stockade diff` shows which, and why"
    if result.changes_cut:
        yield f"the list of changes is cut: {output.name(result.changes_cut)}"


def _headline(result: Result, own: int, total: int, undone: int, *, discarded: bool) -> str:
    more = "more than " if result.changes_cut else ""
    many = f"{more}{own} changed path{'s' if own != 1 else ''}"
    if result.committed is not None:
        return f"{many}, {len(result.committed.changes)} committed to your files"
    if discarded:
        return f"{many} discarded"
    if own == total and not undone:
        return f"{many} kept aside, your files are unchanged"
    back = f", {undone} earlier one{'s' if undone != 1 else ''} undone" if undone else ""
    this = f"{many} in this run{back}" if own or undone else "this run changed nothing"
    return f"{this}; the workspace keeps {total} aside, your files are unchanged"


def _of_this_run(result: Result, earlier: Mapping[str, Mark]) -> tuple[Sequence[Change], int]:
    """Return the changes that this run made, and how many earlier ones it undid."""
    from stockade.sandbox.workspace import Workspace, marks_of

    with contextlib.suppress(StockadeError, OSError):
        now = marks_of(Workspace.open(result.workspace_id))
        own = [one for one in result.changes if now.get(one.path) != earlier.get(one.path)]
        return own, len(earlier.keys() - now.keys())
    return result.changes, 0


def _details(workspace: str, wanted: Sequence[Change] | None) -> list[ChangeDetail]:
    """Return the details of the wanted changes, or of all; nothing if they cannot be read."""
    from stockade.sandbox.workspace import Workspace, details_of

    with contextlib.suppress(StockadeError, OSError):
        found = details_of(Workspace.open(workspace))
        if wanted is None:
            return found
        paths = {one.path for one in wanted}
        return [one for one in found if one.path in paths]
    return []


def next_steps(result: Result, *, continued: bool) -> Iterator[str]:
    """Yield what to type about changes that are kept; a user who `continued` them knows how to do so."""
    id, part = result.workspace_id, " PATH" if result.changes_cut else ""
    yield f"`stockade diff {id}` {'shows those that are listed' if part else 'shows them'}"
    yield f"`stockade commit {id}{part}` applies {'some' if part else 'them'} to your files"
    yield f"`stockade discard {id}` deletes them"
    if not continued:
        from stockade import state
        from stockade.cli.ui.kept_hint import continuing
        from stockade.linux.user import Caller

        caller = Caller.current()
        again = continuing(id, state.state_dir(caller.environ, caller.home))
        yield f"`stockade run {again} -- COMMAND` goes on from here; without -w the next run starts over"
