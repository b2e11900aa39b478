"""Answers about files: what mounts, `deny`, `protect`, `exec` and Landlock let a program do with a path."""

from __future__ import annotations

import errno
import os
import stat

import msgspec

from stockade import state
from stockade.backends.plan_parts import DEVICES
from stockade.controls import Control
from stockade.errors import typed
from stockade.linux.path_lookup import covers, plain
from stockade.linux.quiet_lookup import QuietLookup, look_quietly, remote_devices
from stockade.observe import dangers
from stockade.observe.access import Access, Action
from stockade.observe.answer_values import Answer, PolicyChange
from stockade.observe.view import Kind, Place, Walls
from stockade.policy.values import literal, quote, quote_protected, show
from stockade.resolve.config_files import NAMES as PROJECT_POLICIES
from stockade.resolve.resolution import ungrantable

SHOWN = (Kind.READ, Kind.WRITE, Kind.OVERLAY)
CHANGING = (Action.WRITE, Action.CREATE, Action.REMOVE, Action.RENAME)
#: Actions on the entry of a directory, not on what a link leads to.
ON_ENTRIES = (Action.CREATE, Action.REMOVE, Action.RENAME)
#: Errors that a mount, Landlock or a mask gives, besides ENOENT.
REFUSALS = (errno.EROFS, errno.EACCES, errno.EPERM, errno.EBUSY)
MISSING = (errno.ENOENT, errno.ENOTDIR)


class _PathRefusal(msgspec.Struct, frozen=True):
    """Why a wall refuses a path."""

    wall: Control
    clause: str
    reason: str
    change: PolicyChange | None = None
    #: Whether the program sees no such file, instead of one that it may not use.
    unseen: bool = False


def answer_file(access: Access, walls: Walls) -> Answer:
    """Answer whether a program may do something with a path."""
    if access.action is Action.RENAME:
        return _answer_rename(access, walls)
    path = plain(access.target)
    looked = _look(path, walls, follow=access.action not in ON_ENTRIES)
    refusal = _refusal(access.action, path, looked, walls)
    if not access.error:
        return _answer(access, refusal, _granted(path, looked, walls))
    if refusal is None and access.error in MISSING:
        refusal = _missed(access.action, path, looked, walls)
    if refusal is not None and _is_by_wall(access, refusal, path, looked, walls):
        return _answer(access, refusal)
    return _ordinary(access, path, looked, walls)


def answer_socket(access: Access, walls: Walls) -> Answer:
    """Answer whether a program may connect to a socket with a name."""
    name = access.target.removeprefix("unix:")
    if not name.startswith("/"):
        shares = walls.resolved.policy.net == "open"
        reason = "abstract sockets of the host are out of reach"
        if access.error == errno.ECONNREFUSED or not access.error:
            return (
                _answer(access, _PathRefusal(Control.IPC, "default", reason))
                if shares or not access.error
                else (_plain(access, Control.IPC, "no program inside listens on this abstract socket"))
            )
        return _answer(access, _PathRefusal(Control.IPC, "default", reason))
    path = plain(name)
    looked = _look(path, walls, follow=True)
    place = walls.at(looked.name)
    if walls.alone:
        return _answer(
            access, _PathRefusal(Control.IPC, "default", "without namespaces no named socket can be used")
        )
    if access.action is Action.BIND:
        as_file = msgspec.structs.replace(access, action=Action.CREATE, target=path)
        return msgspec.structs.replace(answer_file(as_file, walls), access=access)
    if place.kind is Kind.READ and Control.IPC not in walls.resolved.policy.accept and looked.exists:
        danger = dangers.of_reading(looked.name, walls.resolved) or dangers.SOCKETS
        change = PolicyChange(toml='accept = ["ipc"]', danger=danger)
        reason = f"sockets in what is shown read-only cannot be reached: {path}"
        if access.error in (0, errno.ECONNREFUSED, *REFUSALS):
            return _answer(access, _PathRefusal(Control.IPC, "accept", reason, change))
    if place.kind in (Kind.ABSENT, Kind.PRIVATE, Kind.HIDDEN):
        as_file = msgspec.structs.replace(access, action=Action.READ, target=path)
        found = answer_file(as_file, walls)
        return msgspec.structs.replace(found, access=access)
    return _plain(access, Control.IPC, "no wall stands before this socket")


def _look(path: str, walls: Walls, *, follow: bool) -> QuietLookup:
    if walls.resolved.environment is not None:
        # The host's files are not those inside, and its answer would tell a client which files exist.
        return QuietLookup(path, None)
    return look_quietly(path, remote_devices(), follow=follow)


def _place(path: str, looked: QuietLookup, walls: Walls) -> Place:
    """Return what is at a path inside, past the links that the sandbox shows too."""
    place = walls.at(path)
    if place.kind not in SHOWN or looked.name == path:
        return place
    return walls.at(looked.name)


def _refusal(action: Action, path: str, looked: QuietLookup, walls: Walls) -> _PathRefusal | None:
    place = _place(path, looked, walls)
    if place.kind is Kind.HIDDEN:
        return _hidden(action, path, place, walls)
    if place.kind is Kind.ABSENT or (place.kind is Kind.WAY and action in CHANGING):
        return _not_shown(action, path, looked, walls)
    if action in CHANGING:
        return _unwritable(action, path, place, looked, walls)
    unseen = looked.exists or dangers.is_secret(path, walls.resolved)
    if place.kind is Kind.PRIVATE and path != place.tree and unseen:
        return _private(path, place, looked, walls)
    if place.tree == "/dev" and path != "/dev" and path.split("/")[2] not in _DEV_NAMES:
        return _PathRefusal(Control.DEVICES, "default", f"the sandbox has no {path}", unseen=True)
    return _not_listed(path, looked, walls) if action is Action.EXECUTE else None


_DEV_NAMES = frozenset((*DEVICES, "fd", "ptmx", "pts", "shm", "stderr", "stdin", "stdout", "console"))


def _hidden(action: Action, path: str, place: Place, walls: Walls) -> _PathRefusal | None:
    resolved = walls.resolved
    workspace = resolved.workspace
    in_overlay = workspace is not None and workspace.access == "overlay" and covers(workspace.path, path)
    if action in CHANGING and in_overlay:
        return None  # the program makes a file of its own there
    written = resolved.hidden.written[place.tree]
    if written not in resolved.policy.deny:
        reason = f"Stockade hides {place.tree}, which may hold credentials of the install around it"
        return _PathRefusal(Control.DENY, "default", reason, unseen=True)
    change = PolicyChange(remove=place.clause, danger=dangers.of_reading(path, resolved))
    return _PathRefusal(Control.DENY, place.clause, f"{place.clause} hides {path}", change, unseen=True)


def _not_shown(action: Action, path: str, looked: QuietLookup, walls: Walls) -> _PathRefusal:
    where = path if looked.name == path or looked.exists is not True else f"{path} ({looked.name})"
    seen = "no clause of the policy grants" if walls.alone else "the policy does not show"
    reason = f"{seen} {where}"
    if action in CHANGING:
        return _PathRefusal(
            Control.FILES, "write", f"{reason} for writing", _write(action, looked, walls), True
        )
    change, never = _read(path, looked, walls)
    return _PathRefusal(Control.FILES, "read", f"{reason}: {never}" if never else reason, change, True)


def _missed(action: Action, path: str, looked: QuietLookup, walls: Walls) -> _PathRefusal | None:
    """Return why a change failed in a private directory that lacks what the host has at its path."""
    place = walls.at(path)
    above = os.path.dirname(path)
    if place.kind is not Kind.PRIVATE or action not in CHANGING or walls.is_there(above):
        return None
    change = _write(action, looked, walls)
    return msgspec.structs.replace(_private(path, place, looked, walls), clause="write", change=change)


def _private(path: str, place: Place, looked: QuietLookup, walls: Walls) -> _PathRefusal:
    change, never = _read(path, looked, walls)
    what = "the home inside" if place.tree == walls.home else f"{place.tree} inside"
    reason = f"{what} is private and empty at first: the policy does not show the host's {path}"
    return _PathRefusal(
        Control.FILES, "read", f"{reason}, and {never}" if never else reason, change, unseen=True
    )


def _unwritable(
    action: Action, path: str, place: Place, looked: QuietLookup, walls: Walls
) -> _PathRefusal | None:
    if place.kind is Kind.MADE:
        name = path.removeprefix("/dev/")
        if place.tree == "/dev" and (name in _DEV_NAMES or name.startswith(("fd/", "pts/"))):
            return None
        return _PathRefusal(Control.FILES, "default", f"{place.tree} is made for the sandbox and read-only")
    if place.kind in (Kind.WRITE, Kind.OVERLAY):
        return _protected(path, walls)
    if place.kind is Kind.PRIVATE:
        return None
    workspace = walls.resolved.workspace
    if workspace is not None and place.tree == workspace.path:
        change = PolicyChange(toml='workspace.mode = "overlay"', flag="--mode overlay")
        return _PathRefusal(
            Control.FILES, 'workspace.mode = "ro"', f"the workspace is read-only: {place.tree}", change
        )
    reason = f"{place.tree} is read-only inside"
    return _PathRefusal(Control.FILES, place.clause, reason, _write(action, looked, walls))


def _protected(path: str, walls: Walls) -> _PathRefusal | None:
    kept, clause = walls.protected_by(path)
    if not kept:
        return None
    reason = f"{kept} is protected: a tool of the host runs or obeys it"
    workspace = walls.resolved.workspace
    if os.path.basename(kept) in PROJECT_POLICIES:
        return _PathRefusal(
            Control.PROTECT, clause, f"{kept} decides the policy of the next run, so no run may change it"
        )
    inner = workspace is not None and covers(workspace.path, kept)
    name = os.path.relpath(kept, workspace.path) if workspace is not None and inner else kept
    word = quote_protected(name)
    change = PolicyChange(
        toml=f"unprotect = [{quote(word)}]", flag=f"--unprotect {typed(word)}", danger=dangers.UNPROTECT
    )
    return _PathRefusal(Control.PROTECT, clause, reason, change)


def _not_listed(path: str, looked: QuietLookup, walls: Walls) -> _PathRefusal | None:
    """Return the refusal of a program that `exec` does not list."""
    resolved = walls.resolved
    if resolved.programs is None:
        return None
    from stockade.resolve.paths.programs import loaders

    listed = [*loaders(), *(file for found in resolved.programs.values() for file in found.files)]
    trees = [tree for found in resolved.programs.values() for tree in found.trees]
    if looked.name in listed or any(covers(tree, looked.name) for tree in trees):
        return None
    clause = f"exec = {show(resolved.policy.exec)}"
    place = walls.at(looked.name)
    if place.kind is not Kind.READ:
        reason = f"with `exec` in the policy, nothing that is writable inside can be executed: {path}"
        return _PathRefusal(Control.EXEC, clause, reason)
    written = [*(resolved.policy.exec or ()), literal(looked.name)]
    change = PolicyChange(toml=f"exec = [{', '.join(map(quote, written))}]")
    return _PathRefusal(Control.EXEC, clause, f"the policy's `exec` does not list {looked.name}", change)


def _read(path: str, looked: QuietLookup, walls: Walls) -> tuple[PolicyChange | None, str]:
    """Return the change that shows a path of the host, or why none can."""
    resolved = walls.resolved
    if resolved.environment is not None:
        return None, ""
    if dangers.is_secret(path, resolved):
        # The same words whether it exists or not.
        written = f"{literal(path)}?"
    elif looked.exists is not True:
        return None, ""
    else:
        path, written = looked.name, literal(looked.name)
        home = state.state_dir(resolved.caller.environ, resolved.caller.home)
        if never := ungrantable(path, "read", resolved.caller, home):
            return None, never
    danger = dangers.of_reading(path, resolved)
    change = PolicyChange(toml=f"read = [{quote(written)}]", flag=f"--read {typed(written)}", danger=danger)
    return change, ""


def _write(action: Action, looked: QuietLookup, walls: Walls) -> PolicyChange | None:
    """Return the change that makes a path of the host writable; None if none can."""
    resolved = walls.resolved
    if resolved.environment is not None or looked.exists is None:
        return None
    path = looked.name if action is Action.WRITE and looked.exists else os.path.dirname(looked.name)
    if not os.access(path, os.W_OK, effective_ids=True):
        return None  # the host refuses it too
    home = state.state_dir(resolved.caller.environ, resolved.caller.home)
    if ungrantable(path, "write", resolved.caller, home):
        return None
    return PolicyChange(
        toml=f"write = [{quote(literal(path))}]",
        flag=f"--write {typed(literal(path))}",
        danger=dangers.of_writing(path, resolved),
    )


def _is_by_wall(access: Access, refusal: _PathRefusal, path: str, looked: QuietLookup, walls: Walls) -> bool:
    """Whether the error that the program got is one that this wall gives."""
    if access.error in MISSING:
        if not refusal.unseen or walls.alone:
            return False
        if dangers.is_secret(path, walls.resolved):
            return True  # whether it exists stays unsaid
        if walls.resolved.environment is not None:
            return False
        if access.action is Action.CREATE:
            above = look_quietly(os.path.dirname(path), remote_devices())
            return above.exists is not False
        return looked.exists is not False
    if access.error not in REFUSALS:
        return False
    # The kernel looks at the mode of a file before it looks at a read-only mount.
    by_mode = access.error == errno.EACCES and not refusal.unseen and refusal.wall is Control.FILES
    of_host = not walls.alone and (looked.exists or walls.at(path).kind is not Kind.MADE)
    return not (by_mode and of_host and _host_refuses(access.action, looked))


def _host_refuses(action: Action, looked: QuietLookup) -> bool:
    """Whether the mode of a file refuses the user on the host too."""
    if looked.exists is None:
        return False
    path = looked.name if looked.exists and action not in ON_ENTRIES else os.path.dirname(looked.name)
    return not os.access(path, os.W_OK, effective_ids=True)


def _ordinary(access: Access, path: str, looked: QuietLookup, walls: Walls) -> Answer:
    """Answer about an error that no clause explains: an ordinary one, or that of root without its rights."""
    resolved = walls.resolved
    by_rights = access.error in (errno.EACCES, errno.EPERM)
    shown = _place(path, looked, walls).kind in (*SHOWN, Kind.PRIVATE)
    if by_rights and shown and resolved.caller.uid == 0 and looked.exists and resolved.environment is None:
        reason = f"no program inside has the privileges of root, and the mode of {path} refuses it without"
        return _answer(access, _PathRefusal(Control.PRIVILEGES, "default", reason))
    words = os.strerror(access.error)
    return _plain(access, Control.FILES, f"no wall refused it: {words} is the ordinary answer here")


def _answer_rename(access: Access, walls: Walls) -> Answer:
    """Answer about a new name: both must be writable, and in the same mount."""
    names = [plain(access.target), plain(access.other or access.target)]
    looked = [_look(name, walls, follow=False) for name in names]
    for name, found in zip(names, looked, strict=True):
        refusal = _refusal(Action.RENAME, name, found, walls)
        if refusal is None:
            continue
        if not access.error or (
            access.error != errno.EXDEV and _is_by_wall(access, refusal, name, found, walls)
        ):
            return _answer(access, refusal)
    places = [walls.at(name) for name in names]
    across = _across(names, looked, places, walls) if access.error in (0, errno.EXDEV) else None
    if across is not None:
        return _answer(access, across)
    if access.error:
        return _ordinary(access, names[0], looked[0], walls)
    return _plain(access, Control.FILES, _granted(names[0], looked[0], walls)[1])


def _across(
    names: list[str], looked: list[QuietLookup], places: list[Place], walls: Walls
) -> _PathRefusal | None:
    """Return the refusal of a rename that an overlay or the border of two mounts does not allow."""
    if all(place.kind is Kind.OVERLAY for place in places):
        if looked[0].exists is False or not stat.S_ISDIR(looked[0].mode):
            return None
        reason = (
            "in an overlay the kernel cannot rename a directory that exists on the host: "
            "programs that copy instead, such as mv, can"
        )
        change: PolicyChange | None = PolicyChange(
            toml='workspace.mode = "rw"', flag="--mode rw", danger=dangers.REAL_CHANGES
        )
        if any(covers(places[0].tree, name) for name in walls.resolved.denied):
            change = None  # in mode rw nothing in the workspace can stay hidden
        return _PathRefusal(Control.WORKSPACE_OVERLAY, 'workspace.mode = "overlay"', reason, change)
    if places[0].tree == places[1].tree:
        return None
    reason = f"{names[0]} and {names[1]} are in different mounts inside, and no rename leads across"
    return _PathRefusal(Control.FILES, "default", reason)


def _granted(path: str, looked: QuietLookup, walls: Walls) -> tuple[str, str]:
    """Return the clause that allows an access, and why it does, in words."""
    place = _place(path, looked, walls)
    words = {
        Kind.READ: f"the policy shows {place.tree} read-only",
        Kind.WRITE: f"{place.tree} is shown, and writable for real",
        Kind.OVERLAY: f"{place.tree} is the workspace: changes are kept aside",
        Kind.PRIVATE: f"{place.tree} is private to the sandbox: empty at first, and gone with it",
        Kind.MADE: f"{place.tree} is made for the sandbox",
        Kind.WAY: "it is a directory on the way to what the policy shows",
        Kind.HIDDEN: "the program makes a file of its own there, and the host's stays hidden",
        Kind.ABSENT: "",
    }
    return place.clause or "default", words[place.kind]


def _answer(
    access: Access, refusal: _PathRefusal | None, granted: tuple[str, str] = ("default", "")
) -> Answer:
    if refusal is None:
        return Answer(
            access=access, allowed=True, wall=Control.FILES.value, clause=granted[0], reason=granted[1]
        )
    return Answer(
        access=access,
        allowed=False,
        wall=refusal.wall.value,
        clause=refusal.clause,
        reason=refusal.reason,
        change=refusal.change,
    )


def _plain(access: Access, wall: Control, reason: str) -> Answer:
    return Answer(access=access, allowed=True, wall=wall.value, clause="default", reason=reason)
