"""Where Stockade keeps what outlives a run: one private directory per user."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Mapping

from stockade.errors import SetupError

SCHEMA = "1\n"


def state_dir(environ: Mapping[str, str], home: str) -> str:
    """The path of the state directory; whether it exists is another question."""
    if own := environ.get("STOCKADE_HOME"):
        # Links are followed here and once: whoever can change one cannot then lead us away from the
        # directory that was checked.
        return os.path.realpath(own)
    shared = environ.get("XDG_STATE_HOME", "")
    # The XDG specification has relative paths ignored.
    return os.path.join(shared if shared.startswith("/") else f"{home}/.local/state", "stockade")


def check(path: str) -> None:
    """Refuse a state directory that somebody else could have written to or can read."""
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
    """Make the state directory if it is missing, check that it is private, and return its path."""
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        check(path)
        _schema(os.path.join(path, "schema"), path)
    except OSError as error:
        raise unusable(path, error) from None
    return path


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


def _schema(file: str, path: str) -> None:
    try:
        with open(file, encoding="ascii", errors="replace") as stream:
            found = stream.read(64)
    except FileNotFoundError:
        # Written aside and linked into place: a reader sees all of it or none, and the first writer wins.
        part = f"{file}.{os.urandom(6).hex()}"
        try:
            with open(part, "w", encoding="ascii") as stream:
                stream.write(SCHEMA)
            os.link(part, file)
        except FileExistsError:
            pass
        finally:
            # What could not be made is not there, which must not hide why.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(part)
        return
    if found != SCHEMA:
        raise SetupError(
            f"{path} was written by another version of Stockade (schema {found.strip()!r})",
            stage="state",
            hint="upgrade Stockade, or set STOCKADE_HOME to another directory",
        )
