"""The user who asks for a run."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Mapping
from typing import ClassVar

import msgspec


class Caller(msgspec.Struct, frozen=True):
    """The user who asks for the run, with their directories and environment."""

    uid: int
    gid: int
    user: str
    group: str
    home: str
    cwd: str
    environ: Mapping[str, str]
    #: The directory of the caller's Python: that of the interpreter that runs this process, or that of the
    #: active virtual environment.
    python: str = ""
    #: Whether the caller is a Python program: not in the process of the `stockade` command, whose interpreter
    #: is not of the user's choice.
    from_python: ClassVar[bool] = True

    @classmethod
    def current(cls) -> Caller:
        """Return the user of this process, even if HOME is unset or the uid has no name."""
        uid, gid = os.getuid(), os.getgid()
        user, group, known_home = _names(uid, gid)
        environ = os.environ  # not copied: a run needs few of its variables
        home = environ.get("HOME", "")
        try:
            cwd = os.getcwd()
        except FileNotFoundError:  # it was removed; only relative paths need it
            cwd = ""
        return cls(
            uid=uid,
            gid=gid,
            user=user,
            group=group,
            home=home if home.startswith("/") else known_home,
            cwd=cwd,
            environ=environ,
            python=cls._python_directory(environ),
        )

    @classmethod
    def _python_directory(cls, environ: Mapping[str, str]) -> str:
        running = os.path.dirname(sys.executable or "") if cls.from_python else ""
        if running not in ("", "/usr/bin", "/bin", "/usr/local/bin"):
            return running
        # An interpreter of the system says nothing, and an environment is active for a reason.
        active = environ.get("VIRTUAL_ENV", "")
        return f"{active}/bin" if active.startswith("/") else ""


@functools.cache
def _names(uid: int, gid: int) -> tuple[str, str, str]:
    import grp
    import pwd

    try:
        entry = pwd.getpwuid(uid)
        user, home = entry.pw_name, entry.pw_dir
    except KeyError:
        user, home = str(uid), "/"
    try:
        group = grp.getgrgid(gid).gr_name
    except KeyError:
        group = str(gid)
    return user, group, home if home.startswith("/") else "/"
