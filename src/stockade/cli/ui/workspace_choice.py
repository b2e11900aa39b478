"""Find out which workspace and which paths a command line means.

Without an id it means the workspace of the user's current directory or of one
above it. If there are several, the command lists them and does nothing. A
commit without an id takes what `stockade diff` showed, and refuses if that has
changed.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Sequence

from stockade.cli.ui import output
from stockade.errors import NotFoundError, PolicyError, StockadeError
from stockade.linux import dirwalk
from stockade.sandbox.workspace import Workspace, names, too_much_to_commit
from stockade.state.ids import SHORTENED, matching
from stockade.workspace import reviews

#: How many workspaces an error lists.
LISTED = 20
#: How many paths an error names.
NAMED = 5


def workspace_for(id: str | None, usage: str, *, quiet: bool = False) -> Workspace:
    """Return the workspace with that id; without one, or with @, the only one here.

    `usage` is the command line that an error suggests, with {} for the id.
    """
    if id not in (None, "@"):
        return report_recovery(Workspace.open(id.removeprefix("@")))
    found = _here(usage)
    if len(found) > 1:
        raise _several(found, f"name one: {usage.replace('{}', found[0].id, 1)}")
    return _announce(found[0], quiet=quiet)


def whole_workspaces(words: Sequence[str], command: str, *, quiet: bool = False) -> list[Workspace]:
    """Return every workspace that the words name, or refuse: for a command that takes no paths."""
    for word in words:
        if not _is_id(word):
            raise PolicyError(
                f"{word!r} is a path, but {command} takes only whole workspaces",
                hint=f"`stockade workspaces` lists them; `stockade {command} ID`",
            )
    asked: Sequence[str | None] = words or [None]
    found = [workspace_for(word, f"stockade {command} {{}}", quiet=quiet) for word in asked]
    return list({one.id: one for one in found}.values())


def workspace_and_paths(words: Sequence[str], usage: str) -> tuple[Workspace, list[str]]:
    """Return the workspace and the paths that a command line names, with an id first or without."""
    id, paths = _split(words)
    workspace = workspace_for(id, usage)
    return workspace, [_existing(word, workspace) for word in paths]


def shown_workspace_and_paths(
    words: Sequence[str], *, unseen: bool
) -> tuple[Workspace, list[str], str | None]:
    """Return what to commit, and the digest that the workspace must still have.

    The digest is None if the user named the workspace by id and `stockade diff` never showed it, or if the
    user wants it `unseen`.
    """
    id, words = _split(words)
    named = id not in (None, "@")
    workspace = workspace_for(id, "stockade commit {}") if named or unseen else _shown_here()
    paths = [path_in(word, workspace) for word in words]
    review = reviews.latest(reviews.known(workspace.layer))
    if unseen or (review is None and named):
        return workspace, paths, None
    again = f"`stockade diff {workspace.id}` shows it as it is now"
    if review is None or not review.digest:
        raise PolicyError(
            f"a sandbox was using workspace {workspace.id} when `stockade diff` showed it",
            hint=f"{again}; `stockade commit {workspace.id} --unseen` commits it anyway",
        )
    if not named and not review.covers(workspace.relative(paths or None)):
        paths_shown = review.paths or ()
        shown = ", ".join(output.name(os.fsdecode(path)) for path in paths_shown[:NAMED])
        shown += f" and {len(paths_shown) - NAMED} more" if len(paths_shown) > NAMED else ""
        raise PolicyError(
            f"`stockade diff` showed only {shown} of workspace {workspace.id}",
            hint=f"commit those paths, or look at the rest: `stockade diff {workspace.id}`",
        )
    return workspace, paths, review.digest


def path_in(word: str, workspace: Workspace) -> str:
    """Return the absolute path that a word means, relative to the user's current directory."""
    here = _cwd() or "/"
    full = "/" + os.path.normpath(os.path.join(here, word)).lstrip("/")
    for path in (full, os.path.join(os.path.realpath(os.path.dirname(full)), os.path.basename(full))):
        if word and _is_in(path, workspace.path):
            return path
    hint = f"paths are relative to where you are, {output.name(here)}"
    if not _is_in(here, workspace.path) and not os.path.isabs(word):
        hint += f"; write {output.name(os.path.join(workspace.path, word))}"
    raise PolicyError(
        f"{word!r} is not in {output.name(workspace.path)}, the directory of workspace {workspace.id}",
        hint=hint,
    )


def report_recovery(workspace: Workspace) -> Workspace:
    """Return the same workspace, and print what became of an interrupted commit."""
    if workspace.recovered:
        output.say(f"an interrupted commit of workspace {workspace.id} was {workspace.recovered}")
    return workspace


def _announce(workspace: Workspace, *, quiet: bool = False, more: str = "") -> Workspace:
    workspace.recover()
    if not quiet:
        output.say(f"workspace {workspace.id} of {output.name(workspace.path)}{more}")
    return report_recovery(workspace)


def _cwd() -> str:
    """Return the real path of the current directory; empty if it was deleted."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""


def _is_in(path: str, directory: str) -> bool:
    return path == directory or path.startswith(directory.rstrip("/") + "/")


def is_here(directory: str) -> bool:
    """Return whether the user is in the directory or below it."""
    here = _cwd()
    return bool(here and directory) and _is_in(here, directory)


def _local() -> list[Workspace]:
    """Return the workspaces of the current directory or of one above it, the last changed first."""
    return [one for one in Workspace.list() if is_here(one.path)]


def _here(usage: str) -> list[Workspace]:
    if found := _local():
        return found
    others = Workspace.list()
    if not others:
        raise NotFoundError("no changes are kept", hint="a run that changes its workspace keeps its changes")
    example = usage.replace("{}", "ID", 1)
    raise NotFoundError(
        f"no changes are kept for {output.name(_cwd()) or 'this directory'} or one above it",
        hint=f"`stockade workspaces` lists those of other directories; name one: {example}",
    )


def _shown_here() -> Workspace:
    """Return the workspace that `stockade diff` last showed here, in this terminal or else in any."""
    found = _here("stockade commit {}")
    shown = {one.id: review for one in found if (review := reviews.latest(reviews.known(one.layer)))}
    own = [one for one in found if one.id in shown and shown[one.id].session == os.getsid(0)]
    if own:
        return _announce(max(own, key=lambda one: shown[one.id].shown))
    if len(shown) == 1:
        (only,) = (one for one in found if one.id in shown)
        return _announce(only, more=", which `stockade diff` showed in another terminal")
    first = found[0].id
    if len(found) == 1:
        if cut := found[0].count_changes()[1]:
            raise too_much_to_commit(first, cut)
        raise PolicyError(
            f"workspace {first} of {output.name(found[0].path)} has not been shown yet",
            hint=f"`stockade diff` shows it; `stockade commit {first}` commits it unseen",
        )
    raise _several(
        found, f"`stockade diff {first}` shows one, then `stockade commit` commits it; or name it: "
        f"stockade commit {first}"
    )  # fmt: skip


def _several(found: list[Workspace], hint: str) -> PolicyError:
    rows = [_row(one) for one in found[:LISTED]]
    more = f"\nand {len(found) - LISTED} more" if len(found) > LISTED else ""
    what = f"there are {len(found)} workspaces for this directory or one above it"
    return PolicyError(f"{what}:\n{aligned(rows)}{more}", hint=hint)


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Return the rows as aligned lines, for an error that lists the candidates."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _row(workspace: Workspace) -> list[str]:
    from stockade.cli.ui.formats import age, many

    try:
        count = many(workspace.count_changes()[0], "change")
    except StockadeError:
        count = "unreadable"
    in_use = ", in use" if workspace.in_use() else ""
    old = age(max(0.0, time.time() - workspace.changed))
    return [workspace.id, f"{old} old", count + in_use, output.name(workspace.path)]


def _split(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the id, if the first word is one, and the paths."""
    if not words:
        return None, []
    first, *rest = words
    return (first, rest) if _is_id(first) else (None, list(words))


def _is_id(word: str) -> bool:
    """Whether a word names a workspace; False if it names a path. Raise if it is both or neither."""
    if word.startswith("@"):
        return True
    is_id = bool(matching(word, names()))
    is_path = "/" in word or word in (".", "..") or any(_exists(word, one) for one in _local())
    if is_id and is_path:
        raise PolicyError(
            f"{word!r} is both a path and the id of a workspace, or its beginning",
            hint=f"write @{word} or ./{word}",
        )
    if not is_id and not is_path:
        raise NotFoundError(
            f"{word!r} is neither a workspace nor a path here",
            hint=f"`stockade workspaces` lists workspaces, {SHORTENED}; paths are relative to where you are",
        )
    return is_id


def _existing(word: str, workspace: Workspace) -> str:
    path = path_in(word, workspace)
    if not _exists(word, workspace):
        raise NotFoundError(
            f"workspace {workspace.id} has no {word!r}",
            hint=f"`stockade diff --name-only {workspace.id}` lists what has changed",
        )
    return path


def _exists(word: str, workspace: Workspace) -> bool:
    """Whether the word is a path of the host's tree, or of the changes to it."""
    try:
        path = path_in(word, workspace)
    except PolicyError:
        return False
    if os.path.lexists(path):
        return True
    parent, name = dirwalk.split(os.path.relpath(path, workspace.path))
    with contextlib.suppress(OSError):
        upper = os.open(f"{workspace.layer}/upper", dirwalk.NODE | os.O_DIRECTORY)
        try:
            with dirwalk.reached(upper, parent, own=True) as directory:
                return dirwalk.look(directory, name) is not None
        finally:
            os.close(upper)
    return False


def confirm_removal(question: str, what: str) -> bool:
    """Ask the user to confirm a removal; raise if there is no terminal to ask on."""
    if not sys.stdin.isatty():
        raise PolicyError(f"this removes {what}, and there is no terminal to ask on", hint="add --yes")
    return confirm(question)


def confirm(question: str) -> bool:
    """Ask the user a question; return whether the answer is yes."""
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
