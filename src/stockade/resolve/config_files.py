"""The files that policies are read from: their names, where they are, and how they are read."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from errno import ENOENT

from stockade.errors import PolicyError

NAMES = ("stockade.toml", "pyproject.toml")
LARGEST = 1 << 20


def config_dir(environ: Mapping[str, str], home: str) -> str:
    """The directory of the user's own policy."""
    shared = environ.get("XDG_CONFIG_HOME", "")
    return os.path.join(shared if shared.startswith("/") else f"{home}/.config", "stockade")


def config_file(environ: Mapping[str, str], home: str) -> str:
    """The user's own file: a policy, and the settings of receipts."""
    return os.path.join(config_dir(environ, home), "config.toml")


def read_file(path: str) -> bytes:
    """Read a policy file, which must be a regular file of at most `LARGEST` bytes. Never blocks."""
    try:
        # Opening a pipe would otherwise block until a process writes to it.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise PolicyError(f"{path} is not a regular file", hint="name a TOML file")
            data = b""
            while len(data) <= LARGEST and (part := os.read(fd, LARGEST + 1 - len(data))):
                data += part
        finally:
            os.close(fd)
    except OSError as error:
        hint = (
            "check the path; `stockade policy schema` shows what a policy may contain"
            if error.errno == ENOENT
            else ""
        )
        raise PolicyError(f"cannot read {path}: {error.strerror}", hint=hint) from error
    if len(data) > LARGEST:
        raise PolicyError(f"{path} is larger than {LARGEST >> 20} MiB", hint="a policy is a few lines")
    return data


def text_of(data: bytes, path: str) -> str:
    """Decode the text of a policy file."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise PolicyError(f"{path} is not UTF-8 text") from None


LAYERS = "policies"


def find_layers(config: str) -> str | None:
    """Find the layers in the user's own directory: a file or a directory, not both."""
    file, directory = f"{config}/{LAYERS}.toml", f"{config}/{LAYERS}"
    has = [path for path in (file, directory) if _is_there(path)]
    if len(has) > 1:
        raise PolicyError(f"there are both {file} and {directory}", hint="keep one of them")
    return has[0] if has else None


def _is_there(path: str) -> bool:
    """Whether the path exists; PolicyError if that cannot be seen, because it may be a ceiling."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise PolicyError(f"cannot look at {path}: {error.strerror}") from error
    return True
