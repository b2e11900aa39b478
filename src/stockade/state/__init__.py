"""The state directory: everything of Stockade's that outlives a run, in one private directory per user.

Its file `schema` holds the version of its layout. The first start that writes
there upgrades an older layout. A newer layout belongs to a newer version of
Stockade, so this one neither reads nor touches it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Mapping

from stockade.errors import SetupError

SCHEMA = 3
#: Whatever Stockade can rebuild at any time: filters, and facts about the machine.
CACHE = "cache"
#: Everything that Stockade keeps, by name; other entries are not ours. `stockade purge` reads it.
ENTRIES = {
    "workspaces": "changes that are kept aside",
    "sandboxes": "the directories of the server's sandboxes",
    "images": "the root file systems that sandboxes can have",
    "server": "the keys of the server, hashed",
    "loops": "the state and the logs of loops",
    "output": "output beyond the limit",
    "runs.log": "what earlier runs did",
    "runs.log.1": "what earlier runs did",
    # The order matters: the first three are useless without the last.
    "receipts.db-tail": "the signed record of every run",
    "receipts.db-wal": "the signed record of every run",
    "receipts.db-shm": "the signed record of every run",
    "receipts.db": "the signed record of every run",
    "receipts.reserve": "room for a receipt on a full disk",
    "keys": "the keys that sign and verify receipts",
    "trust": "the project policies that you trust",
    "run": "the register of living sandboxes",
    "scratch": "the homes of sandboxes without namespaces",
    CACHE: "files that Stockade can rebuild",
    "schema": "the version of this layout",
}


def state_dir(environ: Mapping[str, str], home: str) -> str:
    """Return the path of the state directory, whether it exists or not."""
    if own := environ.get("STOCKADE_HOME"):
        # Links are followed here, and only once: a link that changes later cannot lead us away from the
        # directory that was checked.
        return os.path.realpath(own)
    if _is_other_users_home(home):
        return os.path.join(_roots_home(), ".local/state/stockade")
    shared = environ.get("XDG_STATE_HOME", "")
    # The XDG specification has relative paths ignored.
    return os.path.join(shared if shared.startswith("/") else f"{home}/.local/state", "stockade")


def _is_other_users_home(home: str) -> bool:
    """Return whether root works with the HOME of another user, as under `sudo -E`.

    That user could neither use nor remove what root creates there, so root's state lies in root's own home.
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
    """Refuse a state directory that another user can read or could have written to, or a newer one."""
    check_private(path)
    found = _version(path)
    if found is not None and found > SCHEMA:
        raise _newer_schema_error(path, found)


def check_private(path: str) -> None:
    """Refuse a directory that is not the caller's, or that others can read or write."""
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
            hint="set STOCKADE_HOME to a directory of its own; or, if this one is Stockade's alone, check "
            f"who put what there, then: chmod 700 {path}",
        )


def ensure(path: str) -> str:
    """Create the state directory if it is missing, check that it is private and current, return its path."""
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
            _check_umask(path)
        check_private(path)
        found = _version(path)
        if found is None:
            _begin(path)
        elif found > SCHEMA:
            raise _newer_schema_error(path, found)
        elif found < SCHEMA:
            _upgrade(path)
    except OSError as error:
        raise unusable(path, error) from None
    return path


def _check_umask(path: str) -> None:
    """Refuse a umask under which we could not open our own files again."""
    if os.stat(path).st_mode & 0o700 != 0o700:
        os.rmdir(path)
        raise SetupError(
            "your umask denies you access to your own new files", stage="state", hint="umask 022"
        )


def cache(path: str) -> str:
    """Return the cache of an existing state directory; create it if it is missing."""
    directory = os.path.join(path, CACHE)
    with contextlib.suppress(FileExistsError):
        os.mkdir(directory, 0o700)
    return directory


def unusable(path: str, error: OSError) -> SetupError:
    """Return the error to raise when something in the state directory cannot be read or written."""
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
    """Return the version of the layout; None if the directory is new."""
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
            f"{path}/schema holds no version number: {found!r}",
            stage="state",
            hint="set STOCKADE_HOME to another directory",
        )
    return int(found)


def _newer_schema_error(path: str, found: int) -> SetupError:
    return SetupError(
        f"{path} was written by a newer version of Stockade (schema {found}, this one knows {SCHEMA})",
        stage="state",
        hint="upgrade Stockade, or set STOCKADE_HOME to another directory",
    )


def _begin(path: str) -> None:
    # Written to a temporary file and linked into place: a reader sees all or nothing, and the first wins.
    part = f"{path}/schema.{os.urandom(6).hex()}"
    try:
        with open(part, "w", encoding="utf-8") as stream:
            stream.write(f"{SCHEMA}\n")
        os.link(part, f"{path}/schema")
    except FileExistsError:
        pass
    finally:
        # The file is missing if creating it failed; that must not hide the error.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(part)


def _upgrade(path: str) -> None:
    """Upgrade an older layout step by step; the next start resumes an interrupted upgrade."""
    import fcntl

    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        found = _version(path)  # another process may have been faster
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


def _separate_caches(path: str) -> None:
    """From 1 to 2: caches move to a directory of their own, where they are rebuilt."""
    for name in os.listdir(path):
        if name.startswith(("filter-", "host-")):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{path}/{name}")


def _record_more(path: str) -> None:
    """From 2 to 3: trust records what paths mean, and workspaces their `hold_back` and `allow_commit`.

    Agreements of the old layout stay as they are: `resolve.trust` reads them, and the user must agree again.
    A workspace without these fields has a policy without them. An older version would commit hold-backs.
    """


#: By schema version, the step that leads to the next one.
UPGRADES = {1: _separate_caches, 2: _record_more}
