"""Where Stockade keeps what outlives a run: one private directory per user.

`schema` in it says how it is laid out. An older layout is brought up to date
by the first start that writes there; a newer one is another version's, and is
neither read nor touched.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Mapping

from stockade.errors import SetupError

SCHEMA = 2
#: What can be made again at any time: filters, and what was found out about the machine.
CACHE = "cache"
#: Everything that is kept, by name; whatever else is there is somebody else's. `stockade purge` reads it.
ENTRIES = {
    "workspaces": "changes that are kept aside",
    "output": "output that was too much for memory",
    "runs.log": "what earlier runs did",
    "runs.log.1": "what earlier runs did",
    # In this order: they are of no log without the last.
    "receipts.db-wal": "the signed record of every run",
    "receipts.db-shm": "the signed record of every run",
    "receipts.db": "the signed record of every run",
    "receipts.reserve": "room for a receipt on a full disk",
    "keys": "what signs receipts, and what verifies them",
    "trust": "the policies of projects that you agreed to",
    "run": "the register of living sandboxes",
    "scratch": "the homes of sandboxes without namespaces",
    CACHE: "what can be made again",
    "schema": "how all this is laid out",
}


def state_dir(environ: Mapping[str, str], home: str) -> str:
    """The path of the state directory; whether it exists is another question."""
    if own := environ.get("STOCKADE_HOME"):
        # Links are followed here and once: whoever can change one cannot then lead us away from the
        # directory that was checked.
        return os.path.realpath(own)
    if _borrowed(home):
        return os.path.join(_roots_home(), ".local/state/stockade")
    shared = environ.get("XDG_STATE_HOME", "")
    # The XDG specification has relative paths ignored.
    return os.path.join(shared if shared.startswith("/") else f"{home}/.local/state", "stockade")


def _borrowed(home: str) -> bool:
    """Whether root works with a user's HOME, as under `sudo -E`.

    What root made there the user could neither use nor remove, so root's state is root's own.
    """
    if os.geteuid() != 0:
        return False
    try:
        return os.stat(home).st_uid != 0
    except OSError:
        return False


def _roots_home() -> str:
    import pwd

    try:
        return pwd.getpwuid(0).pw_dir
    except KeyError:
        return "/root"


def check(path: str) -> None:
    """Refuse a state directory that somebody else could have written to or can read, or a newer one."""
    _check_owner(path)
    found = _version(path)
    if found is not None and found > SCHEMA:
        raise _newer(path, found)


def _check_owner(path: str) -> None:
    found = os.stat(path)
    if not stat.S_ISDIR(found.st_mode):
        raise SetupError(f"Stockade's state {path} is not a directory", stage="state")
    if found.st_uid != os.geteuid():
        raise SetupError(
            f"Stockade's state {path} belongs to uid {found.st_uid}, not to you (uid {os.geteuid()})",
            stage="state",
            hint="set STOCKADE_HOME to a directory of your own",
        )
    if found.st_mode & 0o077:
        raise SetupError(
            f"Stockade's state {path} is open to others (mode {stat.S_IMODE(found.st_mode):04o})",
            stage="state",
            hint=f"look who put what there, then: chmod 700 {path}",
        )


def ensure(path: str) -> str:
    """Make the state directory if it is missing, check that it is private and current, return its path."""
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
            _check_umask(path)
        _check_owner(path)
        found = _version(path)
        if found is None:
            _begin(path)
        elif found > SCHEMA:
            raise _newer(path, found)
        elif found < SCHEMA:
            _upgrade(path)
    except OSError as error:
        raise unusable(path, error) from None
    return path


def _check_umask(path: str) -> None:
    """Refuse to begin where nothing that we make would be ours to open again."""
    if os.stat(path).st_mode & 0o700 != 0o700:
        os.rmdir(path)
        raise SetupError(
            "your umask takes the rights to new files from yourself", stage="state", hint="umask 022"
        )


def cache(path: str) -> str:
    """The directory for what can be made again, in a state directory that is there."""
    directory = os.path.join(path, CACHE)
    with contextlib.suppress(FileExistsError):
        os.mkdir(directory, 0o700)
    return directory


def unusable(path: str, error: OSError) -> SetupError:
    """What to raise where something in the state directory cannot be read or written."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return SetupError(
        f"cannot use {path} for Stockade's state: {error.strerror}",
        stage="state",
        errno=error.errno or 0,
        hint="free some space, or set STOCKADE_HOME to a directory elsewhere"
        if full
        else "set STOCKADE_HOME to a directory you can write to",
    )


def _version(path: str) -> int | None:
    """How the directory is laid out; None if nobody has said so yet."""
    try:
        file = os.open(f"{path}/schema", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    try:
        found = os.read(file, 64)
    finally:
        os.close(file)
    if not found.strip().isdigit() or not int(found):
        raise SetupError(
            f"{path}/schema does not say how this state is laid out: {found!r}",
            stage="state",
            hint="set STOCKADE_HOME to another directory",
        )
    return int(found)


def _newer(path: str, found: int) -> SetupError:
    return SetupError(
        f"{path} was written by a newer version of Stockade (schema {found}, this one knows {SCHEMA})",
        stage="state",
        hint="upgrade Stockade, or set STOCKADE_HOME to another directory",
    )


def _begin(path: str) -> None:
    # Written aside and linked into place: a reader sees all of it or none, and the first writer wins.
    part = f"{path}/schema.{os.urandom(6).hex()}"
    try:
        with open(part, "w", encoding="utf-8") as stream:
            stream.write(f"{SCHEMA}\n")
        os.link(part, f"{path}/schema")
    except FileExistsError:
        pass
    finally:
        # What could not be made is not there, which must not hide why.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(part)


def _upgrade(path: str) -> None:
    """Bring an older layout up to date, one step after the other; cut short, it is taken up again."""
    import fcntl

    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        found = _version(path)  # perhaps another process was faster
        for version in range(found or SCHEMA, SCHEMA):
            UPGRADES[version](path)
            part = f"{path}/schema.new"
            with open(part, "w", encoding="utf-8") as stream:
                stream.write(f"{version + 1}\n")
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(part, f"{path}/schema")
            os.fsync(directory)
    finally:
        os.close(directory)


def _caches_apart(path: str) -> None:
    """From 1 to 2: what can be made again has a directory of its own, and is made again there."""
    for name in os.listdir(path):
        if name.startswith(("filter-", "host-")):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{path}/{name}")


#: By the schema from which each leads to the next.
UPGRADES = {1: _caches_apart}
