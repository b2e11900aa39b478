"""The files that policies are read from: their names, and where they are."""

from __future__ import annotations

import os
from collections.abc import Mapping

from stockade.errors import PolicyError

NAMES = ("stockade.toml", "pyproject.toml")


def config_dir(environ: Mapping[str, str], home: str) -> str:
    """Return the directory of the user's own policy."""
    shared = environ.get("XDG_CONFIG_HOME", "")
    return os.path.join(shared if shared.startswith("/") else f"{home}/.config", "stockade")


def config_file(environ: Mapping[str, str], home: str) -> str:
    """Return the path of the user's own file: a policy, and the settings of receipts."""
    return os.path.join(config_dir(environ, home), "config.toml")


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
